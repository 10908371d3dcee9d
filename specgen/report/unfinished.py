"""The report of a run that was stopped or still goes on: of the requests that have ended so far."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specgen.config import UserError
from specgen.config.json_fields import load_json
from specgen.record.record_rows import RequestRow, read_passes, require_present_version
from specgen.report.display import count
from specgen.report.report import load, report_of

_FINISHED = "finished"


def load_so_far(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``report.json`` and ``manifest.json`` as by ``report.load``, of an unfinished run computed from its rows.

    An unfinished run's report has two more fields: ``state`` as in ``status.json`` (``stopped`` without one), and
    ``num_expected``, its requests where that is known.
    """
    status = status_of(directory)
    if is_finished(directory, status):
        return load(directory)
    manifest, passes = directory / "manifest.json", directory / "passes.jsonl"
    require_present_version(directory)
    if not manifest.exists() or not passes.exists():
        return load(directory)  # says what is missing
    record = load_json(manifest, "generate into a new directory")
    report = report_of(
        (RequestRow.of_row(row) for row in _rows(directory / "completions.jsonl") if "token_ids" in row),
        read_passes(passes),
        num_spec_tokens=record["engine"]["num_spec_tokens"],
        num_errors=sum(1 for _ in _rows(directory / "errors.jsonl")),
    ).to_json()
    expected = status.get("total") or None
    if expected is not None:
        report["num_unfinished"] = max(0, expected - report["num_requests"] - report["num_errors"])
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


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of ``path``, but for a last one that a kill, or a write at this moment, has cut."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)


def unfinished(report: Mapping[str, Any]) -> str:
    """A sentence if the report is of an unfinished run, else empty."""
    if "state" not in report:
        return ""
    done = count(report["num_requests"])
    expected = report["num_expected"]
    of = "" if expected is None else f" of {count(expected)} requests"
    return (
        f"This run is not finished ({report['state']}, {done}{of} done): these are the numbers of the "
        "requests that are done, and of all passes. The same command resumes it."
    )
