"""Where two greedy texts of one prompt part, and whether the rounding of the number format explains it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# What the order of work may change. Over 1,650 places of the bundled pair's texts, computed in passes of 1 row, 5 rows
# and all rows, the difference of two logits moved by at most 4 steps of bfloat16 or float16 at the largest logit, and,
# as every product sums in float32, by at most 25 steps of float32. A deeper model gets twice that.
_STEPS = 8
_FLOAT32_STEPS = 48


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place where a text differs from the reference's. A token is None where that text has ended.

    Logits are the target's, behind what the two texts share. ``gap`` is how far the worse of the two tokens is
    behind the likeliest of all: greedy decoding may choose either only where it is within ``rounding``.
    """

    request: str
    position: int  # in the answer, from 0
    reference_token: int | None
    token: int | None
    reference_text: str  # of the token alone
    text: str
    reference_logit: float | None
    logit: float | None
    gap: float | None
    rounding: float

    @property
    def explained(self) -> bool:
        """Whether rounding explains it; nothing explains a text that ends early."""
        return self.gap is not None and self.gap <= self.rounding


@dataclass(frozen=True, kw_only=True)
class Judge:
    """What decides where texts part: the target's next-token logits ``[V]`` behind any tokens, and how it rounds."""

    logits_behind: Callable[[Sequence[int]], Tensor]
    dtype: torch.dtype
    token_text: Callable[[int], str]

    def first_divergence(
        self, request: str, prompt: Sequence[int], reference: Sequence[int], tokens: Sequence[int]
    ) -> Divergence | None:
        """The first place where the answer ``tokens`` leaves ``reference``; None if it does not."""
        at = first_difference(reference, tokens)
        if at is None:
            return None
        logits = self.logits_behind([*prompt, *reference[:at]])
        left, right = (ids[at] if at < len(ids) else None for ids in (reference, tokens))
        return Divergence(
            request=request,
            position=at,
            reference_token=left,
            token=right,
            reference_text=self._text(left),
            text=self._text(right),
            reference_logit=None if left is None else float(logits[left]),
            logit=None if right is None else float(logits[right]),
            gap=None if left is None or right is None else gap(logits, left, right),
            rounding=rounding(logits, self.dtype),
        )

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.token_text(token)


def first_difference(reference: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The first place where they differ, which may be the end of the shorter one; None if they are equal."""
    places = zip(reference, tokens, strict=False)
    length = min(len(reference), len(tokens))
    at = next((at for at, (left, right) in enumerate(places) if left != right), length)
    return None if at == len(reference) == len(tokens) else at


def gap(logits: Tensor, reference_token: int, token: int) -> float:
    """How far the worse of two tokens is behind the likeliest of ``logits`` ``[V]``."""
    return float(logits.max() - torch.minimum(logits[reference_token], logits[token]))


def rounding(logits: Tensor, dtype: torch.dtype) -> float:
    """By how much a pass of another shape may change the difference of two of ``logits`` ``[V]`` in ``dtype``."""
    return _STEPS * _step(logits, dtype) + _FLOAT32_STEPS * _step(logits, torch.float32)


def _step(logits: Tensor, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of ``dtype`` at the largest of ``logits`` by size."""
    _, exponent = math.frexp(float(logits.abs().max()))
    return math.ldexp(torch.finfo(dtype).eps, exponent - 1)
