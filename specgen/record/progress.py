"""The progress of a run: on a display, and in ``status.json`` for other processes."""

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from specgen.record.files import as_json, swapped, write_json
from specgen.record.interrupt import StoppedError
from specgen.record.provenance import timestamp
from specgen.record.record_rows import EngineRow, PassRow

State = Literal["reading", "preparing", "running", "finished", "interrupted", "failed"]
WORKING: tuple[State, ...] = ("reading", "preparing", "running")  # of a process that has not ended
_INTERVAL = 1.0  # seconds between two writes


class Tally:
    """Counts of the passes of one engine, or of a cluster's; its time begins with the first of them."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._began, self._ended = math.inf, -math.inf
        self._num_drafting = 0
        self._num_accepted = 0
        self._most_at_once = 0  # texts

    def update(self, row: EngineRow) -> None:
        if isinstance(row, PassRow):
            self.num_tokens += row.num_tokens
            self._began = min(self._began, row.time - row.seconds)
            self._ended = max(self._ended, row.time)
            self._num_drafting += row.num_drafting
            self._num_accepted += row.num_accepted
            self._most_at_once = max(self._most_at_once, row.num_sequences)

    @property
    def tokens_per_second(self) -> float | None:
        """None before the first step."""
        seconds = self._ended - self._began
        return self.num_tokens / seconds if seconds > 0 else None

    @property
    def acceptance_length(self) -> float | None:
        """Pooled over the steps with drafts; None without any."""
        return 1 + self._num_accepted / self._num_drafting if self._num_drafting else None

    def seconds_left(self, seconds: float, ended: int, left: int) -> float | None:
        """For ``left`` requests, where ``ended`` took ``seconds``; None before as many have ended as run at once.

        The first of a batch to end are its shortest texts, while nothing is counted of the others.
        """
        return seconds * left / ended if ended >= max(1, self._most_at_once) else None


class Progress:
    """Receives what happens in a run, to display it; this one shows nothing."""

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

    def start(self, what: str, num_requests: int, num_done: int = 0) -> None:
        """``what`` starts, with ``num_done`` of ``num_requests`` done; the rows from now on are its own."""

    def update(self, row: EngineRow) -> None:
        """The engine recorded a row."""

    def advance(self) -> None:
        """One more request has ended and is on disk."""

    def finish(self) -> None:
        """What was started has ended."""


# --- status.json --------------------------------------------------------------------------------


class Status:
    """Keeps ``path`` up to date, at most once per second: the counts of one engine, at the end those of the run.

    The file of a finished run stays as it is while its input is read again, or a kill would leave it unfinished.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._earlier = path.read_bytes() if path.exists() else None
        self._is_claimed = False
        self._num_rows: int | None = None  # of the input, read so far
        self._startup: dict[str, float] = {}
        self._started = timestamp()
        self._total = self._done = self._failed = self._done_before = 0
        self._begun = time.monotonic()
        self._tally = Tally()  # of the running engine
        self._is_finished = self._earlier_state() == "finished"
        self._written = time.monotonic()
        if not self._is_finished:
            self.write("reading")

    def read(self, num_rows: int) -> None:
        """So many rows of the input are read: write the file if it is due."""
        self._num_rows = num_rows
        if not self._is_finished and time.monotonic() - self._written >= _INTERVAL:
            self.write("reading")

    def claim(self) -> str | None:
        """The run here is that of this process; returns the state in which an earlier one left it, if any did."""
        self._is_claimed = True
        return self._earlier_state()

    def _earlier_state(self) -> str | None:
        try:
            return str(json.loads(self._earlier or b"{}").get("state"))
        except (ValueError, AttributeError):  # a power failure may leave anything in the file
            return "lost"

    def restore(self) -> None:
        """The file as an earlier process left it, which is still true however this one ends."""
        self._is_claimed = False
        if self._earlier is not None and self._earlier != self._path.read_bytes():
            with swapped(self._path) as file:
                file.write(self._earlier)

    def end(self, state: State) -> None:
        """The process ends in ``state``, that of the run only if it was claimed by it."""
        if self._is_claimed or self._earlier is None:
            self.write(state)
        else:
            self.restore()

    def begin(self, *, total: int, done: int, startup: Mapping[str, float]) -> None:
        """An engine, whose passes are counted from now on, starts; ``done`` of ``total`` requests are done.

        ``startup`` has the seconds until then by phase, see ``startup.py``; a baseline's are added to those before.
        """
        for name, seconds in startup.items():
            self._startup[name] = round(self._startup.get(name, 0.0) + seconds, 3)
        self._total, self._done, self._failed, self._done_before = total, done, 0, done
        self._begun, self._tally = time.monotonic(), Tally()
        self.write("running")

    def update(self, row: EngineRow) -> None:
        """Count a pass, and write the file if it is due."""
        self._tally.update(row)
        if isinstance(row, PassRow) and time.monotonic() - self._written >= _INTERVAL:
            self.write("running")

    def count(self, *, done: int, failed: int) -> None:
        """Set the number of requests on disk and of those that failed."""
        self._done, self._failed = done, failed

    def write(self, state: State) -> None:
        """Write the file, which blocks the engine; ``OSError`` where it cannot be written."""
        self._written = time.monotonic()
        with swapped(self._path) as file:
            file.write(as_json(self._to_json(state)).encode())

    def finish(self, figures: Mapping[str, Any]) -> None:
        """The run has finished; ``figures`` are those of its report, in place of what was counted."""
        write_json(self._path, {**self._to_json("finished"), **figures})

    def _to_json(self, state: State) -> dict[str, Any]:
        return {
            "state": state,
            **({} if self._num_rows is None else {"rows_read": self._num_rows}),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
            "updated": timestamp(),
            **({"startup_seconds": self._startup} if self._startup else {}),
            "total": self._total,
            "done": self._done,
            "failed": self._failed,
            "output_tokens": self._tally.num_tokens,
            "output_tokens_per_second": self._tally.tokens_per_second,
            "acceptance_length": self._tally.acceptance_length,
            "eta_seconds": self._eta() if state == "running" else None,
        }

    def _eta(self) -> float | None:
        """None before a batch of requests is done."""
        ended = self._done - self._done_before + self._failed
        left = self._total - self._done - self._failed
        return self._tally.seconds_left(time.monotonic() - self._begun, ended, left)


@contextmanager
def kept_status(path: Path) -> Iterator[Status]:
    """The status of a run, which is ``interrupted`` or ``failed`` at the end unless it was finished."""
    status = Status(path)
    try:
        yield status
    except BaseException as error:
        with suppress(OSError):  # the user must see ``error``, such as a full disk
            status.end("interrupted" if isinstance(error, StoppedError | KeyboardInterrupt) else "failed")
        raise
