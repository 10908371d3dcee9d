"""The progress of a run on stderr: a bar in a terminal, a line now and then in a log file, or warnings alone."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from specgen.config import option
from specgen.record.progress import Progress, Tally
from specgen.record.record_rows import Captured, EngineRow, OutOfMemory
from specgen.record.startup import compiling_line, startup_line
from specgen.report.display import clock, count

if TYPE_CHECKING:
    from tqdm import tqdm

QUIET = option(False, "Results", "No progress or sample answers: results, warnings and errors alone.")
_BETWEEN = 10.0  # seconds between two lines
_SHORT = "{n_fmt}/{total_fmt} [{elapsed}{postfix}]"  # of a bar, for tqdm, whose time left knows no batch
_NARROW = 80  # columns, below which a description and a bar leave no room for numbers


def progress(quiet: bool, name: str | None = None) -> Progress:
    """The one for stderr as it is; with ``quiet`` only warnings. ``name`` stands for whatever starts."""
    kind = Warnings if quiet else ProgressBar if sys.stderr.isatty() else ProgressLines
    return kind(name)


class Warnings(Progress):
    """Shows warnings and shortages of memory, and ignores the rest."""

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._last = time.monotonic()  # when a line was printed
        self._tally = Tally()

    def warn(self, sentence: str) -> None:
        self._say(f"specgen: warning: {sentence}")

    def update(self, row: EngineRow) -> None:
        if isinstance(row, OutOfMemory):
            batch, tokens = row.max_batch_size, row.max_prefill_tokens
            self._say(f"out of GPU memory: continuing with a batch of {batch} and {tokens} prefill tokens")

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class ProgressLines(Warnings):
    """For files: requests done, output tokens per second and the acceptance length so far, line by line.

    A line at the start, at the end, and between them not more than one in ten seconds.
    """

    _shown = _done = 0

    def note(self, sentence: str) -> None:
        self._say(f"specgen: {sentence}")

    def read(self, num_rows: int) -> None:
        if time.monotonic() - self._last >= _BETWEEN:
            self._last = time.monotonic()
            self._say(f"reading prompts: {count(num_rows)} rows")

    def prepare(self, what: str) -> None:
        self._say(f"{what}: loading")

    def compiling(self, done: int, total: int, names: Sequence[str]) -> None:
        if done in (0, total) or time.monotonic() - self._last >= _BETWEEN:
            self._last = time.monotonic()
            self._say(compiling_line(done, total, names))

    def ready(self, what: str, seconds: Mapping[str, float]) -> None:
        self._say(f"{what}: ready after {startup_line(seconds)}")

    def start(self, what: str, num_requests: int, num_done: int = 0) -> None:
        self._begin(what, num_requests, num_done)
        self._show()

    def _begin(self, what: str, num_requests: int, num_done: int) -> None:
        self._what, self._tally, self._total = self._name or what, Tally(), num_requests
        self._done = self._first = num_done
        self._began = time.monotonic()

    def update(self, row: EngineRow) -> None:
        super().update(row)
        self._tally.update(row)
        if isinstance(row, Captured):
            done = f"captured in {row.seconds:.1f} s" if row.fits else "not enough memory for it yet"
            self._say(f"CUDA graph of a {row.what} of {row.num_sequences} sequences: {done}")

    def advance(self) -> None:
        self._done += 1
        if time.monotonic() - self._last >= _BETWEEN:
            self._show()

    def finish(self) -> None:
        if self._shown != self._done:
            self._show()

    def _show(self) -> None:
        self._last, self._shown = time.monotonic(), self._done
        line = f"{self._what}: {count(self._done)} of {count(self._total)} requests"
        if self._done > self._first:
            line += f" in {clock(self._last - self._began)}"
            line += "".join(f", {part}" for part in self._so_far("acceptance length"))
        self._say(line)

    def _so_far(self, length: str) -> list[str]:
        """The time left, the speed, and behind the word for it the acceptance length: those that are known."""
        ended = self._done - self._first
        left = self._tally.seconds_left(time.monotonic() - self._began, ended, self._total - self._done)
        speed, found = self._tally.tokens_per_second, self._tally.acceptance_length
        return [
            *(() if left is None else (f"{clock(left)} to go",)),
            *(() if speed is None else (f"{speed:.0f} tok/s",)),
            *(() if found is None else (f"{length} {found:.2f}",)),
        ]


class ProgressBar(ProgressLines):
    """Shows progress in a terminal, as a bar."""

    _bar: "tqdm[NoReturn] | None" = None
    _reading: "tqdm[NoReturn] | None" = None
    _compiling: "tqdm[NoReturn] | None" = None

    def read(self, num_rows: int) -> None:
        if self._reading is None:
            from tqdm import tqdm

            self._reading = tqdm(desc="reading prompts", unit=" rows", dynamic_ncols=True)
        self._reading.update(num_rows - self._reading.n)

    def compiling(self, done: int, total: int, names: Sequence[str]) -> None:
        if self._compiling is None:
            from tqdm import tqdm

            self._end_of_reading()
            self._compiling = tqdm(total=total, desc="compiling", unit=" modules", dynamic_ncols=True)
        self._compiling.set_postfix_str("; ".join(names), refresh=False)
        self._compiling.update(done - self._compiling.n)
        self._compiling.refresh()
        if done == total:
            self._compiling.close()
            self._compiling = None

    def start(self, what: str, num_requests: int, num_done: int = 0) -> None:
        from tqdm import tqdm

        from specgen.report.terminal import width_of  # imports rich

        self._end_of_reading()
        self._begin(what, num_requests, num_done)
        self._is_narrow = width_of(sys.stderr) < _NARROW
        self._bar = tqdm(
            bar_format=_SHORT if self._is_narrow else f"{{l_bar}}{{bar}}| {_SHORT}",
            total=num_requests,
            initial=num_done,
            desc=self._what,
            unit="req",
            dynamic_ncols=True,
            disable=False,
        )

    def advance(self) -> None:
        assert self._bar is not None
        self._done += 1
        self._bar.set_postfix_str(
            ", ".join(self._so_far("length" if self._is_narrow else "acceptance length")), refresh=False
        )
        self._bar.update()

    def finish(self) -> None:
        if self._bar is not None:  # else workers did not start
            self._bar.close()

    def _say(self, line: str) -> None:
        from tqdm import tqdm

        self._end_of_reading()
        tqdm.write(line, file=sys.stderr)  # above the bar, if there is one

    def _end_of_reading(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None
