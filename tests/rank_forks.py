"""Processes of ranks, forked from one that has imported all they need: each by itself would import it for seconds."""

import multiprocessing
import os
import socket
import subprocess
import tempfile
from multiprocessing.connection import Connection
from typing import IO, Any

from specgen.engine.rank_group import Place
from specgen.engine.worker_group import WorkerProcess

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["specgen.engine.worker", "tests.rank_plants"])


class Forked:
    """What rank 0 does with a ``subprocess.Popen``."""

    def __init__(self, connection: Connection, place: Place, stderr: IO[bytes]) -> None:
        ends = connection, _FORKS.reducer.DupFd(stderr.fileno())
        self._process = _FORKS.Process(
            target=_follow, args=(*ends, place.rank, dict(os.environ)), daemon=True
        )
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self._process.exitcode


def _follow(connection: Connection, stderr: Any, rank: int, environment: dict[str, str]) -> None:
    """As ``python -m specgen.engine.worker``."""
    from specgen.engine import worker

    os.setsid()
    os.dup2(stderr.detach(), 2)
    os.environ.clear()
    os.environ.update(environment)
    worker.main(connection.fileno(), rank)


def launch(place: Place) -> WorkerProcess:
    """In place of ``worker_group.launch``, which tests of commands use."""
    ours, theirs = socket.socketpair()
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
    with Connection(theirs.detach()) as other:
        process: Any = Forked(other, place, stderr)
    return WorkerProcess(place=place, process=process, connection=Connection(ours.detach()), stderr=stderr)
