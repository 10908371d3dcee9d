"""The other ranks as rank 0 uses them: started, spoken to, asked, blamed and ended. ``roll`` watches them."""

import atexit
import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from specgen.config import UserError, first_line, require
from specgen.core.endings import DeviceLost
from specgen.core.graphs import Runner
from specgen.engine.rank_group import Place, join
from specgen.engine.roll import END, GRACE, Member, Roll, launch, send
from specgen.ranks import Ranks

PATIENCE = 900.0  # seconds for an answer, or for a pass: a first one may compile kernels for minutes
_GATHER = 2.0  # seconds until all that is to be known of a failure is known
_SILENT = "timed out"  # as gloo says it too


class Crew:
    """The ranks behind rank 0, which is this process. They end with it, whatever ends it."""

    def __init__(self, place: Place, members: Sequence[Member]) -> None:
        self._place = place
        self._members = members
        self._roll = Roll(members=members)
        self._numbers, self._ids = count(), count()
        self.ranks = Ranks()  # until they have met
        self.later: deque[tuple[str, tuple[object, ...]]] = deque()  # to be told before the next call
        self.runners: weakref.WeakSet[Runner] = weakref.WeakSet()
        weakref.finalize(self, _close, self._roll, self.runners)
        threading.Thread(target=self._roll.watch, daemon=True).start()

    @property
    def patience(self) -> float:
        """Seconds that a rank waits for the others."""
        return self._place.patience

    def next_id(self) -> int:
        """For a model or an engine."""
        return next(self._ids)

    def name(self, rank: int) -> str:
        """As a message names it."""
        return (self._place if rank == 0 else self._members[rank - 1].place).name

    def tell(self, call: str, *arguments: object) -> int:
        """Let every rank do ``call``; returns the number of the message. One that is gone is found out later."""
        if self._roll.closing:  # also as this process ends, when little is left of it
            return next(self._numbers)
        while self.later:
            earlier, what = self.later.popleft()
            self.tell(earlier, *what)
        number = next(self._numbers)
        send(self._members, (number, call, arguments))
        return number

    @contextmanager
    def working(self, call: str, *arguments: object) -> Iterator[int]:
        """``tell``, around what this rank does of it.

        What interrupts it, and is neither the device's failure nor a refusal, leaves this rank where the others are
        not: they end, so that nothing goes on with them.
        """
        self.require_all()
        self._roll.at_work = time.monotonic()
        try:
            yield self.tell(call, *arguments)
        except (RuntimeError, UserError):
            raise
        except Exception as error:
            self.end(f"{self._place.name}: {type(error).__name__}: {first_line(error)}")
            raise
        except BaseException:
            self.end(f"{self._place.name}: interrupted within a pass")
            raise
        finally:
            self._roll.at_work = None

    def answers(self, number: int) -> list[Any]:
        """Of each rank in turn. ``UserError`` that one has raised; ``RuntimeError`` where one is gone or silent."""
        limit = time.monotonic() + self.patience
        with self._roll.changed:
            while len(found := self._roll.answers.get(number, {})) < len(self._members):
                self.require_all()
                self.require_before(limit)
                self._roll.changed.wait(0.5)
            for old in [each for each in self._roll.answers if each <= number]:
                del self._roll.answers[old]
        for rank, value in sorted(found.items()):
            if isinstance(value, UserError):
                raise UserError(f"{self.name(rank)}: {value}")
        return [found[member.place.rank] for member in self._members]

    def require_all(self) -> None:
        """``RuntimeError`` if a rank is gone."""
        if self._roll.gone or self._roll.ended:
            raise RuntimeError("a rank is gone")

    def require_before(self, limit: float) -> None:
        """``RuntimeError`` if ``limit``, by the monotonic clock, has passed."""
        if time.monotonic() > limit:
            raise RuntimeError(_SILENT)

    def blame(self, reason: str) -> str:
        """Whose fault a failure is that looks like ``reason`` from here, and why; the other ranks are ended.

        One that ended without a word comes first: the others fail for want of it. Then one that says nothing where
        this process has waited in vain.
        """
        limit = time.monotonic() + _GATHER
        roll = self._roll
        with roll.changed:
            while time.monotonic() < limit and not (roll.ended or self._is_plain):
                roll.changed.wait(0.1)
            silent = [member.name for member in self._members if member not in roll.gone]
            gone = [member for member in roll.gone if not member.said or not _has_waited(member.gone)]
        if gone:
            worst = min(gone, key=lambda member: member.said)  # the first of those
            self.end(f"{worst.name}: {worst.gone}")
        elif silent and _has_waited(reason):
            self.end(f"{' and '.join(silent)}: no answer for {self.patience:,.0f} s")
        else:
            self.end(f"{self._place.name}: {reason}")
        return roll.ended

    @property
    def _is_plain(self) -> bool:
        """Whether nothing more can be learnt of a failure."""
        gone = self._roll.gone
        return len(gone) == len(self._members) or any(not member.said for member in gone)

    def end(self, why: str) -> None:
        """End the other ranks at once, for they cannot go on; the first ``why`` is what is said from then on."""
        with self._roll.changed:
            if self._roll.ended:
                return
            self._roll.closing, self._roll.ended = True, why
        for member in self._members:
            member.process.kill()
            with suppress(subprocess.TimeoutExpired):  # a fault of its GPU may hold it
                member.process.wait(END)
        if self._place.device != "cpu":
            # kernels may wait for the others without end, and an orderly exit for the kernels
            atexit.register(signal.alarm, int(GRACE))
        elif dist.is_initialized():
            dist.destroy_process_group()


def _has_waited(reason: str) -> bool:
    """Whether ``reason`` is that of a rank which waited for others: in vain, or until one was gone."""
    return any(word in reason.lower() for word in ("timed out", "timeout", "connection", "a rank is gone"))


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
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    places = [
        Place(
            rank=rank,
            size=size,
            device=device.type if device.index is None else f"{device.type}:{device.index + rank}",
            port=store.port,
            patience=PATIENCE,
            num_threads=num_threads,
        )
        for rank in range(size)
    ]
    crew = Crew(places[0], [launch(place) for place in places[1:]])
    try:
        crew.answers(crew.tell("start", places))
        with crew.working("join") as number:
            crew.ranks = join(places[0], store)
        crew.answers(number)
    except RuntimeError as error:
        raise DeviceLost(crew.blame(first_line(error)), ()) from error
    return crew


def _close(roll: Roll, runners: "weakref.WeakSet[Runner]") -> None:
    """Let the processes end, and leave the group."""
    with roll.changed:
        if roll.closing:
            return
        roll.closing = True
    send(roll.members, (-1, "close", ()))
    for runner in runners:
        runner.forget()
    if dist.is_initialized():
        dist.destroy_process_group()
    for member in roll.members:
        try:
            member.process.wait(END)
        except subprocess.TimeoutExpired:
            member.process.kill()
