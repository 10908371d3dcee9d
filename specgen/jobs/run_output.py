"""The output of a finished run: its report, and its rows in other formats."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from specgen.config import EventsName, FormatName, UserError
from specgen.events import read
from specgen.jobs.export.openai import Served, export_openai
from specgen.jobs.export.parquet import export_parquet
from specgen.jobs.job import Job
from specgen.json_fields import load_json
from specgen.prompts import Prompt, failure
from specgen.report import tables
from specgen.report.from_rows import NONE, fold_rows, without_events
from specgen.report.origin import origin, run_title
from specgen.report.report import Report, fold
from specgen.report.run_texts import RunTexts
from specgen.rundir.atomic import write_json, write_text
from specgen.rundir.row_file import Rows
from specgen.text.tokenizer import Tokenizer, load_tokenizer

MAIN_FILES: Mapping[FormatName, str] = {
    "jsonl": "completions.jsonl",
    "openai": "batch_output.jsonl",
    "parquet": "completions.parquet",
}
_FAILURES_KEPT = 100  # for printing
_REASONING_SHOWN = 200  # characters


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run, for printing."""

    report: Mapping[str, Any]  # as in report.json
    settings: Mapping[str, str]
    samples: list[tuple[str, str]]  # prompt and answer, the first ones
    failures: list[str]  # id and reason, the first ones


def is_finished(path: Path, job: Job, state: str | None) -> bool:
    """Whether an earlier run, left in ``state``, has answered every request, with no failure."""
    if not (path / "report.json").exists() or state != "finished":
        return False
    report = read_json(path / "report.json")
    return report["num_errors"] == 0 and (report["baseline"] is not None or not job.baseline)


def _shown(row: Mapping[str, Any]) -> str:
    """The answer of a row; where it has none because the text ended before, the end of its reasoning."""
    if row["text"] or not row.get("reasoning"):
        return str(row["text"])
    return f"(ended while reasoning) ... {row['reasoning'][-_REASONING_SHOWN:]}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run."""
    return load_json(path, "generate into another directory")


class FinishedRun:
    """The rows of the run in ``path``, found once for its report, other formats, and what is printed of it."""

    def __init__(self, path: Path, completions: Rows | None = None, errors: Rows | None = None) -> None:
        self._path = path
        self._completions = Rows(path / "completions.jsonl") if completions is None else completions
        self._errors = Rows(path / "errors.jsonl") if errors is None else errors

    def write_report(self, baseline: "FinishedRun | None") -> Mapping[str, Any]:
        """Write ``report.json``, whose content is returned, and ``report.html``; ``baseline`` is the plain run."""
        record = read_json(self._path / "manifest.json")
        events: EventsName = record.get("events", "full")
        texts = RunTexts(self._completions) if events == "full" else None  # others tell of no single token
        same: list[bool] = []
        report = self._folded(record["engine"]["num_spec_tokens"], events, baseline, same, texts)
        if baseline is not None:
            plain = baseline._folded(0, events)
            report = report.with_baseline(plain, sum(same) / len(same) if same else 0.0, len(same))
        document = without_events(report.to_json()) if events == NONE else report.to_json()
        shown = ([], None) if texts is None else texts.shown(_tokenizer(record["engine"]["model"]))
        page = tables.page(document, record["settings"], run_title(record), origin(record), *shown)
        write_text(self._path / "report.html", page)
        write_json(self._path / "report.json", document)
        return document

    def _folded(
        self,
        num_spec_tokens: int,
        events: EventsName,
        baseline: "FinishedRun | None" = None,
        same: list[bool] | None = None,
        texts: RunTexts | None = None,
    ) -> Report:
        """The report; ``same`` gets whether tokens are those of ``baseline``, ``texts`` follows the events."""
        if events == NONE:
            rows = self._completions
            report = fold_rows(rows.values(), ids=rows, num_spec_tokens=num_spec_tokens)
        else:
            recorded = read(self._path / "events.jsonl")
            report = fold(
                recorded if texts is None else texts.watch(recorded), num_spec_tokens=num_spec_tokens
            )
        # rejected rows, which have no events, have failed too
        counted = replace(report, num_errors=len(self._errors))
        return counted.with_texts(self._texts(events, baseline, [] if same is None else same))

    def _texts(self, events: EventsName, baseline: "FinishedRun | None", same: list[bool]) -> Iterator[str]:
        plain = {} if baseline is None else baseline._completions
        for name, row in self._completions.items():
            if name in plain:
                same.append(plain[name]["token_ids"] == row["token_ids"])
            yield row["text"] or (row.get("reasoning", "") if events == NONE else "")

    def export(self, format_name: FormatName) -> None:
        """Write the rows in another format too."""
        completions, main = self._completions, self._path / MAIN_FILES[format_name]
        if format_name == "parquet":
            export_parquet(completions.values(), main)
        elif format_name == "openai":
            export_openai(
                completions.values(),
                self._errors.values(),
                output=main,
                error_output=self._path / "batch_errors.jsonl",
                served=_served(self._path),
            )

    def result(self, first: Sequence[Prompt] = ()) -> RunResult:
        """For printing; the prompts ``first`` are shown with their answers."""
        completions, errors = self._completions, self._errors
        answers = [
            _shown(completions[prompt.id]) if prompt.id in completions else errors[prompt.id]["error"]
            for prompt in first
        ]
        return RunResult(
            report=read_json(self._path / "report.json"),
            settings=read_json(self._path / "manifest.json")["settings"],
            samples=[(prompt.last_message, answer) for prompt, answer in zip(first, answers, strict=True)],
            failures=[failure(name, errors[name]["error"]) for name in islice(errors, _FAILURES_KEPT)],
        )


def _tokenizer(model: str) -> Tokenizer | None:
    """None where it cannot be read: shards may be merged on a machine without the model."""
    try:
        return load_tokenizer(model)
    except UserError:
        return None


def _served(path: Path) -> Served:
    record = read_json(path / "manifest.json")
    model = record["engine"]["model"]
    tokenizer = load_tokenizer(model)
    return Served(
        model=record.get("served_model_name", model),
        created=int(datetime.fromisoformat(record["created"]).timestamp()),
        token_text=lambda token: tokenizer.decode_with_special([token]),
    )
