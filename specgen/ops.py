"""The kernels of a forward pass, as one bundle that is bound once by device and dtype."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.layout import Layout

Map = Callable[[Tensor], Tensor]  # rows to rows

# Takes one layer's projections [rows, Hq + 2 * Hkv, D] and its pages, keys and values, each
# [num_pages, page_size, Hkv, D]; stores the rotated keys and the values in them, returns the rotated q [rows, Hq, D].
Store = Callable[[Tensor, Tensor, Tensor], Tensor]
Rope = Callable[[Layout], Store]  # planned once a pass


@dataclass(frozen=True, kw_only=True)
class Ops:
    """What a model is made of; every implementation rounds where ``transformers`` rounds.

    ``linear(weight [out, in])`` and ``rms_norm(weight [..., N], eps)`` prepare a weight once, when it is loaded,
    and return the map that applies it: [rows, in] -> [rows, out], and [rows, ..., N] -> the same shape with
    statistics in float32. ``silu_and_mul(gate_up [rows, 2 * N]) -> [rows, N]``, the gate being the first half.
    ``rope(frequencies [D / 2])`` rotates half-split pairs by position times frequency and stores; see ``Store``.
    """

    linear: Callable[[Tensor], Map]
    rms_norm: Callable[[Tensor, float], Map]
    silu_and_mul: Map
    rope: Callable[[Tensor], Rope]


def bind_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """The fastest kernels for weights of ``dtype`` on ``device``."""
    if device.type == "cpu" and dtype == torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return cpu_float32_ops()
    return torch_ops()


def torch_ops() -> Ops:
    """The reference kernels in plain torch, for any device and dtype."""
    return Ops(linear=_Linear, rms_norm=_RmsNorm, silu_and_mul=_silu_and_mul, rope=_Rope)


def cpu_float32_ops() -> Ops:
    """For CPUs with oneDNN: weights in its blocked order, and a norm of four small kernels instead of six.

    Measured on two cores against ``torch_ops``: one row through a [2048, 2048] weight 0.15 ms instead of
    0.33 ms, five rows 0.24 ms instead of 1.4 ms; a norm of one row of 256 takes 5 us instead of 10 us. Only
    where a weight stays in the core's own cache is a plain call faster (by 8 us), and a model's weights do not.
    """
    return Ops(
        linear=_PackedLinear.pack, rms_norm=_FusedRmsNorm.prepare, silu_and_mul=_silu_and_mul, rope=_Rope
    )


@dataclass(frozen=True)
class _Linear:
    weight: Tensor  # [out, in]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@dataclass(frozen=True)
class _PackedLinear:
    packed: Tensor

    @classmethod
    def pack(cls, weight: Tensor) -> "_PackedLinear":
        # 64 rows is a hint; a weight packed for one row is slow for more, and not the other way round.
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64))

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return y


@dataclass(frozen=True)
class _RmsNorm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight


@dataclass(frozen=True, kw_only=True)
class _FusedRmsNorm:
    weight: Tensor  # times sqrt(N)
    floor: Tensor  # sqrt(N * eps)

    @classmethod
    def prepare(cls, weight: Tensor, eps: float) -> "_FusedRmsNorm":
        size = weight.shape[-1]
        return cls(weight=weight * size**0.5, floor=torch.tensor((size * eps) ** 0.5))

    def __call__(self, x: Tensor) -> Tensor:
        # sqrt(|x|^2 + N eps) is the hypotenuse of |x| and sqrt(N eps): one kernel for add and root.
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)
        return (x / length).mul_(self.weight)


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


@dataclass(frozen=True)
class _Rope:
    frequencies: Tensor  # [D / 2]

    def __call__(self, layout: Layout) -> Store:
        angles = layout.positions[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return _RopeStore(cos=torch.cat((cos, cos), -1), sin=torch.cat((-sin, sin), -1), slots=layout.slots)


@dataclass(frozen=True, kw_only=True)
class _RopeStore:
    cos: Tensor  # [rows, 1, D] float32
    sin: Tensor  # [rows, 1, D] float32; its first half carries the minus sign of the rotation
    slots: Tensor  # [rows]

    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        num_kv_heads = keys.shape[2]
        qk, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
        qk = rotate(qk, self.cos.to(qkv.dtype), self.sin.to(qkv.dtype))
        keys.flatten(0, 1).index_copy_(0, self.slots, qk[:, -num_kv_heads:].to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, self.slots, v.to(values.dtype))
        return qk[:, :-num_kv_heads]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate half-split pairs of ``x`` [rows, heads, D] by tables [rows, 1, D]; see ``_RopeStore``."""
    # Rolling by half a head swaps the two halves.
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
