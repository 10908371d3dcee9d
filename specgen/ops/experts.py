"""The experts of one layer of a mixture: their weights, what stands between their products, and the plain torch map."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.ops.fp8 import dequantised, rounding, through_e4m3
from specgen.ops.mxfp4 import dequantized
from specgen.ops.weight import Weight

# x [rows, H], the ids of each row's experts [rows, k] int64 (each row's differ), their weights [rows, k] in x's dtype
# -> the weighted sum of what they return as partial sums [n, rows, H], added in Norm.add; see Ops.linear_parts.
ExpertsMap = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Gating:
    """``gate * sigmoid(alpha * gate) * (up + shift)``, the gate clamped from above and up on both sides by ``limit``.

    As it is, SwiGLU; GPT-OSS has alpha 1.702, shift 1 and limit 7.
    """

    alpha: float = 1.0
    shift: float = 0.0
    limit: float | None = None

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        # silu rounds once, the other form at every step, as both do in transformers
        gated = F.silu(gate) if self.alpha == 1.0 else gate * torch.sigmoid(gate * self.alpha)
        return gated * (up + self.shift)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The weights of all experts of a layer, E matrices in one ``Weight`` each."""

    gate_up: Weight  # [E, 2 * I, H]: the rows of gate before those of up, however the checkpoint has them
    down: Weight  # [E, H, I]
    gating: Gating


def grouped_experts(experts: Experts) -> ExpertsMap:
    """By ``torch``'s grouped product, on any device; nothing waits for the device.

    Quantized weights are dequantized: on a CPU once, elsewhere in every call, so that no copy of them stays.
    """
    gate_up, down = _product(experts.gate_up), _product(experts.down)
    gating, num_experts = experts.gating, len(experts.gate_up.data)
    del experts  # of quantized weights only what ``gate_up`` and ``down`` keep

    def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        k = ids.shape[1]
        sorted_ids, order = ids.flatten().sort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, sorted_ids, torch.ones_like(sorted_ids, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = gate_up(x[order // k], sorted_ids, ends).chunk(2, -1)
        out = down(gating(gate, up), sorted_ids, ends)
        unsorted = torch.empty_like(out)
        unsorted[order] = out
        return (unsorted.view(*ids.shape, -1) * weights[..., None]).sum(1)[None]

    return forward


def _product(weight: Weight) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Of rows sorted by expert, their experts' ids, and where each expert's rows end."""
    matrices, bias = _matrices(weight), weight.bias
    rounds = _rounding(weight)

    def product(x: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        out = F.grouped_mm(rounds(x, ids), matrices().mT, offs=ends).to(x.dtype)
        return out if bias is None else out + bias[ids]

    return product


def _rounding(weight: Weight) -> Callable[[Tensor, Tensor], Tensor]:
    """What becomes of rows, whose experts are given too, before their product."""
    scales = weight.input_scale
    if scales is not None:
        return lambda x, ids: through_e4m3(x.float(), scales[ids, None])
    by_row = rounding(weight) if weight.format == "fp8" else None
    return lambda x, ids: x if by_row is None else by_row(x)


def _matrices(weight: Weight) -> Callable[[], Tensor]:
    """The matrices [E, out, in] when they are needed: in the model's dtype, of FP8 in float32."""
    if weight.format == "plain":
        return lambda: weight.data
    unpack = dequantised if weight.format == "fp8" else _from_mxfp4
    if weight.data.device.type != "cpu":
        return lambda: unpack(weight)
    plain = unpack(weight)
    return lambda: plain


def _from_mxfp4(weight: Weight) -> Tensor:
    assert weight.bias is not None, "the bias tells the model's dtype"
    return dequantized(weight, weight.bias.dtype).data
