"""The process of a rank behind rank 0: does what it is told, and ends with whoever tells it.

``python -m specgen.engine.follower N RANK`` with the socket to rank 0 as file descriptor N; ``crew`` starts it.
"""

import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torch import distributed as dist

from specgen.config import EngineConfig, SamplingParams, UserError, first_line
from specgen.core.endings import DeviceLost
from specgen.core.engine_core import EngineCore
from specgen.core.peers import Peers
from specgen.core.sequence import Completion
from specgen.engine.assembly import assemble
from specgen.engine.choices import RUNNERS
from specgen.engine.lead import digest
from specgen.engine.loading import Models, OneTarget, load_share, open_checkpoints
from specgen.engine.memory import num_pages
from specgen.engine.rank_group import Failed, Place, join
from specgen.events import Event
from specgen.ranks import Ranks

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Fellows(Peers):
    """The other ranks as a follower has them: it tells them nothing, and nothing that fails can be mended."""

    def __init__(self, ranks: Ranks, answer: Callable[[object], None] | None = None) -> None:
        self.ranks = ranks
        self._answer = answer

    def give_up(self, reason: str) -> None:
        raise RuntimeError(reason)

    def agree(self, completions: Sequence[Completion], in_hand: tuple[str, ...]) -> None:
        if self._answer is not None:
            self._answer(digest(completions))

    def require(self, reason: str, requests: tuple[str, ...] = ()) -> None:
        raise DeviceLost(reason, requests)


class Follower:
    """Models and engines of one rank, by rank 0's numbers for them. Public methods are the calls of ``Crew.tell``."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._number = 0  # of the message in hand
        self._models: dict[int, OneTarget] = {}
        self._planned: dict[int, tuple[EngineConfig, Models]] = {}
        self._engines: dict[int, EngineCore] = {}

    def run(self) -> None:
        """Do one call after another; a ``UserError`` is an answer, and any other exception the last."""
        while True:
            self._number, call, arguments = self._connection.recv()
            try:
                getattr(self, call)(*arguments)
            except UserError as error:
                self._answer(error)

    def _answer(self, value: object) -> None:
        self._connection.send((self._number, value))

    def start(self, places: Sequence[Place]) -> None:
        """All is imported."""
        self._place = places[self._rank]
        self._answer("here")

    def join(self) -> None:
        """Meet the others."""
        self._ranks = join(self._place)
        self._answer("joined")

    def load(self, model: int, config: EngineConfig) -> None:
        """The share of a model, or one more head over it. Rank 0's ``config`` names rank 0's device."""
        if model not in self._models:
            share = partial(load_share, peers=_Fellows(self._ranks))
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
        models = replace(models, peers=_Fellows(self._ranks, self._answer))
        self._engines[engine] = assemble(config, models, pages, RUNNERS[config.cuda_graphs](), _ignore)

    def engine(self, engine: int, call: str, *arguments: Any) -> None:  # noqa: ANN401
        """A call of an engine."""
        core = self._engines[engine]
        if call == "spec_length":
            (core.spec_length,) = arguments
        else:
            getattr(core, call)(*arguments)

    def drop_engine(self, engine: int) -> None:
        """Nothing refers to it any more."""
        self._planned.pop(engine, None)
        self._engines.pop(engine, None)

    def function(
        self, model: int, config: EngineConfig, function: Callable[..., object], *arguments: object
    ) -> None:
        """Call it with the model, as rank 0 does."""
        config = replace(config, device=self._place.device)
        function(config, self._load(model, config), *arguments)
        self._answer("done")

    def close(self) -> None:
        """Leave in order: graphs hold on to the communication that is part of them."""
        self._engines.clear()
        gc.collect()
        dist.destroy_process_group()
        raise SystemExit


def _ignore(event: Event) -> None:
    """Rank 0 records it."""


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
        Follower(connection, rank).run()
    except SystemExit:
        code = 0
    except DeviceLost as lost:
        _report(connection, lost.reason)
    except Exception as error:
        _report(connection, f"{type(error).__name__}: {first_line(error)}")
    os._exit(code)  # whatever a device is still at


def _report(connection: Connection, reason: str) -> None:
    connection.send((-1, Failed(reason=reason)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
