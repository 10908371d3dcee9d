"""The output of a finished run: its report, and its rows in other formats."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import accumulate, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from specgen.config import FormatName, UserError
from specgen.config.json_fields import load_json
from specgen.core.garbage import fewer_gc_passes
from specgen.jobs.job import Job
from specgen.jobs.prompt_index import PromptIndex
from specgen.prompts import Prompt, failure
from specgen.record import columns
from specgen.record.columns import Run, in_both
from specgen.record.files import Rows, replacement, write_json, write_json_lines, write_text
from specgen.record.provenance import busy
from specgen.record.record_rows import read_passes
from specgen.report import tables
from specgen.report.acceptance import RequestMetrics
from specgen.report.origin import origin, run_title
from specgen.report.report import Report, load, report_of
from specgen.report.run_texts import RunTexts, known_tokenizer
from specgen.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import pyarrow


MAIN_FILES: Mapping[FormatName, str] = {
    "jsonl": "completions.jsonl",
    "openai": "batch_output.jsonl",
    "parquet": "completions.parquet",
}
_FAILURES_KEPT = 100  # for printing
_REASONING_SHOWN = 200  # characters
_CHAT = "/v1/chat/completions"  # the default, for rows that are not of a batch
_MIN_LOGPROB = -9999.0  # minus infinity, which JSON cannot write, as in vLLM
_ROW_GROUP = 512  # rows in memory at a time


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run, for printing."""

    report: Report
    settings: Mapping[str, str]
    samples: list[tuple[str, str]]  # prompt and answer, the first ones
    failures: list[str]  # id and reason, the first ones


def complete_run(path: Path, job: Job, state: str | None, index: PromptIndex) -> "FinishedRun | None":
    """The run that was left in ``state`` if it has answered all of ``index``, with no failure; its baseline too.

    Its rows are looked for, as a copy of the directory may have lost some.
    """
    if not (path / "report.json").exists() or state != "finished":
        return None
    try:
        report, _ = load(path)
    except UserError:  # damaged: it is made anew
        return None
    with_plain = report.baseline is not None and report.num_plain_errors == 0
    if report.num_errors > 0 or (job.baseline and not with_plain):
        return None
    runs = [FinishedRun(each) for each in (path, path / "baseline")[: 1 + job.baseline]]
    return None if any(any(run.pending(index)) for run in runs) else runs[0]


def _shown(row: Mapping[str, Any]) -> str:
    """The answer of a row; where it has none because the text ended before, the end of its reasoning."""
    if row["text"] or not row.get("reasoning"):
        return str(row["text"])
    return f"(ended while reasoning) ... {row['reasoning'][-_REASONING_SHOWN:]}"


class FinishedRun:
    """The rows of the run in ``path``, found once for its report, other formats, and what is printed of it."""

    def __init__(self, path: Path, completions: Rows | None = None, errors: Rows | None = None) -> None:
        self._path = path
        self._completions = Rows(path / "completions.jsonl") if completions is None else completions
        self._errors = Rows(path / "errors.jsonl") if errors is None else errors

    def pending(self, index: PromptIndex) -> Iterator[Sequence[str]]:
        """What it has not answered; see ``PromptIndex``."""
        return index.pending(self._completions)

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        return load_json(self._path / "manifest.json", "generate into another directory")

    @fewer_gc_passes()  # rows are read, and what is made of them is kept
    def write_report(
        self, baseline: "FinishedRun | None", *states: Mapping[str, Any], busy_shard: str = ""
    ) -> Report:
        """Write ``report.json``, which is returned, and ``report.html``; ``baseline`` is the plain run.

        ``states`` of the machine are those after its start; ``busy_shard`` is what a shard says of them.
        """
        record = self._manifest
        run = self._read(record["engine"]["num_spec_tokens"])
        report = self._report(run)
        if baseline is not None:
            sampled = record["sampling"]["temperature"] > 0
            sampled |= "temperature" in record["data"].get("own_parameters", [])
            plain = baseline._read(0)
            ours, theirs = in_both(run, plain)
            same = (run.tokens[ours] == plain.tokens[theirs]).tolist()
            report = report.with_baseline(baseline._report(plain), same, sampled=sampled)
        report = replace(report, busy=busy(record.get("state", {}), *states) or busy_shard)
        shown = (
            RunTexts(run, self._completions).shown(known_tokenizer(record["engine"]["model"]))
            if record.get("steps", True)
            else ([], None)
        )
        page = tables.page(report, record["settings"], run_title(record), origin(record), *shown)
        write_text(self._path / "report.html", page)
        write_json(self._path / "report.json", report.to_json())
        return report

    def _read(self, num_spec_tokens: int) -> Run:
        return columns.read(self._path, num_spec_tokens, self._completions)

    def _report(self, run: Run) -> Report:
        return report_of(run, read_passes(self._path / "passes.jsonl"), num_errors=len(self._errors))

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
                served=self._served(),
            )

    def _served(self) -> "Served":
        record = self._manifest
        tokenizer = load_tokenizer(record["engine"]["model"])
        return Served(
            model=record.get("served_model_name", record["engine"]["model"]),
            created=int(datetime.fromisoformat(record["created"]).timestamp()),
            token_text=lambda token: tokenizer.decode_with_special([token]),
        )

    def result(self, first: Sequence[Prompt] = ()) -> RunResult:
        """For printing; the prompts ``first`` are shown with their answers."""
        completions, errors = self._completions, self._errors
        answers = [
            _shown(completions[prompt.id]) if prompt.id in completions else errors[prompt.id]["error"]
            for prompt in first
        ]
        report, record = load(self._path)
        return RunResult(
            report=report,
            settings=record["settings"],
            samples=[(prompt.last_message, answer) for prompt, answer in zip(first, answers, strict=True)],
            failures=[failure(name, errors[name]["error"]) for name in islice(errors, _FAILURES_KEPT)],
        )


# --- other formats ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Served:
    """What all responses of a run share."""

    model: str
    created: int  # start of the run, seconds since 1970: a second export is identical
    token_text: Callable[[int], str]  # of one token id, for log-probabilities


def export_openai(
    completions: Iterable[Mapping[str, Any]],
    errors: Iterable[Mapping[str, Any]],
    *,
    output: Path,
    error_output: Path,
    served: Served,
) -> None:
    """Write the rows of ``completions.jsonl`` and ``errors.jsonl`` as a batch's two files, in their order.

    The lines are those of "The request output object" in OpenAI's API reference and of vLLM's ``run-batch``:
    ``custom_id`` is the id of the row, a chat or text completion is in ``response.body``, and a request that failed
    has no response but an ``error``. The samples of a prompt are the ``choices`` of one line, and where one of them
    failed the request has. Each body has the request's speculation as vLLM's
    ``--per-request-spec-decode-metrics detailed`` gives it, in ``metrics.speculative_decoding``. Ids that a server
    makes at random are hashes of ``custom_id``, so the files are reproducible. Each is replaced atomically.
    """
    failed: dict[str, Mapping[str, Any]] = {}
    for row in errors:
        failed.setdefault(row["id"], row)
    answered = (
        (name, list(rows)) for name, rows in groupby(completions, itemgetter("id")) if name not in failed
    )
    write_json_lines(output, (_answered(name, rows, served) for name, rows in answered))
    write_json_lines(error_output, map(_failed, failed.values()))


def _answered(row_id: str, samples: Sequence[Mapping[str, Any]], served: Served) -> dict[str, Any]:
    name = _digest(row_id)
    response = {"status_code": 200, "request_id": f"req_{name}", "body": _body(samples, name, served)}
    return {"id": f"batch_req_{name}", "custom_id": row_id, "response": response, "error": None}


def _failed(row: Mapping[str, Any]) -> dict[str, Any]:
    of_sample = f"sample {row['sample']}: " if "sample" in row else ""
    error = {"code": "request_failed", "message": of_sample + row["error"]}
    return {"id": f"batch_req_{_digest(row['id'])}", "custom_id": row["id"], "response": None, "error": error}


def _digest(row_id: str) -> str:
    return hashlib.sha256(row_id.encode()).hexdigest()[:32]


def _body(samples: Sequence[Mapping[str, Any]], name: str, served: Served) -> dict[str, Any]:
    row = samples[0]
    is_chat = row.get("endpoint", _CHAT) == _CHAT
    choice = _chat_choice if is_chat else _text_choice
    num_prompt, num_output = row["num_prompt_tokens"], sum(len(each["token_ids"]) for each in samples)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": served.created,
        "model": served.model,
        "choices": [{"index": each.get("sample", 0)} | choice(each, served.token_text) for each in samples],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            **_details(samples),
        },
    }
    if is_chat and "prompt_logprobs" in row:
        body["prompt_logprobs"] = _prompt_logprobs(row, served.token_text)
    if row["metrics"]["num_spec_tokens"]:
        body["metrics"] = {"speculative_decoding": RequestMetrics.of_samples(samples)}
    return body


def _details(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of the usage that is reasoning, where there is any."""
    found = [each["num_reasoning_tokens"] for each in samples if "reasoning" in each]
    return {"completion_tokens_details": {"reasoning_tokens": sum(found)}} if found else {}


def _chat_choice(row: Mapping[str, Any], token_text: Callable[[int], str]) -> dict[str, Any]:
    message = {"role": "assistant", "content": row["text"], "refusal": None}
    if "reasoning" in row:
        message["reasoning_content"] = row["reasoning"]
    logprobs = None
    if "logprobs" in row:
        content = [
            _token(token_text(token), each["chosen"])
            | {"top_logprobs": [_token(token_text(other), logprob) for other, logprob in each["top"]]}
            for token, each in zip(row["token_ids"], row["logprobs"], strict=True)
        ]
        logprobs = {"content": content, "refusal": None}
    return {"message": message, "logprobs": logprobs, "finish_reason": row["finish_reason"]}


def _prompt_logprobs(row: Mapping[str, Any], token_text: Callable[[int], str]) -> list[dict[str, Any] | None]:
    """As vLLM's: by token id, of the prompt's token and of the most likely ones, whose ranks are known; None first."""

    def ranked(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        found = {"logprob": max(logprob, _MIN_LOGPROB), "rank": rank, "decoded_token": token_text(token)}
        return {str(token): found}

    found: list[dict[str, Any] | None] = []
    for token, each in zip(row["prompt_token_ids"], row["prompt_logprobs"], strict=True):
        likely = {} if each is None else ranked(token, each["chosen"], None)
        for rank, (other, logprob) in enumerate(each["top"] if each else (), start=1):
            likely |= ranked(other, logprob, rank)
        found.append(likely or None)
    return found


def _token(text: str, logprob: float) -> dict[str, Any]:
    # The bytes of an incomplete character cannot be recovered from its text.
    spelled = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, _MIN_LOGPROB), "bytes": spelled}


def _text_choice(row: Mapping[str, Any], token_text: Callable[[int], str]) -> dict[str, Any]:
    logprobs = None
    if "logprobs" in row:
        tokens = [token_text(token) for token in row["token_ids"]]
        chosen = [max(each["chosen"], _MIN_LOGPROB) for each in row["logprobs"]]
        top = [
            {token_text(other): max(value, _MIN_LOGPROB) for other, value in each["top"]} | {token: logprob}
            for each, token, logprob in zip(row["logprobs"], tokens, chosen, strict=True)
        ]
        offsets = list(accumulate((len(token) for token in tokens), initial=0))[:-1]
        logprobs = {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}
    reasoning = {"reasoning_content": row["reasoning"]} if "reasoning" in row else {}
    end = {"logprobs": logprobs, "finish_reason": row["finish_reason"]}
    if "prompt_logprobs" in row:
        end["prompt_logprobs"] = _prompt_logprobs(row, token_text)
    return {"text": row["text"], **reasoning, **end}


def export_parquet(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the rows of ``completions.jsonl`` as ``path``, which ``datasets.load_dataset("parquet")`` reads.

    The columns are fixed; ``category``, ``endpoint``, ``logprobs``, the two of reasoning and the two of a prompt's
    tokens are null where a row has none. Memory is that of one row group, and the file is replaced atomically.
    """
    from pyarrow import Table, parquet

    schema, remaining = _schema(), iter(rows)
    with replacement(path) as file, parquet.ParquetWriter(file, schema) as writer:
        while group := [_table_row(row) for row in islice(remaining, _ROW_GROUP)]:
            writer.write_table(Table.from_pylist(group, schema=schema))


def _table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with all metrics, and log-probabilities as objects: a list of a column cannot mix ids and floats."""
    found = {"sample": 0, **row, "metrics": RequestMetrics.of_samples([row])}
    for name in ("logprobs", "prompt_logprobs"):
        if name in row:
            found[name] = [
                each
                and each | {"top": [{"token_id": token, "logprob": value} for token, value in each["top"]]}
                for each in row[name]
            ]
    return found


def _schema() -> "pyarrow.Schema":
    import pyarrow as pa

    text, whole_number, number = pa.string(), pa.int64(), pa.float64()
    likely = pa.struct({"token_id": whole_number, "logprob": number})
    types = {float | None: number, int: whole_number, tuple[int, ...]: pa.list_(whole_number)}
    logprobs = pa.list_(pa.struct({"chosen": number, "top": pa.list_(likely)}))
    metrics = {name: types[found] for name, found in get_type_hints(RequestMetrics).items()}
    columns = {
        "id": text,
        "sample": whole_number,
        "prompt": text,
        "reasoning": text,
        "num_reasoning_tokens": whole_number,
        "text": text,
        "token_ids": pa.list_(whole_number),
        "finish_reason": text,
        "ended_by": text,
        "turn": whole_number,
        "num_prompt_tokens": whole_number,
        "category": text,
        "endpoint": text,
        "logprobs": logprobs,
        "prompt_token_ids": pa.list_(whole_number),
        "prompt_logprobs": logprobs,
        "metrics": pa.struct(metrics),
    }
    return pa.schema(list(columns.items()))
