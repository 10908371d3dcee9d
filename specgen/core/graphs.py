"""CUDA graphs: how a decode step, or each of its forward passes, and short prefills are captured and replayed."""

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
    without a graph runs in the next larger one, of at most twice its rows, ``capture_delay`` times before its own.
    Only counts decide, so ranks agree.
    """

    def __init__(self) -> None:
        self.capture_delay = 0
        self._own: dict[Hashable, set[int]] = {}
        self._asked = Counter[tuple[Hashable, int]]()  # steps without their own graph

    def choose(self, num_sequences: int, what: Hashable) -> int:
        """Rows for a step of ``num_sequences``, with graphs of ``what``; one of that size is there from now on."""
        size, own = bucket(num_sequences), self._own.setdefault(what, set())
        if size in own:
            return size
        larger = min((each for each in own if size < each <= 2 * size), default=None)
        if larger is not None and self._asked[what, size] < self.capture_delay:
            self._asked[what, size] += 1
            return larger
        own.add(size)
        return size

    def forget(self) -> None:
        """There are no graphs any more."""
        self._own.clear()
        self._asked.clear()


class StepGraphs(Runner):
    """A whole step is one graph for each bucket of rows, and so is the forward pass of a short prefill."""

    captures = True

    def __init__(self) -> None:
        self._captures: list[Capture] = []
        self._graphs: dict[Key, _Graph | None] = {}
        self._sizes = GraphSizes()
        self._stream = _capture_stream(torch.cuda.current_device())

    def num_rows(self, num_sequences: int) -> int:
        return bucket(num_sequences)

    def choose_rows(self, num_sequences: int, what: Hashable) -> int:
        return self._sizes.choose(num_sequences, what)

    def delay_captures(self, num_steps: int) -> None:
        self._sizes.capture_delay = num_steps

    def sizes(self, max_sequences: int) -> list[int]:
        return sorted({min(bucket(number), max_sequences) for number in range(1, max_sequences + 1)})

    def step(self, key: Key, function: Callable[[], T]) -> T:
        return self._run(key, function, ())

    def prompts(self, key: Key, function: Callable[..., T], *inputs: Tensor) -> T:
        return self._run(key, function, inputs)

    def take_captures(self) -> list[Capture]:
        taken, self._captures = self._captures, []
        return taken

    def try_again(self) -> None:
        self._graphs = {key: graph for key, graph in self._graphs.items() if graph is not None}

    def forget(self) -> None:
        self._graphs.clear()
        self._sizes.forget()

    @property
    def _pool(self) -> Pool | None:
        """The memory pool that all graphs share, once there is one: a pool ends with its last graph.

        So a separate handle would be of no use after a first capture that failed.
        """
        return next((graph.graph.pool() for graph in self._graphs.values() if graph is not None), None)

    def _run(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> T:
        """Replay; the first time, run without a graph, which also loads and compiles, and capture for the next."""
        graph = self._graphs.get(key)
        if graph is not None:
            return cast(T, graph.replay(inputs))
        result = function(*inputs)
        if key not in self._graphs:
            synchronize()  # a capture does so anyway; what was launched before is not its time
            began = time.perf_counter()
            self._graphs[key] = graph = _capture(function, inputs, self._pool, self._stream)
            seconds = time.perf_counter() - began
            self._captures.append(Capture(key=key, seconds=seconds, fits=graph is not None))
        return result


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
