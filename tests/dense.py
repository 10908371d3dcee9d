"""Attention over whole sequences without a cache: the simplest Attend there is."""

import torch
from torch import Tensor


class DenseAttend:
    """Causal attention of one sequence, rounded as ``transformers`` does it eagerly.

    Keeps K and V, so that a sequence may also come in several passes.
    """

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kept:
            k, v = torch.cat((self.kept[layer][0], k)), torch.cat((self.kept[layer][1], v))
        self.kept[layer] = (k, v)
        rows, num_heads, head_dim = q.shape
        k, v = (x.repeat_interleave(num_heads // x.shape[1], 1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * head_dim**-0.5
        future = torch.ones(rows, k.shape[1], dtype=torch.bool).triu(k.shape[1] - rows + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1, dtype=torch.float32)
        return (weights.to(q.dtype) @ v).transpose(0, 1).reshape(rows, -1)
