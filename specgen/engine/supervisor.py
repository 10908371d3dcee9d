"""Watches the worker processes for rank 0: their messages, their end, and timeouts.

A thread notices it, as rank 0 itself may be inside of a pass that cannot end without the one that is gone.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import IO, Any

from specgen.config import UserError
from specgen.device import RankUnreachable
from specgen.engine.rank_group import Alive, Failed, Place

GRACE = 20.0  # seconds for rank 0 to come back from a pass that lost a rank
END = 10.0  # seconds for a process to end
_TICK = 0.5  # seconds between two looks at the clock


@dataclass(kw_only=True, eq=False)
class WorkerProcess:
    """The process of a rank."""

    place: Place
    process: "subprocess.Popen[bytes]"
    connection: Connection
    stderr: IO[bytes]
    failure: Failed | None = None  # its last message, if it sent one before it ended

    @property
    def name(self) -> str:
        """As a message names it."""
        return self.place.name

    @property
    def why(self) -> str:
        """Why it is gone; one that has said nothing may still be ending."""
        if self.failure is not None:
            return self.failure.reason
        try:
            code = self.process.wait(END)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"it ended with exit code {code}" + (f": {lines[-1]}" if lines else "")


@dataclass(kw_only=True)
class Supervisor:
    """The state of the workers. It holds no reference to the ``WorkerGroup``, which ends when nothing refers to it.

    Times are those of the monotonic clock.
    """

    workers: Sequence[WorkerProcess]
    timeout: float  # seconds that rank 0 waits while nobody says anything
    changed: threading.Condition = field(default_factory=threading.Condition)
    answers: dict[int, dict[int, Any]] = field(default_factory=dict)  # by number of the message and rank
    closing: bool = False
    ended: str = ""  # why rank 0 has ended them
    gone: list[WorkerProcess] = field(default_factory=list)  # in that order
    heard: float = 0.0  # when a worker last said something
    _began: float | None = None  # when rank 0 began the work that it is inside of
    _alive: float = 0.0  # when it last got on with it
    _lost: float = 0.0  # when the first was gone
    _refused: tuple[float, str] = (0.0, "")  # when a worker last refused to do its part, and why

    def begin(self) -> None:
        """Rank 0 begins work that it may need the others for."""
        self._alive = self._began = time.monotonic()

    def leave(self) -> None:
        """Rank 0 has left that work."""
        self._began = None

    def alive(self) -> None:
        """Rank 0 gets on with its work. ``RankUnreachable`` where another is gone."""
        self.require_all()
        self._alive = time.monotonic()

    def require_all(self) -> None:
        """``RankUnreachable`` if a rank is gone."""
        if self.gone or self.ended:
            raise RankUnreachable("a rank is gone", 0.0)

    def require_before(self, since: float) -> None:
        """``RankUnreachable`` if nobody has said anything for as long as rank 0 waits, and it waits ``since`` then."""
        waited = time.monotonic() - max(since, self.heard)
        if waited > self.timeout:
            raise RankUnreachable("no answer", waited)

    def send(self, message: object) -> None:
        """``message`` to all that still take it; nothing is raised where one does not."""
        data = bytes(ForkingPickler.dumps(message))
        for worker in self.workers:
            if worker in self.gone:
                continue
            try:
                worker.connection.send_bytes(data)
            except BlockingIOError:
                # half of it may be on the way, so nothing that follows would be understood
                self._lose(worker, Failed(reason=self._no_answer, waited=False))
                worker.process.kill()
            except OSError:  # the watching thread finds out
                pass

    def fault(self, error: BaseException | None) -> str:
        """Which worker caused the failure of rank 0 (``error``; None: it waits), and why; empty: none of them.

        One that ended without a message comes first, then one that failed by itself, which the others miss. Then
        those that are silent where rank 0 has waited until the timeout.
        """
        with self.changed:
            own = [worker for worker in self.gone if worker.failure is None or not worker.failure.waited]
            silent = [worker.name for worker in self.workers if worker not in self.gone]
        if own:
            worst = min(own, key=lambda worker: worker.failure is not None)
            return f"{worst.name}: {worst.why}"
        if silent and (
            error is None or (isinstance(error, RankUnreachable) and error.seconds > self.timeout / 2)
        ):
            return f"{' and '.join(silent)}: {self._no_answer}"
        return f"{self.gone[0].name}: {self.gone[0].why}" if error is None else ""

    @property
    def is_plain(self) -> bool:
        """Whether nothing more can be learnt of a failure."""
        with self.changed:
            return len(self.gone) == len(self.workers) or any(not worker.failure for worker in self.gone)

    def watch(self) -> None:
        """Take in what workers say, and look at the clock, until rank 0 has done with them. The work of a thread."""
        open_ones = {worker.connection: worker for worker in self.workers}
        while not self.closing:
            for connection in wait(list(open_ones), _TICK):
                worker = open_ones[connection]  # type: ignore[index]
                try:
                    number, value = worker.connection.recv()
                except (EOFError, OSError):
                    del open_ones[worker.connection]
                    self._lose(worker, None)
                else:
                    self._take(worker, number, value)
            self._leave_if_stuck()

    def _take(self, worker: WorkerProcess, number: int, value: object) -> None:
        if isinstance(value, Failed):
            self._lose(worker, value)
            return
        with self.changed:
            self.heard = time.monotonic()
            if isinstance(value, UserError):
                self._refused = self.heard, f"{worker.name}: {value}"
            if not isinstance(value, Alive):
                self.answers.setdefault(number, {})[worker.place.rank] = value
                self.changed.notify_all()

    def _lose(self, worker: WorkerProcess, word: Failed | None) -> None:
        with self.changed:
            if self.closing or worker in self.gone:
                return
            worker.failure = word
            self._lost = self._lost or time.monotonic()
            self.gone.append(worker)
            self.changed.notify_all()

    def _leave_if_stuck(self) -> None:
        """End this process if its main thread waits where nothing else can end it, as in a kernel for another rank."""
        with self.changed:
            began, now, (when, refusal) = self._began, time.monotonic(), self._refused
            if self.closing or began is None:
                return
            since = max(began, self._alive)
        if self.gone and now - max(since, self._lost) > GRACE:
            code = 1
        elif when > began and now - max(since, when) > GRACE:
            code = 2
        elif now - max(since, self.heard) > self.timeout + GRACE:
            code = 1
        else:
            return
        lost = f"the device is lost ({self.fault(None)}); run the command again to continue"
        print(f"\nspecgen: {lost if code == 1 else refusal}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(code)

    @property
    def _no_answer(self) -> str:
        return f"no answer for {self.timeout:,.0f} s"


def launch(place: Place) -> WorkerProcess:
    """Start the process of a rank, which waits for what ``Supervisor.send`` tells it."""
    ours, theirs = socket.socketpair()
    # so that no process which takes nothing in holds this one up
    limit = struct.pack("ll", int(place.timeout), int(place.timeout % 1 * 1e6))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
    with theirs:
        process = subprocess.Popen(
            # -P: as this process, it finds no modules in the working directory
            [sys.executable, "-P", "-m", "specgen.engine.worker", str(theirs.fileno()), str(place.rank)],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # a terminal's signals are for rank 0
        )
    return WorkerProcess(place=place, process=process, connection=Connection(ours.detach()), stderr=stderr)
