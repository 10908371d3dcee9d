"""How requests end: with a completion, tried once more alone, or with a device that is lost."""

from collections.abc import Callable

import torch

from specgen.config import first_line
from specgen.core.journal import Journal
from specgen.core.scheduler import Scheduler
from specgen.core.sequence import Completion, Request, Sequence
from specgen.core.step import Steps


class DeviceLost(RuntimeError):  # noqa: N818
    """The device answers nothing any more, and only a new process gets it back; what has finished is not touched.

    ``reason`` is what the device said, and ``requests`` has the ids of all that were in flight, one of which may be
    to blame.
    """

    def __init__(self, reason: str, requests: tuple[str, ...]) -> None:
        super().__init__(reason, requests)
        self.reason = reason
        self.requests = requests

    def __str__(self) -> str:
        return f"the device is lost ({self.reason}): continue in a new process"


def require_device(device: torch.device, requests: tuple[str, ...] = ()) -> None:
    """``DeviceLost`` with ``requests``, those in flight, if ``device`` does not even finish what was launched."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(first_line(error), requests) from error


class Endings:
    """Takes sequences out and keeps their completions until they are handed out.

    ``new_sequence`` makes the state of a request that is tried again.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        steps: Steps,
        journal: Journal,
        new_sequence: Callable[[Request], Sequence],
    ) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._journal = journal
        self._new_sequence = new_sequence
        self._completions: list[Completion] = []

    def take(self) -> list[Completion]:
        """The completions since this was last asked."""
        taken, self._completions = self._completions, []
        return taken

    def retire(self, sequence: Sequence, error: str | None = None) -> None:
        """``sequence`` has finished; ``error`` says why it could not go on."""
        self._scheduler.retire(sequence)
        self._journal.finished(sequence)
        self._completions.append(sequence.completion(error))

    def fail(self, sequence: Sequence, reason: str) -> None:
        """End ``sequence``; the first time it begins again, and runs alone."""
        sequence.finish_reason = "error"
        pages = self._scheduler.discard(sequence)
        self._steps.clear([0, *pages])  # and page 0, where padding rows are written
        self._journal.finished(sequence)
        if sequence.alone:
            self._completions.append(sequence.completion(f"{reason}, and again when tried alone"))
        else:
            self._scheduler.retry(self._new_sequence(sequence.request))
