"""Timestamped marks between the kernels of a device, in a window of full decode steps."""

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from specgen.device import settle
from specgen.events import Event, Stepped

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

    ``see`` gets every event of the engine.
    """

    def __init__(self, batch: int, marker: Marker, *, skipped: int, num_steps: int) -> None:
        self._batch = batch
        self._marker = marker
        self._first, self._last = skipped, skipped + num_steps
        self._seen = 0

    @property
    def complete(self) -> bool:
        return self._seen >= self._last

    def see(self, event: Event) -> None:
        if not isinstance(event, Stepped) or event.kind != "decode" or event.num_sequences < self._batch:
            return
        self._seen += 1
        if self._seen == self._first:
            settle()  # starting takes a while: work in flight would fall before that gap
            self._marker.start()
        if self._seen == self._last:
            settle()
            self._marker.stop()
