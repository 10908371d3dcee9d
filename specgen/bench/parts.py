"""Which part of a decode step the time goes to: marks around the passes of a step, and the time from mark to mark.

A replayed graph keeps no names of what was captured in it, but it runs its kernels in order. So a mark is captured with
the passes as a kernel of its own, and the work after it belongs to what comes next: parts are told apart in the graph
that decodes, whatever the kernels are called. On a CPU, where a call returns when its work is done, a mark is the time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from specgen.bench.profile import KernelTrace, Recorder, Span
from specgen.core.graphs import Capture, Key, Runner

T = TypeVar("T")
AFTER_MARKS = (
    "draft loop",
    "engine",
    "verify",
    "accept",
    "first pass",
    "engine",
)  # each pass has two, around it
PARTS = (
    "draft loop",
    "verify",
    "accept",
    "first pass",
    "engine",
)  # engine: what lies between steps and passes
_MARK = "mark"
_MARK_KERNEL = (
    "spin_kernel"  # in the name of the kernel that torch.cuda._sleep launches, and nothing else does
)


class Marker(Recorder, Protocol):
    """Notes marks among the work."""

    def mark(self) -> None:
        """Note that something else begins."""
        ...

    def spans(self) -> list[Span]:
        """The work between start and stop and, as spans named ``mark``, the marks."""
        ...


class HostMarker:
    """Marks by the host's clock: everything between two marks is work."""

    def __init__(self) -> None:
        self._open = False
        self._times: list[float] = []

    def start(self) -> None:
        self._open = True
        self.mark()

    def mark(self) -> None:
        if self._open:
            self._times.append(1e6 * time.perf_counter())

    def stop(self) -> None:
        self.mark()
        self._open = False

    def spans(self) -> list[Span]:
        work = [
            Span(name="work", start=start, end=end)
            for start, end in zip(self._times, self._times[1:], strict=False)
        ]
        return work + [Span(name=_MARK, start=moment, end=moment) for moment in self._times[1:-1]]


class DeviceMarker(KernelTrace):
    """Marks as kernels that do nothing."""

    def mark(self) -> None:
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    def spans(self) -> list[Span]:
        return [
            Span(name=_MARK if _MARK_KERNEL in span.name else span.name, start=span.start, end=span.end)
            for span in super().spans()
        ]


class Marked(Runner):
    """A runner that sets a mark before and after each pass of a step."""

    def __init__(self, runner: Runner, marker: Marker) -> None:
        self._runner = runner
        self._marker = marker

    def num_rows(self, num_sequences: int) -> int:
        return self._runner.num_rows(num_sequences)

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
class StepTime:
    """Seconds of a step: in each of ``PARTS``, and ``idle``. They add up to what a step takes."""

    parts: dict[str, float]
    idle: float

    @property
    def total(self) -> float:
        """From one step to the next."""
        return sum(self.parts.values()) + self.idle


def split(spans: Sequence[Span], num_steps: int) -> StepTime:
    """The time of ``num_steps`` steps by part. ``RuntimeError`` if their marks are not all there.

    Work that overlaps counts once, for what began first; marks count as idle, as nothing else runs in them.
    """
    num_marks = sum(span.name == _MARK for span in spans)
    expected = num_steps * len(AFTER_MARKS)
    if num_marks != expected:
        raise RuntimeError(
            f"the profiler saw {num_marks} of {expected} marks: its picture of a step is not whole"
        )
    parts = dict.fromkeys(PARTS, 0.0)
    reached = first = min(span.start for span in spans)
    part = "engine"
    after_marks = iter(AFTER_MARKS * num_steps)
    # at the same moment, a mark comes before the work that it is for
    for span in sorted(spans, key=lambda span: (span.start, span.name != _MARK)):
        if span.name == _MARK:
            part = next(after_marks)
        else:
            parts[part] += max(span.end - max(span.start, reached), 0.0)
            reached = max(reached, span.end)
    length = max(span.end for span in spans) - first
    scale = 1e-6 / num_steps
    return StepTime(
        parts={name: scale * passed for name, passed in parts.items()},
        idle=scale * (length - sum(parts.values())),
    )
