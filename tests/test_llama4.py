"""Llama-4 against ``transformers``: logits across the borders of chunks, features, configs, planted errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bound import KVBytes
from safetensors.torch import load_file
from torch import Tensor, nn

from specgen.attention import Temperature
from specgen.attention.chunks import chunked
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.kv.layout import Layout
from specgen.models import layers, llama4, mlp
from specgen.models.families import FAMILIES
from specgen.models.llama import Llama
from specgen.models.mlp import Mixture
from specgen.ops.experts import Routing, choice
from tests.families import Case, Error, ids_of, is_seen, loaded, paged_logits, plant, right_logits
from tests.marks import mostly_slow
from tests.test_families import CHUNKED, SCOUT, TEXT, WRAPPED
from tests.test_fp8 import PROMPTS, agrees, logits
from tests.tiny_checkpoints import read
from tests.tiny_fp8 import CONFIGS, Fp8Linear, quantize
from tests.tiny_llama4 import CHUNK, one_by_one, write_llama4

CPU = torch.device("cpu")


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
    plant(monkeypatch, WEIGHED_BEHIND)
    assert not agrees(logits(loaded(tmp_path)), right)


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
        "tensors of the part for images and sounds are not loaded: prompts are text",
        "Complete and supported.",
    ):
        assert fact in text, fact
    assert "not read" not in text


# ---- planted errors: what of which module, and what is made of it


def heads_through(call: Callable[..., Tensor]) -> Error:
    """What an attention of rotated layers makes of heads."""
    return (
        *(llama4.ChunkedAttention, "__call__"),
        lambda real: lambda self, x, attend: self.out(call(self, attend, self.qkv(x))),
    )


def rotated(swap: Callable[[tuple[bool, ...]], tuple[bool, ...]]) -> Error:
    return (
        *(llama4, "_rotated"),
        lambda real: lambda config, number: swap(real({**config, "layer_types": None}, number)),
    )


def temperature(change: Callable[[Temperature], Temperature]) -> Error:
    return llama4, "_temperature", lambda real: lambda config: change(real(config))


def weighing(call: Callable[[Any], Any]) -> Error:
    return mlp, "weighing_inputs", lambda real: lambda experts: call(experts)


def _windowed(real: Any) -> Any:
    def build(**each: Any) -> Any:
        found = real(**each)
        return replace(found, layer=replace(found.layer, window=CHUNK))

    return build


def _all_normed(family: Any) -> Any:
    def build(config: Any, load: Any, ops: Any) -> Llama:
        model = family.build(config, load, ops)

        def normed(block: Any) -> Any:
            qkv = llama4._unit_norm(config, block.attention.qkv, model.embedding, ops)
            return replace(block, attention=replace(block.attention, qkv=qkv))

        return replace(model, blocks=tuple(map(normed, model.blocks)))

    return replace(family, build=build)


def _hot_keys(real: Any) -> Any:
    def unrotated(self: Any, x: Tensor, attend: Any) -> Tensor:
        heads = self.qkv(x)
        heads[:, 4:6] *= attend._factors(self.temperature)
        return self.out(attend.tempered(self.layer, None, heads))

    return unrotated


def _shared_weighed(real: Any) -> Any:
    def call(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        ids, weights = self.choice(self.router(x))
        return self.experts(x, ids, weights), *self.beside(x * weights, weights)

    return call


WEIGHED_BEHIND = weighing(lambda experts: experts)
PLANTED: dict[str, Error] = {
    "no chunks": heads_through(lambda self, attend, heads: attend(self.layer, heads)),
    "a window for a chunk": heads_through(
        lambda self, attend, heads: attend(replace(self.layer, window=self.chunk), heads)
    ),
    "a window where all is seen": (llama4, "UnrotatedAttention", _windowed),
    "1 is no rotation": rotated(lambda found: tuple(not each for each in found)),
    "all rotated": rotated(lambda found: (True,) * len(found)),
    "another layer without positions": rotated(lambda found: (*found[1:], found[0])),
    "pairs as they are": (llama4.Llama4Config, "interleaved", lambda real: False),
    "values turned": (
        *(layers, "_in_halves"),
        lambda real: lambda heads, size: real({"k": sum(heads.values())}, size),
    ),
    "no norm": (llama4, "_unit_norm", lambda real: lambda config, projection, *rest: projection),
    "all normed": (FAMILIES, TEXT, _all_normed),
    "no temperature": temperature(lambda found: Temperature(floor=found.floor, scale=1e-9)),
    "temperature of another length": temperature(lambda found: replace(found, floor=found.floor + 3)),
    "temperature a position late": (
        *(Temperature, "of"),
        lambda real: lambda self, positions: real(self, positions - 1),
    ),
    "temperature of keys": (llama4.UnrotatedAttention, "__call__", _hot_keys),
    "outputs weighed": WEIGHED_BEHIND,
    "not weighed": weighing(lambda experts: lambda x, ids, by: experts(x, ids, torch.ones_like(by))),
    "weighed twice": weighing(lambda experts: lambda x, ids, by: experts(x * by, ids, by)),
    "shared expert weighed": (Mixture, "__call__", _shared_weighed),
    "no shared expert": (Mixture, "__call__", lambda real: lambda self, *args: real(self, *args)[:1]),
    "gate and up alternate": (
        *(llama4, "_mixture"),
        lambda real: lambda *args: replace(real(*args), fused="in, out alternating"),
    ),
}


@pytest.fixture(scope="module")
def scout(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("scout")
    ids = ids_of(write_llama4(path, **SCOUT))
    return path, ids, right_logits(path, ids)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_seen(scout: Case, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(monkeypatch, PLANTED[name])
    assert is_seen(*scout)


def _of_the_last_row(real: Any) -> Any:
    def from_last(layout: Layout, size: int) -> Layout:
        found, last = real(layout, size), (layout.kv_lens - 1) // size * size
        every = torch.arange(layout.num_sequences)
        tables = layout._tables_from(every, last, size)
        return replace(found, block_tables=tables, starts=(layout.starts - last).clamp(min=0))

    return from_last


AT_A_BORDER: dict[str, Error] = {
    "all rows see the chunk of the first": (
        *(Layout, "row_by_row"),
        lambda real: lambda layout, size: layout.from_first_chunk(size),
    ),
    "all see that of the last": (Layout, "from_first_chunk", _of_the_last_row),
    "pages not moved": (
        *(Layout, "_tables_from"),
        lambda real: lambda layout, sequences, first, length: real(layout, sequences, first * 0, length),
    ),
}


@pytest.mark.parametrize("name", AT_A_BORDER)
def test_planted_errors_at_a_border_are_seen(scout: Case, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path, ids, expected = scout
    model = loaded(path)
    plant(monkeypatch, AT_A_BORDER[name])
    got = paged_logits(model, ids, StaticSdpaBackend, CHUNKED)
    assert (got - expected).abs().max() > 1e-2
