"""What a device does inside steady decoding: a window of full decode steps, and the spans of work in it."""

from dataclasses import dataclass
from typing import Protocol

from torch.profiler import ProfilerActivity, profile

from specgen.device import settle
from specgen.events import Event, Stepped


@dataclass(frozen=True, kw_only=True)
class Span:
    """One piece of work on the device; times in microseconds."""

    name: str
    start: float
    end: float


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
        """See ``Recorder.start``."""
        self._profiler.start()

    def stop(self) -> None:
        """See ``Recorder.stop``."""
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
