"""Which experts a row goes through, and with which weights, from the logits of a mixture's router."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# How logits become weights: the softmax over all experts, the same divided by the sum over the chosen, or the softmax
# over the chosen.
Weighing = Literal["softmax", "normalized", "softmax of chosen"]
# Logits as partial sums [n, rows, E] (see Ops.linear_parts) -> the ids of each row's experts [rows, k] int64, best
# first, and their weights [rows, k] in the model's dtype.
Choice = Callable[[Tensor], tuple[Tensor, Tensor]]


def choice(num_chosen: int, weighing: Weighing) -> Choice:
    """In plain torch, of logits in one part."""

    def choose(parts: Tensor) -> tuple[Tensor, Tensor]:
        logits = parts.squeeze(0)
        if weighing == "softmax of chosen":
            best, ids = logits.topk(num_chosen)
            return ids, best.softmax(-1)
        best, ids = logits.softmax(-1, dtype=torch.float32).topk(num_chosen)
        if weighing == "normalized":
            best = best / best.sum(-1, keepdim=True)
        return ids, best.to(logits.dtype)

    return choose


@dataclass(frozen=True, kw_only=True)
class SigmoidRouting:
    """How DeepSeek-V3 and its relatives choose: the best experts of the best groups, by biased scores.

    A logit's score is its sigmoid. ``bias`` [E] float32 is added for the choice alone; a group's score is the sum of
    its best two. Weights are the scores, over their sum if ``normalized``, times ``scale``.
    """

    num_chosen: int
    bias: Tensor
    num_groups: int
    num_chosen_groups: int
    normalized: bool
    scale: float


def sigmoid_choice(routing: SigmoidRouting) -> Choice:
    """In plain torch, of float32 logits in any number of parts; the weights are float32 too."""
    groups = routing.num_groups

    def choose(parts: Tensor) -> tuple[Tensor, Tensor]:
        scores = parts.sum(0).sigmoid()
        biased = scores + routing.bias
        if groups > 1:
            grouped = biased.view(len(biased), groups, biased.shape[-1] // groups)
            best = grouped.topk(2).values.sum(-1).topk(routing.num_chosen_groups).indices
            left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            biased = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(-2)
        ids = biased.topk(routing.num_chosen).indices
        weights = scores.gather(-1, ids)
        if routing.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * routing.scale

    return choose
