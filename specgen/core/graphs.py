"""CUDA graphs: how a decode step, or each of its forward passes, and short prefills are captured and replayed."""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from specgen.device import synchronize
from specgen.record.record_rows import Captured

T = TypeVar("T")
Pool = Any  # what CUDAGraph.pool() gives
Key = tuple[str, int, int, Hashable]  # all that the host decides: a name, sequences, drafts of each, sampling
_PATIENCE = 256  # decode steps from a capture without memory to the next try; each time twice as many


@dataclass(frozen=True, kw_only=True)
class Capture:
    """One capture: of what, how long it took, and whether there was memory for it."""

    key: Key
    seconds: float
    fits: bool

    def row(self, now: float) -> Captured:
        """For the record."""
        what, num_sequences, *_ = self.key
        return Captured(
            time=now, what=what, num_sequences=num_sequences, seconds=self.seconds, fits=self.fits
        )


class Runner:
    """How computations run: here every kernel is launched by the host.

    Each computation reads and writes tensors at addresses that stay, and returns tensors.
    """

    # called before and after each forward pass within a step
    mark: Callable[[], None] = staticmethod(lambda: None)
    captures = False  # whether what has run once costs the host next to nothing
    pieces_alone = False  # whether a piece may run without what the pieces before it have computed
    has_peers = False  # whether other ranks run the same passes, whose rows and captures must be the same

    def num_rows(self, num_sequences: int) -> int:
        """Rows to compute for so many sequences; those beyond are padding."""
        return num_sequences

    def choose_rows(self, num_sequences: int, what: Hashable) -> int:
        """The same for the next step, of ``what`` (drafts and form of sampling): more rows may cost less now."""
        return self.num_rows(num_sequences)

    def delay_captures(self, num_steps: int) -> None:
        """Run so many steps of a size in what was made for a larger one before making it its own."""

    def sizes(self, max_sequences: int) -> list[int]:
        """Where it keeps what it has run: the largest of the numbers of sequences that are computed alike."""
        return []

    def step(self, key: Key, function: Callable[[], T]) -> T:
        """Run a whole decode step."""
        return function()

    def piece(self, key: Key, function: Callable[..., T], *inputs: Tensor) -> T:
        """Run one forward pass within a step; ``inputs`` are what the step has computed since the last one."""
        self.mark()
        result = self._piece(key, function, *inputs)
        self.mark()
        return result

    def _piece(self, key: Key, function: Callable[..., T], *inputs: Tensor) -> T:
        return function(*inputs)

    def prompts(self, key: Key, function: Callable[..., T], *inputs: Tensor) -> T:
        """Run a prefill's forward pass over ``inputs``."""
        return function(*inputs)

    def take_captures(self) -> list[Capture]:
        """The captures since this was last asked."""
        return []

    def try_again(self) -> None:
        """There may be memory for what there was none for."""

    def forget(self) -> None:
        """Let go of what was captured: before the communication between ranks ends, which graphs are part of."""


def bucket(num_rows: int) -> int:
    """The size that ``num_rows`` is padded to: in quarters of powers of two, at most 16 apart."""
    apart = min(max((1 << (num_rows - 1).bit_length()) // 4, 1), 16)
    return -(-num_rows // apart) * apart


class GraphSizes:
    """The sizes that have graphs, by all else that a graph is of.

    A batch that drains or fills is of one size for a few steps, and a capture takes as long as many of them. So a size
    without a graph runs in the next larger one, of at most twice its rows, ``capture_delay`` times before its own. One
    that there was no memory for runs in any larger one until it is tried again.
    Only counts decide, and ranks that have peers report no ``shortage``, so ranks agree.
    """

    def __init__(self) -> None:
        self.capture_delay = 0
        self.num_steps = 0
        self._own: dict[Hashable, set[int]] = {}
        self._asked = Counter[tuple[Hashable, int]]()  # steps without their own graph
        self._short: dict[tuple[Hashable, int], int] = {}  # without memory, until that step

    def choose(self, num_sequences: int, what: Hashable) -> int:
        """Rows for a step of ``num_sequences``, with graphs of ``what``; one of that size is there from now on."""
        self.num_steps += 1
        size, own = bucket(num_sequences), self._own.setdefault(what, set())
        is_short = self._is_short(what, size)
        if size in own and not is_short:
            return size
        most = max(own) if is_short else 2 * size
        there = (each for each in own if size < each <= most and not self._is_short(what, each))
        larger = min(there, default=None)
        if larger is not None and (is_short or self._asked[what, size] < self.capture_delay):
            self._asked[what, size] += 1
            return larger
        own.add(size)
        return size

    def _is_short(self, what: Hashable, size: int) -> bool:
        return self.num_steps < self._short.get((what, size), 0)

    def shortage(self, what: Hashable, size: int, until: int) -> None:
        """There is no memory for a graph of that ``size``, and none is tried before the step ``until``."""
        self._short[what, size] = until

    def try_again(self) -> None:
        """There may be memory now."""
        self._short.clear()

    def forget(self) -> None:
        """There are no graphs any more."""
        self._own.clear()
        self._asked.clear()
        self._short.clear()


class StepGraphs(Runner):
    """A whole step is one graph for each bucket of rows, and so is the forward pass of a short prefill."""

    captures = True

    def __init__(self) -> None:
        self._captures: list[Capture] = []
        self._graphs: dict[Key, _Graph] = {}
        self._next_try: dict[Hashable, float] = {}  # of captures without memory: the step from which on
        self._num_failed = Counter[Hashable]()
        self._sizes = GraphSizes()
        self._chosen: tuple[Hashable, int] | None = None  # what the decode step is of, and its rows
        self._stream = _capture_stream(torch.cuda.current_device())

    def num_rows(self, num_sequences: int) -> int:
        return bucket(num_sequences)

    def choose_rows(self, num_sequences: int, what: Hashable) -> int:
        size = self._sizes.choose(num_sequences, what)
        self._chosen = what, size
        return size

    def delay_captures(self, num_steps: int) -> None:
        self._sizes.capture_delay = num_steps

    def sizes(self, max_sequences: int) -> list[int]:
        return sorted({min(bucket(number), max_sequences) for number in range(1, max_sequences + 1)})

    def step(self, key: Key, function: Callable[[], T]) -> T:
        return self._run(key, function, ())

    def prompts(self, key: Key, function: Callable[..., T], *inputs: Tensor) -> T:
        self._chosen = None
        return self._run(key, function, inputs)

    def take_captures(self) -> list[Capture]:
        taken, self._captures = self._captures, []
        return taken

    def try_again(self) -> None:
        self._next_try.clear()
        self._sizes.try_again()

    def forget(self) -> None:
        self._graphs.clear()
        self._next_try.clear()
        self._sizes.forget()

    @property
    def _pool(self) -> Pool | None:
        """The memory pool that all graphs share, once there is one: a pool ends with its last graph.

        So a separate handle would be of no use after a first capture that failed.
        """
        return next((graph.graph.pool() for graph in self._graphs.values()), None)

    def _run(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> T:
        """Replay; the first time, run without a graph, which also loads and compiles, and capture for the next."""
        graph = self._graphs.get(key)
        if graph is not None:
            return cast(T, graph.replay(inputs))
        result = function(*inputs)
        if self._sizes.num_steps >= self._next_try.get(self._together(key), 0):
            synchronize()  # a capture does so anyway; what was launched before is not its time
            began = time.perf_counter()
            graph = _capture(function, inputs, self._pool, self._stream)
            seconds = time.perf_counter() - began
            self._captures.append(Capture(key=key, seconds=seconds, fits=graph is not None))
            if graph is None:
                self._wait(key)
            else:
                self._graphs[key] = graph
        return result

    def _together(self, key: Key) -> Hashable:
        """What names the graphs that are tried again together: with peers, who had the memory, each alone."""
        return key if self.has_peers else key[1:]

    def _wait(self, key: Key) -> None:
        """There was no memory to capture ``key``. With peers it is not tried again: all of them would have to.

        The other pieces of its step are given up too. All graphs share a pool, so what one gives may lie where one that
        was captured before it computes: those of one step have to be captured in the order in which they run.
        """
        together = self._together(key)
        if self.has_peers:
            self._next_try[together] = math.inf
            return
        self._graphs = {each: graph for each, graph in self._graphs.items() if each[1:] != together}
        until = self._sizes.num_steps + (_PATIENCE << self._num_failed[together])
        self._num_failed[together] += 1
        self._next_try[together] = until
        if self._chosen is not None:
            self._sizes.shortage(*self._chosen, until)


class PassGraphs(StepGraphs):
    """Each forward pass of a step is its own graph; the host launches what lies between."""

    pieces_alone = True

    def step(self, key: Key, function: Callable[[], T]) -> T:
        return function()

    def _piece(self, key: Key, function: Callable[..., T], *inputs: Tensor) -> T:
        return self._run(key, function, inputs)


@dataclass(frozen=True, kw_only=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: object

    def replay(self, inputs: tuple[Tensor, ...]) -> object:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.result


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """For all captures on ``device``: torch's own stays on the first device of a process.

    One for all engines, as cuBLAS keeps a workspace of each stream (32 MiB on Hopper) for the life of the process.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _capture(
    function: Callable[..., object], inputs: tuple[Tensor, ...], pool: Pool | None, stream: torch.cuda.Stream
) -> _Graph | None:
    """A graph of ``function`` over copies of ``inputs``; None where memory is short. Nothing is executed."""
    graph = torch.cuda.CUDAGraph()
    try:
        copies = tuple(given.clone() for given in inputs)
        with warnings.catch_warnings(), torch.cuda.graph(graph, pool=pool, stream=stream):
            # plain decoding has nothing to propose
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            result = function(*copies)
    except torch.OutOfMemoryError:
        return None
    return _Graph(graph=graph, inputs=copies, result=result)
