"""Engines on the workers of a Ray cluster behind the interface of one, which streams blocks of prompts to them."""

import logging
import os
import signal
import socket
import sys
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from traceback import format_exception
from typing import Any
from uuid import uuid4

import torch

from specgen.config import MTP, Cluster, EngineConfig, SamplingParams, UserError, require
from specgen.engine.build import DRAWN
from specgen.engine.conversations import RequestOutput
from specgen.engine.engine import Engine
from specgen.jobs.shared_engine import SharedEngine
from specgen.prompts import Prompt, Rejected
from specgen.prompts.prompt import sample_ids
from specgen.record.provenance import num_cpus
from specgen.record.record_rows import EngineRow, PassRow, RequestRow, moved
from specgen.text.tokenizer import Tokenizer, load_tokenizer

_AT_ONCE = 3  # blocks of a worker, which share its batch: others fill it while one ends
_LOSSES = 3  # of every worker, without an answer meanwhile: what they are given, or where they run, is why
_SYNCHRONISED = 2.0  # seconds that two clocks may differ unnoticed
_POLL = 0.2  # seconds between two calls of ``until``
_Record = EngineRow | RequestOutput | Exception
_Rows = Iterable[Prompt | Rejected]


@dataclass(frozen=True, kw_only=True)
class _Block:
    """The prompts of one call of a worker; ``earlier`` as in ``Engine.generate``."""

    prompts: list[Prompt | Rejected]
    earlier: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What a worker found during a call, with passes as it counts them; blocks that it had at once share passes."""

    worker: str
    records: list[_Record]
    time: float  # when, by the worker's clock


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """The engines of ``cluster``, each with the resolved ``config`` in its own process and on its own GPUs, if any.

    ``record`` takes their rows, block by block; times count from the call of ``generate``. ``ready`` is called once the
    first worker has started. ``expected`` is that of ``Engine``. ``UserError`` where this machine has too few GPUs,
    later where there is no cluster or a worker cannot start.
    """

    config: EngineConfig
    cluster: Cluster
    record: Callable[[EngineRow], None]
    expected: SamplingParams = DRAWN
    ready: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        num_gpus, num_workers = torch.cuda.device_count(), self.cluster.num_workers
        each = self.config.tensor_parallel
        require(
            self.config.device == "cpu" or self.cluster.address is not None or num_gpus >= num_workers * each,
            f"num-workers is {num_workers} and this machine has {num_gpus} GPUs: "
            f"use {'one' if each == 1 else each} for each",
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.config.model)

    def generate(
        self,
        prompts: _Rows,
        sampling: SamplingParams,
        *,
        earlier: Mapping[str, str],
        lost: Mapping[str, Sequence[str]],
        until: Callable[[], bool],
    ) -> Iterator[RequestOutput]:
        """As ``Engine.generate``; outputs come when their block is done, each after its passes.

        The blocks of a lost worker are answered again, by whichever has room for them.
        """
        largest, num_workers = self.config.max_batch_size, self.cluster.num_workers
        blocks = _blocks(iter(prompts), earlier, largest, num_workers, sampling)
        # of passes, by worker and its own number; -1 for one that is not seen yet
        numbers: dict[str, array[int]] = defaultdict(lambda: array("q"))
        others, num_passes = set[tuple[str, EngineRow]](), count()
        ahead: dict[str, float] = {}  # the clock of each worker's machine, in seconds
        with _connected(self.cluster):
            for answer in _on_stderr(self._answered(blocks, sampling, lost, until)):
                if not ahead:
                    self.ready()
                if answer.worker not in ahead:  # it has just started
                    ahead[answer.worker] = _seconds_ahead(answer.time)
                known = numbers[answer.worker]
                for record in (_moved(each, -ahead[answer.worker]) for each in answer.records):
                    match record:
                        case RequestOutput(record=RequestRow() as row):
                            yield replace(record, record=row.numbered(known))
                        case RequestOutput():
                            yield record
                        case Exception():
                            raise record
                        case PassRow(number=number):
                            known.extend([-1] * (number + 1 - len(known)))
                            if known[number] < 0:
                                known[number] = next(num_passes)
                                self.record(replace(record, number=known[number]))
                        case _ if (answer.worker, record) not in others:
                            others.add((answer.worker, record))
                            self.record(record)

    def _answered(
        self,
        blocks: Iterator[_Block],
        sampling: SamplingParams,
        lost: Mapping[str, Sequence[str]],
        until: Callable[[], bool],
    ) -> Iterator[_Answer]:
        """The answers to all blocks, in the order in which they are done, until ``until`` is true."""
        import ray

        worker = ray.remote(
            max_concurrency=_AT_ONCE, scheduling_strategy="SPREAD", **_resources(self.cluster, self.config)
        )(_Worker)
        new = partial(worker.remote, _portable(self.config), self.expected, sampling, lost, time.time())
        yield from _Pool(new, self.cluster.num_workers).answers(blocks, until)


class _Pool:
    """Workers, as many as find room in the cluster; one that is lost is replaced, and others take over its blocks."""

    def __init__(self, new: Callable[[], Any], num_workers: int) -> None:
        self._new, self._num_workers = new, num_workers
        self._num_blocks: dict[Any, int] = {}  # of each worker
        # by answer: worker, and block unless it starts
        self._awaited: dict[Any, tuple[Any, _Block | None]] = {}
        self._num_losses = 0  # since the last answer
        for _ in range(num_workers):
            self._add()

    def answers(self, blocks: Iterator[_Block], until: Callable[[], bool]) -> Iterator[_Answer]:
        """As ``RayEngine._answered``; ``UserError`` where workers are lost again and again."""
        import ray

        again = deque[_Block]()  # behind the others, as one of them may be why its worker was lost
        while not until():
            while (worker := self._free()) is not None:
                block = next(blocks, None) or (again.popleft() if again else None)
                if block is None:
                    break
                self._num_blocks[worker] += 1
                self._awaited[worker.answer.remote(block)] = worker, block
            if worker is not None and all(block is None for _, block in self._awaited.values()):
                return
            for done in ray.wait([*self._awaited], timeout=_POLL)[0]:
                worker, block = self._awaited.pop(done)
                try:
                    answer = ray.get(done)
                except ray.exceptions.RayTaskError:
                    raise  # a bug, which another worker has too
                except ray.exceptions.RayError as error:
                    self._replace(worker, error)
                    again.extend([] if block is None else [block])
                    continue
                if block is not None:
                    self._num_losses = 0
                if worker in self._num_blocks:  # else it was lost behind this answer
                    self._num_blocks[worker] -= 1 if block else _AT_ONCE
                yield answer

    def _add(self) -> None:
        worker = self._new()
        self._num_blocks[worker] = _AT_ONCE  # until it is ready
        self._awaited[worker.start.remote()] = worker, None

    def _replace(self, worker: Any, error: Exception) -> None:  # noqa: ANN401
        """``worker`` is lost, for which every answer that it owes has an ``error``."""
        if self._num_blocks.pop(worker, None) is None:
            return
        self._num_losses += 1
        if self._num_losses > _LOSSES * self._num_workers:
            raise UserError(
                f"workers were lost {self._num_losses} times without an answer in between: {_reason(error)}"
            ) from error
        self._add()

    def _free(self) -> Any | None:  # noqa: ANN401
        """The worker with the fewest blocks, if it can have one more."""
        worker = min(self._num_blocks, key=self._num_blocks.__getitem__)
        return worker if self._num_blocks[worker] < _AT_ONCE else None


class _Worker:
    """An engine that answers blocks, several at once, in a process that Ray starts."""

    def __init__(
        self,
        config: EngineConfig,
        expected: SamplingParams,
        sampling: SamplingParams,
        lost: Mapping[str, Sequence[str]],
        began: float,
    ) -> None:
        self._name, self._began, self._late = uuid4().hex, began, 0.0
        self._engine = SharedEngine(partial(Engine, config, expected=expected), sampling, lost)

    def start(self) -> _Answer:
        """Load; where that fails, the reason is all that this answer has."""

        def load(see: Callable[[_Record], None]) -> None:
            self._engine.start()
            self._late = time.time() - self._began  # the engine's clock starts now, the run's at ``began``

        return self._answer(load)

    def answer(self, block: _Block) -> _Answer:
        return self._answer(lambda see: self._engine.answer(block.prompts, see, block.earlier))

    def _answer(self, work: Callable[[Callable[[_Record], None]], None]) -> _Answer:
        records = list[_Record]()
        try:
            work(records.append)
        except Exception as error:
            error.__notes__ = ["".join(format_exception(error))]  # pickling loses the traceback
            records.append(error)  # raised by the driver: Ray would change type and fields
        found = [_moved(each, self._late) for each in records]
        return _Answer(worker=self._name, records=found, time=time.time())


def _seconds_ahead(now: float) -> float:
    """How far a clock is ahead that was ``now`` just before this: 0 as far as the way of an answer may be why."""
    seconds = now - time.time()
    if abs(seconds) < _SYNCHRONISED:
        return 0.0
    logging.getLogger("specgen").warning(
        "the clock of a worker's machine is %.0f s %s this one's, by which its times are moved: synchronise them (NTP)",
        abs(seconds),
        "ahead of" if seconds > 0 else "behind",
    )
    return seconds


def _moved(record: _Record, seconds: float) -> _Record:
    match record:
        case _ if not seconds:
            return record
        case RequestOutput():
            return record if record.record is None else replace(record, record=record.record.moved(seconds))
        case Exception():
            return record
        case _:
            return moved(record, seconds)


def _blocks(
    prompts: Iterator[Prompt | Rejected],
    earlier: Mapping[str, str],
    largest: int,
    num_workers: int,
    sampling: SamplingParams,
) -> Iterator[_Block]:
    """Blocks of ``largest`` requests, a whole batch; the last ones are smaller, so that every worker has one.

    All samples of a prompt are in one block.
    """
    largest = -(-largest // sampling.n)
    while round_robin := list(islice(prompts, num_workers * largest)):
        size = -(-len(round_robin) // num_workers)
        for first in range(0, len(round_robin), size):
            block = round_robin[first : first + size]
            turns = (turn for prompt in block for turn in sample_ids(prompt, sampling))
            texts = {turn: earlier[turn] for turn in turns if turn in earlier}
            yield _Block(prompts=block, earlier=texts)


def _resources(cluster: Cluster, config: EngineConfig) -> dict[str, int]:
    """What a worker and the ranks that it starts get: a GPU each, or an equal share of this machine's cores."""
    if config.device != "cpu":
        return {"num_gpus": config.tensor_parallel}
    share = max(1, num_cpus() // cluster.num_workers)
    return {"num_cpus": config.tensor_parallel if cluster.address else share}


def _portable(config: EngineConfig) -> EngineConfig:
    """``config`` for a process with another working directory that sees only its own GPU."""
    model, drafter, learn_from = (
        str(Path(name).resolve()) if name not in (None, MTP) and Path(str(name)).exists() else name
        for name in (config.model, config.head, config.learn_from)
    )
    assert model is not None
    drafter = config.drafter if config.head is None else drafter
    return replace(
        config, model=model, drafter=drafter, learn_from=learn_from, device=config.device.partition(":")[0]
    )


def _on_stderr(values: Iterator[_Answer]) -> Iterator[_Answer]:
    """``values``; what is printed while waiting for one goes to stderr, because the consumer owns stdout."""
    while True:
        with redirect_stdout(sys.stderr):
            value = next(values, None)
        if value is None:
            return
        yield value


@contextmanager
def _connected(cluster: Cluster) -> Iterator[None]:
    """Ray at the cluster's address, or started on this machine, without telemetry and with its output on stderr."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # which Ray reads from there alone
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    with redirect_stdout(sys.stderr):
        _start(cluster)
    try:
        yield
    except ray.exceptions.RayTaskError:
        raise  # an unexpected error in a worker is a bug
    except ray.exceptions.RayError as error:
        raise UserError(f"a worker failed: {_reason(error)}") from error
    finally:
        with redirect_stdout(sys.stderr):
            ray.shutdown()


def _start(cluster: Cluster) -> None:
    import ray

    on_terminate = signal.getsignal(signal.SIGTERM)
    cores = max(cluster.num_workers, num_cpus())
    own: dict[str, Any] = {} if cluster.address else {"num_cpus": cores, "include_dashboard": False}
    try:
        _require_listening(cluster.address)
        ray.init(
            address=cluster.address or "local", log_to_driver=False, logging_level=logging.CRITICAL, **own
        )
    except (OSError, RuntimeError, ValueError) as error:
        where = f"at address {cluster.address!r}" if cluster.address else "on this machine"
        raise UserError(f"no Ray cluster {where}: {_reason(error)}") from error
    except SystemExit:  # from Ray's handler, at a signal before there is this process's own again
        signal.signal(signal.SIGTERM, on_terminate)
        signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt from None
    signal.signal(signal.SIGTERM, on_terminate)  # Ray's handler would end the process at once


def _require_listening(address: str | None) -> None:
    """``OSError`` where nothing listens at a HOST:PORT, which Ray would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if port.isdecimal() and "//" not in host:
        socket.create_connection((host, int(port)), timeout=5).close()


def _reason(error: BaseException) -> str:
    """The line that says why, which Ray puts after the traceback of another process or the fields of a worker."""
    lines = str(error).strip().splitlines()
    return next((line for line in lines if line.startswith("The actor is dead because")), lines[-1])
