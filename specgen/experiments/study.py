"""Runs a study: every arm evaluates lm-eval's tasks on its own engine, with shared weights."""

import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy
import torch
import yaml
from lm_eval import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from specgen.checkpoints.fingerprint import fingerprint
from specgen.config import EngineConfig, SamplingParams, TemplateKwargs, UserError, require
from specgen.config.bundled import evaluation_directory
from specgen.config.errors import did_you_mean
from specgen.engine.arms import Arm
from specgen.engine.choices import attention_note, resolve
from specgen.engine.generation_config import FILE, generation_config
from specgen.engine.loading import Models, described, load_chat_tokenizer, load_models, open_checkpoints
from specgen.experiments import study_tables
from specgen.experiments.audit import Judge
from specgen.experiments.language_model import SpecgenLM
from specgen.experiments.studies import Asking, Study
from specgen.experiments.study_comparison import ArmRun, StudyComparison, answers, compare, reference_of
from specgen.jobs.run_output import FinishedRun
from specgen.record import columns
from specgen.record.files import write_json, write_text
from specgen.record.progress import Progress
from specgen.record.provenance import MACHINE, manifest, now, state_after, with_recorded_date
from specgen.record.results import RunDirectory, require_same
from specgen.report.display import checkpoint_name, devices, from_here
from specgen.report.origin import origin
from specgen.report.report import report_categories
from specgen.report.table import Column, Table
from specgen.storage import file_digest

_PYTHON_SEED, _SEED = 0, 1234  # lm-eval's defaults
_FORMATS = {".jsonl": "json", ".parquet": "parquet"}  # suffix: builder of ``datasets``


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """lm-eval's task names, or whole configurations for local data."""

    manager: TaskManager
    configs: list[str | dict[str, Any]]

    def load(self, num_fewshot: int | None, n: int | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The tasks for lm-eval's ``evaluate``, the same documents and examples at every call.

        As its ``simple_evaluate`` makes them, which besides collects what a run's manifest has anyway, for seconds an
        arm. ``num_fewshot`` replaces the number of examples of tasks that have any, unless None; ``n`` that
        of samples (``repeats``), and ``arguments`` are over those, of tasks that generate texts.
        """
        random.seed(_PYTHON_SEED)
        numpy.random.seed(_SEED)
        torch.manual_seed(_SEED)
        loaded: dict[str, Any] = self.manager.load(deepcopy(self.configs))
        for task in loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            task.set_config("num_fewshot", own or 0 if num_fewshot is None or own == 0 else num_fewshot)
            if task.get_config("output_type") == "generate_until":
                task.set_config("generation_kwargs", arguments, update=True)
                if n is not None:
                    asked = task.get_config("generation_kwargs") or {}
                    require(
                        n == 1 or (asked.get("do_sample", True) and asked.get("temperature", 0) > 0),
                        f"n is {n} and {task.get_config('task')!r} is answered greedily, each time alike: give the "
                        "arms a temperature in --study, or leave n out",
                    )
                    task.set_config("repeats", n)
            task.set_fewshot_seed(_SEED)
        return loaded


def find_tasks(names: Sequence[str], data_path: Path | None, *, runs_code: bool = False) -> Tasks:
    """The tasks of these names, with GSM8K from ``data_path`` unless None.

    Every task is loaded once, so that an unknown name or missing data is a ``UserError`` before any model is loaded.
    """
    require(
        data_path is None or "gsm8k" in names,
        f"data-path is {str(data_path)!r} but only gsm8k is read from there: leave it out, or name that task",
    )
    local: dict[str, dict[str, Any]] = {}
    if "word_problems" in names:
        local["word_problems"] = word_problems_task()
    if data_path is not None:
        local["gsm8k"] = local_gsm8k(data_path)
    manager = _manager([name for name in names if name not in local])
    tasks = Tasks(manager=manager, configs=[local.get(name, name) for name in names])
    for task in tasks.configs:
        _require_loads(tasks.manager, task, runs_code)
    return tasks


def _manager(names: Sequence[str]) -> TaskManager:
    """An index of lm-eval's own tasks ``names``; of all, which takes seconds, only where that is needed.

    Most tasks are in a directory whose name theirs begins with. Groups and tags may gather tasks of several
    directories, so they need the whole index.
    """
    directories = Path(lm_eval.tasks.__file__).parent
    near = [
        str(directory)
        for directory in sorted(directories.iterdir())
        if directory.is_dir() and any(f"{name}_".startswith(f"{directory.name}_") for name in names)
    ]
    manager = TaskManager(include_defaults=False, include_path=near)
    return manager if set(names) <= set(manager.all_subtasks) else TaskManager()


def _require_loads(manager: TaskManager, task: str | dict[str, Any], runs_code: bool = False) -> None:
    name = task if isinstance(task, str) else task["task"]
    # not `require`: thousands of names are compared
    if isinstance(task, str) and task not in manager.all_tasks:
        meant = did_you_mean(name, ("word_problems", *manager.all_tasks))
        raise UserError(f"task {name!r} is not one of lm-eval's{meant}: `lm-eval ls tasks` lists them")
    try:
        loaded = manager.load([task])["tasks"]
    except Exception as error:  # data sets and the hub raise many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"task {name!r} has no data here ({reason}): connect to the hub, or for gsm8k use --data-path"
        ) from error
    is_unsafe, has_pictures = (
        any(getattr(each, flag, False) for each in loaded.values()) for flag in ("UNSAFE_CODE", "MULTIMODAL")
    )
    require(not has_pictures, f"task {name!r} shows pictures, which is not done here: use one of text alone")
    require(
        not is_unsafe or runs_code,
        f"task {name!r} runs code that a model has written, on this machine: in a container without a network, say so "
        "with --confirm-run-unsafe-code",
    )


def word_problems_task() -> dict[str, Any]:
    """The configuration of ``word_problems``, its paths absolute as lm-eval's start at the working directory."""
    path = evaluation_directory() / "tasks" / "word_problems.yaml"
    config = _read_yaml(path)
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"] = {
        "data_files": {split: str(path.parent / file) for split, file in files.items()}
    }
    return config


def local_gsm8k(path: Path) -> dict[str, Any]:
    """lm-eval's own ``gsm8k``, reading train and test from the directory ``path`` instead of the hub.

    The files are ``train.jsonl`` and ``test.jsonl`` (openai/grade-school-math) or the hub's Parquet files, in
    ``path`` or ``path/main``. ``UserError`` if they are missing.
    """
    format_name, files = _splits(path)
    config = _read_yaml(Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml")
    del config["dataset_name"]  # the hub's configuration; a local file has none
    return {**config, "dataset_path": format_name, "dataset_kwargs": {"data_files": files}}


def _splits(path: Path) -> tuple[str, dict[str, list[str]]]:
    """The format and files of both splits; ``path`` comes before ``path/main``, JSON before Parquet.

    ``datasets`` would also take files beside them as parts of a split, such as openai's ``train_socratic.jsonl``.
    """
    for directory, (suffix, format_name) in product((path, path / "main"), _FORMATS.items()):
        files = {
            split: [*directory.glob(f"{split}{suffix}")] or sorted(directory.glob(f"{split}-*-of-*{suffix}"))
            for split in ("train", "test")
        }
        if all(files.values()):
            return format_name, {
                split: [str(each.resolve()) for each in found] for split, found in files.items()
            }
    raise UserError(
        f"data-path is {str(path)!r}, which has no train and test files of GSM8K: "
        "name the directory with train.jsonl and test.jsonl, or with the hub's Parquet files"
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config


_REMEDY = "name a new directory, or ask for the same"
_LM_EVAL = tuple(
    Column(name=name) for name in ("Tasks", "Version", "Filter", "n-shot", "Metric", "Value", "Stderr")
)
_MAX_TOKENS = 256  # default limit of an answer, as in lm-eval


@dataclass(frozen=True, kw_only=True)
class StudyJob(Asking):
    """One run of ``specgen eval``; ``engine`` is the configuration that arms change."""

    study: Study
    engine: EngineConfig

    def __post_init__(self) -> None:
        kwargs = self.engine.template_kwargs
        require(
            self.apply_chat_template or kwargs == TemplateKwargs(),
            f"chat-template-kwargs is {kwargs} but prompts are raw text: add --apply-chat-template",
        )

    def to_json(self) -> dict[str, Any]:
        """The content of ``study.json``; an evaluation resumes only if it is unchanged."""
        own = {} if self.data_path is None else {"data": self.data()}
        fields = asdict(self)
        del fields["confirm_run_unsafe_code"]
        if self.n is None:  # as of a version that did not know it
            del fields["n"]
        return fields | {
            "study": self.study.to_json(),
            "engine": self.engine.to_json(),
            "data_path": str(self.data_path) if self.data_path else None,
            **own,
        }

    def data(self) -> dict[str, Any]:
        """Tasks, and of rows in files of the user's their content; for manifests."""
        tasks, path = list(self.study.tasks), self.data_path
        if path is None:
            return {"tasks": tasks, "data_path": None}
        digests = [[file_digest(Path(file)) for file in files] for files in _splits(path)[1].values()]
        return {"tasks": tasks, "data_path": str(path), "sha256": sha256(str(digests).encode()).hexdigest()}


class StudyRun:
    """The arms of a study and their shared weights.

    Each arm has a directory in ``path`` where answers are written as they arrive; a killed evaluation resumes from
    them. ``UserError``, before anything runs, for a task or an arm that cannot run and for the directory of another
    study.
    """

    def __init__(self, job: StudyJob, path: Path, progress: Progress) -> None:
        self._job = job
        self._progress = progress
        self._path = path
        arms = {arm.name: arm.configure(job.engine) for arm in job.study.arms}
        self._checkpoints = open_checkpoints(max(arms.values(), key=lambda config: config.draft_length.most))
        resolved = {name: resolve(config, self._checkpoints) for name, config in arms.items()}
        began = min(path.glob("*/manifest.json"), default=path / "manifest.json")  # of any arm that has run
        self._configs = {
            name: with_recorded_date(config, arms[name], began) for name, config in resolved.items()
        }
        self._began = now(next(iter(self._configs.values())).device)  # before this run makes the machine busy
        runs_code = job.confirm_run_unsafe_code
        self._tasks = find_tasks(job.study.tasks, job.data_path, runs_code=runs_code)
        tokenizer = load_chat_tokenizer(next(iter(self._configs.values())), self._checkpoints)
        if job.apply_chat_template:  # refused before there is a directory with it
            tokenizer.require_chat_template()
        elif tokenizer.chat_template:
            progress.warn(
                "all prompts are raw text, but the model has a chat template: a chat model may end raw text at once. "
                "Add --apply-chat-template to ask them as a chat"
            )
        if job.n is not None:  # refused before there is a directory with it
            for arm in job.study.arms:
                self._tasks.load(job.study.num_fewshot, job.n, self._arguments(arm))
        self._generation = generation_config(self._checkpoints["model"], job.engine.generation_config)
        if said := self._generation.sentence():
            progress.note(f"{FILE}: {said}")
        path.mkdir(parents=True, exist_ok=True)
        batch = ("engine.max_batch_size", "study.max_batch_size")  # each arm's manifest has what it is
        require_same(path / "study.json", job.to_json(), free=("data_path", *batch), remedy=_REMEDY)
        self._loaded: dict[str, Models] = {}  # by dtype
        # once, as it reads all weights
        self._fingerprints = {name: fingerprint(each) for name, each in self._checkpoints.items()}

    def arms(self) -> Iterator[ArmRun]:
        """Yield the arms as they finish, after their files are written."""
        for arm in self._job.study.arms:
            yield self._run(arm)

    def compare(self, runs: Sequence[ArmRun]) -> StudyComparison:
        """Compare the arms; writes ``comparison.json`` and ``report.html``."""
        config = self._configs[reference_of(runs).name]
        models = self._models(config)
        comparison = compare(
            runs,
            Judge.of(config, models),
            template_unused=not self._job.apply_chat_template and bool(models.tokenizer.chat_template),
        )
        write_json(self._path / "comparison.json", comparison.to_json())
        page = study_tables.page(comparison, self.settings(), self._title(), origin(self._began))
        write_text(self._path / "report.html", page)
        return comparison

    def _title(self) -> str:
        return f"{checkpoint_name(self._job.engine.model)} on {', '.join(self._job.study.tasks)}"

    def settings(self) -> dict[str, str]:
        """The settings at the top of a report."""
        job, study, configs = self._job, self._job.study, self._configs.values()
        few, limit = study.num_fewshot, study.limit
        chats = next(iter(configs)).template_kwargs
        return {
            "model": described(job.engine.model, self._checkpoints["model"]),
            "drafter": from_here(job.engine.drafter or "none"),
            "draft tokens (K)": _every(
                str(config.draft_length) for config in configs if config.draft_length.most
            ),
            "tasks": ", ".join(study.tasks),
            "prompts": "as a chat" if job.apply_chat_template else "as raw text",
            **({"template": str(chats)} if job.apply_chat_template and chats != TemplateKwargs() else {}),
            "shots": "as the task says" if few is None else str(few),
            "samples": "all of a task" if limit is None else f"the first {limit} of a task",
            **({} if job.n is None else {"texts of each": str(job.n)}),
            "runs on": _every(_where(config) for config in configs),
            "attention": _every(config.attention for config in configs),
            "batch": _every(f"at most {config.max_batch_size}" for config in configs),
            **({"generation config": said} if (said := self._generation.sentence()) else {}),
            "arms": " · ".join(arm.name for arm in study.arms),
        }

    def _settings_of(self, arm: Arm) -> dict[str, str]:
        """The settings at the top of the report of one arm."""
        config, shared = self._configs[arm.name], self.settings()
        del shared["arms"]
        if not config.draft_length.most:
            shared["drafter"] = "none (plain decoding)"
        return {
            "arm": arm.name,
            **shared,
            "draft tokens (K)": str(config.draft_length),
            "runs on": _where(config),
            "attention": attention_note(config, self._checkpoints),
            **({} if config.head is None else {"drafter batch": config.drafter_batch}),
        }

    def _arguments(self, arm: Arm) -> dict[str, Any]:
        """An arm's temperature and the longest text as generation arguments, which override the task's."""
        temperature, longest = arm.changes.get("temperature"), self._job.max_new_tokens
        sampled = {} if temperature is None else {"do_sample": temperature > 0, "temperature": temperature}
        return sampled | ({} if longest is None else {"max_gen_toks": longest})

    def _models(self, config: EngineConfig) -> Models:
        """The weights in the dtype of ``config``; only one dtype is in memory at a time."""
        if config.dtype not in self._loaded:
            self._loaded.clear()
            most = max(other.draft_length.most for other in self._configs.values())
            asked = replace(config, num_spec_tokens=most)
            self._loaded[config.dtype] = load_models(asked, self._checkpoints)
        return self._loaded[config.dtype]

    def _run(self, arm: Arm) -> ArmRun:
        job, config, path = self._job, self._configs[arm.name], self._path / arm.name
        models = self._models(config)
        sampling = self._generation.over(SamplingParams(max_tokens=_MAX_TOKENS, seed=job.seed))
        path.mkdir(parents=True, exist_ok=True)
        asked = manifest(
            engine=config, sampling=sampling, data=job.data(), fingerprints=self._fingerprints
        ) | {"settings": self._settings_of(arm)}
        require_same(path / "manifest.json", asked, free=MACHINE, remedy=_REMEDY)
        arguments = self._arguments(arm)
        began = time.time()
        with RunDirectory(path) as files:
            lm = SpecgenLM(
                config=config,
                models=models,
                sampling=sampling,
                files=files,
                progress=self._progress,
                name=arm.name,
                may_cut=job.max_new_tokens is None,
            )
            results = evaluate(
                lm,
                self._tasks.load(job.study.num_fewshot, job.n, arguments),
                limit=job.study.limit,
                apply_chat_template=job.apply_chat_template,
                fewshot_as_multiturn=True,
                confirm_run_unsafe_code=job.confirm_run_unsafe_code,
            )
        assert results is not None, "only other ranks than the first get None"
        files.arrange(lm.order())
        finished = FinishedRun(path, files.completions, files.errors)
        run = ArmRun(
            name=arm.name,
            dtype=config.formats,
            seconds=lm.seconds,
            report=finished.write_report(None, asked["state"], state_after(config)),
            answers=answers(results["samples"], lm.generated),
            results=results,
            tasks=report_categories(columns.read(path, config.draft_length.most, files.completions)),
            cut=lm.cut,
        )
        own = {"config": _lm_eval_config(config, job.study.limit, arguments), "date": began}
        summary = {key: value for key, value in results.items() if key != "samples"}
        write_text(path / "results.json", _json(summary | own))
        return run


def _every(values: Iterable[object]) -> str:
    """The distinct values, in order."""
    return " or ".join(dict.fromkeys(map(str, values))) or "none"


def _lm_eval_config(config: EngineConfig, limit: int | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What lm-eval's ``simple_evaluate`` says in ``config`` of the model and of how it was asked."""
    return {
        "model": "specgen",
        "model_args": {
            "pretrained": config.model,
            "dtype": config.dtype,
            "drafter": config.drafter if config.draft_length.most else None,
            "num_spec_tokens": str(config.draft_length),
        },
        "batch_size": config.max_batch_size,
        "batch_sizes": [],
        "device": config.device,
        "use_cache": None,
        "limit": limit,
        "bootstrap_iters": signature(evaluate).parameters["bootstrap_iters"].default,
        "gen_kwargs": dict(arguments),
        "random_seed": _PYTHON_SEED,
        **dict.fromkeys(("numpy_seed", "torch_seed", "fewshot_seed"), _SEED),
    }


def results_table(run: ArmRun) -> Table:
    """lm-eval's own table of an arm; its arrows and signs join the adjacent cells."""
    rows = []
    for line in make_table(run.results).splitlines()[2:]:
        *names, metric, better, value, sign, error = (cell.rstrip() for cell in line.strip("|").split("|"))
        cells = (*names, f"{metric} {better}".strip(), value, f"{sign} {error.strip()}".strip())
        rows.append({column.name: cell for column, cell in zip(_LM_EVAL, cells, strict=True)})
    return Table(title=run.name, columns=_LM_EVAL, rows=tuple(rows))


def write_samples(run: ArmRun, path: Path) -> None:
    """Write lm-eval's samples to ``path``, one file per task."""
    for task, rows in run.results["samples"].items():
        write_text(path / f"samples_{task.replace('/', '-')}.json", _json(rows))


def _json(document: object) -> str:
    return json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n"


def _where(config: EngineConfig) -> str:
    return f"{devices(config.device, config.tensor_parallel)}, {config.formats}"
