"""The main job: prompts through an engine into a run directory, and the report of it."""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from specgen import report_html
from specgen.build import Models, build_engine, choose_attention, load_models, resolve
from specgen.checkpoint import fingerprint
from specgen.config import EngineConfig, SamplingParams
from specgen.conversations import Conversations, rejected_row
from specgen.display import draft_length, from_here
from specgen.events import Event, Finished, Submitted, Verified
from specgen.prompts import Prompt, Rejected, load_prompts
from specgen.provenance import manifest
from specgen.report import Report, fold, fold_request
from specgen.results import RunDirectory, directory, require_free, write_json, write_text


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of ``specgen generate``."""

    engine: EngineConfig
    sampling: SamplingParams
    dataset: str
    data_path: Path | None
    num_prompts: int | None
    baseline: bool


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run gave, for printing."""

    report: Report
    settings: dict[str, str]
    samples: list[tuple[str, str]]  # what was asked and answered first, to show
    failures: list[str]  # what could not be run, and why


class Progress(Protocol):
    """Follows a run while it goes."""

    def prepare(self, what: str) -> None:
        """``what`` is being made ready: kernels are loaded, or compiled where this machine has not run them before."""
        ...

    def start(self, what: str, num_requests: int) -> None:
        """``what`` begins, with so many requests."""
        ...

    def see(self, event: Event) -> None:
        """Something happened."""
        ...

    def finish(self) -> None:
        """What was started is over."""
        ...


def run(job: Job, output: Path | None, progress: Progress) -> Result:
    """Run ``job`` and leave its files in ``output``, or nowhere if None. ``ValueError`` for what cannot run."""
    config = resolve(job.engine)
    if output is not None:
        require_free(output)
    prompts, rejected = load_prompts(job.dataset, data_path=job.data_path, num_prompts=job.num_prompts)
    if not prompts:
        raise ValueError(
            f"none of the {len(rejected)} rows of {job.dataset} can be run: {rejected[0].reason}"
        )
    models = load_models(config)
    if any(prompt.messages for prompt in prompts):
        models.tokenizer.require_chat_template()
    settings = _settings(job, config, models, len(prompts))
    with directory(output) as path:
        main = _generate(config, job.sampling, models, prompts, rejected, path, progress)
        report = fold(main.events(), num_spec_tokens=config.num_spec_tokens)
        if job.baseline:
            base = _generate(
                config.plain(), job.sampling, models, prompts, rejected, path / "baseline", progress
            )
            identical, compared = _identical(main, base)
            report = report.with_baseline(fold(base.events(), num_spec_tokens=0), identical, compared)
        if output is not None:
            _write_reports(path, job, config, models, report, settings)
        rows = list(main.completions())
        failures = [f"{row['id']}: {row['error']}" for row in rows if "error" in row]
        return Result(report=report, settings=settings, samples=_samples(rows, prompts), failures=failures)


def _generate(
    config: EngineConfig,
    sampling: SamplingParams,
    models: Models,
    prompts: list[Prompt],
    rejected: list[Rejected],
    path: Path,
    progress: Progress,
) -> RunDirectory:
    steps: dict[str, list[Verified]] = defaultdict(list)

    def record(event: Event) -> None:
        files.add_event(event)
        progress.see(event)
        if isinstance(event, Verified):
            steps[event.sequence].append(event)

    def reject(row: Rejected) -> None:
        record(Submitted(sequence=row.id, time=0.0, num_prompt_tokens=0))
        record(Finished(sequence=row.id, time=0.0, reason="error", num_output_tokens=0))
        files.add_completion(rejected_row(row))

    name = "plain decoding" if config.num_spec_tokens == 0 else "EAGLE3"
    if config.device != "cpu":
        progress.prepare(name)
    engine = build_engine(config, models, record)
    engine.warm_up()
    conversations = Conversations(prompts, models.tokenizer, sampling, reject)
    ids = conversations.ids
    files = RunDirectory(path)
    progress.start(name, len(ids) + len(rejected))
    for row in rejected:
        reject(row)
    for completion in engine.generate(conversations.first_turns(), conversations.follow_up):
        metrics = fold_request(steps.pop(completion.request.id, []), config.num_spec_tokens)
        files.add_completion(conversations.answer(completion) | {"metrics": metrics.to_json()})
    files.close(ids)
    progress.finish()
    return files


def _samples(rows: list[dict[str, Any]], prompts: list[Prompt], count: int = 2) -> list[tuple[str, str]]:
    """The first prompts and their answers, or why there is none."""
    answers = {row["id"]: row.get("error") or row["text"] for row in rows}
    return [(prompt.last_words, answers[prompt.id]) for prompt in prompts[:count]]


def _identical(main: RunDirectory, base: RunDirectory) -> tuple[float, int]:
    """Share of requests with the same tokens in both runs, and how many were compared."""
    ours, theirs = (
        {row["id"]: row["token_ids"] for row in run.completions() if "error" not in row}
        for run in (main, base)
    )
    pairs = [(tokens, theirs[name]) for name, tokens in ours.items() if name in theirs]
    same = sum(left == right for left, right in pairs)
    return (same / len(pairs) if pairs else 0.0), len(pairs)


def _write_reports(
    path: Path, job: Job, config: EngineConfig, models: Models, report: Report, settings: dict[str, str]
) -> None:
    data = {
        "dataset": job.dataset,
        "data_path": str(job.data_path) if job.data_path else None,
        "num_prompts": job.num_prompts,
    }
    write_json(
        path / "manifest.json",
        manifest(
            engine=config,
            sampling=job.sampling,
            data=data,
            fingerprints={name: fingerprint(checkpoint) for name, checkpoint in models.checkpoints.items()},
        )
        | {"settings": settings},
    )
    write_json(path / "report.json", report.to_json())
    title = f"{Path(config.model).name} on {job.dataset}"
    write_text(path / "report.html", report_html.render(report.to_json(), settings, title))


def _settings(job: Job, config: EngineConfig, models: Models, num_prompts: int) -> dict[str, str]:
    """What ran, in the words that head a report."""
    sampling = job.sampling
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    plain = config.num_spec_tokens == 0
    return {
        "model": models.described(config.model),
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
