"""The embedding of a calibrated pair: random numbers, of which some follow the text.

The first ``kv_size`` numbers of a token's embedding, c(t), are all that grouped values can carry: the token's *code*.
They are pairs, each a point on a circle, and each token of the text is one turn further than the token before it: every
pair has a turn of its own, the same at every token. So one matrix takes the code of any token to that of the token
d places further in the text (``Codes.forward``). Codes of different tokens are as nearly orthogonal as random ones.

The first pair does not turn: it is (``mark``, 0) for every token, which tells a code from none.

In a mixture of experts, the last ``head_dim`` numbers are the same for all tokens of a *passage*, a stretch of the
text; its routers read them (calibrated_mixtures.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from calibrated_cycle import Cycle
from calibrated_shapes import Shape
from calibrated_weights import Source
from torch import Tensor

CHUNK = 1 << 13  # tokens at a time: angles are in float64


@dataclass(frozen=True, kw_only=True)
class Codes:
    """The embedding of the target, and how the codes in it follow each other."""

    embedding: Tensor  # [V, H]; the row of the mask token has no code
    turns: Tensor  # [kv_size / 2] float64, radians from a token to the next one of the text
    # What a head's probability of its guess after each token is to be; empty: nearly 1
    probabilities: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def draw(cls, shape: Shape, cycle: Cycle, source: Source) -> "Codes":
        """Every stretch of ``head_dim`` numbers of a row has the norm sqrt(head_dim), so RMSNorm leaves rows alone."""
        table = source.stretches(shape.vocab_size, shape.hidden_size, shape.head_dim)
        tokens = torch.tensor(cycle.tokens, device=source.device)
        # Whole circles in one round of the text, so that its end goes on to its beginning.
        turns = source.integers(shape.kv_size // 2, len(tokens)).double() * (2 * math.pi / len(tokens))
        turns[0] = 0.0
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            place = torch.arange(start, start + len(part), dtype=torch.float64, device=source.device)
            angles = place[:, None] * turns
            points = torch.stack((angles.cos(), angles.sin()), -1).flatten(1) * 2**0.5
            table[part, : shape.kv_size] = points.to(table.dtype)
        first = table[:, 2 : shape.head_dim]  # makes room for the mark
        norm = torch.linalg.vector_norm(first, dim=-1, keepdim=True, dtype=torch.float32)
        first.copy_(first * (shape.head_dim - shape.mark**2) ** 0.5 / norm)
        table[:, 0], table[:, 1] = shape.mark, 0.0
        table[shape.mask_token_id, : shape.kv_size] = 0.0
        if shape.passage_size:
            beginnings = tokens[:: shape.passage_size]
            same = beginnings.repeat_interleave(shape.passage_size)[: len(tokens)]
            table[tokens, -shape.head_dim :] = table[same, -shape.head_dim :]
        return cls(embedding=table, turns=turns)

    def narrowed(self, width: int) -> "Codes":
        """The first ``width`` numbers of each row, the code among them, of which RMSNorm leaves the rows alone too."""
        return replace(self, embedding=self.embedding[:, :width].contiguous())

    def forward(self, distance: int) -> Tensor:
        """``[kv_size, kv_size]`` float32: takes a token's code to that of the token ``distance`` places further."""
        cos, sin = (distance * self.turns).cos(), (distance * self.turns).sin()
        blocks = torch.stack((cos, -sin, sin, cos), -1).view(-1, 2, 2).float()
        return torch.block_diag(*blocks)
