"""The worker processes of the other ranks, as rank 0 drives them: starting, calls, answers, failures, shutdown.

``supervisor`` watches them.
"""

import atexit
import faulthandler
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from specgen.config import UserError, first_line, require
from specgen.config.errors import DeviceLost
from specgen.core.graphs import Runner
from specgen.device import Ranks
from specgen.engine.rank_group import ENVIRONMENT, Place, join
from specgen.engine.supervisor import END, GRACE, Supervisor, WorkerProcess, launch

TIMEOUT = 900.0  # seconds for an answer, or for a pass: a first one may compile kernels for minutes
_GATHER = 2.0  # seconds to collect the reports of a failure


class WorkerGroup:
    """The workers of ranks 1 and up; this process is rank 0. They end with it, whatever ends it."""

    def __init__(self, place: Place, workers: Sequence[WorkerProcess]) -> None:
        self._place = place
        self._supervisor = Supervisor(workers=workers, timeout=place.timeout)
        self._numbers, self._ids = count(), count()
        self.ranks = Ranks()  # until they have met
        self.deferred: deque[tuple[str, tuple[object, ...]]] = deque()  # sent before the next call
        self.runners: weakref.WeakSet[Runner] = weakref.WeakSet()
        self._leave = _leaving()
        weakref.finalize(self, _close, self._supervisor, self.runners, self._leave)
        threading.Thread(target=self._supervisor.watch, daemon=True).start()

    def meet(self, store: TCPStore) -> None:
        """Form the process group of all ranks."""
        with self.working("join") as number:
            self.ranks = join(self._place, self._supervisor.alive, store)
        self.answers(number)

    def next_id(self) -> int:
        """For a model or an engine."""
        return next(self._ids)

    def alive(self) -> None:
        """See ``Ranks``."""
        self._supervisor.alive()

    def broadcast(self, call: str, *arguments: object) -> int:
        """Send ``call`` to every worker; returns the number of the message. A worker that is gone is noticed later."""
        if self._supervisor.closing:  # also as this process ends, when little is left of it
            return next(self._numbers)
        while self.deferred:
            earlier, what = self.deferred.popleft()
            self.broadcast(earlier, *what)
        number = next(self._numbers)
        self._supervisor.send((number, call, arguments))
        return number

    @contextmanager
    def working(self, call: str, *arguments: object) -> Iterator[int]:
        """``broadcast``, around what this rank does of it.

        What interrupts it, and is neither the device's failure nor a refusal, leaves this rank where the others are
        not: they end, so that nothing goes on with them.
        """
        self._supervisor.require_all()
        self._supervisor.begin()
        try:
            yield self.broadcast(call, *arguments)
        except (RuntimeError, UserError):
            raise
        except Exception as error:
            self._end(f"{self._place.name}: {type(error).__name__}: {first_line(error)}")
            raise
        except BaseException:
            self._end(f"{self._place.name}: interrupted within a pass")
            raise
        finally:
            self._supervisor.leave()

    def answers(self, number: int) -> list[Any]:
        """By rank. Raises a worker's ``UserError``, or ``RankUnreachable`` if one is gone or all are silent."""
        began, supervisor = time.monotonic(), self._supervisor
        with supervisor.changed:
            while len(found := supervisor.answers.get(number, {})) < len(supervisor.workers):
                supervisor.require_all()
                supervisor.require_before(began)
                supervisor.changed.wait(0.5)
            for old in [each for each in supervisor.answers if each <= number]:
                del supervisor.answers[old]
        for worker in supervisor.workers:
            if isinstance(value := found[worker.place.rank], UserError):
                raise UserError(f"{worker.name}: {value}")
        return [found[worker.place.rank] for worker in supervisor.workers]

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until ``ready``, by polling; ``RankUnreachable`` where a rank is gone, or has none of it for too long."""
        began = time.monotonic()
        while True:
            self._supervisor.require_all()
            if ready():
                return
            self._supervisor.require_before(began)
            time.sleep(0)

    def diagnose(self, error: BaseException) -> str:
        """Which rank caused ``error``, raised on this one, and why; ends the other ranks."""
        limit, supervisor = time.monotonic() + _GATHER, self._supervisor
        with supervisor.changed:
            while time.monotonic() < limit and not (supervisor.ended or supervisor.is_plain):
                supervisor.changed.wait(0.1)
        self._end(supervisor.fault(error) or f"{self._place.name}: {first_line(error)}")
        return supervisor.ended

    def _end(self, why: str) -> None:
        """End the other ranks at once, for they cannot go on; the first ``why`` is what is said from then on."""
        with self._supervisor.changed:
            if self._supervisor.ended:
                return
            self._supervisor.closing, self._supervisor.ended = True, why
        for worker in self._supervisor.workers:
            worker.process.kill()
            with suppress(subprocess.TimeoutExpired):  # a fault of its GPU may hold it
                worker.process.wait(END)
        if self._place.device != "cpu":
            # kernels may wait for the others without end, and an orderly exit for the kernels
            atexit.register(exit_within, GRACE)
        else:
            self._leave()


def exit_within(seconds: float) -> None:
    """From now on this process has so many ``seconds`` to end, with exit code 1 where it does not.

    A thread of C does it, for which the interpreter need not run; behind its end too there is the alarm.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    signal.alarm(int(2 * seconds) + 1)


def _leaving() -> Callable[[], None]:
    """A function that leaves the group, and this process as it is now."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    num_threads = torch.get_num_threads()

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        torch.set_num_threads(num_threads)

    return leave


def start(device: torch.device, size: int) -> WorkerGroup:
    """Start ``size`` - 1 processes, with this one as rank 0 on ``device`` and the others on the devices behind it.

    ``UserError`` where this process is in another group; ``DeviceLost`` where one does not come up.
    """
    require(
        not dist.is_initialized(),
        f"tensor-parallel is {size} and this process is in another group of torch.distributed: use a separate process",
    )
    # as an OpenMP thread pool of each rank would take all cores for itself
    num_threads = max(torch.get_num_threads() // size, 1) if device.type == "cpu" else torch.get_num_threads()
    with socket.create_server(("127.0.0.1", 0)) as server:  # torch's own would listen on all interfaces
        port: int = server.getsockname()[1]
        listening = server.detach()
    store = TCPStore(
        "127.0.0.1", port, size, is_master=True, wait_for_workers=False, master_listen_fd=listening
    )
    places = [
        Place(
            rank=rank,
            size=size,
            device=device.type if device.index is None else f"{device.type}:{device.index + rank}",
            port=port,
            timeout=TIMEOUT,
            num_threads=num_threads,
        )
        for rank in range(size)
    ]
    workers = WorkerGroup(places[0], [launch(place) for place in places[1:]])
    try:
        workers.answers(workers.broadcast("start", places))
        workers.meet(store)
    except RuntimeError as error:
        raise DeviceLost(workers.diagnose(error), ()) from error
    return workers


def _close(supervisor: Supervisor, runners: "weakref.WeakSet[Runner]", leave: Callable[[], None]) -> None:
    """Let the processes end, and leave the group."""
    with supervisor.changed:
        if supervisor.closing:
            return
        supervisor.closing = True
    supervisor.send((-1, "close", ()))
    for runner in runners:
        runner.forget()
    leave()
    for worker in supervisor.workers:
        try:
            worker.process.wait(END)
        except subprocess.TimeoutExpired:
            worker.process.kill()
