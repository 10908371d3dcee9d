"""Targets in FP8: their logits against the formulas of every published layout, planted errors, texts with drafts.

Dense and mixtures of experts; GEMMs are rounded once in every dtype; tiles of block FP8.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from bound import ExpertSize
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from specgen.checkpoints.checkpoint import build_target, load_target, open_checkpoint, target_config
from specgen.checkpoints.tensor_reader import TensorReader
from specgen.config import SamplingParams, UserError
from specgen.config.bundled import data_directory
from specgen.experiments.audit import Judge
from specgen.models.llama import Llama
from specgen.ops import Ops, block_fp8, fp8
from specgen.ops.cpu import cpu_ops
from specgen.ops.experts import Experts, Gating, grouped_experts
from specgen.ops.fp8 import block_scales, dequantised, rounded
from specgen.ops.reference import torch_ops
from specgen.ops.weight import Weight
from tests.commands import refused
from tests.dense import DenseAttend
from tests.engines import bundled_requests, config_of, generate, load_pair, random_requests
from tests.marks import mostly_slow
from tests.operations import Operations
from tests.tiny_checkpoints import change_tensors, write_head, write_target
from tests.tiny_fp8 import CONFIGS, E4M3, matrix, quantize, reference
from tests.tiny_mixtures import read, write_qwen3_moe

CPU = torch.device("cpu")
PROMPTS = torch.randint(0, 128, (4, 8), generator=torch.Generator().manual_seed(3))


def write(path: Path, form: str, **settings: Any) -> Path:
    """A target whose widths are no multiples of a block, with square projections and rows of many magnitudes."""
    write_target(path, **{"num_layers": 2, "hidden_size": 192, "head_dim": 48, "std": 0.08} | settings)
    quantize(path, form, spread=1.0)
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> Llama:
    return load_target(open_checkpoint(str(path)), dtype, CPU)


@torch.inference_mode()
def logits(model: Llama) -> Tensor:
    """Of each prompt, [prompts, tokens, V] float32."""
    found = [model.logits(model.forward(ids, DenseAttend(model))[0]) for ids in PROMPTS]
    return torch.stack(found).float()


@torch.inference_mode()
def expected(path: Path, form: str, **how: Any) -> Tensor:
    return reference(path, form, **how)(PROMPTS).logits


def furthest(got: Tensor, right: Tensor) -> Tensor:
    """The largest difference of logits in each prompt, sorted."""
    return (got - right).abs().nan_to_num(1e9).flatten(1).amax(1).sort().values


def agrees(got: Tensor, right: Tensor) -> bool:
    """To 1e-3 but for one prompt: an input half way between two values of e4m3 may be rounded to either."""
    apart = furthest(got, right)
    return bool(apart[-2] < 1e-3 and apart[-1] < 0.2)


# with biases, else a factor of q is as good as one of k; and as many heads of k as of q
QWEN2: dict[str, Any] = {"family": "qwen2", "num_kv_heads": 4, "head_dim": None}


@pytest.mark.parametrize("family", [{}, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("form", CONFIGS)
def test_logits_are_those_of_the_formulas(tmp_path: Path, form: str, family: dict[str, Any]) -> None:
    path = write(tmp_path, form, **family)
    right = expected(path, form)
    assert right.std() > 0.5
    assert agrees(logits(load(path)), right)


@pytest.mark.parametrize("form", CONFIGS)
def test_with_unrounded_inputs_logits_are_those_of_dequantized_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    def dequantized(tensors: dict[str, Tensor], layer: str, _: str) -> nn.Module:
        wide = matrix(tensors, layer)
        linear = nn.Linear(wide.shape[1], wide.shape[0], bias=False)
        linear.weight.data = wide
        return linear

    path = write(tmp_path, form)
    monkeypatch.setattr(fp8, "rounding", lambda weight: Tensor.float)
    right = expected(path, form, make=dequantized)
    assert furthest(logits(load(path)), right)[-1] < 1e-4


def test_transposed_blocks_are_seen(tmp_path: Path) -> None:
    path = write(tmp_path, "block")
    right = expected(path, "block")
    tensors = load_file(path / "model.safetensors")
    square = {name for name, value in tensors.items() if "_scale" in name and value.shape == (2, 2)}
    assert square
    change_tensors(path, {name: tensors[name].mT for name in square})
    assert furthest(logits(load(path)), right)[0] > 5e-3
    _alter(path, "model.layers.0.mlp.gate_proj.weight_scale_inv", lambda scale: scale.mT.contiguous())
    with refused(r"weight_scale_inv has shape \[2, 3\], but config.json asks for \[3, 2\]"):
        load(path)


class Casts(Operations):
    """Finds the largest magnitude that is cast to e4m3: before torch 2.13 what is beyond 448 became NaN."""

    largest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("dtype") == E4M3:
            self.largest = max(self.largest, float(args[0].abs().max()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activations", ["static", "token", "group"])
def test_inputs_are_clamped_before_they_are_rounded(activations: Any) -> None:
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1)) * 10
    x[2], x[3, 7] = 0, 1e30
    weight = Weight(
        data=torch.ones(8, 200).to(E4M3),
        scale=torch.ones(8, 2),
        format="fp8",
        activations=activations,
        input_scale=torch.tensor(0.01) if activations == "static" else None,
    )
    with Casts() as casts:
        got = fp8.rounded(x, weight)
    assert 400 < casts.largest <= 448
    assert got.shape == x.shape
    assert got.isfinite().all()
    assert not got[2].any()
    if activations == "static":
        assert got.max() == pytest.approx(4.48)
    else:
        torch.testing.assert_close(got[:2], x[:2], rtol=2**-4, atol=0.1)


def _alter(path: Path, name: str, change: Any) -> None:
    """Replace a tensor; what ``change`` makes None is removed."""
    change_tensors(path, {name: change(load_file(path / "model.safetensors")[name])})


@pytest.mark.parametrize("form", mostly_slow(["dynamic", "block"], "block"))
def test_greedy_texts_with_a_drafter_are_those_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Identical but for the rounding of inputs, which ``verify`` bounds: it turns 1e-7 into the next value of e4m3."""
    shutil.copytree(data_directory() / "demo", tmp_path, dirs_exist_ok=True)
    quantize(tmp_path / "target", form)
    requests = bundled_requests(4, SamplingParams(max_tokens=24))
    pair = load_pair(tmp_path)
    judge = replace(Judge.of(config_of(pair), pair.models), token_text=str)
    assert judge.fp8
    plain, drafted = (generate(pair, requests, num_spec_tokens=k) for k in (0, 4))
    lengths = drafted.accepted
    assert sum(lengths) / len(lengths) > 2
    for request in requests:
        name, prompt = request.id, request.prompt_token_ids
        found = judge.first_divergence(name, prompt, plain.texts[name], drafted.texts[name])
        assert found is None or found.explained

    monkeypatch.setattr(fp8, "rounding", lambda weight: Tensor.float)
    unrounded = load_pair(tmp_path)
    plain, drafted = (generate(unrounded, requests, num_spec_tokens=k) for k in (0, 4))
    assert drafted.texts == plain.texts


NOISE = torch.Generator().manual_seed(5)


def fp8_weight(out: int, width: int, activations: Any, *, bias: bool = False) -> Weight:
    columns = -(-width // 128) if activations == "group" else 1
    return Weight(
        data=torch.randn(out, width, generator=NOISE).to(E4M3),
        scale=torch.rand(out, columns, generator=NOISE) + 0.1,
        bias=torch.randn(out, generator=NOISE) if bias else None,
        format="fp8",
        activations=activations,
        input_scale=torch.tensor(0.01) if activations == "static" else None,
    )


def exact(x: Tensor, weight: Weight) -> Tensor:
    """The GEMM in float64 of what is left of ``x`` and of the weights."""
    out = rounded(x, weight).double() @ dequantised(weight).double().T
    return out if weight.bias is None else out + weight.bias.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activations", ["static", "token", "group"])
def test_gemms_are_rounded_once(activations: Any, dtype: torch.dtype) -> None:
    weight = fp8_weight(64, 200, activations, bias=True)
    weight = replace(weight, bias=weight.bias.to(dtype))
    x = torch.randn(7, 200, generator=NOISE).to(dtype)
    bundles: list[Ops] = [torch_ops(), cpu_ops(dtype)]
    for ops in bundles:
        got, right = ops.linear(weight)(x), exact(x, weight)
        assert got.dtype == dtype
        assert torch.equal(ops.linear_parts(weight)(x)[0], got)
        if dtype == torch.float32:
            torch.testing.assert_close(got.double(), right, atol=1e-4, rtol=1e-5)
        else:
            same = got == right.to(dtype)
            assert same.float().mean() > 0.99  # a second rounding, as of the bias, moves many more
            torch.testing.assert_close(got.double(), right, atol=1e-3, rtol=torch.finfo(dtype).eps)
        gate, up = got.chunk(2, -1)
        torch.testing.assert_close(ops.gated_linear(weight)(x), F.silu(gate) * up)


def test_joined_weights_keep_the_scales_of_each() -> None:
    for activations in ("static", "token", "group"):
        parts = [fp8_weight(out, 200, activations, bias=True) for out in (48, 16, 16)]
        x = torch.randn(5, 200, generator=NOISE)
        make: Callable[[Weight], Any] = torch_ops().linear
        got = make(Weight.joined(parts))(x)
        torch.testing.assert_close(got, torch.cat([make(part)(x) for part in parts], -1))


def test_dequantised_weights_are_the_only_copy() -> None:
    for ops in (torch_ops(), cpu_ops(torch.float32)):
        weight = fp8_weight(16, 200, "group")
        stored, linear = ref(weight.data), ops.linear(weight)
        del weight
        assert stored() is None
        assert linear(torch.ones(1, 200)).any()


@pytest.mark.parametrize(("experts", "halves", "out"), [((), 1, 300), ((5,), 1, 256), ((5,), 2, 300)])
def test_scales_of_blocks_are_those_that_their_outputs_share(
    experts: tuple[int, ...], halves: int, out: int
) -> None:
    """Of gate and up both begin a block, whatever their width."""
    blocks = torch.rand(*experts, halves, -(-out // halves // 128), 3, generator=NOISE)
    shared = blocks.repeat_interleave(128, -2)[..., : out // halves, :].flatten(-3, -2)
    assert shared.shape[-2] == out
    assert torch.equal(block_scales(shared, halves), blocks.flatten(-3, -2))
    shared[..., 100, 1] += 1
    with pytest.raises(UserError, match="do not begin at multiples of 128 outputs: use --device cpu"):
        block_scales(shared, halves)


def test_halves_that_are_no_whole_blocks_are_not_taken_for_one() -> None:
    blocks = torch.rand(4, 3, generator=NOISE)
    shared = torch.cat([half.repeat_interleave(128, 0)[:150] for half in blocks.split(2)])
    with pytest.raises(UserError, match="multiples of 128"):
        block_scales(shared)
    assert torch.equal(block_scales(shared, 2), blocks)


EXPERT_FORMS = ("dynamic", "block", "compressed-block", "static", "modelopt", "autofp8")
WIDTHS: dict[str, int] = {"hidden_size": 192, "moe_intermediate_size": 160, "head_dim": 48}  # no whole blocks


def write_experts(path: Path, form: str, **changes: Any) -> Path:
    write_qwen3_moe(path, **{"num_hidden_layers": 2, **WIDTHS} | changes)
    quantize(path, form, spread=1.0)
    return path


@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_logits_of_experts_are_those_of_the_formulas(tmp_path: Path, form: str) -> None:
    path = write_experts(tmp_path, form)
    right = expected(path, form)
    assert right.std() > 0.5
    assert agrees(logits(load(path)), right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", ["token", "group"])
def test_gemms_of_experts_are_rounded_once(activations: Any, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(1)

    def stacked(out: int, width: int) -> Weight:
        columns = -(-width // 128) if activations == "group" else 1
        return Weight(
            data=torch.randn(4, out, width, generator=noise).to(E4M3),
            scale=torch.rand(4, out, columns, generator=noise) * 0.2 + 0.05,
            format="fp8",
            activations=activations,
        )

    experts = Experts(gate_up=stacked(2 * 160, 192), down=stacked(192, 160), gating=Gating())
    x = torch.randn(9, 192, generator=noise).to(dtype)
    ids = torch.stack([torch.randperm(4, generator=noise)[:2] for _ in x])
    weights = torch.rand(9, 2, generator=noise).to(dtype)
    got = grouped_experts(experts)(x, ids, weights)[0]
    assert got.dtype == dtype

    def gemm(row: Tensor, weight: Weight, expert: int) -> Tensor:
        return (rounded(row, weight).double() @ dequantised(weight)[expert].double().T).to(dtype)

    for row, chosen, scores, out in zip(x, ids.tolist(), weights, got, strict=True):
        halves = [gemm(row[None], experts.gate_up, e).chunk(2, -1) for e in chosen]
        each = [gemm(Gating()(*half), experts.down, e) for half, e in zip(halves, chosen, strict=True)]
        right = (torch.cat(each) * scores[:, None]).sum(0)
        torch.testing.assert_close(
            out, right, atol=1e-3 * float(right.abs().max()), rtol=2 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("form", ["dynamic", "block"])
def test_bytes_of_experts_are_those_of_their_tensors(tmp_path: Path, form: str) -> None:
    checkpoint = open_checkpoint(str(write_experts(tmp_path, form)))
    config = target_config(checkpoint)
    reader = TensorReader(checkpoint=checkpoint, dtype=torch.bfloat16, device=torch.device("meta"))
    build_target(config, reader)
    size = ExpertSize.of(config, 2)
    assert size.total_bytes == sum(count for name, count in reader.taken.items() if ".experts." in name)
    assert config.fp8 is not None
    plain = ExpertSize.of(replace(config, fp8=replace(config.fp8, ignored=("re:.*mlp.experts.*",))), 2)
    assert plain.num_bytes == 2 * 3 * 192 * 160


def test_gate_and_up_of_an_expert_have_one_input_scale(tmp_path: Path) -> None:
    write_experts(tmp_path, "modelopt")
    _alter(tmp_path, "model.layers.1.mlp.experts.3.up_proj.input_scale", lambda scale: scale * 2)
    with refused(r"1.mlp.experts.3.gate_proj, .*3.up_proj have the same inputs, but diff"):
        load(tmp_path)


def test_greedy_texts_of_experts_with_a_drafter_are_those_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inputs as they are; see the dense targets for what rounding them does."""
    write_experts(tmp_path / "target", "block", eos_token_id=0)
    write_head(tmp_path / "drafter", read(tmp_path / "target"), aux_layer_ids=[0, 1, 2], qk_norm=True)
    monkeypatch.setattr(fp8, "rounding", lambda weight: Tensor.float)
    monkeypatch.setattr("specgen.ops.experts.rounding", lambda weight: Tensor.float)
    pair, requests = load_pair(tmp_path), random_requests(6, 128, SamplingParams(max_tokens=16))
    plain, drafted = (generate(pair, requests, num_spec_tokens=k) for k in (0, 3))
    assert drafted.texts == plain.texts


@pytest.mark.parametrize(
    ("rows", "num_out", "chosen"),
    [
        (65, 6144, (48, 1)),  # 128 tiles, one turn of 132
        (128, 6144, (48, 1)),
        (160, 6144, (96, 1)),  # 128 tiles again
        (128, 4096, (32, 1)),
        (320, 4096, (96, 1)),  # 3 x 43
        (1023, 24576, (128, 1)),
        (1024, 24576, (128, 2)),
        (2048, 4096, (128, 2)),
        (2048, 128, (32, 1)),  # too few for pairs
    ],
)
def test_tiles_fill_the_gpu_in_the_fewest_turns(rows: int, num_out: int, chosen: tuple[int, int]) -> None:
    assert block_fp8.tile(rows, num_out, 132) == chosen


def test_an_odd_number_of_multiprocessors_has_no_pairs() -> None:
    assert block_fp8.tile(2048, 4096, 131)[1] == 1
    assert block_fp8.tile(2048, 128 * 33, 132)[1] == 1, "nor an odd number of tiles"


def test_other_shapes_and_devices_take_other_kernels() -> None:
    assert block_fp8.fits(256, 128)
    assert not block_fp8.fits(192, 128)
    assert not block_fp8.fits(128, 192)
    assert not block_fp8.can_run(torch.device("cpu"), 128, 128)
