"""A run that is killed, again and again and at any moment, ends with the files of one that was left alone."""

import gc
import json
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specgen.config import UserError
from specgen.jobs.job import Job
from specgen.jobs.run import run
from specgen.prompts.load import DataSource
from specgen.record import files as run_files
from specgen.record import results
from specgen.record.files import RowFile
from specgen.record.record_rows import PassRow, RequestRow, Session, read_passes
from specgen.record.results import RunDirectory
from specgen.report.report import status_of
from tests.commands import write_rows
from tests.jobs import Silent, conversations, files, keep_in_memory
from tests.marks import mostly_slow

add_completion = RunDirectory.add_completion


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Conversations of two turns with the bundled pair, a broken row, and one whose second turn is too long."""
    turns = [[f"Describe {n} castles beside {2 * n} rivers.", "And " * n + "now?"] for n in range(1, 8)]
    rows = [{"question_id": f"q{n}", "category": "ab"[n % 2], "turns": each} for n, each in enumerate(turns)]
    rows[3:3] = [{"question_id": "broken"}, {"question_id": "long", "turns": ["Stop", "Tom has " * 2000]}]
    return conversations(tmp_path_factory.mktemp("killed"), rows)


@pytest.fixture(autouse=True)
def _loaded(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children find the weights in memory."""
    keep_in_memory(monkeypatch, job.engine)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The moment at which a child dies: after ``number`` visits to ``where``, or so many seconds."""

    where: str
    number: float

    def plant(self) -> None:
        """Make this process die there."""
        left = int(self.number)

        def visit(torn: Callable[[], object] = lambda: None) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                torn()
                os.kill(os.getpid(), signal.SIGKILL)

        def add(file: RowFile, row: dict[str, Any]) -> None:
            if file.path.stem == self.where:
                visit(lambda: _tear(file._file, json.dumps(row)))

        _before(RowFile, "add", add)
        if self.where == "event":
            _before(
                RunDirectory, "record", lambda self, event: visit(lambda: _tear(self._passes, repr(event)))
            )
        elif self.where == "final file":
            _before(RowFile, "_line", lambda self, row_id: visit())
        elif self.where == "replace":
            _before(run_files.os, "replace", lambda *paths: visit())


def _before(owner: Any, name: str, visit: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def visited(*arguments: Any) -> Any:
        visit(*arguments)
        return original(*arguments)

    setattr(owner, name, visited)


def _tear(file: Any, line: str) -> None:
    """Leave half a line."""
    half = line[: len(line) // 2]
    file.write(half if "b" not in file.mode else half.encode())
    file.flush()


def work(job: Job, out: Path, kill: Kill | None = None) -> bool:
    """Run ``job`` in a child; whether it was killed. What else goes wrong there is raised here.

    Rows that are there before are there behind it, as they were.
    """
    before = whole_lines(out)
    child = os.fork()
    if child == 0:
        gc.freeze()  # or the child would look through, and so copy, all that its parent has
        code = 1
        try:
            if kill is not None:
                kill.plant()
            run(job, out, Silent())
            code = 0
        except BaseException:
            out.with_suffix(".traceback").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    if kill is not None and kill.where == "time":
        time.sleep(kill.number)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert before <= whole_lines(out)
    require_passes(out)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        state = status_of(out).get("state", "finished")  # killed before there was a status, or behind the end
        assert state == "finished" or re.fullmatch(r"stopped: process \d+ is gone", state)
        return True
    assert os.WEXITSTATUS(status) == 0, out.with_suffix(".traceback").read_text()
    return False


def whole_lines(out: Path) -> set[bytes]:
    """The rows of the completions in ``out``."""
    path = out / "completions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return {line for line in lines if line.endswith(b"\n")}


def moments(seconds: float) -> Iterator[Kill]:
    """Random ones, of every kind; a whole run takes ``seconds``."""
    rng = random.Random(6)
    visits = {"completions": 14, "errors": 2, "event": 110, "final file": 20, "replace": 8}
    while True:
        yield Kill(where="time", number=rng.uniform(0, seconds))
        where = rng.choice(list(visits))
        yield Kill(where=where, number=rng.randrange(visits[where]))


ANSWERS: list[dict[str, Any]] = [
    {"guided_choice": ["yes, it is", "no, it is not", "12"]},
    {"guided_regex": "(The|So) [a-z ]{3,20}[.]"},
    {"guided_json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    {"guided_json": {"type": "strin"}},
    {},
]


def with_answers(job: Job, path: Path) -> Job:
    """Answers that fit, whose constraints are compiled at any time or kept by the run before, and samples."""
    asked = [{"id": f"a{n}", "prompt": f"Tom has {n} apples.", **ANSWERS[n % 5]} for n in range(10)]
    data = DataSource(dataset=str(write_rows(path, asked)))
    return replace(job, sampling=replace(job.sampling, temperature=0.8, seed=7, n=2), data=data)


@pytest.mark.parametrize(
    ("kind", "num_kills", "at_most"),  # of a run
    mostly_slow([("greedy", 1, 1), ("sampled", 13, 3), ("answers", 12, 2)], ("greedy", 1, 1)),
)
def test_a_run_killed_at_any_moment_ends_like_an_uninterrupted_one(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, num_kills: int, at_most: int
) -> None:
    failed, num_rows = ["broken", "long/turn-2"], 15
    if kind == "answers":
        job, failed, num_rows = with_answers(job, tmp_path / "rows.jsonl"), ["a3", "a3", "a8", "a8"], 16
    elif kind == "sampled":
        job = replace(job, sampling=replace(job.sampling, temperature=0.8, seed=7))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    began = time.monotonic()
    assert not work(job, tmp_path / "whole")
    whole, kills = files(tmp_path / "whole"), moments(time.monotonic() - began)
    assert len(whole["completions.jsonl"].splitlines()) == num_rows
    assert kind == "answers" or all(whole["report.json"]["acceptance_histogram"]), (
        "accepted, and not, everywhere"
    )
    assert [json.loads(row)["id"] for row in whole["errors.jsonl"].splitlines()] == failed
    num_killed = num_runs = 0
    while num_killed < num_kills:
        out = tmp_path / f"run {num_runs}"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache {num_runs}"))
        killed = [work(job, out, next(kills)) for _ in range(at_most)]
        work(job, out)
        assert files(out) == whole
        rows = json.loads((out / "report.json").read_text())["rows"]
        assert rows["target_rejected"] == rows["first_pass_wasted"], "counted over the same steps"
        num_killed, num_runs = num_killed + sum(killed), num_runs + 1


def require_passes(out: Path) -> None:
    """Every step of every whole row has its pass in the file, whose numbers have no gaps."""
    passes: dict[str, list[int]] = {}
    for row in read_passes(out / "passes.jsonl") if (out / "passes.jsonl").exists() else ():
        if isinstance(row, Session):
            passes[row.name] = []
        elif isinstance(row, PassRow):
            list(passes.values())[-1].append(row.number)
    assert all(numbers == list(range(len(numbers))) for numbers in passes.values())
    for line in whole_lines(out):
        record = json.loads(line)["record"]
        assert {*record["steps"]["pass"]} <= {*passes[record["session"]]}


def unflushed(self: RunDirectory, row: dict[str, Any], record: RequestRow | None) -> None:
    flush, self._passes.flush = self._passes.flush, lambda: None  # type: ignore[method-assign]
    add_completion(self, row, record)
    self._passes.flush = flush  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files of a run that nobody kills."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        keep_in_memory(patch, job.engine)
        assert not work(job, out)
    return files(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "bug", "kill"),
    [
        (run_files, "cut_torn_line", lambda path: None, Kill(where="completions", number=5)),
        (results, "cut_torn_line", lambda path: None, Kill(where="event", number=60)),
        (RunDirectory, "add_completion", unflushed, Kill(where="completions", number=9)),
        (RunDirectory, "texts", {}, Kill(where="completions", number=5)),
        (RowFile, "arrange", lambda self, ids: None, Kill(where="completions", number=5)),
    ],
    ids=["torn completion", "torn pass", "lost passes", "asked again", "order"],
)
def test_planted_bugs_are_found(
    job: Job,
    whole: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    bug: Any,
    kill: Kill,
) -> None:
    """Planted bugs are seen: in the files, or because the run does not resume."""
    kills = (kill, Kill(where="completions", number=1), None)
    monkeypatch.setattr(owner, name, bug)
    try:
        assert [work(job, tmp_path / "killed", each) for each in kills] == [True, True, False]
    except (AssertionError, LookupError, ValueError, UserError):
        return
    assert files(tmp_path / "killed") != whole
