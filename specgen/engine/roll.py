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
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import IO, Any

from specgen.config import UserError
from specgen.engine.rank_group import Failed, Place

GRACE = 20.0  # seconds for rank 0 to come back from a pass that lost a rank
END = 10.0  # seconds for a process to end


@dataclass(kw_only=True, eq=False)
class Member:
    """The process of a rank."""

    place: Place
    process: "subprocess.Popen[bytes]"
    connection: Connection
    stderr: IO[bytes]
    gone: str = ""  # why
    said: bool = False  # whether that is its own word

    @property
    def name(self) -> str:
        """As a message names it."""
        return self.place.name

    def end(self) -> str:
        """Why the process, which has closed its connection, has ended."""
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
    """What is known of the members. It does not know the crew, which ends when nothing else refers to it."""

    members: Sequence[Member]
    changed: threading.Condition = field(default_factory=threading.Condition)
    answers: dict[int, dict[int, Any]] = field(default_factory=dict)  # by number of the message and rank
    at_work: float | None = None  # when rank 0 began the pass that it is inside of, by the monotonic clock
    closing: bool = False
    ended: str = ""  # why rank 0 has ended them
    gone: list[Member] = field(default_factory=list)  # in that order

    def watch(self) -> None:
        """Take in what members say until all are gone. The work of a thread."""
        open_ones = {member.connection: member for member in self.members}
        while open_ones:
            for connection in wait(list(open_ones)):
                member = open_ones[connection]  # type: ignore[index]
                try:
                    number, value = member.connection.recv()
                except (EOFError, OSError):
                    del open_ones[member.connection]
                    self._lost(member, member.end(), said=False)
                    continue
                if isinstance(value, Failed):
                    self._lost(member, value.reason, said=True)
                    continue
                if isinstance(value, UserError) and member.place.device != "cpu":
                    # rank 0 may wait for it in a kernel, as part of the same work
                    self._leave_unless_back(f"{member.name}: {value}", 2)
                with self.changed:
                    self.answers.setdefault(number, {})[member.place.rank] = value
                    self.changed.notify_all()

    def _lost(self, member: Member, reason: str, *, said: bool) -> None:
        with self.changed:
            if self.closing or member in self.gone:
                return
            member.gone, member.said = reason, said
            self.gone.append(member)
            self.changed.notify_all()
        if len(self.gone) == 1:
            where = f"{member.name}: {reason}"
            self._leave_unless_back(f"the device is lost ({where}); run the command again to continue", 1)

    def _leave_unless_back(self, why: str, code: int) -> None:
        """End this process if its main thread waits in a kernel for a rank that never comes: nothing else can."""

        def watch(seen: float) -> None:
            while True:
                time.sleep(min(GRACE, 1.0))
                with self.changed:
                    if self.closing or (code == 2 and (self.at_work is None or self.at_work > seen)):
                        return
                    began = self.at_work
                if began is not None and time.monotonic() - max(began, seen) > GRACE:
                    break
            print(f"\nspecgen: {why}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(code)

        threading.Thread(target=watch, args=(time.monotonic(),), daemon=True).start()


def launch(place: Place) -> Member:
    """Start the process of a rank, which waits for what ``send`` tells it."""
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


def send(members: Sequence[Member], message: object) -> None:
    """``message`` to all that still take it; nothing is raised where one does not."""
    data = bytes(ForkingPickler.dumps(message))
    for member in members:
        with suppress(OSError):  # the watching thread, or who waits for an answer, finds out
            member.connection.send_bytes(data)
