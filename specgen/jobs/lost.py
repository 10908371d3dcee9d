"""``lost.jsonl``: the requests in flight when the device was lost, for the process that resumes the run."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from specgen.errors import DeviceLost
from specgen.rundir.atomic import write_json_lines

_NAME = "lost.jsonl"


def note_lost(directory: Path, lost: DeviceLost) -> None:
    """Append a row per request in flight."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [{"id": request, "reason": lost.reason, "time": now} for request in lost.requests]
    write_json_lines(directory / _NAME, [*_rows(directory), *rows])


def read_lost(directory: Path) -> dict[str, list[str]]:
    """By request id, the reason of every device loss during which the request was in flight."""
    reasons = defaultdict[str, list[str]](list)
    for row in _rows(directory):
        reasons[row["id"]].append(row["reason"])
    return reasons


def _rows(directory: Path) -> list[dict[str, str]]:
    path = directory / _NAME
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


@contextmanager
def kept_while_lost(directory: Path) -> Iterator[None]:
    """Removes the notes in and below ``directory`` at the end, unless the device or the process was lost.

    So running the command again retries what failed.
    """
    is_lost = False
    try:
        yield
    except DeviceLost:
        is_lost = True
        raise
    finally:
        for path in () if is_lost else directory.rglob(_NAME):
            path.unlink()
