"""The elementwise kernels of a forward pass, as one bundle that is bound once by device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Ops:
    """The kernels a model calls; every implementation rounds where ``transformers`` rounds.

    Shapes: ``rms_norm(x [..., N], weight [N] or [heads, N], eps) -> [..., N]``, statistics in float32;
    ``silu_and_mul(gate_up [rows, 2 * N]) -> [rows, N]``, the gate being the first half;
    ``rope(x [rows, heads, D], cos [rows, 1, D], sin [rows, 1, D]) -> [rows, heads, D]``, half-split pairs.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]


def bind_ops(device: torch.device) -> Ops:
    """The kernels for ``device``: at present the torch reference everywhere."""
    return torch_ops()


def torch_ops() -> Ops:
    """The reference kernels in plain torch, for any device."""
    return Ops(rms_norm=_rms_norm, silu_and_mul=_silu_and_mul, rope=_rope)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Rolling by half a head swaps the two halves; the minus sign of the rotation is in the table of sines.
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
