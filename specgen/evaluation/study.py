"""A study at work: every arm of it runs lm-eval's tasks on an engine of its own over the same models."""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from specgen import events
from specgen.build import Models, build_engine, load_models, resolve
from specgen.checkpoint import fingerprint
from specgen.config import EngineConfig, SamplingParams, require
from specgen.evaluation import study_html
from specgen.evaluation.arms import ArmRun, Sample
from specgen.evaluation.compare import Comparison
from specgen.evaluation.language_model import SpecgenLM
from specgen.evaluation.studies import Study
from specgen.evaluation.tasks import local_gsm8k, word_problems_task
from specgen.events import Event
from specgen.provenance import manifest
from specgen.report import fold
from specgen.results import write_json, write_text

_MAX_TOKENS = 256  # of an answer whose task names no limit, as in lm-eval


@dataclass(frozen=True, kw_only=True)
class StudyJob:
    """One ``specgen eval``: what all arms share. ``engine`` is what an arm does not change."""

    study: Study
    engine: EngineConfig
    apply_chat_template: bool
    data_path: Path | None = None  # of GSM8K, instead of the hub
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What one arm gave; ``results`` is lm-eval's own document, samples included."""

    run: ArmRun
    results: Mapping[str, Any]
    manifest: Mapping[str, Any]  # what ran
    events: tuple[Event, ...]

    @property
    def table(self) -> str:
        """lm-eval's table."""
        text: str = make_table(self.results)
        return text


def run(job: StudyJob) -> Iterator[ArmResult]:
    """Yield the arms as they finish. ``ValueError``, before anything runs, for a task or an arm that cannot."""
    study = job.study
    configs = [resolve(arm.configure(job.engine)) for arm in study.arms]
    manager, tasks = TaskManager(), _tasks(study.tasks, job.data_path)
    _require_tasks(manager, tasks)
    loaded: dict[str, Models] = {}
    fingerprints: dict[str, str] = {}
    for arm, config in zip(study.arms, configs, strict=True):
        if config.dtype not in loaded:
            loaded.clear()  # the weights of one number format at a time
            most = max(other.num_spec_tokens for other in configs)
            loaded[config.dtype] = load_models(replace(config, num_spec_tokens=most))
            fingerprints |= {
                name: fingerprint(checkpoint)
                for name, checkpoint in loaded[config.dtype].checkpoints.items()
                if name not in fingerprints  # reading all weights takes a while
            }
        if job.apply_chat_template:
            loaded[config.dtype].tokenizer.require_chat_template()
        drawn = None if arm.temperature is None else _drawn(arm.temperature)
        yield _run_arm(job, arm.name, config, loaded[config.dtype], (manager, tasks), drawn, fingerprints)


def _run_arm(
    job: StudyJob,
    name: str,
    config: EngineConfig,
    models: Models,
    tasks: tuple[TaskManager, list[str | dict[str, Any]]],
    gen_kwargs: dict[str, Any] | None,
    fingerprints: dict[str, str],
) -> ArmResult:
    seen: list[Event] = []
    engine = build_engine(config, models, seen.append)
    engine.warm_up()
    sampling = SamplingParams(max_tokens=_MAX_TOKENS, seed=job.seed)
    lm = SpecgenLM(engine=engine, models=models, sampling=sampling)
    results = simple_evaluate(
        model=lm,
        tasks=deepcopy(tasks[1]),  # an arm's generation arguments are written into them
        task_manager=tasks[0],
        num_fewshot=job.study.num_fewshot,
        limit=job.study.limit,
        apply_chat_template=job.apply_chat_template,
        gen_kwargs=gen_kwargs,
    )
    assert results is not None, "only other ranks than the first get None"
    found = ArmRun(
        name=name,
        seconds=lm.seconds,
        report=fold(seen, num_spec_tokens=config.num_spec_tokens),
        samples=tuple(_samples(results["samples"], lm.token_ids)),
    )
    ran = manifest(
        engine=config,
        sampling=sampling,
        data={"tasks": job.study.tasks, "data_path": str(job.data_path) if job.data_path else None},
        fingerprints=fingerprints,
    )
    return ArmResult(run=found, results=results, manifest=ran, events=tuple(seen))


def _drawn(temperature: float) -> dict[str, Any]:
    """An arm's temperature as generation arguments, which come before those of the task."""
    return {"do_sample": temperature > 0, "temperature": temperature}


def write_arm(result: ArmResult, path: Path) -> None:
    """Leave an arm's files in the new directory ``path``, which ``specgen report`` can read."""
    path.mkdir(parents=True)
    summary = {key: value for key, value in result.results.items() if key != "samples"}
    write_text(path / "results.json", _json(summary))
    write_json(path / "manifest.json", result.manifest)
    write_json(path / "report.json", result.run.report.to_json())
    events.write(path / "events.jsonl", result.events)


def write_comparison(job: StudyJob, comparison: Comparison, path: Path) -> None:
    """Leave what the arms show together in ``path``, as data and as a page."""
    study = job.study
    settings = {
        "model": job.engine.model,
        "drafter": str(job.engine.drafter),
        "tasks": ", ".join(study.tasks),
        "arms": ", ".join(arm.name for arm in study.arms),
        "samples of a task": "all" if study.limit is None else f"the first {study.limit}",
    }
    title = f"{Path(job.engine.model).name} on {settings['tasks']}"
    write_json(path / "comparison.json", comparison.to_json())
    write_text(path / "report.html", study_html.render(comparison, settings, title))


def write_samples(result: ArmResult, path: Path) -> None:
    """Leave lm-eval's samples in ``path``, a file for every task."""
    for task, rows in result.results["samples"].items():
        write_text(path / f"samples_{task.replace('/', '-')}.json", _json(rows))


def _json(document: object) -> str:
    return json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n"


# --- tasks ----------------------------------------------------------------------------------------


def _tasks(names: Sequence[str], data_path: Path | None) -> list[str | dict[str, Any]]:
    """lm-eval's names, or whole configurations where the data is on this machine."""
    require(
        data_path is None or "gsm8k" in names,
        f"data-path is {str(data_path)!r} but only gsm8k is read from there: leave it out, or name that task",
    )
    local: dict[str, dict[str, Any]] = {}
    if "word_problems" in names:
        local["word_problems"] = word_problems_task()
    if data_path is not None:
        local["gsm8k"] = local_gsm8k(data_path)
    return [local.get(name, name) for name in names]


def _require_tasks(manager: TaskManager, tasks: list[str | dict[str, Any]]) -> None:
    """Load every task once, so that one that is not there is found before the models are loaded."""
    for task in tasks:
        name = task if isinstance(task, str) else task["task"]
        require(
            not isinstance(task, str) or task in manager.all_tasks,
            f"task {name!r} is not one of lm-eval's: `lm-eval ls tasks` lists them",
        )
        try:
            manager.load([task])
        except Exception as error:  # data sets and their hub raise what they like
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"task {name!r} has no data here ({reason}): connect to the hub, or for gsm8k use --data-path"
            ) from error


# --- samples --------------------------------------------------------------------------------------


def _samples(
    logged: Mapping[str, list[dict[str, Any]]], token_ids: Mapping[tuple[str, int], tuple[int, ...]]
) -> Iterator[Sample]:
    """lm-eval's samples, a sample for every metric that is a share; perplexities compare by themselves."""
    for task, rows in logged.items():
        for row in rows:
            for metric in row["metrics"]:
                score = row[metric]
                if isinstance(score, int | float) and 0 <= score <= 1:
                    yield Sample(
                        task=task,
                        doc_id=row["doc_id"],
                        metric=f"{metric},{row['filter']}",
                        score=float(score),
                        text=_text(row["resps"]),
                        token_ids=token_ids.get((task, row["doc_id"]), ()),
                        question=_question(row),
                    )


def _text(responses: list[list[Any]]) -> str:
    """What was written, or which choice was the likeliest."""
    first = responses[0][0]
    if isinstance(first, str):
        return first
    likelihoods = [float(response[0][0]) for response in responses]
    return f"choice {likelihoods.index(max(likelihoods))}"


def _question(row: Mapping[str, Any]) -> str:
    """The document's own question where it has one, else the whole prompt."""
    own = row["doc"].get("question")
    return own if isinstance(own, str) else str(row["arguments"][0][0])
