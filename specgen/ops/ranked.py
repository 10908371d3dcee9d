"""Kernels for a share of a model: sums over ranks where the parts of a product are added to the residual stream."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen.ops import Norm, Ops
from specgen.ranks import Ranks


def ranked(ops: Ops, ranks: Ranks) -> Ops:
    """``ops``, whose norms add the parts of all ``ranks``."""
    if ranks.size == 1:
        return ops

    def rms_norm(
        weight: Tensor, eps: float, casts_last: bool = False, out_scale: Tensor | None = None
    ) -> Norm:
        return RankedNorm(norm=ops.rms_norm(weight, eps, casts_last, out_scale), ranks=ranks)

    return replace(ops, rms_norm=rms_norm, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class RankedNorm:
    """A norm whose ``add`` sums the parts of every rank first, in the dtype of the stream."""

    norm: Norm
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def add(self, stream: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        mine = parts[0] if len(parts) == 1 else parts.sum(0, dtype=torch.float32)
        return self.norm.add(stream, self.ranks.sum(mine.to(stream.dtype))[None])
