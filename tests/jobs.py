"""Jobs over conversations with the bundled pair, for tests that stop and resume a run, and the output of such a run."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.config import EngineConfig, SamplingParams
from specgen.config.bundled import data_directory
from specgen.jobs.job import Job
from specgen.prompts.load import DataSource
from specgen.record.progress import Progress
from tests.commands import write_rows
from tests.engines import engine_config, loaded

# How the passes went, which a kill changes; everything else in a report has to be the same.
HOW_IT_WENT = (
    *("wall_seconds", "wall", "ttft_seconds", "tpot_seconds", "output_tokens_per_second"),
    *("steps", "rows", "num_cached_tokens", "num_lost_tokens", "busy"),
)
_TIMED = {
    "report.json": HOW_IT_WENT,
    "manifest.json": ("created", "argv", "state"),
    "status.json": ("pid", "started", "updated", "startup_seconds", "output_tokens_per_second"),
}


Silent = Progress  # which shows nothing


def of_field_q(job: Job) -> Job:
    """``job`` with the field ``q`` of its rows as the prompt."""
    how = replace(job.data.how, prompt_field="q")
    return replace(job, data=replace(job.data, how=how))


def conversations(directory: Path, rows: Iterable[dict[str, Any]], *, baseline: bool = False) -> Job:
    """A job over ``rows`` in the form of MT-Bench, which are written to ``directory``."""
    path = directory / "question.jsonl"
    write_rows(path, rows)
    pair = data_directory() / "demo"
    return Job(
        engine=engine_config(pair, num_spec_tokens=3, max_batch_size=4),
        sampling=SamplingParams(max_tokens=14),
        data=DataSource(dataset="mt-bench", data_path=path),
        baseline=baseline,
    )


def keep_in_memory(patch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    """Let every run in this process and its children find the models of ``config`` in memory."""
    models = loaded(config)
    patch.setattr("specgen.jobs.run.load_models", lambda *asked: models)


def files(out: Path) -> dict[str, Any]:
    """What a run left, without times."""
    found: dict[str, Any] = {path.name: None for path in out.iterdir()}
    for name in ("completions.jsonl", "errors.jsonl"):
        found[name] = untimed(out / name)
    for name, untold in _TIMED.items():
        document = json.loads((out / name).read_text())
        found[name] = {key: value for key, value in document.items() if key not in untold}
    return found


def untimed(path: Path) -> bytes:
    """The rows of a file, without what a kill changes: times, and which session and passes they are of."""
    lines = []
    for line in path.read_bytes().splitlines():
        row = json.loads(line)
        if "record" in row:
            record = row["record"]
            steps = {name: record["steps"][name] for name in ("drafts", "accepted") if "steps" in record}
            row["record"] = {"counts": record["counts"], "steps": steps}
        lines.append(json.dumps(row).encode() + b"\n")
    return b"".join(lines)
