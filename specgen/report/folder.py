"""Directories of evaluations and benches, and a folder of results: a row for each, and the page that links them."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specgen.config import UserError
from specgen.config.json_fields import load_json
from specgen.record.progress import WORKING
from specgen.report.display import count, plain, printable, rate, several
from specgen.report.origin import run_title
from specgen.report.page import Page
from specgen.report.report import is_finished, load, status_of
from specgen.report.table import Column, Row, Table
from specgen.report.terminal import ALARMING, Part

INDEX = "index.html"
GENERATOR = "specgen report"  # in the page, which says that it may be replaced
COMPARISON, STUDY = "compare.json", "study.json"  # in the directory of a comparison, of an evaluation
_OF_RUNS = {"manifest.json", "report.json", "status.json"}  # one of them is there from the start of a run
_BENCH = {"title", "head", "columns", "rows", "notes"}  # keys of a bench's file
_STATES = ("finished", "not finished", "broken")  # what ``state`` begins with
_COLUMNS = (
    Column(name="directory", link="page"),
    Column(name="length", show=plain),
    Column(name="speed", title="tokens/s", show=rate),
    Column(name="state", wraps=True),
    Column(name="what", wraps=True),
)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The results below ``folder``, by path; ``links`` are symbolic links to directories, which are not followed."""

    folder: Path
    rows: Sequence[Row]
    links: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "rows": self.rows, "links_not_followed": self.links}

    def parts(self) -> Iterator[Part]:
        """What the terminal shows."""
        yield from (self._table(), self._summary())

    def to_html(self) -> str:
        """The page, whose links are relative to ``folder``."""
        title = f"Results in {printable(self.folder.resolve().name)}"
        tables = [self._table()]
        page = Page(title=title, settings={}, sentence=self._summary(), tables=tables, generator=GENERATOR)
        return page.to_html()

    def _table(self) -> Table:
        title = "Runs, comparisons, evaluations and benches"
        note = "acceptance lengths are over all steps; speeds are of one run each"
        return Table(title=title, note=note, columns=_COLUMNS, rows=tuple(self.rows))

    def _summary(self) -> str:
        counts = {word: sum(row["state"].startswith(word) for row in self.rows) for word in _STATES}
        named = (f"{count(number)} {word}" for word, number in counts.items() if number)
        links = f"\nSymbolic links are not followed: {', '.join(self.links)}." if self.links else ""
        return f"{several(len(self.rows), 'result')}: {', '.join(named)}.{links}"


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a directory that holds no run, comparison or evaluation itself."""
    # these functions of os, as a Path raises an error for what may not be read
    marks = (COMPARISON, STUDY, *_OF_RUNS)
    return os.path.isdir(path) and not any(os.path.exists(path / mark) for mark in marks)


def may_replace(index: Path) -> bool:
    """Whether there is no file ``index``, or one of this module."""
    if not os.path.lexists(index):
        return True
    mark = f'<meta name="generator" content="{GENERATOR}">'.encode()
    try:
        return not index.is_symlink() and mark in index.read_bytes()[:1000]
    except OSError:  # a directory, say
        return False


def listed(folder: Path) -> Listing:
    """Everything below ``folder``, hidden directories and symbolic links aside; what cannot be read is a row too."""
    rows, links, errors = list[Row](), list[str](), list[OSError]()
    for name, directories, files in os.walk(folder, onerror=errors.append):
        path = Path(name)
        shown = [path / each for each in sorted(directories) if not each.startswith(".")]
        directories[:] = [each.name for each in shown if not each.is_symlink()]
        links += [printable(str(each.relative_to(folder))) for each in shown if each.is_symlink()]
        rows += [_row(folder, path / page, values) for page, values in _found(path, set(files))]
    rows += [_row(folder, Path(error.filename) / "report.html", _broken(error)) for error in errors]
    return Listing(folder=folder, rows=rows, links=links)


def _found(path: Path, files: set[str]) -> list[tuple[str, Row]]:
    """The page and values of each result that lies in the directory ``path`` itself."""
    try:
        if COMPARISON in files:
            return [("compare.html", _comparison(path))]
        if STUDY in files:
            return [("report.html", _evaluation(path))]
        if files & _OF_RUNS:
            return [("report.html", _run(path))]
        return [(f"{file.stem}.html", _bench(document)) for file, document in _documents(path, files)]
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        return [("report.html", _broken(error))]


def _broken(error: Exception) -> Row:
    reason = f"its files are not as specgen writes them ({type(error).__name__}: {error})"
    if isinstance(error, OSError):
        reason = f"it cannot be read ({error.strerror})"
    return {"state": f"broken: {error if isinstance(error, UserError) else reason}", ALARMING: True}


def _row(folder: Path, page: Path, values: Row) -> Row:
    """``values`` on one line each, with the directory of ``page`` and, where that is a file, its address."""
    found = {"what": None, "length": None, "speed": None, ALARMING: False, **values}
    return {
        "directory": printable(str(page.parent.relative_to(folder))),
        "page": quote(os.fsencode(page.relative_to(folder))) if os.path.isfile(page) else "",
        **{name: printable(each) if isinstance(each, str) else each for name, each in found.items()},
    }


def _run(path: Path) -> Row:
    status = status_of(path)
    if not is_finished(path, status):
        begun = (path / "manifest.json").exists()  # it comes once the rows are read
        what = (
            run_title(load_json(path / "manifest.json", "generate into a new directory")) if begun else None
        )
        state = [str(status.get("state", "stopped"))]
        if total := status.get("total"):
            state.append(f"{count(status['done'])} of {count(total)} done")
        if state[0] in WORKING:  # or it was, when it last wrote
            state.append(f"written {datetime.fromisoformat(status['updated']):%Y-%m-%d %H:%M %Z}")
        return {"what": what, "state": f"not finished: {', '.join(state)}"}
    report, manifest = load(path)
    wrong = [f"{count(report.num_errors)} failed"] if report.num_errors else []
    wrong += [report.unlike_work] if report.unlike_work else []
    over_all_steps = report.num_steps_without_drafts > 0  # as n-grams and heads stand side by side
    return {
        "what": run_title(manifest),
        "state": ", ".join(["finished", *wrong, *(["BUSY"] if report.busy else [])]),
        "length": report.length_over_all_steps if over_all_steps else report.mean_acceptance_length,
        "speed": report.output_tokens_per_second,
        ALARMING: bool(wrong),
    }


def _comparison(path: Path) -> Row:
    runs = [Path(each) for each in load_json(path / COMPARISON, "compare again")["runs"]]
    done = sum(is_finished(path / run, status_of(path / run)) for run in runs)
    heads, sets = {run.name for run in runs}, {run.parent for run in runs}
    what = f"comparison of {several(len(heads), 'drafter')} on {several(len(sets), 'data set')}"
    return {"what": what, "state": _of_several(done, len(runs), "run", path / "comparison.json")}


def _evaluation(path: Path) -> Row:
    study = load_json(path / STUDY, "evaluate into a new directory")["study"]
    done = sum((path / arm["name"] / "report.json").exists() for arm in study["arms"])
    state = _of_several(done, len(study["arms"]), "arm", path / "comparison.json")
    return {"what": f"evaluation of {', '.join(study['tasks'])}", "state": state}


def _of_several(done: int, number: int, noun: str, conclusion: Path) -> str:
    finished = done == number and conclusion.exists()
    return "finished" if finished else f"not finished: {count(done)} of {several(number, noun)} done"


def _bench(document: Mapping[str, Any]) -> Row:
    notes = "\n".join(document["notes"])
    state = (
        "not finished" if "\nnot measured yet" in f"\n{notes}" else "finished" + ", BUSY" * ("BUSY" in notes)
    )
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
