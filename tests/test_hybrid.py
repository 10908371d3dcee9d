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
from specgen.checkpoints.checkpoint import load_drafter, mtp_part, open_checkpoint, target_config
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
from tests.families import Case, Error, ids_of, is_seen, loaded, paged_logits, plant, right_logits
from tests.marks import mostly_slow
from tests.reference_heads import DenseTarget, ReferenceMtp
from tests.test_families import MIXTURE, NEXT
from tests.test_fp8 import agrees, expected, logits
from tests.tiny_checkpoints import change_json, change_tensors, read
from tests.tiny_fp8 import quantize
from tests.tiny_hybrids import CONFIGS, write_hybrid

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


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
        "vision 21 tensors of the part for images and sounds are not loaded: prompts are text",
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


# ---- planted errors: what of which module, and what is made of it


def delta(**changes: Callable[[Any], Any]) -> Error:
    """What a layer hands over, changed by field."""

    def wrong(real: Any) -> Any:
        def changed(layer: Any, before: Tensor, rows: Tensor) -> Any:
            found = real(layer, before, rows)
            return found._replace(**{name: change(found) for name, change in changes.items()})

        return changed

    return gated_delta, "_convolved", wrong


def _a_and_b_swapped(real: Any) -> Any:
    def swapped(delta: DeltaConfig, width: int, prefix: str, load: Any) -> Any:
        first, second = real(delta, width, prefix, load)
        heads = delta.num_value_heads
        return first, second.reordered([*range(heads, 2 * heads), *range(heads)])

    return swapped


def order_of_parts(*order: int) -> Error:
    """Queries, keys and values in another order in front of the convolution."""

    def wrong(real: Any) -> Any:
        def other(delta: DeltaConfig, width: int, prefix: str, load: Any) -> Any:
            first, second = real(delta, width, prefix, load)
            keys = delta.num_key_heads * delta.key_dim
            ends = (0, keys, 2 * keys, delta.num_channels)
            rows = [row for i in order for row in range(ends[i], ends[i + 1])]
            return first.reordered([*rows, *range(delta.num_channels, len(first.data))]), second

        return other

    return layers, "_delta_weights", wrong


def _gate_before_norm(real: Any) -> Any:
    def build(cls: Any, config: Any, *args: Any) -> Any:
        norm = torch_ops().rms_norm(torch.ones(config.delta.value_dim), config.rms_norm_eps)
        return replace(real(config, *args), norm=lambda x, gate: norm(x * F.silu(gate)))

    return classmethod(build)


def _plain_norm(real: Any) -> Any:
    return lambda config, name, size, load: load(f"{name}.weight", (size,))


GATES_AS_HALVES = (
    *(layers, "_by_kind"),
    lambda real: lambda num_groups, sizes: real(1, [num_groups * size for size in sizes]),
)
PLANTED: dict[str, Error] = {
    "1 not added to norms": (layers, "norm_weight", _plain_norm),
    "gates as halves, key heads as one": GATES_AS_HALVES,
    "no gate": (layers.Projection, "with_gates", lambda real: lambda self, x: (real(self, x)[0], x[:, :0])),
    "unit norm of the mean": (
        *(gated_delta, "_unit"),
        lambda real: lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
    ),
    "epsilon beside the root": (
        *(gated_delta, "_unit"),
        lambda real: lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-2),
    ),
    "a and b swapped": (layers, "_delta_weights", _a_and_b_swapped),
    "beta and decay swapped": delta(beta=lambda rows: rows.g.exp(), g=lambda rows: rows.beta.log()),
    "no decay": delta(g=lambda rows: torch.zeros_like(rows.g)),
    "queries not scaled": delta(q=lambda rows: rows.q * 4),
    "q and k swapped": delta(q=lambda rows: rows.k, k=lambda rows: rows.q),
    "v|q|k": order_of_parts(2, 0, 1),
    "k|q|v": order_of_parts(1, 0, 2),
    "taps backwards": (
        *(layers, "DeltaLayer"),
        lambda real: lambda **each: real(**each | {"conv": each["conv"].flip(1)}),
    ),
    "gate before norm": (layers.GatedDelta, "build", _gate_before_norm),
    "shared expert in full": (mlp, "Routing", lambda real: lambda **given: real(**given | {"gated": False})),
    "all of a head rotated": (
        *(TargetConfig, "rotary_dim"),
        lambda real: property(lambda self: self.head_dim),
    ),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """A hybrid of an architecture, token ids, and their logits by ``transformers``."""

    @cache
    def of(architecture: str) -> Case:
        path = tmp_path_factory.mktemp("hybrid")
        ids = ids_of(write_hybrid(path, architecture))
        return path, ids, right_logits(path, ids)

    return of


@pytest.mark.parametrize("architecture", mostly_slow([NEXT, MIXTURE], MIXTURE))
@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_seen(
    right: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str, architecture: str
) -> None:
    case = right(architecture)
    plant(monkeypatch, PLANTED[name])
    assert is_seen(*case)


def _state_before_embedding(real: Any) -> Any:
    def build(cls: Any, *args: Any) -> Any:
        found = real(*args)
        return replace(found, inputs=lambda *each: torch.cat(found.inputs(*each).chunk(2, -1)[::-1], -1))

    return classmethod(build)


def _norms_swapped(real: Any) -> Any:
    def swapped(layer: int) -> Any:
        found = real(layer)
        return replace(found, embed_norm=found.hidden_norm, hidden_norm=found.embed_norm)

    return swapped


@torch.inference_mode()
@pytest.mark.parametrize(
    "errors",
    [
        [(mtp.MtpLayer, "build", _state_before_embedding)],
        [(mtp, "_apart", _norms_swapped)],
        [(module, "norm_weight", _plain_norm) for module in (mtp, layers)],
        [GATES_AS_HALVES],
    ],
)
def test_planted_errors_of_the_mtp_layer_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[Error]
) -> None:
    ids = ids_of(write_hybrid(tmp_path, mtp=True))
    hidden, expected = right_mtp(tmp_path, ids)
    for each in errors:
        plant(monkeypatch, each)
    assert (mtp_logits(tmp_path, ids[1:], hidden) - expected[10:]).abs().max() > 1e-2
