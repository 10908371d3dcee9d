"""What a run leaves when every request has ended: its report, and its rows in the formats of others."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from specgen import report_html
from specgen.atomic import write_json, write_text
from specgen.export import export_openai, export_parquet
from specgen.export.openai import Served
from specgen.job import FormatName, Job
from specgen.report import Report
from specgen.row_file import RowFile
from specgen.survey import Survey
from specgen.tokenizer import load_tokenizer

MAIN_FILES: Mapping[FormatName, str] = {
    "jsonl": "completions.jsonl",
    "openai": "batch_output.jsonl",
    "parquet": "completions.parquet",
}
_FAILURES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run gave, for printing."""

    report: Mapping[str, Any]  # as in report.json
    settings: Mapping[str, str]
    samples: list[tuple[str, str]]  # what was asked and answered first, to show
    failures: list[str]  # the first of what could not be run, and why


def is_finished(path: Path, job: Job) -> bool:
    """Whether an earlier run has left nothing to do, no failed request either."""
    if not (path / "report.json").exists() or _read(path / "status.json")["state"] != "finished":
        return False
    report = _read(path / "report.json")
    return report["num_errors"] == 0 and (report["baseline"] is not None or not job.baseline)


def read_result(path: Path, found: Survey) -> Result:
    """What the files of a finished run say."""
    completions, errors = RowFile(path / "completions.jsonl"), RowFile(path / "errors.jsonl")
    answers = [
        completions[prompt.id]["text"] if prompt.id in completions else errors[prompt.id]["error"]
        for prompt in found.first
    ]
    return Result(
        report=_read(path / "report.json"),
        settings=_read(path / "manifest.json")["settings"],
        samples=[(prompt.last_words, answer) for prompt, answer in zip(found.first, answers, strict=True)],
        failures=[f"{name}: {errors[name]['error']}" for name in islice(errors, _FAILURES_SHOWN)],
    )


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def write_report(path: Path, job: Job, report: Report) -> None:
    """Leave ``report`` in the run directory ``path``, as data and as a page."""
    document, settings = report.to_json(), _read(path / "manifest.json")["settings"]
    title = f"{Path(job.engine.model).name} on {job.dataset}"
    write_text(path / "report.html", report_html.render(document, settings, title))
    write_json(path / "report.json", document)


def export(path: Path, format_name: FormatName) -> None:
    """Write the rows of the finished run in ``path`` in another format, beside its own files."""
    completions, main = RowFile(path / "completions.jsonl"), path / MAIN_FILES[format_name]
    if format_name == "parquet":
        export_parquet(completions.values(), main)
    elif format_name == "openai":
        errors = RowFile(path / "errors.jsonl").values()
        error_output = path / "batch_errors.jsonl"
        export_openai(
            completions.values(), errors, output=main, error_output=error_output, served=_served(path)
        )


def _served(path: Path) -> Served:
    record = _read(path / "manifest.json")
    model = record["engine"]["model"]
    tokenizer = load_tokenizer(model)
    return Served(
        model=model,
        created=int(datetime.fromisoformat(record["created"]).timestamp()),
        token_text=lambda token: tokenizer.decode_with_special([token]),
    )
