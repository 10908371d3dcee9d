"""Engines on the workers of a Ray cluster behind the interface of one: Ray Data streams blocks of prompts to them."""

import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from traceback import format_exception
from typing import TYPE_CHECKING, Any

import torch

from specgen.config import MTP, Cluster, EngineConfig, SamplingParams, UserError, require
from specgen.engine.build import DRAWN
from specgen.engine.conversations import RequestOutput
from specgen.prompts import Prompt, Rejected
from specgen.record.provenance import num_cpus
from specgen.record.record_rows import EngineRow, PassRow, RequestRow, moved
from specgen.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import pyarrow

_BATCHES = 4  # per block: at its end the batch is no longer full
_ENVIRONMENT = {  # settings that Ray reads from the environment alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a thread that still pulls after the shutdown would start Ray again
}
_POLL = 0.2  # seconds between two calls of ``until``
_Record = EngineRow | RequestOutput | Exception
_Rows = Iterable[Prompt | Rejected]


@dataclass(frozen=True, kw_only=True)
class _Block:
    """The prompts of one call of a worker; ``earlier`` and ``lost`` as in ``Engine.generate``."""

    prompts: list[Prompt | Rejected]
    earlier: Mapping[str, str]
    lost: Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """The engines of ``cluster``, each with the resolved ``config`` in its own process and on its own GPUs, if any.

    ``record`` takes their rows, block by block; times count from the call of ``generate``. ``expected`` is that of
    ``Engine``. ``UserError`` where this machine has too few GPUs, later where there is no cluster or a worker cannot
    start.
    """

    config: EngineConfig
    cluster: Cluster
    record: Callable[[EngineRow], None]
    expected: SamplingParams = DRAWN

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

        The block of a lost worker is answered again by another one.
        """
        size = _BATCHES * self.config.max_batch_size
        blocks = _blocks(iter(prompts), earlier, lost, size, self.cluster.num_workers)
        num_passes = 0  # of all workers, each of which counts its own
        with _connected(self.cluster):
            for records in _on_stderr(_until(until, self._answered(blocks, sampling))):
                passes = [record for record in records if isinstance(record, PassRow)]
                behind = num_passes - passes[0].number if passes else 0
                num_passes += len(passes)
                for record in records:
                    match record:
                        case RequestOutput(record=RequestRow() as row):
                            yield replace(record, record=row.moved(0.0, behind))
                        case RequestOutput():
                            yield record
                        case Exception():
                            raise record
                        case _:
                            self.record(moved(record, 0.0, behind))

    def _answered(self, blocks: Iterable[_Block], sampling: SamplingParams) -> Iterator[list[_Record]]:
        """The records of each block, in the order in which they finish."""
        import ray

        tables = [ray.put(_table(block)) for block in blocks]  # in the object store, which spills to disk
        if not tables:
            return
        answers = ray.data.from_arrow_refs(tables).map_batches(
            _Worker,
            fn_constructor_args=(_portable(self.config), self.expected, sampling, time.time()),
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=self.cluster.num_workers),
            **_resources(self.cluster, self.config),
        )
        for table in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from _values(table)


class _Worker:
    """An engine that answers blocks, in a process that Ray Data starts and calls."""

    def __init__(
        self, config: EngineConfig, expected: SamplingParams, sampling: SamplingParams, began: float
    ) -> None:
        from specgen.engine.engine import Engine

        self._sampling = sampling
        self._records: list[_Record] = []
        self._failed: Exception | None = None
        try:
            self._engine = Engine(config, record=self._note, expected=expected)
        except Exception as error:
            self._failed = error
        self._late = time.time() - began  # the engine's clock starts now, the run's started at ``began``

    def __call__(self, table: "pyarrow.Table") -> "pyarrow.Table":
        self._records.clear()
        try:
            if self._failed is not None:
                raise self._failed
            for block in _values(table):
                for output in self._engine.generate(
                    block.prompts, self._sampling, earlier=block.earlier, lost=block.lost
                ):
                    if output.record is not None:
                        output = replace(output, record=output.record.moved(self._late, 0))
                    self._records.append(output)
        except Exception as error:
            error.add_note("".join(format_exception(error)))  # pickling loses the traceback
            self._records.append(error)  # raised by the driver: Ray would change type and fields
        return _table(self._records)

    def _note(self, row: EngineRow) -> None:
        self._records.append(moved(row, self._late, 0))


def _blocks(
    prompts: Iterator[Prompt | Rejected],
    earlier: Mapping[str, str],
    lost: Mapping[str, Sequence[str]],
    largest: int,
    num_workers: int,
) -> Iterator[_Block]:
    """Blocks of ``largest`` prompts; the last ones are smaller, so that every worker has one."""
    while round_robin := list(islice(prompts, num_workers * largest)):
        size = -(-len(round_robin) // num_workers)
        for first in range(0, len(round_robin), size):
            block = round_robin[first : first + size]
            turns = (turn for prompt in block for turn in prompt.turn_ids)
            texts = {turn: earlier[turn] for turn in turns if turn in earlier}
            yield _Block(prompts=block, earlier=texts, lost=lost)


def _resources(cluster: Cluster, config: EngineConfig) -> dict[str, int]:
    """What a worker and the ranks that it starts get: a GPU each, or an equal share of this machine's cores."""
    if config.device != "cpu":
        return {"num_gpus": config.tensor_parallel}
    share = max(1, num_cpus() // cluster.num_workers)
    return {"num_cpus": config.tensor_parallel if cluster.address else share}


def _table(value: object) -> "pyarrow.Table":
    """``value`` as a table, which a block of Ray Data is."""
    import pyarrow

    return pyarrow.table({"pickled": pyarrow.array([pickle.dumps(value)], pyarrow.large_binary())})


def _values(table: "pyarrow.Table") -> Iterator[Any]:
    """The inverse of ``_table``."""
    yield from map(pickle.loads, table["pickled"].to_pylist())


def _portable(config: EngineConfig) -> EngineConfig:
    """``config`` for a process with another working directory that sees only its own GPU."""
    model, drafter = (
        str(Path(name).resolve()) if name not in (None, MTP) and Path(str(name)).exists() else name
        for name in (config.model, config.head)
    )
    assert model is not None
    drafter = config.drafter if config.head is None else drafter
    return replace(config, model=model, drafter=drafter, device=config.device.partition(":")[0])


def _until(until: Callable[[], bool], values: Iterator[list[_Record]]) -> Iterator[list[_Record]]:
    """``values``, pulled by a thread, so that waiting for the next one ends once ``until`` is true."""
    pulled: Queue[list[_Record] | Exception | None] = Queue(maxsize=1)
    Thread(target=_pull, args=(values, pulled), daemon=True).start()
    while not until():
        try:
            value = pulled.get(timeout=_POLL)
        except Empty:
            continue
        if value is None:
            return
        if isinstance(value, Exception):
            raise value
        yield value


def _pull(values: Iterator[list[_Record]], into: "Queue[list[_Record] | Exception | None]") -> None:
    try:
        for value in values:
            into.put(value)
        into.put(None)
    except Exception as error:  # raised by ``_until``
        into.put(error)


def _on_stderr(values: Iterator[list[_Record]]) -> Iterator[list[_Record]]:
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
    os.environ |= _ENVIRONMENT
    import ray.data

    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    with redirect_stdout(sys.stderr):
        _start(cluster)
    try:
        yield
    except ray.exceptions.RayTaskError:
        raise  # an unexpected error in a worker is a bug
    except ray.exceptions.RayError as error:
        raise UserError(f"a worker failed: {_last_line(error)}") from error
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
        raise UserError(f"no Ray cluster {where}: {_last_line(error)}") from error
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


def _last_line(error: BaseException) -> str:
    """The reason, which Ray puts after the traceback of another process."""
    return str(error).strip().splitlines()[-1]
