"""The weight of a linear layer, as the checkpoint stores it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A matrix [out, in] on its way from the checkpoint to a kernel.

    ``format`` says what ``data`` and ``scale`` hold: in "plain", ``data`` is the matrix in the model's dtype, and there
    is no scale. A quantized format has values of few bits in ``data`` and what they are multiplied by in ``scale``; it
    joins its scales in ``joined``, and each ``Ops`` that runs it has kernels for it. All others ask for ``matrix``.
    """

    data: Tensor
    scale: Tensor | None = None
    format: Literal["plain"] = "plain"

    @classmethod
    def joined(cls, weights: Sequence["Weight"]) -> "Weight":
        """``weights`` of the same input below each other: one product instead of several."""
        return weights[0] if len(weights) == 1 else cls(data=torch.cat([each.matrix for each in weights]))

    @property
    def matrix(self) -> Tensor:
        """The matrix [out, in] in the model's dtype, for kernels that know no other format."""
        assert self.format == "plain", f"no kernel for weights in the format {self.format}"
        return self.data

    @property
    def num_bytes(self) -> int:
        """What a pass reads of it."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)
