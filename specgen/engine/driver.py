"""Rank 0's side of tensor parallelism: the calls that its engines send to the other ranks, and their answers."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from specgen.config import EngineConfig, SamplingParams, require
from specgen.config.errors import DeviceLost
from specgen.core.graphs import Runner
from specgen.core.peers import Peers
from specgen.device import HostCopy
from specgen.engine.rank_group import Checksum
from specgen.engine.worker_group import WorkerGroup, start

_worker_groups: "weakref.WeakValueDictionary[tuple[str, int], WorkerGroup]" = weakref.WeakValueDictionary()


def peers_of(config: EngineConfig) -> Peers:
    """Those of a model that a resolved ``config`` loads; starts them unless an earlier model's are still there."""
    if config.tensor_parallel == 1:
        return Peers()
    gc.collect()  # a model that nothing refers to any more may still hold the processes of other devices
    key = config.device, config.tensor_parallel
    workers = _worker_groups.get(key)
    if workers is None:
        require(
            not _worker_groups,
            f"tensor-parallel is {config.tensor_parallel} on {config.device}, and an engine of this process has "
            f"{' and '.join(f'{size} on {device}' for device, size in _worker_groups)}: use one number in a process",
        )
        workers = _worker_groups[key] = start(torch.device(config.device), config.tensor_parallel)
    return ModelPeers(workers)


class ModelPeers(Peers):
    """The peers of a model. Engines that only try something out (``memory.num_pages``) are made by each for itself."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.ranks = workers.ranks
        self._workers = workers
        self._model = workers.next_id()
        self._on_end("drop_model", self._model)

    @contextmanager
    def together(self, call: str, *arguments: object) -> Iterator[None]:
        with self._diagnosing(), self._workers.working(call, self._model, *arguments) as number:
            yield
        with self._diagnosing():
            self._workers.answers(number)

    def least(self, number: Callable[..., int], config: EngineConfig, models: object) -> int:
        with self._diagnosing(), self._workers.working("number", self._model, config, number) as asked:
            mine = number(config, models)
        with self._diagnosing():
            others: list[int] = self._workers.answers(asked)
        return min(mine, *others)

    def of_engine(self, config: EngineConfig, expected: SamplingParams) -> Peers:
        return EnginePeers(self._workers, self._model, config, expected)

    def see(self, *numbers: int) -> None:
        self._workers.alive()

    def require_recoverable(self, error: RuntimeError) -> None:
        raise error

    def wait(self, numbers: HostCopy) -> None:
        self._workers.wait(lambda: numbers.ready)

    def require(self, error: RuntimeError, requests: tuple[str, ...] = ()) -> NoReturn:
        if isinstance(error, DeviceLost):
            raise error
        raise DeviceLost(self._workers.diagnose(error), requests) from error

    @contextmanager
    def _diagnosing(self, requests: tuple[str, ...] = ()) -> Iterator[None]:
        """``DeviceLost`` for what fails within."""
        try:
            yield
        except RuntimeError as error:
            self.require(error, requests)

    def _on_end(self, call: str, *arguments: object) -> None:
        """Send ``call`` once nothing refers to this: with the next call, as finalizers may run during a send."""
        weakref.finalize(self, self._workers.deferred.append, (call, arguments)).atexit = False


class EnginePeers(ModelPeers):
    """The peers of an engine, to which every call of it is sent."""

    def __init__(
        self, workers: WorkerGroup, model: int, config: EngineConfig, expected: SamplingParams
    ) -> None:
        self.ranks = workers.ranks
        self._workers = workers
        gc.collect()  # an engine that nothing refers to any more may still be there
        self._engine = workers.next_id()
        self._on_end("drop_engine", self._engine)
        self._asked = model, config, expected
        self._checksum = Checksum()

    def assemble(self, num_pages: Callable[[], int], runner: Runner) -> int:
        self._workers.runners.add(runner)
        with self._diagnosing(), self._workers.working("build", self._engine, *self._asked) as number:
            mine = num_pages()
        with self._diagnosing():
            others: list[int] = self._workers.answers(number)
        pages = min(mine, *others)
        self._workers.broadcast("assemble", self._engine, pages)
        return pages

    def broadcast(self, call: str, *arguments: object) -> None:
        self._workers.broadcast("engine", self._engine, self._checksum.value, call, *arguments)

    @contextmanager
    def working(self, call: str, *arguments: object) -> Iterator[None]:
        with self._workers.working("engine", self._engine, self._checksum.value, call, *arguments):
            yield

    def see(self, *numbers: int) -> None:
        super().see(*numbers)
        self._checksum.add(*numbers)

    def agree(self, requests: tuple[str, ...]) -> None:
        with self._diagnosing(requests):
            self._workers.answers(self._workers.broadcast("agree", self._engine, self._checksum.value))
