"""What a killed run left behind, cut to what is whole, so that the next run can go on from there."""

import json
import mmap
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from specgen.events import Resumed, to_line

_FINISHED = b'{"event":"finished",'  # begins a line of ``events.to_line``; within one its quotes were escaped


def recover(completions: Path, events: Path) -> None:
    """Make two files of a killed run agree: a torn last line goes, and every finished request has its completion.

    The events of a request are on disk before its completion, and both in the order in which requests finished. So
    the first ``Finished`` without a completion, if there is one, tells where what follows has to be done again.
    """
    for path in (completions, events):
        path.touch()
        _truncate(path, _end_of_lines(path))
    _truncate(events, _end_of_done(events, {row["id"] for row in read_rows(completions)}))
    if events.stat().st_size:
        with events.open("a", encoding="utf-8") as file:
            file.write(to_line(Resumed(time=0.0)) + "\n")


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file that has one in every line."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def _end_of_lines(path: Path) -> int:
    """Where the last whole line ends."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1


def _end_of_done(events: Path, done: Container[str]) -> int:
    """Where the first request finishes that is not ``done``, or the end."""
    size = events.stat().st_size
    if not size:
        return 0
    with events.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = 0
        while (start := content.find(_FINISHED, start)) >= 0:
            end = content.find(b"\n", start)
            if json.loads(content[start:end])["sequence"] not in done:
                return start
            start = end
    return size
