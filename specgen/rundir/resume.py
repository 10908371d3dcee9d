"""What a killed run left behind, cut to what is whole, so that the next run can go on from there."""

import mmap
import re
from collections.abc import Container
from pathlib import Path

from specgen.events import Resumed, to_line
from specgen.rundir.atomic import naming
from specgen.rundir.row_file import cut_torn_line, unquoted

_FINISHED = b'{"event":"finished",'  # begins a line of ``events.to_line``; within one its quotes were escaped
_FIELDS = re.compile(re.escape(_FINISHED) + rb'"sequence":("(?:[^"\\]|\\.)*"),"time":[^,]*,"reason":"(\w+)"')


def recover(events: Path, done: Container[str]) -> None:
    """Make the events of a killed run agree with its completions, whose ids are ``done``.

    The events of a request are on disk before its completion, and both in the order in which requests finished. So
    the first ``Finished`` without a completion, if there is one, tells where what follows has to be done again; one
    of a failed request needs none.
    """
    events.touch()
    cut_torn_line(events)
    with naming(events), events.open("r+b") as file:
        file.truncate(_end_of_done(events, done))
        if file.seek(0, 2):
            file.write(to_line(Resumed(time=0.0)).encode() + b"\n")


def _end_of_done(events: Path, done: Container[str]) -> int:
    """Where the first request finishes that is not ``done``, or the end."""
    size = events.stat().st_size
    if not size:
        return 0
    with events.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = 0
        while (start := content.find(_FINISHED, start)) >= 0:
            found = _FIELDS.match(content, start)
            if found is None or (found[2] != b"error" and unquoted(found[1]) not in done):
                return start
            start = found.end()
    return size
