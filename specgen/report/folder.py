"""Directories of evaluations and benches, and a folder of results: a row for each."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specgen.config import UserError
from specgen.config.json_fields import load_json
from specgen.report.display import count, plain, printable, rate, several
from specgen.report.origin import run_title
from specgen.report.report import is_finished, load, status_of
from specgen.report.table import Column, Table
from specgen.report.terminal import ALARMING

COMPARISON, STUDY = "compare.json", "study.json"  # in the directory of a comparison, of an evaluation
_OF_RUNS = {"manifest.json", "report.json", "status.json"}  # one of them is there from the start of a run
_BENCH = {"title", "head", "columns", "rows", "notes"}  # keys of a bench's file
_COLUMNS = (
    Column(name="directory"),
    Column(name="what", wraps=True),
    Column(name="state", wraps=True),
    Column(name="length", show=plain),
    Column(name="speed", title="tokens/s", show=rate),
)
_EMPTY = {**{column.name: None for column in _COLUMNS}, ALARMING: False}


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a directory that holds no run, comparison or evaluation itself."""
    # these functions of os, as a Path raises an error for what may not be read
    marks = (COMPARISON, STUDY, *_OF_RUNS)
    return os.path.isdir(path) and not any(os.path.exists(path / mark) for mark in marks)


def listed(folder: Path) -> Table:
    """Everything below ``folder``, hidden directories and symbolic links aside; what cannot be read is a row too.

    Lengths are over all steps, as those of n-grams and heads stand side by side; speeds are of one run each.
    """
    found, errors = list[tuple[Path, dict[str, Any]]](), list[OSError]()
    for name, directories, files in os.walk(folder, onerror=errors.append):
        directories[:] = sorted(each for each in directories if not each.startswith("."))
        found += [(Path(name), values) for values in _found(Path(name), set(files))]
    found += [(Path(error.filename), _broken(error)) for error in errors]
    rows = (_EMPTY | {"directory": str(path.relative_to(folder))} | values for path, values in found)
    on_one_line = (
        {key: printable(each) if isinstance(each, str) else each for key, each in row.items()} for row in rows
    )
    return Table(title="Results", columns=_COLUMNS, rows=tuple(on_one_line))


def _found(path: Path, files: set[str]) -> list[dict[str, Any]]:
    """The values of each result that lies in the directory ``path`` itself."""
    try:
        if COMPARISON in files:
            return [_comparison(path)]
        if STUDY in files:
            return [_evaluation(path)]
        return [_run(path)] if files & _OF_RUNS else [_bench(each) for _, each in _documents(path, files)]
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        return [_broken(error)]


def _broken(error: Exception) -> dict[str, Any]:
    reason = f"its files are not as specgen writes them ({type(error).__name__}: {error})"
    if isinstance(error, OSError):
        reason = f"it cannot be read ({error.strerror})"
    return {"state": f"broken: {error if isinstance(error, UserError) else reason}", ALARMING: True}


def _run(path: Path) -> dict[str, Any]:
    status = status_of(path)
    if not is_finished(path, status):
        record = path / "manifest.json"  # it comes once the rows are read
        what = run_title(load_json(record, "generate into a new directory")) if record.exists() else None
        done = f", {count(status['done'])} of {count(total)} done" if (total := status.get("total")) else ""
        return {"what": what, "state": f"not finished: {status.get('state', 'stopped')}{done}"}
    report, manifest = load(path)
    wrong = [f"{count(report.num_errors)} failed"] if report.num_errors else []
    wrong += [report.unlike_work] if report.unlike_work else []
    return {
        "what": run_title(manifest),
        "state": ", ".join(["finished", *wrong, *(["BUSY"] if report.busy else [])]),
        "length": report.length_over_all_steps,
        "speed": report.output_tokens_per_second,
        ALARMING: bool(wrong),
    }


def _comparison(path: Path) -> dict[str, Any]:
    runs = [Path(each) for each in load_json(path / COMPARISON, "compare again")["runs"]]
    done = sum(is_finished(path / run, status_of(path / run)) for run in runs)
    heads, sets = {run.name for run in runs}, {run.parent for run in runs}
    what = f"comparison of {several(len(heads), 'drafter')} on {several(len(sets), 'data set')}"
    return {"what": what, "state": _of_several(done, len(runs), "run", path)}


def _evaluation(path: Path) -> dict[str, Any]:
    study = load_json(path / STUDY, "evaluate into a new directory")["study"]
    done = sum((path / arm["name"] / "report.json").exists() for arm in study["arms"])
    state = _of_several(done, len(study["arms"]), "arm", path)
    return {"what": f"evaluation of {', '.join(study['tasks'])}", "state": state}


def _of_several(done: int, number: int, noun: str, path: Path) -> str:
    finished = done == number and (path / "comparison.json").exists()
    return "finished" if finished else f"not finished: {count(done)} of {several(number, noun)} done"


def _bench(document: Mapping[str, Any]) -> dict[str, Any]:
    notes = "\n".join(document["notes"])
    finished = "finished" + ", BUSY" * ("BUSY" in notes)
    state = "not finished" if "\nnot measured yet" in f"\n{notes}" else finished
    return {"what": f"bench: {document['title']}", "state": state}


# --- evaluations and benches --------------------------------------------------------------------


def _documents(path: Path, files: Iterable[str]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The JSON files in ``path`` that a bench wrote, and what they hold.

    It writes them beside a CSV; other JSON files, such as data sets, may be large and are not read.
    """
    for file in (path / each for each in sorted(files)):
        if file.suffix == ".json" and file.with_suffix(".csv").name in files:
            with suppress(UserError):  # something else
                document = load_json(file, "measure again")
                if set(document) >= _BENCH:
                    yield file, document


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


def benches(directory: Path) -> dict[str, dict[str, Any]]:
    """The documents of the benches in ``directory``, by name; none where it is the directory of a run."""
    if any(os.path.exists(directory / mark) for mark in ("manifest.json", STUDY)):
        return {}
    names = {file.name for file in directory.glob("*")}
    return {file.stem: document for file, document in _documents(directory, names)}


def of_bench(document: Mapping[str, Any]) -> str:
    """What the terminal showed of a bench; of an earlier version, which kept no text, what it says in words."""
    words = (document["title"], *(f"{name}: {value}" for name, value in document["head"].items()))
    return str(document.get("text", "\n".join((*words, *document["notes"]))))
