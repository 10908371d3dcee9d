"""What a device does inside steady decoding: a window of full decode steps, and the kernels that run in it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch.profiler import ProfilerActivity, profile

from specgen.bench.environment import settle
from specgen.events import Event, Stepped


@dataclass(frozen=True, kw_only=True)
class Span:
    """One piece of work on the device; times in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All launches of one kernel in the window."""

    name: str
    share: float  # of the device's busy time, overlaps counted twice
    launches_per_step: float
    us_per_step: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A window of decode steps of a full batch."""

    num_steps: int
    ms_per_step: float  # under the profiler
    idle_share: float  # of the time between the first start and the last end
    kernels: tuple[Kernel, ...]  # those with the most time

    def to_json(self) -> dict[str, Any]:
        """The fields under their names."""
        return asdict(self)


class Recorder(Protocol):
    """Notes the spans of work between start and stop."""

    def start(self) -> None:
        """Begin to note."""
        ...

    def stop(self) -> None:
        """Note no more."""
        ...


class KernelTrace:
    """The kernels that run on a GPU, by torch's profiler; those of a replayed graph too, one by one."""

    def __init__(self) -> None:
        # the first start takes seconds, and graphs captured before it may not be seen
        with profile(activities=[ProfilerActivity.CUDA]):
            pass
        self._profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()

    def spans(self) -> list[Span]:
        """The kernels and copies that ran, in no fixed order."""
        return [
            Span(name=event.name, start=event.time_range.start, end=event.time_range.end)
            for event in self._profiler.events()  # type: ignore[no-untyped-call]
            if event.device_type.name == "CUDA"
        ]


class Window:
    """Opens ``recorder`` for ``num_steps`` decode steps of ``batch`` sequences, after ``skipped`` of them.

    It is fed every event of an engine, and starts and stops the recorder between two steps.
    """

    def __init__(self, batch: int, recorder: Recorder, *, skipped: int = 8, num_steps: int = 32) -> None:
        self.skipped = skipped
        self.num_steps = num_steps
        self._batch = batch
        self._recorder = recorder
        self._seen = 0

    @property
    def complete(self) -> bool:
        """Whether all steps were seen."""
        return self._seen >= self.skipped + self.num_steps

    def see(self, event: Event) -> None:
        """Count a step."""
        if not isinstance(event, Stepped) or event.kind != "decode" or event.num_sequences < self._batch:
            return
        self._seen += 1
        if self._seen == self.skipped:
            settle()  # starting takes a while, and nothing that is in flight may stand before that gap
            self._recorder.start()
        if self._seen == self.skipped + self.num_steps:
            settle()
            self._recorder.stop()


def summarize(spans: Sequence[Span], num_steps: int, num_kernels: int = 10) -> Profile:
    """The profile of ``spans``, one or more, that ``num_steps`` steps gave."""
    length = max(span.end for span in spans) - min(span.start for span in spans)
    return Profile(
        num_steps=num_steps,
        ms_per_step=length / num_steps / 1e3,
        idle_share=1 - busy(spans) / length,
        kernels=longest(spans, num_steps)[:num_kernels],
    )


def busy(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one of ``spans`` runs."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(span.end - max(span.start, reached), 0.0)
        reached = max(reached, span.end)
    return total


def longest(spans: Sequence[Span], num_steps: int) -> tuple[Kernel, ...]:
    """The kernels of ``spans``, those with the most time first."""
    durations: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        durations[span.name].append(span.end - span.start)
    total = sum(map(sum, durations.values()))
    ordered = sorted(durations.items(), key=lambda item: -sum(item[1]))
    return tuple(
        Kernel(
            name=name,
            share=sum(times) / total,
            launches_per_step=len(times) / num_steps,
            us_per_step=sum(times) / num_steps,
        )
        for name, times in ordered
    )
