"""Directories of evaluations and benches, and a folder of results: a row for each, and the page that links them."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specgen.config import UserError, ngram_length, require
from specgen.config.json_fields import load_json
from specgen.record.progress import WORKING
from specgen.record.record_rows import WHOLE
from specgen.report.display import (
    SHOWS,
    checkpoint_name,
    count,
    plain,
    printable,
    rate,
    ratio,
    several,
    value,
)
from specgen.report.page import Page
from specgen.report.report import is_finished, load, status_of
from specgen.report.table import Column, Row, Table, keys
from specgen.report.terminal import ALARMING, Part, heading

INDEX = "index.html"
GENERATOR = "specgen report"  # in the page, which says that it may be replaced
_OF_RUNS = {"manifest.json", "report.json", "status.json"}  # one of them is there from the start of a run
_STATES = ("finished", "not finished", "broken")  # what ``state`` begins with
_SHARED = ("what", "model", "drafter", "k")  # said once where all rows have the same
# What reading a file of another shape raises
_MISSHAPEN = (LookupError, TypeError, ValueError, AttributeError)
COMPARISON, STUDY = "compare.json", "study.json"  # in the directory of a comparison, of an evaluation
_BENCH = {"title", "head", "columns", "rows", "notes"}  # keys of a bench's file


def _share(part: int, of: int) -> str:
    return f"{count(part)} of {count(of)}"


_COLUMNS = (
    Column(name="directory", wraps=True, link="page"),
    Column(name="what", wraps=True),
    Column(name="when", title="when (UTC)"),
    Column(name="model", wraps=True),
    Column(name="drafter", wraps=True),
    Column(name="k", title="K"),
    Column(name="requests", show=count),
    Column(name="length", show=plain, interval="length_ci95"),
    Column(name="speed", title="tokens/s", show=rate),
    Column(name="x_plain", title="x plain", show=ratio),
    Column(name="same_texts", title="same texts", show=lambda same: "-" if same is None else _share(*same)),
    Column(name="state", wraps=True),
)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What was found below ``folder``, by path; ``links`` are symbolic links to directories, which are not followed."""

    folder: Path
    rows: Sequence[Row]
    links: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        rows = [{key: value for key, value in row.items() if key != ALARMING} for row in self.rows]
        return {"folder": str(self.folder), "rows": rows, "links_not_followed": list(self.links)}

    def parts(self) -> Iterator[Part]:
        """What the terminal shows: intervals are on the page."""
        yield heading(self._shared())
        table = self._table()
        yield replace(table, columns=tuple(replace(column, interval="") for column in table.columns))
        yield "\n".join([self._summary(), *self._notes()])

    def to_html(self) -> str:
        """The page, whose links are relative to ``folder``."""
        table = self._table()
        ranks = {column.name: _ranks([row[column.name] for row in self.rows]) for column in table.columns}
        return Page(
            title=f"Results in {printable(self.folder.resolve().name)}",
            settings={**self._shared(), "listed": f"{_minute(datetime.now(UTC))} UTC"},
            sentence=self._summary(),
            tables=[replace(table, ranks=ranks)],
            findings=list(self._notes()),
            generator=GENERATOR,
        ).to_html()

    def _shared(self) -> dict[str, str]:
        """The values of ``_SHARED`` that all rows have alike, by heading."""
        found = {}
        for column in _COLUMNS:
            values = {str(row[column.name]) for row in self.rows if row[column.name] is not None}
            if column.name in _SHARED and len(self.rows) > 1 and len(values) == 1:
                found[column.heading] = values.pop()
        return found

    def _table(self) -> Table:
        shared = self._shared()
        measured = {key for row in self.rows for key, value in row.items() if value is not None}
        columns = [column for column in _COLUMNS if column.name in measured and column.heading not in shared]
        return Table(
            title="Runs, comparisons, evaluations and benches",
            note="lengths over all steps, with 95 % intervals; speeds are of one run each",
            columns=tuple(columns),
            rows=tuple(self.rows),
        )

    def _summary(self) -> str:
        counts = {word: sum(row["state"].startswith(word) for row in self.rows) for word in _STATES}
        named = (f"{count(number)} {word}" for word, number in counts.items() if number)
        return f"{several(len(self.rows), 'result')}: {', '.join(named)}."

    def _notes(self) -> Iterator[str]:
        if any(row["state"].startswith("not finished") for row in self.rows):
            yield "`specgen report` with the directory of a run that is not finished prints what it has so far."
        if self.links:
            yield f"Symbolic links are not followed: {', '.join(self.links)}."


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
    rows: list[Row] = []
    links = []

    def unreadable(error: OSError) -> None:
        rows.append(_broken(folder, Path(error.filename), f"it cannot be read ({error.strerror})"))

    for name, directories, files in os.walk(folder, onerror=unreadable):
        path = Path(name)
        shown = [each for each in sorted(directories) if not each.startswith(".")]
        linked = [each for each in shown if (path / each).is_symlink()]
        directories[:] = [each for each in shown if each not in linked]
        links += [_relative(folder, path / each) for each in linked]
        rows += _found(folder, path, set(files))
    return Listing(folder=folder, rows=rows, links=links)


def _found(folder: Path, path: Path, files: set[str]) -> Iterable[Row]:
    """The rows of what lies in the directory ``path`` itself."""
    try:
        if COMPARISON in files:
            return [_row(folder, path / "compare.html", _comparison(path))]
        if STUDY in files:
            return [_row(folder, path / "report.html", _evaluation(path))]
        if files & _OF_RUNS:
            return [_row(folder, path / "report.html", _run(path))]
        return [_row(folder, path / page, values) for page, values in _benches(path, files)]
    except UserError as error:
        reason = str(error)
    except OSError as error:
        reason = f"it cannot be read ({error.strerror})"
    except _MISSHAPEN as error:
        reason = f"its files are not as specgen writes them ({type(error).__name__}: {error})"
    return [_broken(folder, path, reason)]


def _broken(folder: Path, path: Path, reason: str) -> Row:
    return _row(folder, path / "report.html", {"state": f"broken: {reason}", ALARMING: True})


def _row(folder: Path, page: Path, values: Row) -> Row:
    """``values`` with the directory of ``page`` and, where that is a file, its address; None for what is missing."""
    found = {key: values.get(key) for key in keys(_COLUMNS)}
    return {
        **{key: printable(each) if isinstance(each, str) else each for key, each in found.items()},
        "directory": _relative(folder, page.parent),
        "page": quote(os.fsencode(page.relative_to(folder))) if os.path.isfile(page) else "",
        ALARMING: ALARMING in values,
    }


def _relative(folder: Path, path: Path) -> str:
    return printable(str(path.relative_to(folder)))


# --- what a row says ------------------------------------------------------------------------------


def _run(path: Path) -> Row:
    status = status_of(path)
    if is_finished(path, status):
        report, manifest = load(path)
        failed, plain = report.num_errors, report.baseline
        of_requests = [f"{count(failed)} failed"] if failed else []
        at_times = report.num_steps_without_drafts > 0
        of_plain, same = [report.unlike_work] if report.unlike_work else [], None
        if plain is not None and plain.identical is not None:
            same = round(plain.identical * plain.num_compared), plain.num_compared
        return {
            **_settings(manifest),
            "requests": report.num_requests,
            # over all steps, as n-grams and heads stand side by side
            "length": report.length_over_all_steps if at_times else report.mean_acceptance_length,
            "length_ci95": None if at_times else report.mean_acceptance_length_ci95,
            "speed": report.output_tokens_per_second,
            "x_plain": plain and plain.ratio,
            "same_texts": same,
            "state": ", ".join(["finished", *of_requests, *of_plain, *(["BUSY"] if report.busy else [])]),
            **({ALARMING: True} if of_requests or of_plain else {}),
        }
    begun = (path / "manifest.json").exists()  # it comes once the rows are read
    return {
        **(_settings(load_json(path / "manifest.json", "generate into a new directory")) if begun else {}),
        "state": f"not finished: {_progress(status)}",
    }


def _settings(manifest: Mapping[str, Any]) -> Row:
    engine, data = manifest["engine"], manifest["data"]
    k = engine["num_spec_tokens"]
    drafter = checkpoint_name(_text(engine["drafter"])) if k else "plain decoding"
    is_head = k and ngram_length(drafter) is None
    kind = engine.get("spec_length", "fixed")
    shard = data.get("shard", WHOLE)
    source = Path(_text(data["dataset"])).name if "dataset" in data else ", ".join(data["tasks"])
    return {
        "what": f"run on {source}{'' if shard == WHOLE else f', shard {shard}'}",
        "when": _when(manifest["created"]),
        "model": checkpoint_name(_text(manifest.get("served_model_name", engine["model"]))),
        "drafter": f"{drafter}, {engine['drafter_batch']}" if is_head else drafter,
        "k": _number(k) if kind == "fixed" else _text(kind),
    }


def _progress(status: Mapping[str, Any]) -> str:
    """``interrupted, 12 of 64 done``; of one that may still go on, when it last said so."""
    state, total = status.get("state", "stopped"), status.get("total")
    known = [str(state)]
    if total:
        known.append(f"{_share(_number(status['done']) or 0, _number(total) or 0)} done")
    if state in WORKING:
        known.append(f"written {_when(status['updated'])}")
    return ", ".join(known)


def _comparison(path: Path) -> Row:
    record = load_json(path / COMPARISON, "compare again")
    runs = [Path(_text(each)) for each in record["runs"]]
    inside = [run for run in runs if not run.is_absolute() and ".." not in run.parts]
    done = sum(is_finished(path / run, status_of(path / run)) for run in inside)
    heads, sets = {run.name for run in runs}, {run.parent for run in runs}
    return {
        "what": f"comparison of {several(len(heads), 'drafter')} on {several(len(sets), 'data set')}",
        "when": _when(record["created"]),
        "state": _of_several(done, len(runs), "run", path / "comparison.json"),
    }


def _evaluation(path: Path) -> Row:
    study = load_json(path / STUDY, "evaluate into a new directory")["study"]
    arms = [_text(arm["name"]) for arm in study["arms"]]
    begun = [each for each in arms if Path(each).name == each and (path / each / "manifest.json").exists()]
    created = [load_json(path / each / "manifest.json", "evaluate again")["created"] for each in begun]
    done = sum((path / each / "report.json").exists() for each in begun)
    return {
        "what": f"evaluation of {', '.join(map(_text, study['tasks']))}",
        "when": _when(min(created)) if created else None,
        "state": _of_several(done, len(arms), "arm", path / "comparison.json"),
    }


def _of_several(done: int, number: int, noun: str, conclusion: Path) -> str:
    finished = done == number and conclusion.exists()
    return "finished" if finished else f"not finished: {count(done)} of {several(number, noun)} done"


def _benches(path: Path, files: set[str]) -> Iterator[tuple[str, Row]]:
    """The page of each bench in ``path``, and its row."""
    for file, document in _documents(path, files):
        with suppress(UserError):
            yield f"{file.stem}.html", _bench(document, file)


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


def _bench(document: Mapping[str, Any], path: Path) -> Row:
    head, notes = document["head"], document["notes"]
    missing, is_busy = any(each.startswith("not measured yet") for each in notes), "BUSY" in "".join(notes)
    return {
        "what": f"bench: {_text(document['title'])}",
        "when": _minute(datetime.fromtimestamp(path.stat().st_mtime, UTC)),
        "model": head["model"].partition(",")[0] if "model" in head else None,
        "drafter": head.get("drafter"),
        "state": "not finished" if missing else "finished" + ", BUSY" * is_busy,
    }


# --- values of files that anyone may have written ---------------------------------------------------


def _text(value: object) -> str:
    require(isinstance(value, str), f"{value!r} is no text")
    return str(value)


def _number(value: object) -> Any:  # noqa: ANN401
    """A number or None."""
    require(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)),
        f"{value!r} is no number",
    )
    return value


def _when(value: object) -> str:
    return _minute(datetime.fromisoformat(_text(value)).astimezone(UTC))


def _minute(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M")


def _ranks(values: Sequence[Any]) -> tuple[int, ...]:
    """The place of each in the order that a reader asks for: names from a, numbers from the largest, none last."""

    def key(at: int) -> tuple[int, float, str]:
        value = values[at]
        if value is None:
            return 2, 0.0, ""
        if isinstance(value, str):
            return 1, 0.0, value
        number = value[0] / max(value[1], 1) if isinstance(value, tuple) else value
        return 0, -number, ""

    places = {at: place for place, at in enumerate(sorted(range(len(values)), key=key))}
    return tuple(places[at] for at in range(len(values)))


# --- evaluations and benches --------------------------------------------------------------------


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


def of_bench(document: Mapping[str, Any]) -> Iterator[Part]:
    """What the terminal shows of a bench's document."""
    yield "\n".join([document["title"], *(f"{name}: {value}" for name, value in document["head"].items())])
    columns = tuple(
        Column(
            name=each["name"],
            unit=each["unit"],
            interval=each.get("interval", ""),
            show=SHOWS.get(each.get("show", ""), value),
        )
        for each in document["columns"]
    )
    yield Table(
        title=document["title"],
        columns=columns,
        rows=tuple(document["rows"]),
        num_keys=document.get("num_keys", 1),  # files of earlier versions have none
    )
    yield "\n".join(document["notes"])
