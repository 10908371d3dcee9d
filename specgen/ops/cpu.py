"""Faster kernels for CPUs with oneDNN."""

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from specgen.ops import Map, Ops, joined
from specgen.ops.experts import Activation
from specgen.ops.fp8 import fp8_linear
from specgen.ops.reference import gated, heads_normed, one_part, torch_ops, whole
from specgen.ops.weight import Weight

_LARGEST_BY_COLUMNS = 1 << 22  # elements; of larger weights blocks are faster for more than one row


def _in_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed GEMMs of ``dtype`` for this CPU."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def cpu_ops(dtype: torch.dtype) -> Ops:
    """Weights in oneDNN's blocked layout, small ones of float32 on Intel by columns for MKL; in float32 also RMSNorm
    in four small kernels instead of six.

    Measured on one core of an AMD EPYC (Zen 5), weights in no cache, against ``torch_ops``: a [3072, 576] weight in
    bfloat16 takes 0.11 ms instead of 0.24 ms for one row and 0.13 ms instead of 0.24 ms for five; a [2048, 2048] one in
    float32 0.43 ms instead of 1.28 ms and 0.54 ms instead of 2.9 ms. A norm of one row of 256 takes 5 us instead of
    10 us. On one core of an Intel Xeon (Sapphire Rapids) the [3072, 576] weight in float32 takes, by rows, blocked and
    by columns, 0.33, 0.39 and 0.31 ms for one row, 0.59, 0.39 and 0.36 ms for five.
    """
    if not _in_onednn(dtype):
        return torch_ops()
    _limit_primitive_caches()
    ops = replace(
        torch_ops(),
        linear=_packed,
        linear_parts=lambda weight: one_part(_packed(weight)),
        gated_linear=_gated_linear,
    )
    return replace(ops, rms_norm=_FusedNorm.prepare) if dtype == torch.float32 else ops


def _limit_primitive_caches() -> None:
    """For the whole process, unless the environment sets it: keep compiled GEMMs of recent shapes only.

    oneDNN compiles a GEMM for every number of rows, and oneDNN and torch would each cache 1024 of them: half a
    gigabyte in a long run. 64 cover about the last five numbers of rows and are no slower.
    """
    for library in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(library, "64")


def _gated_linear(weight: Weight, out_scale: Tensor | None = None, activation: Activation = "swish") -> Map:
    del out_scale  # whoever reads the result rounds it
    return gated(_packed(weight), activation)


@cache
def _has_fast_mkl() -> bool:
    """Whether MKL runs here as on Intel's own processors; on others it takes two to five times as long."""
    cpus = Path("/proc/cpuinfo")
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return has_mkl and cpus.exists() and "GenuineIntel" in cpus.read_text()


def _packed(weight: Weight) -> Map:
    if weight.format == "fp8":
        return fp8_linear(weight, _packed)
    matrix, bias = weight.matrix, weight.bias
    if matrix.dtype == torch.float32 and matrix.numel() <= _LARGEST_BY_COLUMNS and _has_fast_mkl():
        by_columns = matrix.t().contiguous().t()
        return lambda x: linear(x, by_columns, bias)
    # 64 rows is a hint: a weight packed for one row is slow for more rows, but not the reverse.
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), 64)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@dataclass(frozen=True, kw_only=True)
class _FusedNorm:
    weight: Tensor  # times sqrt(N)
    floor: Tensor  # sqrt(N * eps)

    @classmethod
    def prepare(
        cls, weight: Tensor, eps: float, casts_last: bool = False, out_scale: Tensor | None = None
    ) -> "_FusedNorm":
        del casts_last, out_scale  # in float32 nothing is rounded, and e4m3 by whoever reads the result
        size = weight.shape[-1]
        return cls(weight=weight * size**0.5, floor=torch.tensor((size * eps) ** 0.5))

    def __call__(self, x: Tensor) -> Tensor:
        return heads_normed(self._normed, self.weight, x)

    def _normed(self, x: Tensor) -> Tensor:
        # sqrt(|x|^2 + N eps) is the hypotenuse of |x| and sqrt(N eps): one kernel for add and root.
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)
        return (x / length).mul_(self.weight)

    def add(self, stream: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        total = stream + whole(joined(parts))
        return total, self(total)
