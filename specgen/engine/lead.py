"""Rank 0's side of tensor parallelism: what its engines tell the other ranks, and what it hears from them."""

import gc
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch

from specgen.config import EngineConfig, SamplingParams, first_line, require
from specgen.core.endings import DeviceLost
from specgen.core.graphs import Runner
from specgen.core.peers import Peers
from specgen.core.sequence import Completion
from specgen.device import HostCopy
from specgen.engine.crew import Crew, start

_crews: "weakref.WeakValueDictionary[tuple[str, int], Crew]" = weakref.WeakValueDictionary()


def peers_of(config: EngineConfig) -> Peers:
    """Those of a model that a resolved ``config`` loads; starts them unless an earlier model's are still there."""
    if config.tensor_parallel == 1:
        return Peers()
    gc.collect()  # a model that nothing refers to any more may still hold the processes of other devices
    key = config.device, config.tensor_parallel
    crew = _crews.get(key)
    if crew is None:
        require(
            not _crews,
            f"tensor-parallel is {config.tensor_parallel} on {config.device}, and an engine of this process has "
            f"{' and '.join(f'{size} on {device}' for device, size in _crews)}: use one number in a process",
        )
        crew = _crews[key] = start(torch.device(config.device), config.tensor_parallel)
    return ModelPeers(crew)


def digest(completions: Sequence[Completion]) -> int:
    """A number by which ranks compare what they have found."""
    found = [
        (each.request.id, each.token_ids, each.error, [(step.drafts, step.accepted) for step in each.steps])
        for each in completions
    ]
    return zlib.crc32(repr(found).encode())


class ModelPeers(Peers):
    """The peers of a model. Engines that only try something out (``memory.num_pages``) are made by each for itself."""

    def __init__(self, crew: Crew) -> None:
        self.ranks = crew.ranks
        self._crew = crew
        self._model = crew.next_id()
        self._on_end("drop_model", self._model)

    @contextmanager
    def together(self, call: str, *arguments: object) -> Iterator[None]:
        try:
            with self._crew.working(call, self._model, *arguments) as number:
                yield
            self._crew.answers(number)
        except RuntimeError as error:
            self.require(first_line(error))

    def of_engine(self, config: EngineConfig, expected: SamplingParams) -> Peers:
        return EnginePeers(self._crew, self._model, config, expected)

    def give_up(self, reason: str) -> None:
        raise RuntimeError(reason)

    def wait(self, numbers: HostCopy) -> None:
        limit = time.monotonic() + self._crew.patience
        while True:
            self._crew.require_all()
            if numbers.ready:
                return
            self._crew.require_before(limit)
            time.sleep(0)

    def require(self, reason: str, requests: tuple[str, ...] = ()) -> NoReturn:
        raise DeviceLost(self._crew.blame(reason), requests)

    def _on_end(self, call: str, *arguments: object) -> None:
        """Tell the peers once nothing refers to this any more: with the next call, as that may be while one is sent."""
        weakref.finalize(self, self._crew.later.append, (call, arguments)).atexit = False


class EnginePeers(ModelPeers):
    """The peers of an engine that is told call by call."""

    def __init__(self, crew: Crew, model: int, config: EngineConfig, expected: SamplingParams) -> None:
        self.ranks = crew.ranks
        self._crew = crew
        gc.collect()  # an engine that nothing refers to any more may still be there
        self._engine = crew.next_id()
        self._on_end("drop_engine", self._engine)
        self._asked = crew.tell("build", self._engine, model, config, expected)

    def assemble(self, num_pages: int, runner: Runner) -> int:
        self._crew.runners.add(runner)
        try:
            others: list[int] = self._crew.answers(self._asked)
        except RuntimeError as error:
            self.require(first_line(error))
        pages = min(num_pages, *others)
        self._crew.tell("assemble", self._engine, pages)
        return pages

    def tell(self, call: str, *arguments: object) -> None:
        self._crew.tell("engine", self._engine, call, *arguments)

    @contextmanager
    def working(self, call: str, *arguments: object) -> Iterator[None]:
        with self._crew.working("engine", self._engine, call, *arguments) as self._asked:
            yield

    def agree(self, completions: Sequence[Completion], in_hand: tuple[str, ...]) -> None:
        requests = (*(each.request.id for each in completions), *in_hand)
        try:
            others = self._crew.answers(self._asked)
        except RuntimeError as error:
            self.require(first_line(error), requests)
        mine = digest(completions)
        for rank, other in enumerate(others, start=1):
            if other != mine:
                self._crew.end(f"{self._crew.name(rank)}: it has found other tokens than rank 0")
                self.require("", requests)
