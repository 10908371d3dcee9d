"""The main job: prompts through an engine into a run directory, and the report of it; what was begun goes on."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from specgen import report_html
from specgen.atomic import write_json, write_text
from specgen.build import Models, choose_attention, described, open_checkpoints, resolve
from specgen.checkpoint import fingerprint
from specgen.config import EngineConfig, SamplingParams, require
from specgen.display import draft_length, from_here
from specgen.engine import Engine
from specgen.engine_core import until_done
from specgen.events import Event
from specgen.interrupt import StoppedError
from specgen.output import RequestOutput
from specgen.prompts import PromptSet, open_prompts
from specgen.provenance import FREE_IN_A_RUN, manifest
from specgen.report import Report, fold
from specgen.results import RunDirectory, directory, require_same, set_aside
from specgen.row_file import RowFile
from specgen.status import Status, kept_status
from specgen.survey import Survey, survey

_FAILURES_SHOWN = 3
_REMEDY = "name another directory, or begin anew with --restart, which keeps the old one"


class TooManyFailuresError(Exception):
    """More requests failed than the user lets pass; the text is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of ``specgen generate``. More than ``max_failures`` failed requests end it; None: none do."""

    engine: EngineConfig
    sampling: SamplingParams
    dataset: str
    data_path: Path | None
    num_prompts: int | None
    baseline: bool
    restart: bool = False  # what the output holds is set aside
    max_failures: int | None = None

    def __post_init__(self) -> None:
        require(
            self.max_failures is None or self.max_failures >= 0,
            f"max-failures is {self.max_failures}: use 0 or more",
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run gave, for printing."""

    report: Mapping[str, Any]  # as in report.json
    settings: Mapping[str, str]
    samples: list[tuple[str, str]]  # what was asked and answered first, to show
    failures: list[str]  # the first of what could not be run, and why


class Progress(Protocol):
    """Follows a run while it goes."""

    def prepare(self, what: str) -> None:
        """``what`` is being made ready: kernels are loaded, or compiled where this machine has not run them before."""
        ...

    def start(self, what: str, num_requests: int, num_done: int = 0) -> None:
        """``what`` begins, with so many requests, ``num_done`` of which an earlier run has answered."""
        ...

    def see(self, event: Event) -> None:
        """Something happened."""
        ...

    def advance(self) -> None:
        """One more request has ended, and what it gave is kept."""
        ...

    def finish(self) -> None:
        """What was started is over."""
        ...


def run(job: Job, output: Path | None, progress: Progress, until: Callable[[], bool] = until_done) -> Result:
    """Run ``job``, or what an earlier run has left of it, and leave its files in ``output``, or nowhere if None.

    ``until`` is asked between steps; once it is true the run ends with ``StoppedError``, and beyond
    ``job.max_failures`` with ``TooManyFailuresError``: what is done by then is kept, and the same job goes on.
    ``ValueError`` for what cannot run, and for an ``output`` that holds something else, is in use, or cannot be
    written.
    """
    config = resolve(job.engine)
    prompts = open_prompts(job.dataset, data_path=job.data_path, num_prompts=job.num_prompts)
    found = survey(job.dataset, prompts)
    if output is not None and job.restart:
        set_aside(output, "manifest.json")
    with directory(output, "manifest.json") as path:
        asked = _manifest(job, config, found, with_fingerprints=output is not None)
        require_same(path / "manifest.json", asked, free=FREE_IN_A_RUN, remedy=_REMEDY)
        if not _is_finished(path, job):
            with kept_status(path / "status.json") as status:
                work = _Work(
                    job=job, prompts=prompts, survey=found, progress=progress, status=status, until=until
                )
                _write_report(path, job, work.report(config, path))
        return _result(path, found)


@dataclass(kw_only=True)
class _Work:
    """What is done for a job: the same prompts through an engine, and for a baseline through another."""

    job: Job
    prompts: PromptSet
    survey: Survey
    progress: Progress
    status: Status
    until: Callable[[], bool]
    models: Models | None = None  # once an engine has loaded them

    def report(self, config: EngineConfig, path: Path) -> Report:
        """Answer everything and fold what happened."""
        main = self._answer(config, path)
        report = fold(main.events(), num_spec_tokens=config.num_spec_tokens)
        report = replace(report, num_errors=len(main.errors))  # rows that were never a request among them
        if not self.job.baseline:
            return report
        base = self._answer(config.plain(), path / "baseline")
        return report.with_baseline(fold(base.events(), num_spec_tokens=0), *_identical(main, base))

    def _answer(self, config: EngineConfig, path: Path) -> RunDirectory:
        with RunDirectory(path) as files:
            if len(files.completions) < len(self.survey.ids):
                self._generate(config, files)
        files.arrange(self.survey.ids)
        return files

    def _generate(self, config: EngineConfig, files: RunDirectory) -> None:
        def record(event: Event) -> None:
            files.add_event(event)
            self.progress.see(event)
            self.status.see(event)

        name = "plain decoding" if config.num_spec_tokens == 0 else "EAGLE3"
        if config.device != "cpu":
            self.progress.prepare(name)
        engine = Engine(config, record=record, models=self.models)
        self.models = engine.models
        if self.survey.has_chats:
            self.models.tokenizer.require_chat_template()
        total, done = len(self.survey.ids), len(files.completions)
        self.status.begin(total=total, done=done)
        self.progress.start(name, total, done)
        outputs = engine.generate(
            self.prompts,
            self.job.sampling,
            earlier=files.texts,
            until=lambda: self.until() or self._too_many(files),
        )
        try:
            for output in outputs:
                self._keep(output, files)
        finally:
            self.progress.finish()
        self._require_all(files)

    def _keep(self, output: RequestOutput, files: RunDirectory) -> None:
        if output.error is None:
            files.add_completion(output.to_row())
        else:
            files.add_error(output.to_row())
        self.status.count(done=len(files.completions), failed=len(files.errors))
        self.progress.advance()

    def _too_many(self, files: RunDirectory) -> bool:
        return self.job.max_failures is not None and len(files.errors) > self.job.max_failures

    def _require_all(self, files: RunDirectory) -> None:
        """Every request is done or failed, unless the run was ended before."""
        done, failed, total = len(files.completions), len(files.errors), len(self.survey.ids)
        if self._too_many(files):
            raise TooManyFailuresError(
                f"{failed} requests failed, more than max-failures {self.job.max_failures}; "
                f"{done} of {total} are done"
            )
        if done + failed < total:
            raise StoppedError(f"interrupted with {done} of {total} requests done")


def _identical(main: RunDirectory, base: RunDirectory) -> tuple[float, int]:
    """Share of requests with the same tokens in both runs, and how many were compared."""
    both = [name for name in main.completions if name in base.completions]
    same = sum(main.completions[name]["token_ids"] == base.completions[name]["token_ids"] for name in both)
    return (same / len(both) if both else 0.0), len(both)


def _is_finished(path: Path, job: Job) -> bool:
    """Whether an earlier run has left nothing to do, no failed request either."""
    if not (path / "report.json").exists() or _read(path / "status.json")["state"] != "finished":
        return False
    report = _read(path / "report.json")
    return report["num_errors"] == 0 and (report["baseline"] is not None or not job.baseline)


def _result(path: Path, found: Survey) -> Result:
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


def _write_report(path: Path, job: Job, report: Report) -> None:
    document, settings = report.to_json(), _read(path / "manifest.json")["settings"]
    title = f"{Path(job.engine.model).name} on {job.dataset}"
    write_text(path / "report.html", report_html.render(document, settings, title))
    write_json(path / "report.json", document)


def _manifest(job: Job, config: EngineConfig, found: Survey, *, with_fingerprints: bool) -> dict[str, Any]:
    checkpoints = open_checkpoints(config)
    data = {
        "dataset": job.dataset,
        "data_path": str(job.data_path) if job.data_path else None,
        "num_prompts": job.num_prompts,
        "sha256": found.digest,
    }
    return manifest(
        engine=config,
        sampling=job.sampling,
        data=data,
        fingerprints={name: fingerprint(checkpoint) for name, checkpoint in checkpoints.items()}
        if with_fingerprints
        else {},  # reading all weights takes a while
    ) | {"settings": _settings(job, config, described(config.model, checkpoints["model"]), found.num_prompts)}


def _settings(job: Job, config: EngineConfig, model: str, num_prompts: int) -> dict[str, str]:
    """What runs, in the words that head a report."""
    sampling = job.sampling
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    plain = config.num_spec_tokens == 0
    return {
        "model": model,
        "drafter": "none (plain decoding)" if plain else from_here(str(config.drafter)),
        "draft tokens (K)": draft_length(config.num_spec_tokens, config.spec_length),
        **({} if plain else {"drafter batch": config.drafter_batch}),
        "data": f"{job.dataset}, {num_prompts} prompts",
        "sampling": f"{how}, at most {sampling.max_tokens} new tokens, seed {sampling.seed}",
        "runs on": f"{config.device}, {config.dtype}",
        "attention": f"{config.attention}: {choose_attention(replace(config, attention=job.engine.attention))[1]}",
        **({} if config.device == "cpu" else {"CUDA graphs": config.cuda_graphs}),
        "batch": f"at most {config.max_batch_size}",
    }
