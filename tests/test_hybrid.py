"""Hybrids of Gated DeltaNet and gated attention against ``transformers``: kernels, logits, MTP, planted errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from specgen.attention import Attend, gated_delta
from specgen.attention.sdpa import SdpaBackend
from specgen.checkpoints.checkpoint import load_drafter, load_target, mtp_part, open_checkpoint, target_config
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import UserError
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import Layout
from specgen.models import layers, mlp, mtp
from specgen.models.families import FAMILIES
from specgen.models.llama import Llama
from specgen.models.model_config import DeltaConfig, TargetConfig
from specgen.models.mtp import MtpHead
from specgen.ops.reference import torch_ops
from tests.dense import DenseAttend
from tests.marks import mostly_slow
from tests.reference_heads import DenseTarget, ReferenceMtp
from tests.test_fp8 import agrees, expected, logits
from tests.test_mixtures import check_dense, check_in_pieces, ids_of, loaded, paged_logits
from tests.tiny_checkpoints import change_json, change_tensors, read
from tests.tiny_fp8 import quantize
from tests.tiny_hybrids import CONFIGS, write_hybrid
from tests.tiny_mixtures import in_one_tensor

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MIXTURE = "Qwen3_5MoeForCausalLM"
# the last is cut; all behind the first, which is a prefill, are decode passes
PIECES = [40, 1, 5, 24, 1, 30]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_equal_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

    torch.manual_seed(0)
    ops, x, gate = torch_ops(), torch.randn(9, 4, 64).to(dtype) * 3, torch.randn(9, 4, 64).to(dtype)
    centred, gated = Qwen3_5RMSNorm(64, eps=1e-5), Qwen3_5RMSNormGated(64, eps=1e-5)
    for norm in (centred, gated):
        norm.weight.normal_()
        norm.to(dtype)
    assert torch.equal(ops.rms_norm(1 + centred.weight.float(), 1e-5, True)(x), centred(x))
    assert torch.equal(ops.gated_norm(gated.weight, 1e-5)(x, gate), gated(x, gate))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_numbers_of_a_head_are_rotated_as_in_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

    torch.manual_seed(0)
    frequencies, qkv = 1e4 ** -(torch.arange(4) / 4), torch.randn(6, 3 + 2 * 2, 32).to(dtype)
    keys, values = torch.zeros(2, 3, 4, 2, 32, dtype=dtype)
    layout = Layout.ragged(torch.tensor([[0, 2]], dtype=torch.int32), [1], [6], 4)
    q = torch_ops().rope(frequencies)(layout)(qkv, keys, values)
    angles = torch.cat((frequencies, frequencies)) * torch.arange(1, 7)[:, None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = apply_rotary_pos_emb(qkv[:, :3], qkv[:, 3:5], cos, sin, unsqueeze_dim=1)
    assert torch.equal(q, expected[0])
    assert torch.equal(keys.flatten(0, 1)[layout.slots], expected[1])
    assert torch.equal(values.flatten(0, 1)[layout.slots], qkv[:, 5:])


def of_transformers(path: Path, architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )


@torch.inference_mode()
def right_logits(path: Path, architecture: str, ids: Tensor) -> Tensor:
    return of_transformers(path, architecture)(ids[None]).logits[0]


TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in CONFIGS},
    "by-interval": ("Qwen3_5ForCausalLM", {"layer_types": None, "num_hidden_layers": 5}),
    "other-order": (
        "Qwen3_5ForCausalLM",
        {
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
            "attention_bias": True,
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 1,
        },
    ),
    "as-many-key-heads": (
        "Qwen3NextForCausalLM",
        {"linear_num_key_heads": 4, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "other-share": (
        "Qwen3_5ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "shared-beside": ("Qwen3NextForCausalLM", {"shared_expert_intermediate_size": 24}),
    "two-shared": (MIXTURE, {"shared_expert_intermediate_size": 64}),
    "no-recurrence": ("Qwen3NextForCausalLM", {"layer_types": ["full_attention"] * 4}),
}


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        TARGETS,
        "Qwen3_5ForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "shared-beside",
    ),
)
def test_logits_equal_transformers_whole_in_pieces_and_row_by_row(tmp_path: Path, name: str) -> None:
    architecture, changes = TARGETS[name]
    ids = ids_of(write_hybrid(tmp_path, architecture, **changes))
    expected, model = right_logits(tmp_path, architecture, ids), loaded(tmp_path)
    check_in_pieces(model, ids, expected, PIECES, [30, *[1] * 20, len(ids)])


@torch.inference_mode()
def test_the_dense_reference_gives_the_same(tmp_path: Path) -> None:
    ids = ids_of(write_hybrid(tmp_path, MIXTURE))
    check_dense(loaded(tmp_path), ids)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", MIXTURE])
def test_in_bfloat16_rounding_costs_as_much_as_in_transformers(tmp_path: Path, architecture: str) -> None:
    ids = ids_of(write_hybrid(tmp_path, architecture))
    right, theirs = right_logits(tmp_path, architecture, ids), of_transformers(tmp_path, architecture)
    lost = (theirs.bfloat16()(ids[None]).logits[0].float() - right).std()
    model = load_target(open_checkpoint(str(tmp_path)), torch.bfloat16, CPU)
    got = paged_logits(model, ids, SdpaBackend, [len(ids)])
    assert got.dtype == torch.bfloat16
    assert 0 < (got.float() - right).std() < 1.5 * lost


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_output_weights_may_be_tied_to_the_embedding(tmp_path: Path, architecture: str) -> None:
    ids = ids_of(write_hybrid(tmp_path, architecture, tie_word_embeddings=True))
    expected, model = right_logits(tmp_path, architecture, ids), loaded(tmp_path)
    assert model.config.tied_embeddings
    got = paged_logits(model, ids, SdpaBackend, [len(ids)])
    torch.testing.assert_close(got, expected, atol=2e-4 * float(expected.std()), rtol=0)


@torch.inference_mode()
def test_features_are_streams_between_layers_of_either_kind(tmp_path: Path) -> None:
    ids = ids_of(write_hybrid(tmp_path))
    states = of_transformers(tmp_path, "Qwen3_5ForCausalLM")(
        ids[None], output_hidden_states=True
    ).hidden_states
    model = loaded(tmp_path)
    _, features = model.forward(ids, DenseAttend(model), (1, 3))
    torch.testing.assert_close(features, torch.cat([states[1][0], states[3][0]], -1), atol=2e-4, rtol=0)


def test_experts_may_lie_in_one_tensor(tmp_path: Path) -> None:
    ids = ids_of(write_hybrid(tmp_path, MIXTURE))
    right = paged_logits(loaded(tmp_path), ids, SdpaBackend, [len(ids)])
    in_one_tensor(tmp_path)
    assert torch.equal(paged_logits(loaded(tmp_path), ids, SdpaBackend, [len(ids)]), right)


@torch.inference_mode()
@pytest.mark.parametrize("form", ["block", "dynamic", "modelopt"])
@pytest.mark.parametrize(
    "architecture", mostly_slow(["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"], "Qwen3_5ForCausalLM")
)
def test_fp8_is_read_as_it_is_published(tmp_path: Path, architecture: str, form: str) -> None:
    """Large matrices; what makes a and b, and ``mtp.fc``, stay plain."""
    dense = {"mlp_only_layers": [0, 1, 2, 3]} if architecture == "Qwen3NextForCausalLM" else {}
    write_hybrid(tmp_path, architecture, std=0.08, **dense)
    quantize(tmp_path, form, spread=1.0)
    model = loaded(tmp_path)
    apart = [getattr(block.attention, "rates", None) is not None for block in model.blocks]
    assert apart == [True, True, True, False]
    assert agrees(logits(model), expected(tmp_path, form))
    write_hybrid(tmp_path, architecture, std=0.08, mtp=True)
    quantize(tmp_path, form)
    assert mtp_of(tmp_path)[1].config.fp8 is not None


def test_a_model_for_text_may_keep_the_names_of_a_vision_language_one(tmp_path: Path) -> None:
    """As ``transformers`` reads them in either."""
    config = write_hybrid(tmp_path, "Qwen3_5ForCausalLM", mtp=True)
    right = paged_logits(loaded(tmp_path), ids_of(config), SdpaBackend, [40])
    stored = load_file(tmp_path / "model.safetensors")
    old = {name: tensor for name, tensor in stored.items() if name.startswith("model.")}
    moved = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in old.items()}
    change_tensors(tmp_path, dict.fromkeys(old) | moved)
    assert target_config(open_checkpoint(str(tmp_path))).prefix == "model.language_model."
    assert torch.equal(paged_logits(loaded(tmp_path), ids_of(config), SdpaBackend, [40]), right)


# ---- configs


def test_what_the_top_level_of_a_vision_language_model_says_counts(tmp_path: Path) -> None:
    write_hybrid(tmp_path, "Qwen3_5ForConditionalGeneration")
    raw = json.loads((tmp_path / "config.json").read_text())
    assert read(tmp_path).eos_token_ids == (2,)
    change_json(tmp_path / "config.json", eos_token_id=[5, 6], pad_token_id=None)
    assert read(tmp_path).eos_token_ids == (5, 6)
    change_json(tmp_path / "config.json", eos_token_id=None)
    assert read(tmp_path).eos_token_ids == (2,)
    assert FAMILIES["Qwen3_5ForCausalLM"].config(raw["text_config"] | {"architectures": ["x"]}) == replace(
        read(tmp_path), architecture="x"
    )


def test_of_layers_the_text_config_counts(tmp_path: Path) -> None:
    """As in transformers, which does not look at the top level; what is there alone is read."""
    write_hybrid(tmp_path, "Qwen3_5ForConditionalGeneration")
    plain = read(tmp_path)
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    change_json(tmp_path / "config.json", rms_norm_eps=0.01, rope_parameters=linear, vocab_size=3)
    assert read(tmp_path) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "no layer has full attention"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types names 3 layers, num_hidden_layers 4"),
        ({"layer_types": ["mamba"] * 4}, "layer_types has 'mamba': only full_attention and linear_attention"),
        ({"attn_output_gate": False}, "attn_output_gate is False: only True is supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid': only 'swish' or 'silu'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16': only 'float32'"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True: only False"),
        ({"linear_num_value_heads": 3}, "3 linear value heads cannot share 2 key heads"),
        ({"sliding_window": 8}, "sliding_window is 8 and in use"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.07}}, "need an even number"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "only fully rotary heads"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_hybrid(tmp_path)
    change_json(tmp_path / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_inspect_says_what_was_understood(tmp_path: Path) -> None:
    write_hybrid(tmp_path, "Qwen3_5MoeForConditionalGeneration", mtp=True)
    text = " ".join(describe(str(tmp_path), "mtp").to_text().split())
    for fact in (
        "family Qwen3_5MoeForConditionalGeneration, q and k normed",
        "experts 6 in all layers, 32 wide; beside one for all tokens, 32 wide and gated",
        "attention 4 heads, 2 KV heads, 16 wide each, outputs gated",
        "recurrence 3 of 4 layers keep a state in place of keys and values: 4 heads of 24 x 16, 2 key heads, behind a "
        "convolution over 4 positions",
        "rotary base 10,000, no scaling, of the first 0.25 of a head",
        "norm rounded behind the product with its weight plus 1",
        "MTP 1 layer, used by --drafter mtp",
        "vision 21 tensors of the vision part are not loaded: prompts are text",
        "fed back the hidden state behind mtp.norm",
        "Target and head fit; together 512 bytes of KV cache per token.",
    ):
        assert fact in text, fact
    assert "not read" not in text


# ---- MTP


@torch.inference_mode()
def right_mtp(path: Path, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The target's states of all of a text but its last token, and the logits that the MTP layer makes of them."""
    reference = ReferenceMtp(path, DenseTarget(path))
    tokens, hidden = reference.rows(ids, reference.target.states(tuple(ids.tolist()))[1])
    out = reference.run(0, tokens, hidden, torch.arange(len(tokens)))
    return hidden, reference.norm(out, 0, "shared_head.norm") @ reference.lm_head(0).T


def mtp_of(path: Path) -> tuple[Llama, MtpHead]:
    checkpoint, target = open_checkpoint(str(path)), loaded(path)
    head = load_drafter(mtp_part(checkpoint), target)
    assert isinstance(head, MtpHead)
    return target, head


@torch.inference_mode()
def mtp_logits(path: Path, ids: Tensor, hidden: Tensor) -> Tensor:
    """Of the rows of a text, the first of which are only stored."""
    _, head = mtp_of(path)
    cache = KVCache(spec=head.config.kv_spec, num_pages=33, page_size=4, dtype=torch.float32, device=CPU)
    tables = torch.arange(1, 33, dtype=torch.int32)[None]

    def attend(start: int, end: int) -> Attend:
        return Attend(SdpaBackend(CPU), cache, Layout.ragged(tables, [start], [end - start], 4), head.rope)

    head.write_kv(ids[:10], hidden[:10], attend(0, 10))
    state, normed = head.forward(ids[10:], hidden[10:], attend(10, len(ids)))
    assert state is normed
    return head.logits(normed)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", mostly_slow(CONFIGS, "Qwen3NextForCausalLM", MIXTURE))
def test_the_mtp_layer_equals_one_made_of_transformers_layers(tmp_path: Path, architecture: str) -> None:
    ids = ids_of(write_hybrid(tmp_path, architecture, mtp=True))
    hidden, expected = right_mtp(tmp_path, ids)
    got = mtp_logits(tmp_path, ids[1:], hidden)
    torch.testing.assert_close(got, expected[10:], atol=1e-4, rtol=0)


def test_a_model_without_its_mtp_layer_says_so(tmp_path: Path) -> None:
    write_hybrid(tmp_path)
    with pytest.raises(UserError, match=r"has no MTP layer .*no mtp\.layers\.0"):
        mtp_part(open_checkpoint(str(tmp_path)))


def test_an_mtp_layer_may_lie_in_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    write_hybrid(tmp_path / "both", "Qwen3_5ForConditionalGeneration", mtp=True)
    stored = load_file(tmp_path / "both" / "model.safetensors")
    write_hybrid(tmp_path / "alone", "Qwen3_5ForConditionalGeneration", mtp=True)
    change_tensors(tmp_path / "alone", {name: None for name in stored if not name.startswith("mtp.")})
    assert describe(str(tmp_path / "both"), str(tmp_path / "alone")).misfits == ()


# ---- planted errors: each must be seen by the comparison with transformers


def _centred_norm_forgotten(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(layers, "norm_weight", lambda config, name, size, load: load(f"{name}.weight", (size,)))


def _gates_as_halves(plant: pytest.MonkeyPatch) -> None:
    real = layers._by_kind

    def halves(num_groups: int, sizes: Any) -> list[list[int]]:
        return real(1, [num_groups * size for size in sizes])

    plant.setattr(layers, "_by_kind", halves)


def _no_gate(plant: pytest.MonkeyPatch) -> None:
    real = layers.Projection.with_gates
    plant.setattr(layers.Projection, "with_gates", lambda self, x: (real(self, x)[0], x[:, :0]))


def _delta(**changes: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """What a layer hands over, changed by field."""

    def plant_it(plant: pytest.MonkeyPatch) -> None:
        real = gated_delta._convolved

        def changed(layer: Any, before: Tensor, rows: Tensor) -> Any:
            found = real(layer, before, rows)
            return found._replace(**{name: change(found) for name, change in changes.items()})

        plant.setattr(gated_delta, "_convolved", changed)

    return plant_it


def _mean_in_the_unit_norm(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(gated_delta, "_unit", lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


def _eps_beside_the_root(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(gated_delta, "_unit", lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-2))


def _a_and_b_swapped(plant: pytest.MonkeyPatch) -> None:
    real = layers._delta_weights

    def swapped(delta: DeltaConfig, width: int, prefix: str, load: Any) -> Any:
        first, second = real(delta, width, prefix, load)
        heads = delta.num_value_heads
        return first, second.reordered([*range(heads, 2 * heads), *range(heads)])

    plant.setattr(layers, "_delta_weights", swapped)


def _order_of_parts(*order: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Queries, keys and values in another order in front of the convolution."""

    def plant_it(plant: pytest.MonkeyPatch) -> None:
        real = layers._delta_weights

        def other(delta: DeltaConfig, width: int, prefix: str, load: Any) -> Any:
            first, second = real(delta, width, prefix, load)
            keys = delta.num_key_heads * delta.key_dim
            ends = (0, keys, 2 * keys, delta.num_channels)
            parts = [range(ends[i], ends[i + 1]) for i in range(3)]
            rows = [row for i in order for row in parts[i]]
            return first.reordered([*rows, *range(delta.num_channels, len(first.data))]), second

        plant.setattr(layers, "_delta_weights", other)

    return plant_it


def _taps_backwards(plant: pytest.MonkeyPatch) -> None:
    real = layers.DeltaLayer
    plant.setattr(layers, "DeltaLayer", lambda **each: real(**each | {"conv": each["conv"].flip(1)}))


def _gate_before_norm(plant: pytest.MonkeyPatch) -> None:
    real = layers.GatedDelta.build.__func__

    def build(cls: Any, config: Any, *args: Any) -> Any:
        found = real(cls, config, *args)
        norm = torch_ops().rms_norm(torch.ones(config.delta.value_dim), config.rms_norm_eps)
        return replace(found, norm=lambda x, gate: norm(x * F.silu(gate)))

    plant.setattr(layers.GatedDelta, "build", classmethod(build))


def _shared_expert_in_full(plant: pytest.MonkeyPatch) -> None:
    real = mlp.Routing
    plant.setattr(mlp, "Routing", lambda **given: real(**given | {"gated": False}))


def _all_rotated(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(TargetConfig, "rotary_dim", property(lambda self: self.head_dim))


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "1 not added to norms": _centred_norm_forgotten,
    "gates as halves, key heads as one": _gates_as_halves,
    "no gate": _no_gate,
    "unit norm of the mean": _mean_in_the_unit_norm,
    "epsilon beside the root": _eps_beside_the_root,
    "a and b swapped": _a_and_b_swapped,
    "beta and decay swapped": _delta(beta=lambda rows: rows.g.exp(), g=lambda rows: rows.beta.log()),
    "no decay": _delta(g=lambda rows: torch.zeros_like(rows.g)),
    "queries not scaled": _delta(q=lambda rows: rows.q * 4),
    "q and k swapped": _delta(q=lambda rows: rows.k, k=lambda rows: rows.q),
    "v|q|k": _order_of_parts(2, 0, 1),
    "k|q|v": _order_of_parts(1, 0, 2),
    "taps backwards": _taps_backwards,
    "gate before norm": _gate_before_norm,
    "shared expert in full": _shared_expert_in_full,
    "all of a head rotated": _all_rotated,
}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor, Tensor]]:
    """A hybrid of an architecture, token ids, and their logits by ``transformers``."""

    @cache
    def of(architecture: str) -> tuple[Path, Tensor, Tensor]:
        path = tmp_path_factory.mktemp("hybrid")
        ids = ids_of(write_hybrid(path, architecture))
        return path, ids, right_logits(path, architecture, ids)

    return of


@pytest.mark.parametrize("architecture", mostly_slow(["Qwen3NextForCausalLM", MIXTURE], MIXTURE))
@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_seen(
    right: Callable[[str], tuple[Path, Tensor, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    architecture: str,
) -> None:
    path, ids, expected = right(architecture)
    PLANTED[name](monkeypatch)
    got = paged_logits(loaded(path), ids, SdpaBackend, [len(ids)])
    assert (got - expected).abs().max() > 1e-2


def _state_before_embedding(plant: pytest.MonkeyPatch) -> None:
    real = mtp.MtpLayer.build.__func__

    def build(cls: Any, *args: Any) -> Any:
        found = real(cls, *args)
        return replace(found, inputs=lambda *each: torch.cat(found.inputs(*each).chunk(2, -1)[::-1], -1))

    plant.setattr(mtp.MtpLayer, "build", classmethod(build))


def _norms_swapped(plant: pytest.MonkeyPatch) -> None:
    real = mtp._apart

    def swapped(layer: int) -> Any:
        found = real(layer)
        return replace(found, embed_norm=found.hidden_norm, hidden_norm=found.embed_norm)

    plant.setattr(mtp, "_apart", swapped)


def _plain_mtp_norms(plant: pytest.MonkeyPatch) -> None:
    for module in (mtp, layers):
        plant.setattr(module, "norm_weight", lambda config, name, size, load: load(f"{name}.weight", (size,)))


@torch.inference_mode()
@pytest.mark.parametrize(
    "plant_it", [_state_before_embedding, _norms_swapped, _plain_mtp_norms, _gates_as_halves]
)
def test_planted_errors_of_the_mtp_layer_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant_it: Callable[[pytest.MonkeyPatch], None]
) -> None:
    ids = ids_of(write_hybrid(tmp_path, mtp=True))
    hidden, expected = right_mtp(tmp_path, ids)
    plant_it(monkeypatch)
    assert (mtp_logits(tmp_path, ids[1:], hidden) - expected[10:]).abs().max() > 1e-2
