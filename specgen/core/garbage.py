"""Python's search for garbage, kept out of runs."""

import gc
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

T = TypeVar("T")

_RARELY = 1000  # times as many collections of younger objects before one of all


@contextmanager
def fewer_gc_passes() -> Iterator[None]:
    """Within it Python looks for garbage among new objects, and among all of them seldom.

    A search through everything that torch, Triton and FlashInfer keep takes some tenths of a second, in which no pass
    is launched. It comes as steps are kept, so once in many runs. Behind it the program that this is a part of has the
    thresholds that it had, or those that it has set meanwhile.
    """
    found = gc.get_threshold()
    ours = (*found[:2], max(found[2], _RARELY))
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:  # nobody else has changed them
            gc.set_threshold(*found)


def with_fewer_gc_passes(items: Generator[T, None, None]) -> Generator[T, None, None]:
    """``items``, each of which is made within ``fewer_gc_passes``: who reads them, or stops, finds nothing changed."""
    with closing(items):
        while True:
            with fewer_gc_passes():
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
