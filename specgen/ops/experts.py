"""The experts of one layer of a mixture: their weights, what stands between their products, and the plain torch map."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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
        return gate * torch.sigmoid(gate * self.alpha) * (up + self.shift)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The weights of all experts of a layer, E matrices in one ``Weight`` each."""

    gate_up: Weight  # [E, 2 * I, H]: the rows of gate before those of up, however the checkpoint has them
    down: Weight  # [E, H, I]
    gating: Gating


def grouped_experts(experts: Experts) -> ExpertsMap:
    """By ``torch``'s grouped product, on any device; nothing waits for the device."""
    gate_up, down = experts.gate_up.matrix, experts.down.matrix
    num_experts = gate_up.shape[0]

    def grouped(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, ends: Tensor) -> Tensor:
        out = F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        return out if bias is None else out + bias[ids]

    def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        k = ids.shape[1]
        sorted_ids, order = ids.flatten().sort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, sorted_ids, torch.ones_like(sorted_ids, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped(x[order // k], gate_up, experts.gate_up.bias, sorted_ids, ends).chunk(2, -1)
        out = grouped(experts.gating(gate, up), down, experts.down.bias, sorted_ids, ends)
        unsorted = torch.empty_like(out)
        unsorted[order] = out
        return (unsorted.view(*ids.shape, -1) * weights[..., None]).sum(1)[None]

    return forward
