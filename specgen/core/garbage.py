"""Python's search for garbage, kept out of runs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = 1000  # times as many collections of younger objects before one of all
_USUALLY = gc.get_threshold()[2]
_running = 0  # at once


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Within it Python looks for garbage among new objects alone, and among all of those seldom.

    A search through everything that torch, Triton and FlashInfer keep takes some tenths of a second, in which no pass
    is launched. It comes as events are kept, so once in many runs. What became garbage before is freed afterwards.
    """
    global _running
    _running += 1
    if _running == 1:
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _RARELY)
    try:
        yield
    finally:
        _running -= 1
        if _running == 0:
            young, middle, _ = gc.get_threshold()
            gc.set_threshold(young, middle, _USUALLY)
            gc.unfreeze()
