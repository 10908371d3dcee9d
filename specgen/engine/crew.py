"""The other ranks as rank 0 uses them: started, spoken to, asked, blamed and ended. ``roll`` watches them."""

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
from specgen.core.graphs import Runner
from specgen.engine.rank_group import ENVIRONMENT, Place, join
from specgen.engine.roll import END, GRACE, Member, Roll, launch
from specgen.errors import DeviceLost
from specgen.ranks import Ranks

PATIENCE = 900.0  # seconds for an answer, or for a pass: a first one may compile kernels for minutes
_GATHER = 2.0  # seconds until all that is to be known of a failure is known


class Crew:
    """The ranks behind rank 0, which is this process. They end with it, whatever ends it."""

    def __init__(self, place: Place, members: Sequence[Member]) -> None:
        self._place = place
        self._roll = Roll(members=members, patience=place.patience)
        self._numbers, self._ids = count(), count()
        self.ranks = Ranks()  # until they have met
        self.later: deque[tuple[str, tuple[object, ...]]] = deque()  # to be told before the next call
        self.runners: weakref.WeakSet[Runner] = weakref.WeakSet()
        self._leave = _leaving()
        weakref.finalize(self, _close, self._roll, self.runners, self._leave)
        threading.Thread(target=self._roll.watch, daemon=True).start()

    def meet(self, store: TCPStore) -> None:
        """Form a group with the others."""
        with self.working("join") as number:
            self.ranks = join(self._place, self._roll.alive, store)
        self.answers(number)

    def next_id(self) -> int:
        """For a model or an engine."""
        return next(self._ids)

    def alive(self) -> None:
        """See ``Ranks``."""
        self._roll.alive()

    def tell(self, call: str, *arguments: object) -> int:
        """Let every rank do ``call``; returns the number of the message. One that is gone is found out later."""
        if self._roll.closing:  # also as this process ends, when little is left of it
            return next(self._numbers)
        while self.later:
            earlier, what = self.later.popleft()
            self.tell(earlier, *what)
        number = next(self._numbers)
        self._roll.send((number, call, arguments))
        return number

    @contextmanager
    def working(self, call: str, *arguments: object) -> Iterator[int]:
        """``tell``, around what this rank does of it.

        What interrupts it, and is neither the device's failure nor a refusal, leaves this rank where the others are
        not: they end, so that nothing goes on with them.
        """
        self._roll.require_all()
        self._roll.begin()
        try:
            yield self.tell(call, *arguments)
        except (RuntimeError, UserError):
            raise
        except Exception as error:
            self._end(f"{self._place.name}: {type(error).__name__}: {first_line(error)}")
            raise
        except BaseException:
            self._end(f"{self._place.name}: interrupted within a pass")
            raise
        finally:
            self._roll.leave()

    def answers(self, number: int) -> list[Any]:
        """Of each rank in turn. ``UserError`` that one has raised; ``Unmet`` where one is gone or all are silent."""
        began, roll = time.monotonic(), self._roll
        with roll.changed:
            while len(found := roll.answers.get(number, {})) < len(roll.members):
                roll.require_all()
                roll.require_before(began)
                roll.changed.wait(0.5)
            for old in [each for each in roll.answers if each <= number]:
                del roll.answers[old]
        for member in roll.members:
            if isinstance(value := found[member.place.rank], UserError):
                raise UserError(f"{member.name}: {value}")
        return [found[member.place.rank] for member in roll.members]

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until ``ready``, by polling; ``Unmet`` where a rank is gone, or has none of it for too long."""
        began = time.monotonic()
        while True:
            self._roll.require_all()
            if ready():
                return
            self._roll.require_before(began)
            time.sleep(0)

    def blame(self, error: BaseException) -> str:
        """Whose fault ``error`` is, which this rank has come upon, and why; the other ranks are ended."""
        limit, roll = time.monotonic() + _GATHER, self._roll
        with roll.changed:
            while time.monotonic() < limit and not (roll.ended or roll.is_plain):
                roll.changed.wait(0.1)
        self._end(roll.fault(error) or f"{self._place.name}: {first_line(error)}")
        return roll.ended

    def _end(self, why: str) -> None:
        """End the other ranks at once, for they cannot go on; the first ``why`` is what is said from then on."""
        with self._roll.changed:
            if self._roll.ended:
                return
            self._roll.closing, self._roll.ended = True, why
        for member in self._roll.members:
            member.process.kill()
            with suppress(subprocess.TimeoutExpired):  # a fault of its GPU may hold it
                member.process.wait(END)
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


def start(device: torch.device, size: int) -> Crew:
    """Start ``size`` - 1 processes, with this one as rank 0 on ``device`` and the others on the devices behind it.

    ``UserError`` where this process is in another group; ``DeviceLost`` where one does not come up.
    """
    require(
        not dist.is_initialized(),
        f"tensor-parallel is {size} and this process is in another group of torch.distributed: use one of its own",
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
            patience=PATIENCE,
            num_threads=num_threads,
        )
        for rank in range(size)
    ]
    crew = Crew(places[0], [launch(place) for place in places[1:]])
    try:
        crew.answers(crew.tell("start", places))
        crew.meet(store)
    except RuntimeError as error:
        raise DeviceLost(crew.blame(error), ()) from error
    return crew


def _close(roll: Roll, runners: "weakref.WeakSet[Runner]", leave: Callable[[], None]) -> None:
    """Let the processes end, and leave the group."""
    with roll.changed:
        if roll.closing:
            return
        roll.closing = True
    roll.send((-1, "close", ()))
    for runner in runners:
        runner.forget()
    leave()
    for member in roll.members:
        try:
            member.process.wait(END)
        except subprocess.TimeoutExpired:
            member.process.kill()
