"""Tasks for lm-eval: its own by name, and over local files the bundled word problems and GSM8K without the hub."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.tasks import TaskManager

from specgen.bundled import evaluation_directory
from specgen.config import UserError, require

_FORMATS = {".jsonl": "json", ".parquet": "parquet"}  # suffix: the name of the builder in ``datasets``


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """What ``simple_evaluate`` is given: lm-eval's names, or whole configurations where the data is on this machine."""

    manager: TaskManager
    configs: list[str | dict[str, Any]]


def find_tasks(names: Sequence[str], data_path: Path | None) -> Tasks:
    """The tasks of these names, GSM8K from ``data_path`` unless None; every one is loaded once.

    ``UserError`` for a name that lm-eval does not know and for data that is not there, before any model is loaded.
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
    # the index of lm-eval's own tasks is thousands of files, read at every start
    manager = TaskManager(include_defaults=not local.keys() >= set(names))
    tasks = Tasks(manager=manager, configs=[local.get(name, name) for name in names])
    for task in tasks.configs:
        _require_loads(tasks.manager, task)
    return tasks


def _require_loads(manager: TaskManager, task: str | dict[str, Any]) -> None:
    name = task if isinstance(task, str) else task["task"]
    require(
        not isinstance(task, str) or task in manager.all_tasks,
        f"task {name!r} is not one of lm-eval's: `lm-eval ls tasks` lists them",
    )
    try:
        loaded = manager.load([task])["tasks"]
    except Exception as error:  # data sets and their hub raise what they like
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
    """The configuration of ``word_problems`` for lm-eval, with the absolute path of its data.

    lm-eval takes a relative path from the working directory, so the YAML alone runs only beside its data.
    """
    path = evaluation_directory() / "tasks" / "word_problems.yaml"
    config = _read_yaml(path)
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"] = {
        "data_files": {split: str(path.parent / file) for split, file in files.items()}
    }
    return config


def local_gsm8k(path: Path) -> dict[str, Any]:
    """lm-eval's own ``gsm8k``, reading train and test from the directory ``path`` instead of the hub.

    The files are ``train.jsonl`` and ``test.jsonl`` (openai/grade-school-math) or the Parquet files of the hub's
    repository, in ``path`` or in ``path/main``. ``UserError`` where they are not there.
    """
    format_name, files = _splits(path)
    config = _read_yaml(Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml")
    del config["dataset_name"]  # the hub's configuration; a local file has none
    return {**config, "dataset_path": format_name, "dataset_kwargs": {"data_files": files}}


def _splits(path: Path) -> tuple[str, dict[str, list[str]]]:
    """The format and the files of both splits; the directory itself comes before ``main``, JSON before Parquet."""
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
    """The files of a split: ``train.jsonl``, or the shards ``train-00000-of-00002.parquet`` and on."""
    whole = directory / f"{split}{suffix}"
    shards = sorted(directory.glob(f"{split}-*-of-*{suffix}"))
    return [str(file.resolve()) for file in ([whole] if whole.is_file() else shards)]


def _read_yaml(path: Path) -> dict[str, Any]:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config
