"""The process of a rank above 0: executes the calls of rank 0, and ends with it.

``python -m specgen.engine.worker N RANK`` with the socket to rank 0 as file descriptor N; ``worker_group`` starts it.
"""

import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

from torch import distributed as dist

from specgen.config import EngineConfig, SamplingParams, UserError, first_line
from specgen.core.engine_core import EngineCore, discard
from specgen.core.garbage import fewer_gc_passes
from specgen.core.peers import Peers
from specgen.device import Ranks, RankUnreachable
from specgen.engine.build import assemble, num_pages
from specgen.engine.choices import RUNNERS
from specgen.engine.loading import Models, OneTarget, load_share, open_checkpoints
from specgen.engine.rank_group import Alive, Checksum, Failed, Place, join

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _WorkerPeers(Peers):
    """The other ranks, seen from a worker: it sends them nothing, and cannot recover from a failed pass."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._checksum = Checksum()

    def record(self, numbers: Iterable[int]) -> None:
        self._checksum.add(numbers)

    def compare(self, checksum: int) -> None:
        """``RuntimeError`` unless ``checksum``, of rank 0 at this call, is this rank's."""
        if self._checksum.value != checksum:
            raise RuntimeError("it has other tokens or another batch than rank 0")

    def require_recoverable(self, error: RuntimeError) -> None:
        raise error

    def require(self, error: RuntimeError, requests: tuple[str, ...] = ()) -> None:
        raise error


class Worker:
    """Models and engines of one rank, by rank 0's numbers for them, which ``WorkerGroup`` has call public methods."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._number = 0  # of the message in hand
        self._models: dict[int, OneTarget] = {}
        self._planned: dict[int, tuple[EngineConfig, Models]] = {}
        self._engines: dict[int, tuple[EngineCore, _WorkerPeers]] = {}
        self._spoke = 0.0  # when, by the monotonic clock

    def run(self) -> None:
        """Do one call after another; a ``UserError`` is an answer, and any other exception the last."""
        with fewer_gc_passes():  # else every rank waits for this one's search, as for a pass
            while True:
                self._number, call, arguments = self._connection.recv()
                try:
                    call(self, *arguments)
                except UserError as error:
                    self._answer(error)

    def _answer(self, value: object) -> None:
        self._connection.send((self._number, value))
        self._spoke = time.monotonic()

    def _alive(self) -> None:
        """Send a heartbeat if the last message is long ago."""
        if time.monotonic() - self._spoke > self._place.timeout / 100:
            self._answer(Alive())

    def start(self, places: Sequence[Place]) -> None:
        """Answer once every module is imported."""
        self._place = places[self._rank]
        self._answer("here")

    def join(self) -> None:
        self._ranks = join(self._place, self._alive)
        self._answer("joined")

    def load(self, model: int, config: EngineConfig) -> None:
        """The share of a model, or one more head over it. Rank 0's ``config`` names rank 0's device."""
        if model not in self._models:
            share = partial(load_share, peers=_WorkerPeers(self._ranks))
            self._models[model] = OneTarget(share)
        self._load(model, config)
        self._answer("loaded")

    def _load(self, model: int, config: EngineConfig) -> Models:
        config = replace(config, device=self._place.device)
        return self._models[model].load(config, open_checkpoints(config))

    def drop_model(self, model: int) -> None:
        """Nothing refers to it any more."""
        self._models.pop(model, None)

    def build(self, engine: int, model: int, config: EngineConfig, expected: SamplingParams) -> None:
        """Answer with the pages that there is room for."""
        gc.collect()
        models, config = self._load(model, config), replace(config, device=self._place.device)
        self._planned[engine] = config, models
        self._answer(num_pages(config, models, expected))

    def assemble(self, engine: int, pages: int) -> None:
        """With as many as every rank has room for."""
        config, models = self._planned.pop(engine)
        peers = _WorkerPeers(self._ranks)
        models = replace(models, peers=peers)
        runner = RUNNERS[config.cuda_graphs]()
        runner.has_peers = True
        core = assemble(config, models, pages, runner, discard)  # rank 0 records
        self._engines[engine] = core, peers

    def engine(self, engine: int, checksum: int, call: Callable[..., object], *arguments: object) -> None:
        """A call of an engine, of which rank 0's has come to ``checksum``."""
        core, peers = self._engines[engine]
        peers.compare(checksum)
        call(core, *arguments)

    def agree(self, engine: int, checksum: int) -> None:
        """Answer if it has come to ``checksum`` too."""
        self._engines[engine][1].compare(checksum)
        self._answer("the same")

    def drop_engine(self, engine: int) -> None:
        """Nothing refers to it any more."""
        self._planned.pop(engine, None)
        self._engines.pop(engine, None)

    def function(
        self, model: int, config: EngineConfig, function: Callable[..., object], *arguments: object
    ) -> None:
        """Call it with the model, as rank 0 does. Answer with what it returns, if that is a number."""
        models = self._load(model, config)
        found = function(replace(config, device=self._place.device), models, *arguments)
        self._answer(found if isinstance(found, int) else None)

    def close(self) -> None:
        """Leave in order: graphs hold on to the communication that is part of them."""
        self._engines.clear()
        gc.collect()
        dist.destroy_process_group()
        raise SystemExit


def _end_with(descriptor: int) -> None:
    """Wait until rank 0 is gone, and end this process, wherever it is. The work of a thread."""
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", 0))  # Linux has it
    poll.poll()
    os._exit(1)


def main(descriptor: int, rank: int) -> None:
    """Follow rank 0 until it ends, or something fails here."""
    for each in _SIGNALS:  # rank 0 decides what they mean
        signal.signal(each, signal.SIG_IGN)
    connection = Connection(descriptor)
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    code = 1
    try:
        Worker(connection, rank).run()
    except SystemExit:
        code = 0
    except Exception as error:
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        connection.send(
            (-1, Failed(reason=f"{kind}{first_line(error)}", waited=isinstance(error, RankUnreachable)))
        )
    os._exit(code)  # whatever a device is still at


if __name__ == "__main__":
    from specgen.engine import worker  # calls name its class by that

    worker.main(int(sys.argv[1]), int(sys.argv[2]))
