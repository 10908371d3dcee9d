"""The processes of the other ranks as rank 0 knows them: what each says, and that it is gone.

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
from specgen.engine.rank_group import Alive, Failed, Place
from specgen.ranks import Unmet

GRACE = 20.0  # seconds for rank 0 to come back from a pass that lost a rank
END = 10.0  # seconds for a process to end
_TICK = 0.5  # seconds between two looks at the clock


@dataclass(kw_only=True, eq=False)
class Member:
    """The process of a rank."""

    place: Place
    process: "subprocess.Popen[bytes]"
    connection: Connection
    stderr: IO[bytes]
    word: Failed | None = None  # its last, where it is gone with one

    @property
    def name(self) -> str:
        """As a message names it."""
        return self.place.name

    @property
    def why(self) -> str:
        """Why it is gone; one that has said nothing may still be ending."""
        if self.word is not None:
            return self.word.reason
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
class Roll:
    """What is known of the members. It does not know the crew, which ends when nothing else refers to it.

    Times are those of the monotonic clock.
    """

    members: Sequence[Member]
    patience: float  # seconds that rank 0 waits while nobody says anything
    changed: threading.Condition = field(default_factory=threading.Condition)
    answers: dict[int, dict[int, Any]] = field(default_factory=dict)  # by number of the message and rank
    closing: bool = False
    ended: str = ""  # why rank 0 has ended them
    gone: list[Member] = field(default_factory=list)  # in that order
    heard: float = 0.0  # when a member last said something
    _began: float | None = None  # when rank 0 began the work that it is inside of
    _alive: float = 0.0  # when it last got on with it
    _lost: float = 0.0  # when the first was gone
    _refused: tuple[float, str] = (0.0, "")  # when a member last refused to do its part, and why

    def begin(self) -> None:
        """Rank 0 begins work that it may need the others for."""
        self._alive = self._began = time.monotonic()

    def leave(self) -> None:
        """It is back."""
        self._began = None

    def alive(self) -> None:
        """Rank 0 gets on with its work. ``Unmet`` where another is gone."""
        self.require_all()
        self._alive = time.monotonic()

    def require_all(self) -> None:
        """``Unmet`` if a rank is gone."""
        if self.gone or self.ended:
            raise Unmet("a rank is gone", 0.0)

    def require_before(self, since: float) -> None:
        """``Unmet`` if nobody has said anything for as long as rank 0 waits, and it waits ``since`` then."""
        waited = time.monotonic() - max(since, self.heard)
        if waited > self.patience:
            raise Unmet("no answer", waited)

    def send(self, message: object) -> None:
        """``message`` to all that still take it; nothing is raised where one does not."""
        data = bytes(ForkingPickler.dumps(message))
        for member in self.members:
            if member in self.gone:
                continue
            try:
                member.connection.send_bytes(data)
            except BlockingIOError:
                # half of it may be on the way, so nothing that follows would be understood
                self._lose(member, Failed(reason=self._no_answer, waited=False))
                member.process.kill()
            except OSError:  # the watching thread finds out
                pass

    def fault(self, error: BaseException | None) -> str:
        """Which member is to blame where rank 0 fails with ``error``, None: waits, and why; empty: none.

        One that ended without a word comes first, then one that failed by itself: the others fail for want of it. Then
        those that say nothing where rank 0 has waited in vain.
        """
        with self.changed:
            own = [member for member in self.gone if member.word is None or not member.word.waited]
            silent = [member.name for member in self.members if member not in self.gone]
        if own:
            worst = min(own, key=lambda member: member.word is not None)
            return f"{worst.name}: {worst.why}"
        if silent and (error is None or (isinstance(error, Unmet) and error.seconds > self.patience / 2)):
            return f"{' and '.join(silent)}: {self._no_answer}"
        return f"{self.gone[0].name}: {self.gone[0].why}" if error is None else ""

    @property
    def is_plain(self) -> bool:
        """Whether nothing more can be learnt of a failure."""
        with self.changed:
            return len(self.gone) == len(self.members) or any(not member.word for member in self.gone)

    def watch(self) -> None:
        """Take in what members say, and look at the clock, until rank 0 has done with them. The work of a thread."""
        open_ones = {member.connection: member for member in self.members}
        while not self.closing:
            for connection in wait(list(open_ones), _TICK):
                member = open_ones[connection]  # type: ignore[index]
                try:
                    number, value = member.connection.recv()
                except (EOFError, OSError):
                    del open_ones[member.connection]
                    self._lose(member, None)
                else:
                    self._take(member, number, value)
            self._leave_if_stuck()

    def _take(self, member: Member, number: int, value: object) -> None:
        if isinstance(value, Failed):
            self._lose(member, value)
            return
        with self.changed:
            self.heard = time.monotonic()
            if isinstance(value, UserError):
                self._refused = self.heard, f"{member.name}: {value}"
            if not isinstance(value, Alive):
                self.answers.setdefault(number, {})[member.place.rank] = value
                self.changed.notify_all()

    def _lose(self, member: Member, word: Failed | None) -> None:
        with self.changed:
            if self.closing or member in self.gone:
                return
            member.word = word
            self._lost = self._lost or time.monotonic()
            self.gone.append(member)
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
        elif now - max(since, self.heard) > self.patience + GRACE:
            code = 1
        else:
            return
        lost = f"the device is lost ({self.fault(None)}); run the command again to continue"
        print(f"\nspecgen: {lost if code == 1 else refusal}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(code)

    @property
    def _no_answer(self) -> str:
        return f"no answer for {self.patience:,.0f} s"


def launch(place: Place) -> Member:
    """Start the process of a rank, which waits for what ``Roll.send`` tells it."""
    ours, theirs = socket.socketpair()
    # so that no process which takes nothing in holds this one up
    limit = struct.pack("ll", int(place.patience), int(place.patience % 1 * 1e6))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
    with theirs:
        process = subprocess.Popen(
            # -P: as this process, it finds no modules in the working directory
            [sys.executable, "-P", "-m", "specgen.engine.follower", str(theirs.fileno()), str(place.rank)],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # a terminal's signals are for rank 0
        )
    return Member(place=place, process=process, connection=Connection(ours.detach()), stderr=stderr)
