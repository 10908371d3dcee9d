"""Llama-4 against ``transformers``: logits across the borders of chunks, features, configs, planted errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from specgen.attention import Temperature
from specgen.attention.chunks import chunked
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import UserError
from specgen.experiments.bound import KVBytes
from specgen.kv.layout import Layout
from specgen.models import layers, llama4, mlp
from specgen.models.families import FAMILIES
from specgen.models.llama import Llama
from specgen.models.mlp import Mixture
from specgen.ops.experts import Routing, choice
from tests.dense import DenseAttend
from tests.marks import mostly_slow
from tests.test_fp8 import PROMPTS, agrees, logits
from tests.test_mixtures import check_dense, check_in_pieces, ids_of, loaded, paged_logits
from tests.tiny_checkpoints import LLAMA3_SCALING, change_json, read
from tests.tiny_fp8 import CONFIGS, Fp8Linear, quantize
from tests.tiny_llama4 import CHUNK, one_by_one, write_llama4

CPU = torch.device("cpu")
TEXT, WRAPPED = "Llama4ForCausalLM", "Llama4ForConditionalGeneration"
# the last is cut; all behind the first, which is a prefill, are decode passes, some of which cross a border of chunks
PIECES = [10, 5, 9, 1, 7, 2, 38, 30]
SCOUT = {"rope_parameters": LLAMA3_SCALING | {"factor": 16.0, "high_freq_factor": 1.0}}  # one step, no blend
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "scout": (TEXT, SCOUT),
    "maverick": (TEXT, {"interleave_moe_layer_step": 2, "use_qk_norm": False, "num_local_experts": 16}),
    "with-vision": (WRAPPED, {"num_hidden_layers": 4}),
    "named-layers": (
        TEXT,
        {"no_rope_layers": [0, 1, 1, 0, 0, 1], "moe_layers": [0, 4], "attention_chunk_size": 8},
    ),
    "no-temperature": (TEXT, {"attn_temperature_tuning": False, "attention_bias": True}),
    "no-experts": (TEXT, {"moe_layers": [], "tie_word_embeddings": True, "no_rope_layer_interval": 2}),
}


def of_transformers(path: Path, architecture: str = TEXT) -> Any:
    import transformers

    return getattr(transformers, architecture).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )


@torch.inference_mode()
def right_logits(path: Path, ids: Tensor, architecture: str = TEXT) -> Tensor:
    model = of_transformers(path, architecture)
    # As the wrapper with images of transformers 5.24 raises without any
    return getattr(model, "language_model", model)(ids[None]).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", mostly_slow(TARGETS, "scout", "maverick", "with-vision", "named-layers"))
def test_logits_equal_transformers_whole_in_pieces_and_row_by_row(tmp_path: Path, name: str) -> None:
    architecture, changes = TARGETS[name]
    ids = ids_of(write_llama4(tmp_path, architecture, **changes))
    expected, model = right_logits(tmp_path, ids, architecture), loaded(tmp_path)
    check_in_pieces(model, ids, expected, PIECES, [30, *[1] * 20, len(ids)])


@torch.inference_mode()
def test_the_dense_reference_gives_the_same(tmp_path: Path) -> None:
    ids = ids_of(write_llama4(tmp_path))
    check_dense(loaded(tmp_path), ids)


@torch.inference_mode()
@pytest.mark.parametrize("name", mostly_slow(["scout", "maverick"], "scout"))
def test_in_bfloat16_rounding_costs_as_much_as_in_transformers(tmp_path: Path, name: str) -> None:
    ids = ids_of(write_llama4(tmp_path, **TARGETS[name][1]))
    right, theirs = right_logits(tmp_path, ids), of_transformers(tmp_path)
    lost = (theirs.bfloat16()(ids[None]).logits[0].float() - right).abs().median()
    model = load_target(open_checkpoint(str(tmp_path)), torch.bfloat16, CPU)
    got = paged_logits(model, ids, SdpaBackend, [len(ids)])
    assert got.dtype == torch.bfloat16
    # the median: in a few rows another expert is chosen
    assert 0 < (got.float() - right).abs().median() < 1.5 * lost


@torch.inference_mode()
def test_features_are_streams_between_layers(tmp_path: Path) -> None:
    ids = ids_of(write_llama4(tmp_path))
    states = of_transformers(tmp_path)(ids[None], output_hidden_states=True).hidden_states
    model = loaded(tmp_path)
    _, features = model.forward(ids, DenseAttend(model), (1, 4))
    torch.testing.assert_close(features, torch.cat([states[1][0], states[4][0]], -1), atol=2e-4, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_router_chooses_as_in_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4Router

    torch.manual_seed(0)
    router, x = (
        Llama4Router(Llama4TextConfig(hidden_size=32, num_local_experts=8)),
        torch.randn(40, 32).to(dtype),
    )
    router.weight.normal_(std=8.0)  # so that scores of some are 1 and equal
    scores, logits = router.to(dtype)(x)
    ids, weights = choice(Routing(num_experts=8, num_chosen=1, weighing="sigmoid"))(logits[None])
    assert (scores == 1).any()
    assert torch.equal(torch.zeros_like(scores).scatter(1, ids, weights), scores)


# ---- FP8


class _Experts(nn.Module):
    """By the formulas, in the place of ``transformers``': inputs are weighed, and 0 where an expert is not chosen."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, form: str, number: int) -> None:
        super().__init__()
        names = ("gate_proj", "up_proj", "down_proj")
        self.each = [
            [Fp8Linear(tensors, f"{prefix}.{expert}.{name}", CONFIGS[form][1]) for name in names]
            for expert in range(number)
        ]

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(self.each), len(x) // len(self.each), x.shape[-1])
        for (gate, up, down), rows, into in zip(self.each, x.view_as(out), out, strict=True):
            chosen = rows.any(-1)
            if chosen.any():
                into[chosen] = down(nn.functional.silu(gate(rows[chosen])) * up(rows[chosen]))
        return out.flatten(0, 1)


def formulas(path: Path, form: str) -> Any:
    """``transformers``' model of a Llama-4 whose linear layers and experts are in FP8."""
    import transformers

    tensors = load_file(path / "model.safetensors")
    settings = json.loads((path / "config.json").read_text())
    del settings["quantization_config"]
    config = transformers.Llama4TextConfig(**settings)
    config._attn_implementation = "eager"
    model = transformers.Llama4ForCausalLM(config).eval()
    plain = {name: each for name, each in tensors.items() if each.dtype.itemsize > 1 and "scale" not in name}
    model.load_state_dict(plain, strict=False)
    for name in [name.removesuffix(".weight") for name, each in tensors.items() if each.dtype.itemsize == 1]:
        parent, _, child = name.rpartition(".")
        if ".experts." not in name:
            setattr(model.get_submodule(parent), child, Fp8Linear(tensors, name, CONFIGS[form][1]))
        elif name.endswith("experts.0.gate_proj"):
            block = model.get_submodule(parent.removesuffix(".experts.0"))
            block.experts = _Experts(tensors, parent.removesuffix(".0"), form, settings["num_local_experts"])
    return model


@torch.inference_mode()
@pytest.mark.parametrize("step", mostly_slow([1, 2], 1))
@pytest.mark.parametrize("form", mostly_slow(["dynamic", "static"], "dynamic"))
def test_fp8_experts_round_weighed_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, step: int
) -> None:
    write_llama4(tmp_path, std=0.08, interleave_moe_layer_step=step)
    one_by_one(tmp_path)
    plain = logits(loaded(tmp_path))
    quantize(tmp_path, form, spread=1.0)
    right, got = formulas(tmp_path, form)(PROMPTS).logits, logits(loaded(tmp_path))
    assert agrees(got, right)
    assert (right - plain).abs().max() > 0.1
    _weighed_behind(monkeypatch)
    assert not agrees(logits(loaded(tmp_path)), right)


def _weighed_behind(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(mlp, "weighing_inputs", lambda experts: experts)


@torch.inference_mode()
def test_experts_may_be_stored_one_by_one(tmp_path: Path) -> None:
    ids = ids_of(write_llama4(tmp_path, WRAPPED))
    right = paged_logits(loaded(tmp_path), ids, SdpaBackend, [len(ids)])
    one_by_one(tmp_path)
    assert torch.equal(paged_logits(loaded(tmp_path), ids, SdpaBackend, [len(ids)]), right)


# ---- chunks


def _seen_alone(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, position: int, size: int) -> Tensor:
    """What the row ``q`` [Hq, D] attends to by the definition."""
    slots = torch.arange(position // size * size, position + 1)
    pages = table[slots // keys.shape[1]].long(), slots % keys.shape[1]
    share = len(q) // keys.shape[2]
    k, v = (each[pages].repeat_interleave(share, 1) for each in (keys, values))
    weights = (torch.einsum("hd,nhd->hn", q, k) * 0.3).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v).flatten()


def _layouts() -> dict[str, Layout]:
    """Of three sequences over 64 positions each, in pages of 4."""
    tables = torch.randperm(48, generator=torch.Generator().manual_seed(1)).to(torch.int32).view(3, 16)
    starts, lens = torch.tensor([13, 16, 30]), torch.tensor([6, 1, 3])
    uniform = Layout.uniform(tables, starts, 6, 4)
    ragged = {"ragged_lens": lens, "uniform_q": None, "num_rows": 10}
    return {
        "prefill": Layout.ragged(tables, [0, 15, 3], [64, 1, 30], 4),
        "decode": uniform,
        "one-row": Layout.uniform(tables, starts, 1, 4),
        "partial": replace(uniform, **ragged, full=True),
        "padded": replace(uniform, **ragged | {"num_rows": 14}),
        "padded-alike": replace(uniform, **ragged | {"num_rows": 14, "ragged_lens": torch.tensor([4, 4, 4])}),
        "blocks": replace(
            Layout.uniform(tables[:2].repeat(2, 1), torch.tensor([0, 20, 16, 36]), 16, 4), chained=True
        ),
    }


@pytest.mark.parametrize("backend", [SdpaBackend, StaticSdpaBackend])
@pytest.mark.parametrize("size", [4, 8, 16, 32])
@pytest.mark.parametrize("name", _layouts())
def test_rows_see_their_chunk_up_to_themselves(name: str, size: int, backend: type[SdpaBackend]) -> None:
    layout, noise = _layouts()[name], torch.Generator().manual_seed(2)
    keys, values = (torch.randn(48, 4, 2, 8, generator=noise) for _ in range(2))
    q = torch.randn(layout.num_rows, 6, 8, generator=noise)
    layer = layers.LayerAttention(index=0, scale=0.3)
    planned = backend(CPU).plan

    def plan(inner: Layout) -> Callable[..., Tensor]:
        """Kernels look up the pages of all positions, and of no more where the host knows how many there are."""
        room, most = inner.block_tables.shape[1], -(-int(inner.kv_lens.max()) // 4)
        assert most == room if inner.host else most <= room <= 16
        assert inner.starts.min() >= 0
        return planned(inner)

    got = chunked(plan, layout, size)(layer, q, keys, values)
    own = int(layout.query_lens.sum())
    for row, sequence, position in zip(
        range(own), layout.sequences.tolist(), layout.positions.tolist(), strict=False
    ):
        right = _seen_alone(q[row], keys, values, layout.block_tables[sequence], position, size)
        torch.testing.assert_close(got[row], right, atol=1e-5, rtol=0)
    assert got.isfinite().all(), "padding rows must not become NaN"


def test_rows_behind_a_border_read_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a page and the rows of a pass, however long a chunk is."""
    planned = list[Layout]()

    def plan(layout: Layout) -> Callable[..., Tensor]:
        planned.append(layout)
        return SdpaBackend(CPU).plan(layout)

    tables = torch.zeros(2, 4096, dtype=torch.int32)
    chunked(plan, Layout.uniform(tables, torch.tensor([8190, 20_000]), 5, 16), 8192)
    together, alone = planned
    assert together.starts.tolist() == [8190, 20_000 - 2 * 8192]
    assert together.block_tables.shape == (2, (8192 + 4 + 15) // 16)
    assert alone.block_tables.shape == (10, 2)
    assert alone.starts.tolist() == [14, 15, 0, 1, 2, *(20_000 % 16 + row for row in range(5))]


def test_a_text_within_a_chunk_is_plain_causal_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(write_llama4(tmp_path, attention_chunk_size=96))
    expected = right_logits(tmp_path, ids)
    monkeypatch.setattr(Layout, "_tables_from", None)  # nothing is laid out anew
    got = paged_logits(loaded(tmp_path), ids, StaticSdpaBackend, [40, 5, 51])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


# ---- configs


def test_what_is_said_at_the_top_of_a_vision_language_model_counts(tmp_path: Path) -> None:
    write_llama4(tmp_path, WRAPPED)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert FAMILIES[TEXT].config(raw["text_config"] | {"architectures": ["x"]}) == replace(
        read(tmp_path), architecture="x"
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Llama4TextConfig

    said = {"num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"}
    every = Llama4TextConfig(max_position_embeddings=131072).to_dict()
    short = {name: value for name, value in every.items() if name in said}
    short |= {"architectures": [TEXT], "max_position_embeddings": 131072, "eos_token_id": 2}
    found = FAMILIES[TEXT].config(short)
    assert found == FAMILIES[TEXT].config(every | {"architectures": [TEXT]})
    assert isinstance(found, llama4.Llama4Config)
    assert found.temperature == Temperature(floor=8192, scale=0.1)
    assert (found.chunk, found.rotated[:4], found.intermediate_size) == (
        8192,
        (True, True, True, False),
        16384,
    )


def test_the_bound_reads_of_a_chunk_what_is_seen(tmp_path: Path) -> None:
    read_ = KVBytes.of(write_llama4(tmp_path), 2)
    of_layer = 2 * 2 * 16 * 2
    for context, seen in ((1, 1), (16, 16), (17, 1), (40, 8)):
        assert read_.at(context) == of_layer * (5 * seen + context)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2: experts whose inputs are weighed"),
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]: it must have a 1 or a 0 for each of 6"),
        ({"no_rope_layers": [2] * 6}, "no_rope_layers is"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types is .* rotated layers with chunked_attention"),
        ({"moe_layers": [6]}, r"moe_layers is \[6\]: it must be a list of the numbers of 6 layers"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0: it must be a whole number above 0"),
        ({"floor_scale": 0}, "floor_scale is 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_llama4(tmp_path)
    change_json(tmp_path / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_inspect_says_what_was_understood(tmp_path: Path) -> None:
    write_llama4(tmp_path, WRAPPED, interleave_moe_layer_step=2)
    text = " ".join(describe(str(tmp_path)).to_text().split())
    for fact in (
        "family Llama4ForConditionalGeneration, q and k normed",
        "layers 6, 64 wide, MLP 96 wide",
        "experts 6 in 3 of 6 layers, 32 wide; beside one for all tokens, 32 wide",
        "router chooses 1 per token; weights by sigmoid, of the expert's inputs",
        "chunks 16 positions, in 5 of 6 layers; the others have no rotary positions and see all, queries times 1 + "
        "0.7 log(1 + positions // 10)",
        "tensors of the vision part are not loaded: prompts are text",
        "Complete and supported.",
    ):
        assert fact in text, fact
    assert "not read" not in text


# ---- planted errors


def _attention(plant: pytest.MonkeyPatch, call: Callable[[Any, Any, Tensor, Tensor], Tensor]) -> None:
    """What an attention of rotated layers makes of heads."""
    plant.setattr(
        llama4.ChunkedAttention,
        "__call__",
        lambda self, x, attend: self.out(call(self, attend, x, self.qkv(x))),
    )


def _no_chunks(plant: pytest.MonkeyPatch) -> None:
    _attention(plant, lambda self, attend, x, heads: attend(self.layer, heads))


def _a_window(plant: pytest.MonkeyPatch) -> None:
    _attention(plant, lambda self, attend, x, heads: attend(replace(self.layer, window=self.chunk), heads))


def _chunks_everywhere(plant: pytest.MonkeyPatch) -> None:
    real = llama4.UnrotatedAttention

    def build(**each: Any) -> Any:
        found = real(**each)
        return replace(found, layer=replace(found.layer, window=CHUNK))

    plant.setattr(llama4, "UnrotatedAttention", build)


def _rotated(swap: Callable[[tuple[bool, ...]], tuple[bool, ...]]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant_it(plant: pytest.MonkeyPatch) -> None:
        real = llama4._rotated
        plant.setattr(
            llama4, "_rotated", lambda config, number: swap(real({**config, "layer_types": None}, number))
        )

    return plant_it


def _pairs_as_they_are(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(llama4._PairsAsHalves, "_turns", lambda self, name: False)


def _values_turned(plant: pytest.MonkeyPatch) -> None:
    real = llama4._PairsAsHalves._turns
    plant.setattr(
        llama4._PairsAsHalves, "_turns", lambda self, name: real(self, name.replace("v_proj", "k_proj"))
    )


def _no_norm(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(llama4, "_unit_norm", lambda config, projection, *rest: projection)


def _norm_without_positions_too(plant: pytest.MonkeyPatch) -> None:
    real = llama4.build

    def build(config: Any, load: Any, ops: Any) -> Llama:
        model = real(config, load, ops)

        def normed(block: Any) -> Any:
            qkv = llama4._unit_norm(config, block.attention.qkv, model.embedding, ops)
            return replace(block, attention=replace(block.attention, qkv=qkv))

        return replace(model, blocks=tuple(map(normed, model.blocks)))

    family = FAMILIES[TEXT]
    plant.setitem(FAMILIES, TEXT, replace(family, build=build))


def _temperature(change: Callable[[Temperature], Temperature]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant_it(plant: pytest.MonkeyPatch) -> None:
        real = llama4._temperature
        plant.setattr(llama4, "_temperature", lambda config: change(real(config)))

    return plant_it


def _off_by_one(plant: pytest.MonkeyPatch) -> None:
    real = Temperature.of
    plant.setattr(Temperature, "of", lambda self, positions: real(self, positions - 1))


def _hot_keys(plant: pytest.MonkeyPatch) -> None:
    def unrotated(self: Any, x: Tensor, attend: Any) -> Tensor:
        heads = self.qkv(x)
        heads[:, 4:6] *= attend._factors(self.temperature)
        return self.out(attend.unrotated(self.layer, self.rope, None, heads))

    plant.setattr(llama4.UnrotatedAttention, "__call__", unrotated)


def _not_weighed(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(
        mlp,
        "weighing_inputs",
        lambda experts: lambda x, ids, weights: experts(x, ids, torch.ones_like(weights)),
    )


def _weighed_twice(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(
        mlp, "weighing_inputs", lambda experts: lambda x, ids, weights: experts(x * weights, ids, weights)
    )


def _shared_weighed(plant: pytest.MonkeyPatch) -> None:
    def call(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        ids, weights = self.choice(self.router(x))
        return self.experts(x, ids, weights), *self.beside(x * weights, weights)

    plant.setattr(Mixture, "__call__", call)


def _no_shared(plant: pytest.MonkeyPatch) -> None:
    real = Mixture.__call__
    plant.setattr(Mixture, "__call__", lambda self, *args: real(self, *args)[:1])


def _gate_and_up_alternate(plant: pytest.MonkeyPatch) -> None:
    real = llama4._mixture
    plant.setattr(llama4, "_mixture", lambda *args: replace(real(*args), fused="in, out alternating"))


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no chunks": _no_chunks,
    "a window for a chunk": _a_window,
    "a window where all is seen": _chunks_everywhere,
    "1 is no rotation": _rotated(lambda found: tuple(not each for each in found)),
    "all rotated": _rotated(lambda found: (True,) * len(found)),
    "another layer without positions": _rotated(lambda found: (*found[1:], found[0])),
    "pairs as they are": _pairs_as_they_are,
    "values turned": _values_turned,
    "no norm": _no_norm,
    "all normed": _norm_without_positions_too,
    "no temperature": _temperature(lambda found: Temperature(floor=found.floor, scale=1e-9)),
    "temperature of another length": _temperature(lambda found: replace(found, floor=found.floor + 3)),
    "temperature a position late": _off_by_one,
    "temperature of keys": _hot_keys,
    "outputs weighed": _weighed_behind,
    "not weighed": _not_weighed,
    "weighed twice": _weighed_twice,
    "shared expert weighed": _shared_weighed,
    "no shared expert": _no_shared,
    "gate and up alternate": _gate_and_up_alternate,
}


@pytest.fixture(scope="module")
def scout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    path = tmp_path_factory.mktemp("scout")
    ids = ids_of(write_llama4(path, **SCOUT))
    return path, ids, right_logits(path, ids)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_seen(
    scout: tuple[Path, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, ids, expected = scout
    PLANTED[name](monkeypatch)
    got = paged_logits(loaded(path), ids, SdpaBackend, [len(ids)])
    assert (got - expected).abs().max() > 1e-2


def _never_alone(plant: pytest.MonkeyPatch) -> None:
    """All rows of a pass see the chunk of the first."""
    plant.setattr(Layout, "row_by_row", lambda layout, size: layout.from_first_chunk(size))


def _of_the_last_row(plant: pytest.MonkeyPatch) -> None:
    real = Layout.from_first_chunk

    def from_last(layout: Layout, size: int) -> Layout:
        found, last = real(layout, size), (layout.kv_lens - 1) // size * size
        every = torch.arange(layout.num_sequences)
        tables = layout._tables_from(every, last, size)
        return replace(found, block_tables=tables, starts=(layout.starts - last).clamp(min=0))

    plant.setattr(Layout, "from_first_chunk", from_last)


def _pages_not_moved(plant: pytest.MonkeyPatch) -> None:
    real = Layout._tables_from
    plant.setattr(
        Layout,
        "_tables_from",
        lambda layout, sequences, first, length: real(layout, sequences, first * 0, length),
    )


@pytest.mark.parametrize("plant_it", [_never_alone, _of_the_last_row, _pages_not_moved])
def test_planted_errors_at_a_border_are_seen(
    scout: tuple[Path, Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    plant_it: Callable[[pytest.MonkeyPatch], None],
) -> None:
    path, ids, expected = scout
    model = loaded(path)
    plant_it(monkeypatch)
    got = paged_logits(model, ids, StaticSdpaBackend, PIECES)
    assert (got - expected).abs().max() > 1e-2
