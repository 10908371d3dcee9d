"""Tasks of lm-eval over local files: the bundled word problems, and GSM8K without the hub."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specgen.bundled import evaluation_directory

_FORMATS = {".jsonl": "json", ".parquet": "parquet"}  # suffix: the name of the builder in ``datasets``


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
    repository, in ``path`` or in ``path/main``. ``ValueError`` where they are not there.
    """
    format_name, files = _splits(path)
    config = _read_yaml(_installed_tasks() / "gsm8k" / "gsm8k.yaml")
    del config["dataset_name"]  # the hub's configuration; a local file has none
    return {**config, "dataset_path": format_name, "dataset_kwargs": {"data_files": files}}


def _splits(path: Path) -> tuple[str, dict[str, list[str]]]:
    """The format and the files of both splits; the directory itself comes before ``main``, JSON before Parquet."""
    for directory in (path, path / "main"):
        for suffix, format_name in _FORMATS.items():
            files = {split: _files(directory, split, suffix) for split in ("train", "test")}
            if all(files.values()):
                return format_name, files
    raise ValueError(
        f"data-path is {str(path)!r}, which has no train and test files of GSM8K: "
        "name the directory with train.jsonl and test.jsonl, or with the hub's Parquet files"
    )


def _files(directory: Path, split: str, suffix: str) -> list[str]:
    """The files of a split: ``train.jsonl``, or the shards ``train-00000-of-00002.parquet`` and on."""
    whole = directory / f"{split}{suffix}"
    shards = sorted(directory.glob(f"{split}-*-of-*{suffix}"))
    return [str(file.resolve()) for file in ([whole] if whole.is_file() else shards)]


def _installed_tasks() -> Path:
    """Where lm-eval keeps its task definitions; found without importing it, which takes seconds."""
    found = find_spec("lm_eval")
    assert found, "lm-eval is a dependency"
    assert found.origin
    return Path(found.origin).parent / "tasks"


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config
