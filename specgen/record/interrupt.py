"""SIGINT and SIGTERM: polled by a run between its steps, raised in work that does not poll, obeyed in ten seconds."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Thread
from types import FrameType

TRY_AGAIN = os.EX_TEMPFAIL  # 75, after SIGTERM: for schedulers, the same command goes on
STOPPED = (TRY_AGAIN, 128 + signal.SIGINT)  # exit codes
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TO_POLL = 4.0  # seconds in which what polls has ended; then ``KeyboardInterrupt`` is raised
_TO_END = 8.0  # seconds after which the process ends, wherever it is


def _exit_code(number: int | None) -> int:
    return TRY_AGAIN if number == signal.SIGTERM else 128 + signal.SIGINT


class StoppedError(Exception):
    """A signal ended the run early; the text is one line for the user."""


class Interrupt:
    """Called, it tells whether a signal has arrived. Not called for ``to_poll`` s, it raises ``KeyboardInterrupt``."""

    def __init__(self, to_poll: float) -> None:
        self._to_poll = to_poll
        self._signal: int | None = None

    def __call__(self) -> bool:
        if self._signal is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)  # who is told ends by itself, such as by an upload
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """``TRY_AGAIN`` after SIGTERM; else 130, as shells have it for Ctrl-C."""
        return _exit_code(self._signal)

    def take(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal. A second Ctrl-C ends the process at once; schedulers may send SIGTERM twice."""
        if self._signal is not None:
            return
        self._signal = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not self._to_poll:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, self._to_poll)

    def break_off(self, number: int, frame: FrameType | None) -> None:
        """Handle the end of ``to_poll``."""
        raise KeyboardInterrupt


def interruptible(last_words: Callable[[], str]) -> AbstractContextManager[Interrupt]:
    """Notes signals in what is yielded, for work that asks it and then raises ``StoppedError``.

    What has not asked 4 s later receives ``KeyboardInterrupt``. What is not at its end after 8 s, such as in a library
    that waits or computes, ends with the process, with ``last_words`` on stderr: for the files of a run no worse than a
    kill. Restores the handlers afterwards. To be used in the main thread.
    """
    return _handled(Interrupt(_TO_POLL), last_words)


def breakable(last_words: Callable[[], str]) -> AbstractContextManager[Interrupt]:
    """As ``interruptible``, for work that does not poll: a signal raises ``KeyboardInterrupt`` at once."""
    return _handled(Interrupt(0.0), last_words)


@contextmanager
def _handled(interrupt: Interrupt, last_words: Callable[[], str]) -> Iterator[Interrupt]:
    handlers = {**dict.fromkeys(_SIGNALS, interrupt.take), signal.SIGALRM: interrupt.break_off}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    outer = getattr(before[signal.SIGTERM], "__self__", None)
    try:
        with _ended_in_time(last_words):
            if isinstance(outer, Interrupt) and outer():  # the library that it broke off has swallowed it
                raise KeyboardInterrupt
            yield interrupt
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def _ended_in_time(last_words: Callable[[], str]) -> Iterator[None]:
    """Ends the process if it is still inside 8 s after a signal.

    A thread waits for what the interpreter writes as a signal arrives, as handlers in Python run only once the main
    thread is back from the library that it is in.
    """
    arrivals, arrive = socket.socketpair()
    is_over = Event()

    def watch() -> None:
        number = None
        while number not in _SIGNALS:
            (number,) = arrivals.recv(1) or (signal.SIGINT,)  # nothing once it is closed
        if not is_over.wait(_TO_END):
            try:
                print(last_words(), file=sys.stderr, flush=True)
            finally:
                os._exit(_exit_code(number))

    arrive.setblocking(False)
    before = signal.set_wakeup_fd(arrive.fileno(), warn_on_full_buffer=False)
    thread = Thread(target=watch, daemon=True, name="signals")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(before)
        arrive.close()
        thread.join()
        arrivals.close()
