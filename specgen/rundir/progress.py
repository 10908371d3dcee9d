"""The interface of a progress display."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from specgen.record.record_rows import EngineRow, PassRow


class Tally:
    """Counts of the passes of one engine."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.seconds = 0.0
        self._num_drafting = 0
        self._num_accepted = 0

    def see(self, row: EngineRow) -> None:
        if isinstance(row, PassRow):
            self.num_tokens += row.num_tokens
            self.seconds = row.time
            self._num_drafting += row.num_drafting
            self._num_accepted += row.num_accepted

    @property
    def tokens_per_second(self) -> float | None:
        """None before the first step."""
        return self.num_tokens / self.seconds if self.seconds > 0 else None

    @property
    def acceptance_length(self) -> float | None:
        """Pooled over the steps with drafts; None without any."""
        return 1 + self._num_accepted / self._num_drafting if self._num_drafting else None


class Progress(Protocol):
    """Receives what happens in a run, to display it."""

    def warn(self, sentence: str) -> None:
        """Something that does not stop the run but that the user has hardly meant."""

    def note(self, sentence: str) -> None:
        """Something that the user did not say and that decides the texts."""

    def read(self, num_rows: int) -> None:
        """So many rows of the input are read."""

    def prepare(self, what: str) -> None:
        """``what`` is starting: kernels are loaded, or compiled where this machine has not run them before."""

    def compiling(self, done: int, total: int, names: Sequence[str]) -> None:
        """``done`` of ``total`` modules of kernels are compiled, all but ``names``."""

    def ready(self, what: str, seconds: Mapping[str, float]) -> None:
        """``what`` is ready for its first request, after so many seconds by phase (see ``startup``)."""

    def start(self, what: str, tally: Tally, num_requests: int, num_done: int = 0) -> None:
        """``what`` starts, with ``num_done`` of ``num_requests`` done; ``tally`` counts a row before ``see``."""

    def see(self, row: EngineRow) -> None:
        """The engine recorded a row."""

    def advance(self) -> None:
        """One more request has ended and is on disk."""

    def finish(self) -> None:
        """What was started has ended."""
