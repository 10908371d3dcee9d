"""Rank 0's side of tensor parallelism: what its engines tell the other ranks, and what it hears from them."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from specgen.config import EngineConfig, SamplingParams, require
from specgen.core.graphs import Runner
from specgen.core.peers import Peers
from specgen.device import HostCopy
from specgen.engine.crew import Crew, start
from specgen.engine.rank_group import Account
from specgen.errors import DeviceLost

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


class ModelPeers(Peers):
    """The peers of a model. Engines that only try something out (``memory.num_pages``) are made by each for itself."""

    def __init__(self, crew: Crew) -> None:
        self.ranks = crew.ranks
        self._crew = crew
        self._model = crew.next_id()
        self._on_end("drop_model", self._model)

    @contextmanager
    def together(self, call: str, *arguments: object) -> Iterator[None]:
        with self._blaming(), self._crew.working(call, self._model, *arguments) as number:
            yield
        with self._blaming():
            self._crew.answers(number)

    def least(self, number: Callable[..., int], config: EngineConfig, models: object) -> int:
        with self._blaming(), self._crew.working("number", self._model, config, number) as asked:
            mine = number(config, models)
        with self._blaming():
            others: list[int] = self._crew.answers(asked)
        return min(mine, *others)

    def of_engine(self, config: EngineConfig, expected: SamplingParams) -> Peers:
        return EnginePeers(self._crew, self._model, config, expected)

    def see(self, *numbers: int) -> None:
        self._crew.alive()

    def give_up(self, error: RuntimeError) -> None:
        raise error

    def wait(self, numbers: HostCopy) -> None:
        self._crew.wait(lambda: numbers.ready)

    def require(self, error: RuntimeError, requests: tuple[str, ...] = ()) -> NoReturn:
        if isinstance(error, DeviceLost):
            raise error
        raise DeviceLost(self._crew.blame(error), requests) from error

    @contextmanager
    def _blaming(self, requests: tuple[str, ...] = ()) -> Iterator[None]:
        """``DeviceLost`` for what fails within."""
        try:
            yield
        except RuntimeError as error:
            self.require(error, requests)

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
        self._asked = model, config, expected
        self._account = Account()

    def assemble(self, num_pages: Callable[[], int], runner: Runner) -> int:
        self._crew.runners.add(runner)
        with self._blaming(), self._crew.working("build", self._engine, *self._asked) as number:
            mine = num_pages()
        with self._blaming():
            others: list[int] = self._crew.answers(number)
        pages = min(mine, *others)
        self._crew.tell("assemble", self._engine, pages)
        return pages

    def tell(self, call: str, *arguments: object) -> None:
        self._crew.tell("engine", self._engine, self._account.mark, call, *arguments)

    @contextmanager
    def working(self, call: str, *arguments: object) -> Iterator[None]:
        with self._crew.working("engine", self._engine, self._account.mark, call, *arguments):
            yield

    def see(self, *numbers: int) -> None:
        super().see(*numbers)
        self._account.add(*numbers)

    def agree(self, requests: tuple[str, ...]) -> None:
        with self._blaming(requests):
            self._crew.answers(self._crew.tell("agree", self._engine, self._account.mark))
