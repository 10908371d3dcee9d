"""The time of a decode step by its parts, by marks between the kernels of a window of full steps.

A replayed graph keeps no names of what was captured, but it runs its kernels in order. So a mark is captured as an
empty kernel before and after each pass, and the work up to the next mark belongs to one part, whatever the kernels
are called. On a CPU, where a call returns when its work is done, a mark is a timestamp.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from specgen.core.graphs import Capture, Key, Runner
from specgen.device import synchronize
from specgen.record.record_rows import EngineRow, PassRow

MARK = "mark"
WORK = "work"  # of the host, of which no more is known
_MARK_KERNEL = "spin_kernel"  # only in the name of the kernel of torch.cuda._sleep


@dataclass(frozen=True, kw_only=True)
class Span:
    """A kernel or other work on the device, or a mark; times in microseconds."""

    name: str
    start: float
    end: float


class Marker(Protocol):
    """Records marks and the work between them, from ``start`` to ``stop``."""

    def start(self) -> None: ...

    def mark(self) -> None: ...

    def stop(self) -> None: ...

    def spans(self) -> list[Span]:
        """The work and the marks (named ``mark``), in any order."""
        ...


class HostMarker:
    """Marks by the host's clock; everything between two marks is work."""

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
        between = zip(self._times, self._times[1:], strict=False)
        work = [Span(name=WORK, start=start, end=end) for start, end in between]
        return work + [Span(name=MARK, start=moment, end=moment) for moment in self._times[1:-1]]


class DeviceMarker:
    """Marks as empty kernels in the trace of torch's profiler, which also sees replayed graphs."""

    def __init__(self) -> None:
        # the first start takes seconds, and graphs captured before it may not be seen
        with profile(activities=[ProfilerActivity.CUDA]):
            pass
        self._profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)

    def start(self) -> None:
        self._profiler.start()

    def mark(self) -> None:
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self._profiler.stop()

    def spans(self) -> list[Span]:
        return [
            Span(
                name=MARK if _MARK_KERNEL in event.name else event.name,
                start=event.time_range.start,
                end=event.time_range.end,
            )
            for event in self._profiler.events()  # type: ignore[no-untyped-call]
            if event.device_type.name == "CUDA"
        ]


class Window:
    """Runs ``marker`` for ``num_steps`` decode steps of ``batch`` sequences, after ``skipped`` of them.

    ``see`` gets every row of the engine.
    """

    def __init__(self, batch: int, marker: Marker, *, skipped: int, num_steps: int) -> None:
        self._batch = batch
        self._marker = marker
        self._first, self._last = skipped, skipped + num_steps
        self._seen = 0

    @property
    def complete(self) -> bool:
        return self._seen >= self._last

    def see(self, row: EngineRow) -> None:
        if not isinstance(row, PassRow) or row.kind != "decode" or row.num_sequences < self._batch:
            return
        self._seen += 1
        if self._seen == self._first:
            synchronize()  # starting takes a while: work in flight would fall before that gap
            self._marker.start()
        if self._seen == self._last:
            synchronize()
            self._marker.stop()


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
