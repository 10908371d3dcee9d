"""What happens before a first request, phase by phase: timed and reported."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

# modules done, of how many, and those that are not done
Compiling = Callable[[int, int, Sequence[str]], None]


class Startup:
    """Seconds of each phase since ``take`` was last called, in the order in which they began.

    What the process did before this object was made, its imports above all, is the phase ``process``.
    """

    def __init__(self, compiling: Compiling) -> None:
        self.compiling = compiling
        self._now = time.perf_counter()
        self._seconds = {"process": _process_seconds()}

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds by phase; what was in none is ``other``."""
        began, self._now = self._now, time.perf_counter()
        taken, self._seconds = self._seconds, {}
        in_phases = sum(taken.values()) - taken.get("process", 0.0)
        return {**taken, "other": self._now - began - in_phases}


_watching: ContextVar[Startup | None] = ContextVar("startup", default=None)


@contextmanager
def watched(compiling: Compiling) -> Iterator[Startup]:
    """Time the phases within; ``compiling`` receives the progress of compiling kernels."""
    token = _watching.set(startup := Startup(compiling))
    try:
        yield startup
    finally:
        _watching.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """What is done within is the phase ``name``; phases do not contain each other."""
    began = time.perf_counter()
    try:
        yield
    finally:
        if (startup := _watching.get()) is not None:
            startup.add(name, time.perf_counter() - began)


def compiling(done: int, total: int, names: Sequence[str]) -> None:
    """Report to ``watched``; outside of it, log a line at the beginning."""
    if (startup := _watching.get()) is not None:
        startup.compiling(done, total, names)
    elif done == 0:
        logging.getLogger("specgen").warning("%s", compiling_line(done, total, names))


def compiling_line(done: int, total: int, names: Sequence[str]) -> str:
    """How far the compilation is, in a line."""
    to_do = f"; to do: {'; '.join(names)}" if names else ""
    return f"compiling kernels, once on this machine: {done} of {total} modules{to_do}"


def startup_line(seconds: Mapping[str, float]) -> str:
    """The phases in a line; those that took no time worth naming are left out."""
    parts = [f"{name} {spent:.1f}" for name, spent in seconds.items() if spent >= 0.05]
    return f"{sum(seconds.values()):.1f} s ({', '.join(parts)})"


def _process_seconds() -> float:
    """How long this process has been there, where Linux says so; else 0."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    except (OSError, AttributeError, ValueError):
        return 0.0
