"""MXFP4: 4-bit floats in blocks of 32 along a row, each block with a power of two as its scale; read as they are."""

from functools import cache

import torch
from torch import Tensor

from specgen.ops.weight import Weight

BLOCK = 32  # values with one scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three low bits; the fourth is the sign
_BIAS = 127  # of the scales' exponents


def dequantized(weight: Weight, dtype: torch.dtype) -> Weight:
    """``weight`` [E, out, in] in the format "plain", on its device; exact in bfloat16 and float32.

    Expert by expert, so that what it needs besides the result is small.
    """
    assert weight.format == "mxfp4", weight.format
    assert weight.scale is not None
    pairs = _pairs(weight.data.device)
    plain = torch.empty(*weight.data.shape[:-1], 2 * weight.data.shape[-1], dtype=dtype, device=pairs.device)
    for out, packed, scale in zip(plain, weight.data, weight.scale, strict=True):
        values = pairs[packed.int()].view(*scale.shape, BLOCK)
        out.copy_(torch.ldexp(values, scale[..., None].int() - _BIAS).flatten(-2))
    return Weight(data=plain, bias=weight.bias)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two values of each byte, [256, 2] float32: the low four bits are the first."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=device)
    byte = torch.arange(256, device=device)
    return values[torch.stack((byte & 15, byte >> 4), -1)]
