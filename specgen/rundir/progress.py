"""What follows a run while it goes."""

from typing import Protocol

from specgen.events import Event
from specgen.rundir.tally import Tally


class Progress(Protocol):
    """Follows a run while it goes."""

    def prepare(self, what: str) -> None:
        """``what`` is being made ready: kernels are loaded, or compiled where this machine has not run them before."""
        ...

    def start(self, what: str, tally: Tally, num_requests: int, num_done: int = 0) -> None:
        """``what`` begins, with so many requests, ``num_done`` of which an earlier run has answered.

        ``tally`` has counted an event before it is seen.
        """
        ...

    def see(self, event: Event) -> None:
        """Something happened."""
        ...

    def advance(self) -> None:
        """One more request has ended, and what it gave is kept."""
        ...

    def finish(self) -> None:
        """What was started is over."""
        ...
