"""SIGINT and SIGTERM: polled by a run between its steps, or raised in work that does not poll."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """A signal ended the run early; the text is one line for the user."""


class Interrupt:
    """Called, it tells whether a signal has arrived."""

    def __init__(self) -> None:
        self._signal: int | None = None

    def __call__(self) -> bool:
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as in shells."""
        assert self._signal is not None
        return 128 + self._signal

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note it; the next one ends the process at once."""
        self._signal = number
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Notes signals in what is yielded; restores the handlers afterwards."""
    interrupt = Interrupt()
    with _handled(interrupt.take):
        yield interrupt


@contextmanager
def breakable() -> Iterator[Interrupt]:
    """As ``interruptible``, for work that does not poll: a signal, SIGTERM too, raises ``KeyboardInterrupt``."""
    interrupt = Interrupt()

    def break_off(number: int, frame: FrameType | None) -> None:
        interrupt.take(number, frame)
        raise KeyboardInterrupt

    with _handled(break_off):
        yield interrupt


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {each: signal.signal(each, handler) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, earlier in before.items():
            signal.signal(each, earlier)
