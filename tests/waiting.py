"""Waiting for other processes and threads: for long, as limits are for what hangs and a busy machine takes its time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LIMIT = 600.0  # seconds


def wait_until(condition: Callable[[], T]) -> T:
    """What ``condition`` is at last."""
    until = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < until, "it hangs"
        time.sleep(0.02)
    return found
