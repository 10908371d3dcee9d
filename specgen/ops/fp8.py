"""FP8 weights on a CPU: dequantised once, with activations rounded to e4m3 before each product.

Formulas of compressed-tensors, of the block FP8 of DeepSeek-V3 and Qwen3, and of NVIDIA's modelopt.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.ops.weight import Weight

GROUP = 128  # inputs that share a scale in block FP8
LARGEST = 448.0  # of e4m3
_SMALLEST = 1e-12  # a scale, so that a row of zeros stays zero


def dequantised(weight: Weight) -> Tensor:
    """The float32 matrix [out, in] of a weight in FP8."""
    assert weight.format == "fp8", weight.format
    assert weight.scale is not None
    wide = weight.data.float()
    if weight.scale.shape[1] == 1:
        return wide * weight.scale
    return wide * weight.scale.repeat_interleave(GROUP, 1)[:, : wide.shape[1]]


def rounded(x: Tensor, weight: Weight) -> Tensor:
    """``x`` [rows, in] as ``weight`` has its inputs rounded to e4m3, times the scale again, in float32."""
    wide = x.float()
    if weight.activations == "static":
        assert weight.input_scale is not None
        return _to_e4m3(wide, weight.input_scale)
    if weight.activations == "token":
        return _to_e4m3(wide, _scale(wide))
    padded = F.pad(wide, (0, -wide.shape[-1] % GROUP))
    padded = padded.view(*padded.shape[:-1], -1, GROUP)
    return _to_e4m3(padded, _scale(padded)).flatten(-2)[..., : wide.shape[-1]]


def _scale(x: Tensor) -> Tensor:
    return (x.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=_SMALLEST)


def _to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale
