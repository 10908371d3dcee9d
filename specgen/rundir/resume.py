"""Recovery of the events of a killed run, so that the next run can resume it."""

import mmap
import re
from collections.abc import Container, Iterator
from heapq import merge
from pathlib import Path

from specgen.events import Resumed, to_line
from specgen.rundir.atomic import naming
from specgen.rundir.row_file import cut_torn_line, unquoted

# The starts of lines of ``events.to_line``; inside a line the quotes are escaped.
_ENDS = (b'{"event":"finished",', b'{"event":"answered",')
_FIELDS = re.compile(rb'\{"event":"\w+","sequence":("(?:[^"\\]|\\.)*"),"time":[^,]*,"reason":"(\w+)"')


def recover(events: Path, done: Container[str]) -> None:
    """Make the events of a killed run agree with its completions, whose ids are ``done``.

    The events of a request are on disk before its completion, and both in the order in which requests finished. So
    events are cut at the first ``Finished`` without a completion, those of failed requests excepted.
    """
    events.touch()
    cut_torn_line(events)
    with naming(events), events.open("r+b") as file:
        file.truncate(_end_of_done(events, done))
        if file.seek(0, 2):
            file.write(to_line(Resumed(time=0.0)).encode() + b"\n")


def _end_of_done(events: Path, done: Container[str]) -> int:
    """Offset of the first ``Finished`` of a request that is not ``done``, or of the end."""
    size = events.stat().st_size
    if not size:
        return 0
    with events.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for start in merge(*(_all(content, end) for end in _ENDS)):
            found = _FIELDS.match(content, start)
            if found is None or (found[2] != b"error" and unquoted(found[1]) not in done):
                return start
    return size


def _all(content: mmap.mmap, what: bytes) -> Iterator[int]:
    start = -1
    while (start := content.find(what, start + 1)) >= 0:
        yield start
