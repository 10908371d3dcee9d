"""When the device had nothing to do: from the end of one pass to the beginning of the next, and who had the host."""

import time
from dataclasses import dataclass

import torch

from specgen.device import Moment


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The beginning of a pass; ``outside`` are the seconds that the engine's caller had since the launch before."""

    begun: Moment
    outside: float


class Waits:
    """Times passes by the clock of ``device``. Nothing in here waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left: float | None = None  # when the engine handed back to its caller
        self._outside = 0.0
        self._end: Moment | None = None  # of the pass that was read last

    def enter(self) -> None:
        """The caller asks for a step."""
        if self._left is not None:
            self._outside += time.perf_counter() - self._left
            self._left = None

    def leave(self) -> None:
        """The caller goes on."""
        self._left = time.perf_counter()

    def launch(self) -> Launch:
        """A pass begins here."""
        outside, self._outside = self._outside, 0.0
        return Launch(begun=Moment(self._device), outside=outside)

    def before(self, launch: Launch, end: Moment) -> float:
        """Seconds that the device waited for a pass, which has ended; passes come in the order of launch."""
        idle = 0.0 if self._end is None else max(launch.begun.since(self._end), 0.0)
        self._end = end
        return idle

    def forget(self) -> None:
        """What comes next continues nothing: time before it is nobody's."""
        self._left = self._end = None
        self._outside = 0.0
