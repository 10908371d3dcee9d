"""FP8 weights alone: GEMMs rounded once in every dtype, joined ones, experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.config import UserError
from specgen.ops import Ops
from specgen.ops.cpu import cpu_float32_ops
from specgen.ops.fp8 import block_scales, dequantised, rounded
from specgen.ops.reference import torch_ops
from specgen.ops.weight import Weight
from tests.tiny_fp8 import E4M3

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
    assert weight.bias is not None
    weight = replace(weight, bias=weight.bias.to(dtype))
    x = torch.randn(7, 200, generator=NOISE).to(dtype)
    bundles: list[Ops] = [torch_ops(), *([cpu_float32_ops()] if dtype == torch.float32 else [])]
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
    for ops in (torch_ops(), cpu_float32_ops()):
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
