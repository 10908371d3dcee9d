"""Engines on the workers of a Ray cluster, called as if they were one: Ray Data streams blocks of prompts to them."""

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

from specgen.config import Cluster, EngineConfig, SamplingParams, UserError, require
from specgen.engine.memory import DRAWN
from specgen.engine.request_output import RequestOutput
from specgen.events import Event
from specgen.prompts import Prompt, Rejected
from specgen.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import pyarrow

_BATCHES = 4  # in a block: its last sequences run in a batch that is no longer full
_ENVIRONMENT = {  # what Ray takes from nowhere else
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a thread that still draws when Ray is shut down would start another one
}
_POLL = 0.2  # seconds between two looks at whether the run is to end
_Record = Event | RequestOutput | Exception
_Rows = Iterable[Prompt | Rejected]


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Prompts that one worker answers in one go, with what is known of them; see ``Engine.generate``."""

    prompts: list[Prompt | Rejected]
    earlier: Mapping[str, str]
    lost: Mapping[str, Sequence[str]]


class RayEngine:
    """The engines of ``cluster``, each with a resolved ``config`` in a process of its own, and a GPU if it needs one.

    ``record`` takes every event of what they generate, block by block; times count from the call of ``generate``.
    ``expected`` is that of ``Engine``.
    ``UserError`` where this machine has too few GPUs, later where there is no cluster or a worker cannot start.
    """

    def __init__(
        self,
        config: EngineConfig,
        cluster: Cluster,
        *,
        record: Callable[[Event], None],
        expected: SamplingParams = DRAWN,
    ) -> None:
        num_gpus = torch.cuda.device_count()
        require(
            config.device == "cpu" or cluster.address is not None or num_gpus >= cluster.num_workers,
            f"num-workers is {cluster.num_workers} and this machine has {num_gpus} GPUs: use one for each",
        )
        self._config = config
        self._cluster = cluster
        self._record = record
        self._expected = expected

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the target."""
        return load_tokenizer(self._config.model)

    def generate(
        self,
        prompts: _Rows,
        sampling: SamplingParams,
        *,
        earlier: Mapping[str, str],
        lost: Mapping[str, Sequence[str]],
        until: Callable[[], bool],
    ) -> Iterator[RequestOutput]:
        """As ``Engine.generate``; outputs come when their block is done, each after its events.

        A block whose worker was lost is answered by another one, and what the lost one did of it is forgotten.
        """
        size = _BATCHES * self._config.max_batch_size
        blocks = _blocks(iter(prompts), earlier, lost, size, self._cluster.num_workers)
        with _connected(self._cluster):
            for records in _on_stderr(_until(until, self._answered(blocks, sampling))):
                for record in records:
                    match record:
                        case RequestOutput():
                            yield record
                        case Exception():
                            raise record
                        case _:
                            self._record(record)

    def _answered(self, blocks: Iterable[_Block], sampling: SamplingParams) -> Iterator[list[_Record]]:
        """What each of the blocks gave, in the order in which they are done."""
        import ray

        tables = [ray.put(_table(block)) for block in blocks]  # in the object store, which spills to disk
        if not tables:
            return
        answers = ray.data.from_arrow_refs(tables).map_batches(
            _Worker,
            fn_constructor_args=(_portable(self._config), self._expected, sampling, time.time()),
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=self._cluster.num_workers),
            **_share(self._cluster, self._config.device),
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
        self._late = time.time() - began  # the clock of the engine starts now, that of the run has run since

    def __call__(self, table: "pyarrow.Table") -> "pyarrow.Table":
        self._records.clear()
        try:
            if self._failed is not None:
                raise self._failed
            for block in _values(table):
                for output in self._engine.generate(
                    block.prompts, self._sampling, earlier=block.earlier, lost=block.lost
                ):
                    self._records.append(output)
        except Exception as error:
            error.add_note("".join(format_exception(error)))  # which does not cross to another process
            self._records.append(error)  # raised by the driver: Ray's own has neither its type nor its fields
        return _table(self._records)

    def _note(self, event: Event) -> None:
        self._records.append(replace(event, time=event.time + self._late))


def _blocks(
    prompts: Iterator[Prompt | Rejected],
    earlier: Mapping[str, str],
    lost: Mapping[str, Sequence[str]],
    most: int,
    num_workers: int,
) -> Iterator[_Block]:
    """Blocks of ``most`` prompts; the last ones are smaller where that gives every worker one."""
    while some := list(islice(prompts, num_workers * most)):
        size = -(-len(some) // num_workers)
        for first in range(0, len(some), size):
            block = some[first : first + size]
            turns = (turn for prompt in block for turn in prompt.turn_ids)
            texts = {turn: earlier[turn] for turn in turns if turn in earlier}
            yield _Block(prompts=block, earlier=texts, lost=lost)


def _share(cluster: Cluster, device: str) -> dict[str, int]:
    """What a worker gets: a GPU, or of this machine's cores as many as the others."""
    if device != "cpu":
        return {"num_gpus": 1}
    return {"num_cpus": 1 if cluster.address else max(1, (os.cpu_count() or 1) // cluster.num_workers)}


def _table(value: object) -> "pyarrow.Table":
    """``value`` as a block of Ray Data, which is a table."""
    import pyarrow

    return pyarrow.table({"pickled": pyarrow.array([pickle.dumps(value)], pyarrow.large_binary())})


def _values(table: "pyarrow.Table") -> Iterator[Any]:
    """What ``_table`` was made of."""
    yield from map(pickle.loads, table["pickled"].to_pylist())


def _portable(config: EngineConfig) -> EngineConfig:
    """``config`` for a process that works in another directory and sees only the GPU that it was given."""
    model, drafter = (
        str(Path(name).resolve()) if name is not None and Path(name).exists() else name
        for name in (config.model, config.drafter)
    )
    assert model is not None
    return replace(config, model=model, drafter=drafter, device=config.device.partition(":")[0])


def _until(until: Callable[[], bool], values: Iterator[list[_Record]]) -> Iterator[list[_Record]]:
    """``values``, drawn in a thread, so that a wait for the next one ends as soon as ``until`` says so."""
    drawn: Queue[list[_Record] | Exception | None] = Queue(maxsize=1)
    Thread(target=_draw, args=(values, drawn), daemon=True).start()
    while not until():
        try:
            value = drawn.get(timeout=_POLL)
        except Empty:
            continue
        if value is None:
            return
        if isinstance(value, Exception):
            raise value
        yield value


def _draw(values: Iterator[list[_Record]], into: "Queue[list[_Record] | Exception | None]") -> None:
    try:
        for value in values:
            into.put(value)
        into.put(None)
    except Exception as error:  # raised where it is looked at
        into.put(error)


def _on_stderr(values: Iterator[list[_Record]]) -> Iterator[list[_Record]]:
    """``values``, with what is printed while one is waited for on stderr; stdout is of whoever takes them."""
    while True:
        with redirect_stdout(sys.stderr):
            value = next(values, None)
        if value is None:
            return
        yield value


@contextmanager
def _connected(cluster: Cluster) -> Iterator[None]:
    """Ray at the cluster's address, or one on this machine: without telemetry, and with what it says on stderr."""
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
        raise  # what a worker does not expect is a bug
    except ray.exceptions.RayError as error:
        raise UserError(f"a worker cannot go on: {_last_line(error)}") from error
    finally:
        with redirect_stdout(sys.stderr):
            ray.shutdown()


def _start(cluster: Cluster) -> None:
    import ray

    on_terminate = signal.getsignal(signal.SIGTERM)
    num_cpus = max(cluster.num_workers, os.cpu_count() or 1)
    own: dict[str, Any] = {} if cluster.address else {"num_cpus": num_cpus, "include_dashboard": False}
    try:
        _require_listening(cluster.address)
        ray.init(
            address=cluster.address or "local", log_to_driver=False, logging_level=logging.CRITICAL, **own
        )
    except (OSError, RuntimeError, ValueError) as error:
        where = f"at address {cluster.address!r}" if cluster.address else "on this machine"
        raise UserError(f"no Ray cluster {where}: {_last_line(error)}") from error
    signal.signal(signal.SIGTERM, on_terminate)  # Ray's would end the process at once


def _require_listening(address: str | None) -> None:
    """``OSError`` where nobody listens at a HOST:PORT, which Ray would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if port.isdecimal() and "//" not in host:
        socket.create_connection((host, int(port)), timeout=5).close()


def _last_line(error: BaseException) -> str:
    """Where Ray puts the reason, behind the traceback of another process."""
    return str(error).strip().splitlines()[-1]
