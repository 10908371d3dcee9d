"""``lost.jsonl``: which requests were in flight when the device was lost, noted for the process that goes on."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from specgen.core.endings import DeviceLost
from specgen.rundir.atomic import write_text

_NAME = "lost.jsonl"


def note_lost(directory: Path, lost: DeviceLost) -> None:
    """Add a row for every request that was in flight."""
    path = directory / _NAME
    now = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [{"id": request, "reason": lost.reason, "time": now} for request in lost.requests]
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_text(path, before + "".join(json.dumps(row) + "\n" for row in rows))


def read_lost(directory: Path) -> dict[str, list[str]]:
    """Why the device was lost with a request in flight, by the ids of requests and once for each time."""
    reasons, path = defaultdict[str, list[str]](list), directory / _NAME
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        reasons[row["id"]].append(row["reason"])
    return dict(reasons)


@contextmanager
def kept_while_lost(directory: Path) -> Iterator[None]:
    """What is noted in and below ``directory`` is forgotten at every end but that of the device and of the process.

    So a command that is given again tries again what has failed.
    """
    try:
        yield
    except DeviceLost:
        raise
    except BaseException:
        _forget(directory)
        raise
    _forget(directory)


def _forget(directory: Path) -> None:
    for path in directory.rglob(_NAME):
        path.unlink()
