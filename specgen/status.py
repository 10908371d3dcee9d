"""``status.json``: how far a run is, for other processes to read while it goes."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from specgen.atomic import write_json
from specgen.events import Event, Stepped
from specgen.interrupt import StoppedError
from specgen.tally import Tally

State = Literal["preparing", "running", "finished", "interrupted", "failed"]
_INTERVAL = 1.0  # seconds between two writes


class Status:
    """Keeps ``path`` up to date, at most once a second; rates are those of the engine that runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started = _now()
        self._total = self._done = self._failed = self._done_before = 0
        self._begun = time.monotonic()
        self._tally = Tally()
        self.write("preparing")

    def begin(self, *, total: int, done: int) -> None:
        """An engine sets to work on what is left of ``total`` requests."""
        self._total, self._done, self._failed, self._done_before = total, done, 0, done
        self._begun, self._tally = time.monotonic(), Tally()
        self.write("running")

    def see(self, event: Event) -> None:
        """Count what happened."""
        self._tally.see(event)
        if isinstance(event, Stepped) and time.monotonic() - self._written >= _INTERVAL:
            self.write("running")

    def count(self, *, done: int, failed: int) -> None:
        """So many requests are on disk by now, and so many have failed."""
        self._done, self._failed = done, failed

    def write(self, state: State) -> None:
        """Write the file; ``OSError`` where that is not possible."""
        self._written = time.monotonic()
        write_json(self._path, self._to_json(state))

    def _to_json(self, state: State) -> dict[str, Any]:
        return {
            "state": state,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
            "updated": _now(),
            "total": self._total,
            "done": self._done,
            "failed": self._failed,
            "output_tokens": self._tally.num_tokens,
            "output_tokens_per_second": self._tally.tokens_per_second,
            "acceptance_length": self._tally.acceptance_length,
            "eta_seconds": self._eta() if state == "running" else None,
        }

    def _eta(self) -> float | None:
        """None before the first request is done."""
        ended = self._done - self._done_before + self._failed
        left = self._total - self._done - self._failed
        return left * (time.monotonic() - self._begun) / ended if ended else None


@contextmanager
def kept_status(path: Path) -> Iterator[Status]:
    """The status of a run that begins here; how the run ends is written at the end."""
    status = Status(path)
    try:
        yield status
    except BaseException as error:
        with suppress(OSError):  # a full disk is what the user has to hear of
            status.write("interrupted" if isinstance(error, StoppedError) else "failed")
        raise
    status.write("finished")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
