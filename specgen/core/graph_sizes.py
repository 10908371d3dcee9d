"""In which size of CUDA graph a batch runs: its own, or for a while in a larger one that is there."""

from collections import Counter
from collections.abc import Hashable


def bucket(num_rows: int) -> int:
    """The size that ``num_rows`` is padded to: in quarters of powers of two, at most 16 apart."""
    apart = min(max((1 << (num_rows - 1).bit_length()) // 4, 1), 16)
    return -(-num_rows // apart) * apart


class GraphSizes:
    """The sizes that have graphs, by all else that a graph is of.

    A batch that drains or fills is of one size for a few steps, and a capture takes as long as many of them. So a size
    without a graph runs in the next larger one, of at most twice its rows, ``patience`` times before it gets its own.
    Only counts decide, so ranks agree.
    """

    def __init__(self) -> None:
        self.patience = 0
        self._own: dict[Hashable, set[int]] = {}
        self._asked = Counter[tuple[Hashable, int]]()  # steps without a graph of their own

    def choose(self, num_sequences: int, what: Hashable) -> int:
        """Rows for a step of ``num_sequences``, with graphs of ``what``; one of that size is there from now on."""
        size, own = bucket(num_sequences), self._own.setdefault(what, set())
        if size in own:
            return size
        larger = min((each for each in own if size < each <= 2 * size), default=None)
        if larger is not None and self._asked[what, size] < self.patience:
            self._asked[what, size] += 1
            return larger
        own.add(size)
        return size

    def forget(self) -> None:
        """There are no graphs any more."""
        self._own.clear()
        self._asked.clear()
