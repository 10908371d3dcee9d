"""Attributes the time of a decode step to its parts, by marks around the passes of a step.

A replayed graph keeps no names of what was captured, but it runs its kernels in order. So a mark is captured as an
empty kernel before and after each pass, and the work up to the next mark belongs to one part, whatever the kernels
are called. On a CPU, where a call returns when its work is done, a mark is a timestamp.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from specgen.bench.marks import MARK, WORK, Marker, Span
from specgen.core.graphs import Capture, Key, Runner

T = TypeVar("T")
# the part after each mark of a step
AFTER_MARKS = ("draft loop", "engine", "verify", "accept", "KV fill", "engine")
# KV fill: the drafter's; engine: between steps and passes
PARTS = ("draft loop", "verify", "accept", "KV fill", "engine")


class Marked(Runner):
    """A runner that sets a mark before and after each pass of a step."""

    def __init__(self, runner: Runner, marker: Marker) -> None:
        self._runner = runner
        self._marker = marker
        self.pieces_alone = runner.pieces_alone

    def num_rows(self, num_sequences: int) -> int:
        return self._runner.num_rows(num_sequences)

    def choose_rows(self, num_sequences: int, what: Hashable) -> int:
        return self._runner.choose_rows(num_sequences, what)

    def sizes(self, max_sequences: int) -> list[int]:
        return self._runner.sizes(max_sequences)

    def step(self, key: Key, function: Callable[[], T]) -> T:
        return self._runner.step(key, function)

    def piece(self, key: Key, function: Callable[..., T], *inputs: Tensor) -> T:
        self._marker.mark()
        result = self._runner.piece(key, function, *inputs)
        self._marker.mark()
        return result

    def take_captures(self) -> list[Capture]:
        return self._runner.take_captures()


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """A kernel in one part of a step."""

    part: str
    name: str  # without its parameters
    seconds: float  # a step
    calls: float  # a step


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by part, in order of ``PARTS``, and ``idle``; they add up to the whole step."""

    parts: dict[str, float]
    idle: float
    kernels: tuple[KernelTime, ...] = ()  # which add up to the parts, the longest first; of a GPU

    @property
    def total(self) -> float:
        return sum(self.parts.values()) + self.idle


def split(spans: Sequence[Span], num_steps: int) -> StepTime:
    """The mean time of ``num_steps`` steps by part. ``RuntimeError`` if marks are missing.

    Overlapping work counts once, for what began first; marks count as idle.
    """
    num_marks = sum(span.name == MARK for span in spans)
    expected = num_steps * len(AFTER_MARKS)
    if num_marks != expected:
        raise RuntimeError(f"the profiler saw {num_marks} of {expected} marks: its trace is incomplete")
    parts = dict.fromkeys(PARTS, 0.0)
    times, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    reached = first = min(span.start for span in spans)
    part = "engine"
    after_marks = iter(AFTER_MARKS * num_steps)
    # a mark sorts before work with the same start
    for span in sorted(spans, key=lambda span: (span.start, span.name != MARK)):
        if span.name == MARK:
            part = next(after_marks)
        else:
            alone = max(span.end - max(span.start, reached), 0.0)
            reached = max(reached, span.end)
            parts[part] += alone
            kernel = part, _kernel(span.name)
            times[kernel] += alone  # type: ignore[assignment]
            calls[kernel] += 1
    length = max(span.end for span in spans) - first
    scale = 1e-6 / num_steps
    return StepTime(
        parts={name: scale * passed for name, passed in parts.items()},
        idle=scale * (length - sum(parts.values())),
        kernels=tuple(
            KernelTime(part=part, name=name, seconds=scale * time, calls=calls[part, name] / num_steps)
            for (part, name), time in times.most_common()
            if name != WORK
        ),
    )


def _kernel(name: str) -> str:
    """A kernel's ``name`` without its return type, template arguments and parameters."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split("[<(]", plain)[0].strip()
