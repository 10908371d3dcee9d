"""What `specgen report` finds in the directory of an evaluation or of a bench."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specgen.config import UserError
from specgen.config.json_fields import load_json
from specgen.report.table import Column, Table
from specgen.report.terminal import Part

COMPARISON, STUDY = "compare.json", "study.json"  # in the directory of a comparison, of an evaluation
_BENCH = {"title", "head", "columns", "rows", "notes"}  # keys of a bench's file


def arms(directory: Path) -> list[Path]:
    """The directories of an evaluation's arms that have begun; of anything else, ``directory`` itself."""
    if not (directory / STUDY).exists():
        return [directory]
    study = load_json(directory / STUDY, "evaluate into a new directory")
    paths = [directory / arm["name"] for arm in study["study"]["arms"]]
    return [path for path in paths if (path / "manifest.json").exists()] or [directory]


def evaluation_note(directory: Path) -> str:
    """Where the scores of an evaluation are; empty for anything else and for one that has not finished."""
    page = directory / "report.html"
    if not (directory / STUDY).exists() or not page.exists():
        return ""
    return f"{directory} holds an evaluation: its scores and texts are in {page}."


def benches(directory: Path) -> list[dict[str, Any]]:
    """The documents of the benches in ``directory``, by name; none where it is the directory of a run."""
    if any(os.path.exists(directory / mark) for mark in ("manifest.json", STUDY)):
        return []
    found = []
    for path in sorted(directory.glob("*.json")):
        with suppress(UserError):  # something else
            found.append(load_json(path, "measure again"))
    return [document for document in found if is_bench(document)]


def is_bench(document: Mapping[str, Any]) -> bool:
    """Whether a JSON file's ``document`` was written by a bench."""
    return set(document) >= _BENCH


def of_bench(document: Mapping[str, Any]) -> Iterator[Part]:
    """What the terminal shows of a bench's document."""
    yield "\n".join([document["title"], *(f"{name}: {value}" for name, value in document["head"].items())])
    columns = tuple(
        Column(name=each["name"], unit=each["unit"], interval=each.get("interval", ""))
        for each in document["columns"]
    )
    yield Table(
        title=document["title"],
        columns=columns,
        rows=tuple(document["rows"]),
        num_keys=document.get("num_keys", 1),  # files of earlier versions have none
    )
    yield "\n".join(document["notes"])
