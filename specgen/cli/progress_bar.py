"""The progress bar of a run, on stderr."""

import sys
from typing import TYPE_CHECKING, NoReturn

from specgen.events import Captured, Event, OutOfMemory, Stepped
from specgen.rundir.tally import Tally

if TYPE_CHECKING:
    from tqdm import tqdm


class ProgressBar:
    """A ``Progress`` that shows requests done, output tokens per second and the acceptance length so far."""

    def __init__(self) -> None:
        self._reading: tqdm[NoReturn] | None = None

    def warn(self, sentence: str) -> None:
        self._end_of_reading()
        print(f"specgen: warning: {sentence}", file=sys.stderr)

    def read(self, num_rows: int) -> None:
        if self._reading is None:
            from tqdm import tqdm

            self._reading = tqdm(desc="reading prompts", unit=" rows", dynamic_ncols=True)
        self._reading.update(num_rows - self._reading.n)

    def _end_of_reading(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def prepare(self, what: str) -> None:
        self._end_of_reading()
        note = "loading; kernels that this machine has not run before are compiled, which takes minutes"
        print(f"{what}: {note}", file=sys.stderr)

    def start(self, what: str, tally: Tally, num_requests: int, num_done: int = 0) -> None:
        from tqdm import tqdm

        self._end_of_reading()
        self._bar = tqdm(total=num_requests, initial=num_done, desc=what, unit="req", dynamic_ncols=True)
        self._tally = tally

    def see(self, event: Event) -> None:
        match event:
            case Stepped():
                speed = f"{self._tally.tokens_per_second or 0:.0f} tok/s"
                length = f"acceptance length {self._tally.acceptance_length or 1:.2f}"
                self._bar.set_postfix_str(f"{speed}, {length}", refresh=False)
            case Captured(what=what, num_sequences=number, seconds=seconds, fits=fits):
                done = f"captured in {seconds:.1f} s" if fits else "not enough memory, runs without"
                self._bar.write(f"CUDA graph of a {what} of {number} sequences: {done}", file=sys.stderr)
            case OutOfMemory(max_batch_size=batch, max_prefill_tokens=tokens):
                self._bar.write(
                    f"out of GPU memory: continuing with a batch of {batch} and {tokens} prefill tokens",
                    file=sys.stderr,
                )
            case _:
                pass

    def advance(self) -> None:
        self._bar.update()

    def finish(self) -> None:
        self._bar.close()
