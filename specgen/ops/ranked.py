"""Kernels for a share of a model: sums over ranks where the parts of a product are added to the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen.device import Ranks
from specgen.ops import Norm, Ops
from specgen.ops.reference import joined


def ranked(ops: Ops, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Ops:
    """``ops``, whose norms add the parts of all ``ranks``; by one kernel where there is one."""
    if ranks.size == 1:
        return ops
    fuse: Callable[[Norm, Norm, Tensor, float, Ranks], Norm] | None = None
    if device.type == "cuda":
        from specgen.ops.fused_sum import FusedNorm, can_fuse

        fuse = FusedNorm.build if can_fuse(ranks, device, dtype) else None

    def rms_norm(
        weight: Tensor, eps: float, casts_last: bool = False, out_scale: Tensor | None = None
    ) -> Norm:
        norm = ops.rms_norm(weight, eps, casts_last, out_scale)
        sums = RankedNorm(norm=norm, ranks=ranks)
        return sums if fuse is None else fuse(norm, sums, weight, eps, ranks)

    return replace(ops, rms_norm=rms_norm, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class RankedNorm:
    """A norm whose ``add`` sums the parts of every rank first, in the dtype of the stream."""

    norm: Norm
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def add(self, stream: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        each = joined(parts)
        mine = each[0] if len(each) == 1 else each.sum(0, dtype=torch.float32)
        return self.norm.add(stream, self.ranks.sum(mine.to(stream.dtype))[None])
