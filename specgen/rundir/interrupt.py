"""SIGINT and SIGTERM as a question that a run asks between its steps, or as an exception in work that never asks."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """The run was asked to end before its end; the text is one line for the user."""


class Interrupt:
    """Call it: whether a signal has asked the run to end."""

    def __init__(self) -> None:
        self._signal: int | None = None

    def __call__(self) -> bool:
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells have it."""
        assert self._signal is not None
        return 128 + self._signal

    def take(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; the next one ends the process at once."""
        self._signal = number
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Signals are noted in what is yielded, and taken as before behind it."""
    interrupt = Interrupt()
    with _handled(interrupt.take):
        yield interrupt


@contextmanager
def breakable() -> Iterator[Interrupt]:
    """As ``interruptible``, around work that never asks: a signal raises ``KeyboardInterrupt`` in it, SIGTERM too."""
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
