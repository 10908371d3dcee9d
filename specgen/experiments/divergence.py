"""Where two greedy texts of one prompt diverge, and whether rounding in the dtype explains it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

import torch
from torch import Tensor

from specgen.config import EngineConfig, SamplingParams
from specgen.decoding.sampling import decisive_logits
from specgen.engine.build import prefill_logits
from specgen.engine.loading import Models

# How far rounding may move the difference of two logits. Over 1,650 positions of the bundled pair's texts, computed in
# passes of 1 row, 5 rows and all rows, it moved by at most 4 steps of bfloat16 or float16 at the largest logit and, as
# every GEMM accumulates in float32, by at most 25 steps of float32. Doubled to allow for deeper models.
_STEPS = 8
_FLOAT32_STEPS = 48
# A key or value that rounding moves across the middle between two numbers of FP8 is stored as the other one, of which
# the steps are 16 times as far apart as bfloat16's. Over 1,336 such positions with an FP8 KV cache in float32, where
# nothing else is of that size, it moved differences of logits by at most 2.9 steps of bfloat16.
_FP8_KV_STEPS = 8
# Where inputs of GEMMs are rounded to FP8, one that lies between two of its values goes to the other, all behind it
# change, and with them many more: in any dtype the difference of two of the four largest logits moved by up to 0.13 of
# the largest over 1,260 positions of the bundled pair in FP8 (median 0.01), about one step of e4m3.
_FP8_STEPS = 2
_PLAIN = SamplingParams()


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first position where a text differs from the reference's. A token is None if that text has ended.

    Logits are the target's after the common prefix, with the biases and penalties of the request. ``gap`` is the
    largest logit minus the smaller one of the two tokens: greedy decoding may choose either token only if it is within
    ``rounding``.
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
        """Whether rounding explains it; it never explains a text that ends early."""
        return self.gap is not None and self.gap <= self.rounding


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Judges divergences by the target's next-token logits ``[V]`` after any tokens, and its number formats."""

    logits_after: Callable[[Sequence[int]], Tensor]
    dtype: torch.dtype
    fp8: bool = False  # whether inputs of GEMMs are rounded to FP8
    token_text: Callable[[int], str]
    fp8_kv: bool = False  # keys and values are kept in FP8

    @classmethod
    def of(cls, config: EngineConfig, models: Models) -> Self:
        """A judge of greedy texts of the target of a resolved ``config``."""
        return cls(
            logits_after=prefill_logits(config, models),
            dtype=models.target.dtype,
            fp8=models.target.config.fp8 is not None,
            token_text=lambda token: models.tokenizer.decode_with_special([token]),
            fp8_kv=config.kv_dtype == "fp8",
        )

    def first_divergence(
        self,
        request: str,
        prompt: Sequence[int],
        reference: Sequence[int],
        tokens: Sequence[int],
        sampling: SamplingParams = _PLAIN,
    ) -> Divergence | None:
        """The first position where the answer ``tokens`` diverges from ``reference``; None if they are equal.

        ``sampling`` is that of both.
        """
        at = first_difference(reference, tokens)
        if at is None:
            return None
        raw = self.logits_after([*prompt, *reference[:at]])
        logits = decisive_logits(raw, prompt, reference[:at], sampling)
        by = sampling.repetition_penalty  # also a factor of rounding
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
            rounding=max(by, 1 / by) * rounding(raw, self.dtype, fp8=self.fp8, fp8_kv=self.fp8_kv),
        )

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.token_text(token)


def first_difference(reference: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The first position where they differ, at most the shorter length; None if they are equal."""
    pairs = enumerate(zip_longest(reference, tokens))
    return next((at for at, (left, right) in pairs if left != right), None)


def gap(logits: Tensor, reference_token: int, token: int) -> float:
    """The largest of ``logits`` ``[V]`` minus the smaller one of the two tokens."""
    return float(logits.max() - torch.minimum(logits[reference_token], logits[token]))


def rounding(logits: Tensor, dtype: torch.dtype, *, fp8: bool = False, fp8_kv: bool = False) -> float:
    """By how much a pass of another shape may change the difference of two ``logits`` ``[V]`` in ``dtype``."""
    inputs = _FP8_STEPS * _step(logits, torch.float8_e4m3fn) if fp8 else 0.0
    stored = _FP8_KV_STEPS * _step(logits, torch.bfloat16) if fp8_kv else 0.0
    return inputs + stored + _STEPS * _step(logits, dtype) + _FLOAT32_STEPS * _step(logits, torch.float32)


def _step(logits: Tensor, dtype: torch.dtype) -> float:
    """The spacing of ``dtype`` at the largest absolute logit."""
    _, exponent = math.frexp(float(logits.abs().max()))
    return math.ldexp(torch.finfo(dtype).eps, exponent - 1)
