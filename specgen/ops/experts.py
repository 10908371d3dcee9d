"""The experts of one layer of a mixture: their weights, what stands between their products, and the plain torch map."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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
    gate_up, down = _matrices(experts.gate_up), _matrices(experts.down)
    gate_up_bias, down_bias, gating = experts.gate_up.bias, experts.down.bias, experts.gating
    num_experts = len(experts.gate_up.data)
    del experts  # of quantized weights only what ``gate_up`` and ``down`` keep

    def grouped(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, ends: Tensor) -> Tensor:
        out = F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        return out if bias is None else out + bias[ids]

    def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        k = ids.shape[1]
        sorted_ids, order = ids.flatten().sort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, sorted_ids, torch.ones_like(sorted_ids, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped(x[order // k], gate_up(), gate_up_bias, sorted_ids, ends).chunk(2, -1)
        out = grouped(gating(gate, up), down(), down_bias, sorted_ids, ends)
        unsorted = torch.empty_like(out)
        unsorted[order] = out
        return (unsorted.view(*ids.shape, -1) * weights[..., None]).sum(1)[None]

    return forward


def _matrices(weight: Weight) -> Callable[[], Tensor]:
    """The matrices [E, out, in] in the model's dtype, when they are needed."""
    if weight.format == "plain":
        return lambda: weight.data
    assert weight.bias is not None, "the bias tells the model's dtype"
    dtype = weight.bias.dtype
    if weight.data.device.type != "cpu":
        return lambda: dequantized(weight, dtype).data
    plain = dequantized(weight, dtype).data
    return lambda: plain
