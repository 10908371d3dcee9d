"""Tasks for lm-eval: its own by name, and from local files the bundled word problems and GSM8K."""

import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy
import torch
import yaml
from lm_eval.tasks import TaskManager

from specgen.config import UserError, require
from specgen.config.bundled import evaluation_directory
from specgen.config.errors import did_you_mean

_SEED = 1234  # lm-eval's default
_FORMATS = {".jsonl": "json", ".parquet": "parquet"}  # suffix: builder of ``datasets``


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """lm-eval's task names, or whole configurations for local data."""

    manager: TaskManager
    configs: list[str | dict[str, Any]]

    def load(self, num_fewshot: int | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The tasks for lm-eval's ``evaluate``, the same documents and examples at every call.

        As its ``simple_evaluate`` makes them, which besides collects what a run's manifest has anyway, for seconds an
        arm. ``num_fewshot`` replaces the number of examples of tasks that have any, unless None, and ``arguments``
        are over those of tasks that generate texts.
        """
        random.seed(0)
        numpy.random.seed(_SEED)
        torch.manual_seed(_SEED)
        loaded: dict[str, Any] = self.manager.load(deepcopy(self.configs))
        for task in loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            task.set_config("num_fewshot", own or 0 if num_fewshot is None or own == 0 else num_fewshot)
            if task.get_config("output_type") == "generate_until":
                task.set_config("generation_kwargs", arguments, update=True)
            task.set_fewshot_seed(_SEED)
        return loaded


def find_tasks(names: Sequence[str], data_path: Path | None) -> Tasks:
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
        _require_loads(tasks.manager, task)
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


def _require_loads(manager: TaskManager, task: str | dict[str, Any]) -> None:
    name = task if isinstance(task, str) else task["task"]
    if (
        isinstance(task, str) and task not in manager.all_tasks
    ):  # not `require`: thousands of names are compared
        meant = did_you_mean(name, ("word_problems", *manager.all_tasks))
        raise UserError(f"task {name!r} is not one of lm-eval's{meant}: `lm-eval ls tasks` lists them")
    try:
        loaded = manager.load([task])["tasks"]
    except Exception as error:  # data sets and the hub raise many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"task {name!r} has no data here ({reason}): connect to the hub, or for gsm8k use --data-path"
        ) from error
    for flag, what in (
        ("UNSAFE_CODE", "runs code that a model has written"),
        ("MULTIMODAL", "shows pictures"),
    ):
        unfit = any(getattr(each, flag, False) for each in loaded.values())
        require(not unfit, f"task {name!r} {what}, which is not done here: use one of text alone")


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
    """The format and files of both splits; ``path`` comes before ``path/main``, JSON before Parquet."""
    for directory in (path, path / "main"):
        for suffix, format_name in _FORMATS.items():
            files = {split: _files(directory, split, suffix) for split in ("train", "test")}
            if all(files.values()):
                return format_name, files
    raise UserError(
        f"data-path is {str(path)!r}, which has no train and test files of GSM8K: "
        "name the directory with train.jsonl and test.jsonl, or with the hub's Parquet files"
    )


def _files(directory: Path, split: str, suffix: str) -> list[str]:
    """The files of a split: ``train.jsonl``, or shards such as ``train-00000-of-00002.parquet``."""
    whole = directory / f"{split}{suffix}"
    shards = sorted(directory.glob(f"{split}-*-of-*{suffix}"))
    return [str(file.resolve()) for file in ([whole] if whole.is_file() else shards)]


def _read_yaml(path: Path) -> dict[str, Any]:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config
