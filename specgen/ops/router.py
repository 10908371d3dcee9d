"""Which experts a row goes through, and with which weights, from the logits of a mixture's router."""

from collections.abc import Callable
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
