"""The output of a finished run: its report, and its rows in other formats."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from specgen.config import FormatName, UserError
from specgen.config.json_fields import load_json
from specgen.jobs.export import Served, export_openai, export_parquet
from specgen.jobs.job import Job
from specgen.prompts import Prompt, failure
from specgen.record.record_rows import RequestRow, read_passes
from specgen.report import tables
from specgen.report.origin import origin, run_title
from specgen.report.report import Report, report_of
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
        texts = RunTexts(self._completions)
        same: list[bool] = []
        report = self._report(record["engine"]["num_spec_tokens"], baseline, same, texts)
        if baseline is not None:
            plain = baseline._report(0)
            report = report.with_baseline(plain, sum(same) / len(same) if same else 0.0, len(same))
        document = report.to_json()
        shown = (
            texts.shown(_tokenizer(record["engine"]["model"])) if record.get("steps", True) else ([], None)
        )
        page = tables.page(document, record["settings"], run_title(record), origin(record), *shown)
        write_text(self._path / "report.html", page)
        write_json(self._path / "report.json", document)
        return document

    def _report(
        self,
        num_spec_tokens: int,
        baseline: "FinishedRun | None" = None,
        same: list[bool] | None = None,
        texts: RunTexts | None = None,
    ) -> Report:
        """The report; ``same`` gets whether tokens are those of ``baseline``, ``texts`` sees the requests."""
        empty: list[str] = []
        requests = self._requests(baseline, [] if same is None else same, empty)
        report = report_of(
            requests if texts is None else texts.watch(requests),
            read_passes(self._path / "passes.jsonl"),
            num_spec_tokens=num_spec_tokens,
            num_errors=len(self._errors),
        )
        return report.with_texts(empty)

    def _requests(
        self, baseline: "FinishedRun | None", same: list[bool], empty: list[str]
    ) -> Iterator[RequestRow]:
        """All requests; ``empty`` gets the texts without a character."""
        plain = {} if baseline is None else baseline._completions
        for name, row in self._completions.items():
            if name in plain:
                same.append(plain[name]["token_ids"] == row["token_ids"])
            if not row["text"].strip():
                empty.append(row["text"])
            yield RequestRow.of_row(row)

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
