"""The embedding of a calibrated pair: random numbers, of which some follow the text.

The first ``kv_size`` numbers of a token's embedding, c(t), are all that grouped values can carry: the token's *code*.
They are pairs, each a point on a circle, and each token of the text is one turn further than the token before it: every
pair has a turn of its own, the same at every token. So one matrix takes the code of any token to that of the token
d places further in the text (``Codes.forward``). Codes of different tokens are as nearly orthogonal as random ones.

The first pair does not turn: it is (``mark``, 0) for every token, which tells a code from none.

In a hybrid, whose MTP layer drafts with the target's embedding and output weights, the numbers behind the code tell
unknown tokens from others (``Codes.leap``). The first ``leap_size`` of them are zero but for unknown tokens, and the
rest, the passage's excepted, is zero for these. There they are points on circles too, each one turn further than the
unknown token before it: so one matrix takes each of them to the next one, and leaves known tokens alone.

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
    # [leap_size / 2] float64, radians from an unknown token to the next one of them
    leap: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    # What a head's probability of its guess after each token is to be; empty: nearly 1
    probabilities: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def draw(cls, shape: Shape, cycle: Cycle, source: Source) -> "Codes":
        """Every stretch of ``head_dim`` numbers of a row has the norm sqrt(head_dim), so RMSNorm leaves rows alone."""
        table = source.stretches(shape.vocab_size, shape.hidden_size, shape.head_dim)
        tokens = torch.tensor(cycle.tokens, device=source.device)
        turns = _turns(shape.kv_size, len(tokens), source)
        turns[0] = 0.0
        _write_points(table, tokens, 0, turns, 1.0)
        first = table[:, 2 : shape.head_dim]  # makes room for the mark
        norm = torch.linalg.vector_norm(first, dim=-1, keepdim=True, dtype=torch.float32)
        first.copy_(first * (shape.head_dim - shape.mark**2) ** 0.5 / norm)
        table[:, 0], table[:, 1] = shape.mark, 0.0
        table[shape.mask_token_id, : shape.kv_size] = 0.0
        leap = _set_unknown_apart(table, shape, cycle, source)
        if shape.passage_size:
            beginnings = tokens[:: shape.passage_size]
            same = beginnings.repeat_interleave(shape.passage_size)[: len(tokens)]
            table[tokens, -shape.head_dim :] = table[same, -shape.head_dim :]
        return cls(embedding=table, turns=turns, leap=leap)

    def narrowed(self, width: int) -> "Codes":
        """The first ``width`` numbers of each row, the code among them, of which RMSNorm leaves the rows alone too."""
        return replace(self, embedding=self.embedding[:, :width].contiguous())

    def forward(self, distance: int) -> Tensor:
        """``[kv_size, kv_size]`` float32: takes a token's code to that of the token ``distance`` places further."""
        return turned_by(distance * self.turns)


def turned_by(angles: Tensor) -> Tensor:
    """``[2 n, 2 n]`` float32: takes each pair of numbers, a point, ``angles`` [n] further on its circle."""
    cos, sin = angles.cos(), angles.sin()
    blocks = torch.stack((cos, -sin, sin, cos), -1).view(-1, 2, 2).float()
    return torch.block_diag(*blocks)


def _turns(width: int, count: int, source: Source) -> Tensor:
    """``[width / 2]`` float64: Whole circles in ``count`` steps, so that the last goes on to the first."""
    return source.integers(width // 2, count).double() * (2 * math.pi / count)


def _write_points(table: Tensor, tokens: Tensor, start: int, turns: Tensor, rms: float) -> None:
    """Write points of RMS ``rms`` into the rows of ``tokens``, each one turn further than the one before it."""
    end = start + 2 * len(turns)
    for first in range(0, len(tokens), CHUNK):
        part = tokens[first : first + CHUNK]
        place = torch.arange(first, first + len(part), dtype=torch.float64, device=table.device)
        angles = place[:, None] * turns
        points = torch.stack((angles.cos(), angles.sin()), -1).flatten(1) * (2**0.5 * rms)
        table[part, start:end] = points.to(table.dtype)


def _set_unknown_apart(table: Tensor, shape: Shape, cycle: Cycle, source: Source) -> Tensor:
    """Give unknown tokens points where others have zeros, and zeros where others have their own numbers; see ``leap``.

    Rows keep their norm.
    """
    start, middle, end = shape.own_bounds
    if start == middle:
        return torch.zeros(0, dtype=torch.float64, device=table.device)
    unknown = torch.tensor(cycle.unknown, dtype=torch.int64, device=table.device)
    leap = _turns(middle - start, max(len(unknown), 2), source)
    table[:, start:middle] = 0.0
    table[:, middle:end].mul_(((end - start) / (end - middle)) ** 0.5)
    table[unknown, middle:end] = 0.0
    _write_points(table, unknown, start, leap, ((end - start) / (middle - start)) ** 0.5)
    return leap
