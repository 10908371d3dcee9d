"""FP8 weights in plain torch: dequantised to float32 once, and inputs rounded to e4m3 before each GEMM.

The formulas of compressed-tensors, of DeepSeek-V3's and Qwen3's block FP8 and of NVIDIA's modelopt: the reference of
faster kernels, and what a CPU runs, at 4 bytes a weight.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.config import require
from specgen.ops.weight import GROUP, Weight

LARGEST = 448.0  # of e4m3
_ROWS = 4096  # that are in float32 at once, while a weight is copied
_Map = Callable[[Tensor], Tensor]


def fp8_linear(weight: Weight, plain: Callable[[Weight], _Map]) -> _Map:
    """``Ops.linear`` by the GEMM of float32 matrices that ``plain`` prepares; rounded once, to the inputs' dtype."""
    bias = None if weight.bias is None else weight.bias.float()
    gemm, rounds = plain(Weight(data=dequantised(weight), bias=bias)), rounding(weight)
    return lambda x: gemm(rounds(x)).to(x.dtype)


def in_fp8(weight: Weight) -> Weight:
    """``weight`` [out, in] with a scale for each output, inputs rounded row by row; as it is if it is in FP8."""
    if weight.format == "fp8":
        return weight
    data, scales = torch.empty_like(weight.matrix, dtype=torch.float8_e4m3fn), list[Tensor]()
    for rows, place in zip(*(torch.split(each, _ROWS) for each in (weight.matrix, data)), strict=True):
        wide = rows.float()
        scales.append(_scale(wide))
        place.copy_(_to_e4m3(wide, scales[-1]))
    return Weight(data=data, scale=torch.cat(scales), bias=weight.bias, format="fp8", activations="token")


def dequantised(weight: Weight) -> Tensor:
    """The float32 matrix [..., out, in] of a weight in FP8."""
    assert weight.format == "fp8", weight.format
    assert weight.scale is not None
    wide, scale = weight.data.float(), weight.scale
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(GROUP, -1)[..., : wide.shape[-1]]
    return wide.mul_(scale)


def plain_matrix(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix in ``dtype``, of FP8 dequantised: where inputs are not to be rounded."""
    return (weight.matrix if weight.format == "plain" else dequantised(weight)).to(dtype)


def block_scales(scale: Tensor, halves: int = 1) -> Tensor:
    """Those of each block, [..., blocks, in / 128], of scales [..., out, in / 128] that 128 outputs share.

    Of several ``halves`` of the outputs each begins a block. ``UserError`` if a block has several scales.
    """
    parts = scale.view(*scale.shape[:-2], halves, -1, scale.shape[-1])
    blocks = parts[..., ::GROUP, :]
    same = torch.equal(blocks.repeat_interleave(GROUP, -2)[..., : parts.shape[-2], :], parts)
    require(same, "block FP8 has blocks that do not begin at multiples of 128 outputs: use --device cpu")
    return blocks.flatten(-3, -2)


def rounded(x: Tensor, weight: Weight) -> Tensor:
    """``x`` [..., in] rounded to e4m3 as ``weight`` asks of its inputs, times its scales again, in float32."""
    return rounding(weight)(x)


def rounding(weight: Weight) -> _Map:
    """``rounded`` for this weight, without keeping its matrix; not for experts with separate scales."""
    if weight.activations == "static":
        scale = weight.input_scale
        assert scale is not None
        return lambda x: through_e4m3(x.float(), scale)
    assert weight.activations is not None
    return _by_token if weight.activations == "token" else _by_group


def _by_token(x: Tensor) -> Tensor:
    wide = x.float()
    return through_e4m3(wide, _scale(wide))


def _by_group(x: Tensor) -> Tensor:
    padded = F.pad(x.float(), (0, -x.shape[-1] % GROUP))
    padded = padded.view(*x.shape[:-1], padded.shape[-1] // GROUP, GROUP)
    return through_e4m3(padded, _scale(padded)).flatten(-2)[..., : x.shape[-1]]


def _scale(x: Tensor) -> Tensor:
    """Of each row, so that its largest magnitude becomes the largest of e4m3; 1 where all are zero."""
    scale = x.abs().amax(-1, keepdim=True) / LARGEST
    return torch.where(scale == 0, 1.0, scale)


def through_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """``x`` in float32 rounded to e4m3 with ``scale``, and times it again."""
    return _to_e4m3(x, scale).float() * scale


def _to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    # before torch 2.13 a cast makes NaN of what is beyond the range
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
