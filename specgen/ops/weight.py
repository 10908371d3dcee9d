"""The weight of a linear layer, as the checkpoint stores it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

GROUP = 128  # inputs that share a scale where there is more than one per row; in blocks outputs as well
OUTPUTS = 32  # of a weight with few of them, what a kernel computes together


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    dtype = tensors[0].dtype
    if dtype == torch.float8_e4m3fn:  # as bytes: torch concatenates no 8-bit floats on some devices
        tensors = [each.view(torch.uint8) for each in tensors]
    return torch.cat(tuple(tensors)).view(dtype)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A matrix [out, in], or one for each expert [E, out, in], on its way from the checkpoint to a kernel.

    In the format "plain", ``data`` is the matrix in the model's dtype, without scales. In "mxfp4" it is uint8
    [..., in / 2], two values of 4 bits a byte, with a scale uint8 [..., in / 32] for each 32 of them (see
    ``ops/experts.py``). In "fp8" it is float8_e4m3fn [..., out, in] with float32 scales [..., out, 1] or, one for each
    128 inputs, [..., out, ceil(in / 128)]; ``activations`` says which inputs share a scale when they are rounded to
    e4m3 too (see ``ops/fp8.py``). Another quantized format would hold its values and scales likewise, and need kernels
    in every ``Ops`` that runs it; other kernels ask for ``matrix``.
    """

    data: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None  # [out] or [E, out], added to the result before it is rounded
    format: Literal["plain", "mxfp4", "fp8"] = "plain"
    # of "fp8": all of them, a row, 128 of a row
    activations: Literal["static", "token", "group"] | None = None
    input_scale: Tensor | None = None  # float32 [] or, of experts, [E], of static activations

    @classmethod
    def joined(cls, weights: Sequence["Weight"]) -> "Weight":
        """``weights`` of the same input, concatenated by output: one GEMM instead of several."""
        if len(weights) == 1:
            return weights[0]
        biases = [each.bias for each in weights if each.bias is not None]
        assert len(biases) in (0, len(weights)), "all have a bias, or none"
        bias, first = torch.cat(biases) if biases else None, weights[0]
        if first.format == "fp8":
            assert all((each.format, each.activations) == ("fp8", first.activations) for each in weights)
            scales = [each.scale for each in weights if each.scale is not None]
            return replace(
                first, data=_cat([each.data for each in weights]), scale=torch.cat(scales), bias=bias
            )
        return cls(data=torch.cat([each.matrix for each in weights]), bias=bias)

    @classmethod
    def stacked(cls, weights: Sequence["Weight"]) -> "Weight":
        """Experts [E, out, in] in one format and without biases, those of one weight behind those of another."""
        first = weights[0]
        alike = ((each.format, each.activations, each.bias) for each in weights)
        assert set(alike) == {(first.format, first.activations, None)}

        def whole(tensors: Sequence[Tensor | None]) -> Tensor | None:
            found = [each for each in tensors if each is not None]
            return _cat(found) if found else None

        return replace(
            first,
            data=_cat([each.data for each in weights]),
            scale=whole([each.scale for each in weights]),
            input_scale=whole([each.input_scale for each in weights]),
        )

    def reordered(self, rows: Sequence[int]) -> "Weight":
        """The same outputs in the order of ``rows``."""
        order = torch.tensor(rows, device=self.data.device)

        def chosen(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[order]

        # as bytes: torch gathers no 8-bit floats on some devices
        data = self.data.view(torch.uint8) if self.format == "fp8" else self.data
        return replace(
            self, data=data[order].view(self.data.dtype), scale=chosen(self.scale), bias=chosen(self.bias)
        )

    @property
    def static_scale(self) -> Tensor | None:
        """Float32 [1], with which inputs are rounded to e4m3 whatever they are; None: they are not, or not so."""
        return None if self.input_scale is None else self.input_scale.reshape(1)

    @property
    def matrix(self) -> Tensor:
        """The matrix [out, in] in the model's dtype, for kernels that know no other format."""
        assert self.format == "plain", f"no kernel for weights in the format {self.format}"
        return self.data

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads; of block FP8 a row of scales for each 128."""
        if self.scale is None:
            return self.data.nbytes
        scales = self.scale[..., ::GROUP, :] if self.activations == "group" else self.scale
        return self.data.nbytes + scales.nbytes
