"""The report of a run that was stopped or still goes on: a fold over the events that it has so far."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from specgen.config import UserError
from specgen.display import count
from specgen.events import from_line
from specgen.json_fields import load_json
from specgen.report.from_rows import NONE, fold_rows, without_events
from specgen.report.report import fold, load

_FINISHED = "finished"


def load_so_far(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``report.json`` and ``manifest.json`` as by ``report.load``, of an unfinished run computed from its events.

    An unfinished run's report has two more fields: ``state`` as in ``status.json`` (``stopped`` without one), and
    ``num_expected``, its requests where that is known.
    """
    status = status_of(directory)
    if is_finished(directory, status):
        return load(directory)
    manifest, events = directory / "manifest.json", directory / "events.jsonl"
    if not manifest.exists() or not events.exists():
        return load(directory)  # says what is missing
    record = load_json(manifest, "generate into a new directory")
    num_spec_tokens = record["engine"]["num_spec_tokens"]
    if record.get("events") == NONE:
        path = directory / "completions.jsonl"
        ids = [json.loads(line)["id"] for line in _whole_lines(path)]
        rows = islice(map(json.loads, _whole_lines(path)), len(ids))  # a run may be at work
        report = without_events(fold_rows(rows, ids=ids, num_spec_tokens=num_spec_tokens).to_json())
    else:
        report = fold(map(from_line, _whole_lines(events)), num_spec_tokens=num_spec_tokens).to_json()
    expected = status.get("total") or None
    return {**report, "state": status.get("state", "stopped"), "num_expected": expected}, record


def is_finished(directory: Path, status: Mapping[str, Any]) -> bool:
    """Whether the run in ``directory``, whose ``status_of`` it is, has a report of all its requests."""
    return status.get("state", _FINISHED) == _FINISHED and (directory / "report.json").exists()


def status_of(directory: Path) -> dict[str, Any]:
    """``status.json``; empty without one, or where a power failure has emptied it."""
    path = directory / "status.json"
    try:
        return load_json(path, "run the same command again") if path.exists() else {}
    except UserError:
        return {"state": "lost"}


def _whole_lines(path: Path) -> Iterator[str]:
    """All lines but for a last one that a kill, or a write at this moment, has cut."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield line


def unfinished(report: Mapping[str, Any]) -> str:
    """A sentence if the report is of an unfinished run, else empty."""
    if "state" not in report:
        return ""
    done = count(report["num_requests"] - report["num_unfinished"])
    expected = report["num_expected"]
    of = "" if expected is None else f" of {count(expected)} requests"
    return (
        f"This run is not finished ({report['state']}, {done}{of} done): these are the numbers of its events so far. "
        "The same command resumes it."
    )
