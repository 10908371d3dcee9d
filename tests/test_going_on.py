"""A run directory that is used again: what is resumed, retried, refused and kept."""

import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen import storage
from specgen.config import FormatName, SamplingParams, UserError
from specgen.core.scheduler import Scheduler
from specgen.core.sequence import NOT_FINITE, Sequence
from specgen.engine.loading import load_models
from specgen.jobs import run, run_output
from specgen.jobs.job import Job
from specgen.jobs.prompt_index import index_prompts
from specgen.jobs.run import TooManyFailuresError
from specgen.jobs.shards import WHOLE
from specgen.prompts import DataSource
from specgen.prompts.formats import Reading
from specgen.record.files import swapped
from specgen.record.interrupt import StoppedError
from specgen.record.progress import Status
from specgen.record.record_rows import read_passes
from specgen.record.results import LOCK, RunDirectory
from tests.commands import printed, refused, rows, write_rows
from tests.engines import engine_config
from tests.jobs import Silent, keep_in_memory, of_field_q
from tests.marks import mostly_slow
from tests.tiny_checkpoints import write_head, write_target
from tests.tiny_tokenizers import write_byte_level

NAMES = [f"p{n}" for n in range(8)]


class Follower(Silent):
    """Notes what it is called with, and does ``act`` at every request that ends."""

    def __init__(self, act: Callable[[int], None] = lambda count: None) -> None:
        self.act = act
        self.count = 0
        self.started: list[tuple[str, int, int]] = []

    def start(self, what: str, num_requests: int, num_done: int = 0) -> None:
        self.started.append((what, num_requests, num_done))

    def advance(self) -> None:
        self.count += 1
        self.act(self.count)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    path = tmp_path_factory.mktemp("pair")
    write_head(path / "drafter", write_target(path / "target", vocab_size=352), draft_vocab_size=100)
    write_byte_level(path / "target")
    write_prompts(path / "own.jsonl")
    return Job(
        engine=engine_config(path, max_batch_size=2),
        sampling=SamplingParams(max_tokens=6, ignore_eos=True),
        data=DataSource(dataset=str(path / "own.jsonl")),
        baseline=False,
    )


def write_prompts(path: Path, names: Iterable[str] = NAMES, **changed: str) -> None:
    write_rows(path, ({"id": name, "prompt": changed.get(name, f"Tom has {name}")} for name in names))


def ids(path: Path) -> list[str]:
    return [row["id"] for row in rows(path)]


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != LOCK}


def stopped(job: Job, out: Path, number: int) -> None:
    """A run that is stopped after so many requests."""
    follower = Follower()
    with pytest.raises(StoppedError, match="interrupted with"):
        run.run(job, out, follower, lambda: follower.count >= number)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The ids in it fail in the engine."""
    names: set[str] = set()
    refusal = Scheduler.refusal

    def planted(self: Scheduler, sequence: Sequence) -> str | None:
        return "planted" if sequence.request.id in names else refusal(self, sequence)

    monkeypatch.setattr(Scheduler, "refusal", planted)
    return names


@pytest.mark.parametrize("left", [0, 5])
def test_a_finished_run_that_has_lost_rows_goes_on(job: Job, tmp_path: Path, left: int) -> None:
    """As a copy of its directory may have: the report alone does not say what is there."""
    run.run(job, tmp_path, Follower())
    file = tmp_path / "completions.jsonl"
    before = [row["token_ids"] for row in rows(file)]
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:left]))
    follower = Follower()
    run.run(job, tmp_path, follower)
    assert follower.count == 8 - left
    assert ids(file) == NAMES
    assert [row["token_ids"] for row in rows(file)] == before


def test_rows_of_other_requests_do_not_stand_for_those_of_the_run(job: Job, tmp_path: Path) -> None:
    stopped(job, tmp_path, 3)
    file = tmp_path / "completions.jsonl"
    found = rows(file)
    write_rows(file, [*found, *(found[0] | {"id": f"other{n}"} for n in range(8))])
    run.run(job, tmp_path, Follower())
    assert ids(file) == NAMES


def test_a_stop_at_the_end_of_a_run_says_what_is_done(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the report is written, twice, and while a finished run is exported, which stays finished."""

    def stopped_in(*given: object, **named: object) -> None:
        with swapped(tmp_path / "batch_output.jsonl") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    def state() -> tuple[str, int, int]:
        status = json.loads((tmp_path / "status.json").read_text())
        return status["state"], status["done"], status["total"]

    with monkeypatch.context() as patch:
        patch.setattr(run_output.FinishedRun, "write_report", stopped_in)
        for _ in range(2):  # the second time with nothing left to generate
            with pytest.raises(KeyboardInterrupt):
                run.run(job, tmp_path, Follower())
            assert state() == ("interrupted", 8, 8)
    run.run(job, tmp_path, Follower())
    monkeypatch.setattr("specgen.jobs.run_output.export_openai", stopped_in)
    monkeypatch.setattr(run_output.FinishedRun, "_served", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        run.run(replace(job, format="openai"), tmp_path, Follower())
    assert state() == ("finished", 8, 8)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("damage", [b"\0" * 20, b"\1", b"\xff"], ids=["zeros", "control", "not UTF-8"])
def test_a_row_that_is_damaged_within_is_answered_again_or_named(
    job: Job, tmp_path: Path, damage: bytes
) -> None:
    stopped(job, tmp_path, 3)
    file = tmp_path / "completions.jsonl"
    first, *others = file.read_bytes().splitlines(keepends=True)
    middle = first.index(b'"text": "') + 9
    file.write_bytes(b"".join([first[:middle], damage, first[middle + len(damage) :], *others]))
    if damage[0] == 0:
        run.run(job, tmp_path, Follower())
        assert ids(file) == NAMES
        return
    name = json.loads(first)["id"]
    with refused(f"completions.jsonl: the row of '{name}' is damaged .*: remove that line"):
        run.run(job, tmp_path, Follower())
    file.write_bytes(
        b"".join(line for line in file.read_bytes().splitlines(keepends=True) if name not in str(line))
    )
    run.run(job, tmp_path, Follower())
    assert ids(file) == NAMES
    passes = tmp_path / "passes.jsonl"
    line, *more = passes.read_text().splitlines(keepends=True)
    passes.write_text("".join([line, "\0\n", *more]))
    with refused(r"passes\.jsonl, line 2: not a row .*: remove that line"):
        list(read_passes(passes))


@pytest.mark.parametrize("lost", [False, True])
def test_finished_requests_are_not_run_again(job: Job, tmp_path: Path, lost: bool) -> None:
    """A record of passes that is lost makes no two sessions one, whose time would be that of one of them."""
    stopped(job, tmp_path, 3)
    done = len(ids(tmp_path / "completions.jsonl"))
    assert 3 <= done < 8
    if lost:
        (tmp_path / "passes.jsonl").write_text("")
    follower = Follower()
    run.run(job, tmp_path, follower)
    assert follower.started == [("speculative decoding", 8, done)]
    assert follower.count == 8 - done
    assert ids(tmp_path / "completions.jsonl") == NAMES
    sessions = Counter(row["record"]["session"] for row in rows(tmp_path / "completions.jsonl"))
    assert sessions == {"0/1-0": done, "0/1-1": 8 - done}


def test_failed_requests_are_retried(job: Job, tmp_path: Path, refusing: set[str]) -> None:
    clean = run.run(job, tmp_path / "clean", Follower()).report
    out = tmp_path / "run"
    refusing |= {"p1", "p5"}
    result = run.run(job, out, Follower())
    before = content(out)
    with refused("none of the"):
        run.run(of_field_q(job), out, Follower())
    assert content(out) == before, "a mistake removes no run that was there"
    assert result.report.num_errors == 2
    assert result.failures == ["p1: line 2: planted", "p5: line 6: planted"]
    assert ids(out / "errors.jsonl") == ["p1", "p5"]
    assert ids(out / "completions.jsonl") == [name for name in NAMES if name not in refusing]
    refusing.remove("p1")
    assert run.run(job, out, Follower()).report.num_errors == 1
    assert (ids(out / "errors.jsonl"), len(ids(out / "completions.jsonl"))) == (["p5"], 7)
    refusing.clear()
    report = run.run(job, out, Follower()).report
    assert (ids(out / "errors.jsonl"), ids(out / "completions.jsonl")) == ([], NAMES)
    same = ("num_errors", "num_requests", "num_drafts", "acceptance", "finish_reasons", "num_prompt_tokens")
    assert all(getattr(report, name) == getattr(clean, name) for name in same)


def retrying(job: Job, file: Path, **corrected: str | None) -> Job:
    """The job over a new ``file`` with these prompts; None leaves one out."""
    names = [name for name in NAMES if corrected.get(name, "") is not None]
    write_prompts(file, names, **{name: text for name, text in corrected.items() if text is not None})
    return replace(job, data=DataSource(dataset=str(file)), retry_errors=True)


@pytest.mark.slow
def test_failed_rows_are_mended_by_a_corrected_file(job: Job, tmp_path: Path, refusing: set[str]) -> None:
    broken = retrying(job, tmp_path / "broken.jsonl", p3="", p6="Tom has " * 9000)
    out = tmp_path / "run"
    with refused(r"retry-errors is given, but output '.*' holds no run yet: leave it out"):
        run.run(broken, out, Follower())
    assert not out.exists()
    refusing.add("p1")
    first = run.run(replace(broken, retry_errors=False), out, Follower()).report
    assert (first.num_errors, ids(out / "errors.jsonl")) == (3, ["p1", "p3", "p6"])
    before = content(out)
    for changed, says in (
        (
            {"p0": "Tom had"},
            "'p0' has an answer, but its row in .*other.jsonl is not what was asked: --retry-e",
        ),
        ({"p0": ""}, "'p0' has an answer, but its row in .*other.jsonl is not what was asked"),
        ({"p0": None}, "'p0' has an answer, but no row in .*other.jsonl: --retry-errors takes other rows"),
    ):
        with refused(says):
            run.run(retrying(job, tmp_path / "other.jsonl", **changed), out, Follower())
        with refused("differs in --max-new-tokens 6 -> 7: "):
            run.run(
                with_changes(replace(broken, retry_errors=True), {"sampling": {"max_tokens": 7}}),
                out,
                Follower(),
            )
        assert content(out) == before
    refusing.clear()
    mended = retrying(job, tmp_path / "mended.jsonl", p3="Tom has 33")
    with refused("differs in --dataset"):
        run.run(replace(mended, retry_errors=False), out, Follower())
    stopped(mended, out, 1)
    follower = Follower()
    assert run.run(mended, out, follower).report.num_errors == 0
    assert follower.count < 3, "one was mended before the stop"
    clean = replace(mended, retry_errors=False)
    run.run(clean, tmp_path / "clean", Follower())
    mine, whole = (rows(each / "completions.jsonl") for each in (out, tmp_path / "clean"))
    assert [(row["id"], row["text"]) for row in mine] == [(row["id"], row["text"]) for row in whole]
    assert run.run(clean, out, follower := Follower()).report.num_errors == follower.count == 0
    finished = content(out)
    with refused(r"but no row of the run in '.*' failed: leave it out"):
        run.run(mended, out, Follower())
    assert content(out) == finished, "status.json too"


def test_a_later_turn_is_corrected_alone(job: Job, tmp_path: Path) -> None:
    job = replace(job, data=DataSource(dataset="mt-bench", data_path=tmp_path / "q.jsonl"), retry_errors=True)
    turns = ["Tom has", "And now? " * 5000]
    write_rows(tmp_path / "q.jsonl", [{"question_id": "q", "turns": turns}])
    report = run.run(replace(job, retry_errors=False), tmp_path / "run", Follower()).report
    assert (report.num_requests, report.num_errors) == (1, 1)
    write_rows(tmp_path / "q.jsonl", [{"question_id": "q", "turns": [turns[0], "And now?", "And then?"]}])
    with refused(r"'q' has an answer, but its row in .*q.jsonl is not what was asked"):
        run.run(job, tmp_path / "run", Follower())
    write_rows(tmp_path / "q.jsonl", [{"question_id": "q", "turns": [turns[0], "And now?"]}])
    follower = Follower()
    assert run.run(job, tmp_path / "run", follower).report.num_requests == 2
    assert follower.count == 1


def test_too_many_failures_end_the_run(job: Job, tmp_path: Path, refusing: set[str]) -> None:
    refusing |= {"p1", "p2"}
    assert run.run(replace(job, max_failures=2), tmp_path / "two", Follower()).report.num_errors == 2
    with pytest.raises(
        TooManyFailuresError, match=r"2 requests failed, more than max-failures 1; . of 8 are done"
    ):
        run.run(replace(job, max_failures=1), tmp_path / "run", Follower())
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    refusing.clear()
    run.run(replace(job, max_failures=1), tmp_path / "run", Follower())
    assert ids(tmp_path / "run" / "completions.jsonl") == NAMES


@pytest.mark.slow
def test_a_tokenizer_with_more_tokens_than_the_model_warns(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.jobs.run.load_models", load_models)  # and not those kept in memory
    warnings: list[str] = []
    follower = Follower()
    follower.warn = warnings.append  # type: ignore[method-assign]
    job = replace(job, data=replace(job.data, how=Reading(chat=False)))
    run.run(job, None, follower)
    assert warnings == []
    pair = Path(job.engine.model).parent
    shutil.copytree(pair, tmp_path / "pair")
    write_byte_level(tmp_path / "pair" / "target", added=tuple(f"<{n}>" for n in range(200)))
    names = {"model": str(tmp_path / "pair" / "target"), "drafter": str(tmp_path / "pair" / "drafter")}
    run.run(replace(job, engine=replace(job.engine, **names), baseline=True), None, follower)
    (sentence,) = warnings
    assert re.match(r"the tokenizer has \d{3} tokens and the model's vocabulary 352: if it is", sentence)


def _many(job: Job, tmp_path: Path, num_broken: int = 0) -> tuple[Job, list[str]]:
    """As ``job``, of 40 requests behind some rows that are none."""
    names = [f"p{n}" for n in range(40)]
    write_prompts(tmp_path / "many.jsonl", names)
    rows = '{"id": "x"}\n' * num_broken + (tmp_path / "many.jsonl").read_text()
    (tmp_path / "many.jsonl").write_text(rows)
    return replace(job, data=DataSource(dataset=str(tmp_path / "many.jsonl"))), names


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The logits of the ids in it are not finite."""
    names: set[str] = set()
    append = Sequence.append

    def planted(self: Sequence, tokens: list[int], *rest: Any) -> int:
        return append(self, [NOT_FINITE] * len(tokens) if self.request.id in names else tokens, *rest)

    monkeypatch.setattr(Sequence, "append", planted)
    return names


def test_a_run_whose_first_requests_all_fail_stops(job: Job, tmp_path: Path, failing: set[str]) -> None:
    many, names = _many(job, tmp_path, num_broken=1)
    failing |= set(names)
    reason = (
        r"the first 32 of 41 requests all failed, and none is done \(p0: line 2: the model's .* alone\): fix"
    )
    with pytest.raises(TooManyFailuresError, match=reason):
        run.run(many, tmp_path / "run", Follower())
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    failing.clear()
    assert run.run(many, tmp_path / "run", Follower()).report.num_errors == 1
    assert ids(tmp_path / "run" / "completions.jsonl") == names


@pytest.mark.slow
def test_a_run_goes_on_if_any_of_its_first_requests_may_succeed(
    job: Job, tmp_path: Path, failing: set[str]
) -> None:
    """Also where that one is known long after all others have failed, and where the rows before it are none."""
    many, names = _many(job, tmp_path, num_broken=40)
    failing |= set(names) - {"p31"}
    assert run.run(many, tmp_path / "one", Follower()).report.num_errors == 79
    failing |= {"p31"}
    limited = replace(many, max_failures=100)
    assert run.run(limited, tmp_path / "limited", Follower()).report.num_errors == 80
    failing.clear()
    failing |= set(names[1:])
    assert run.run(many, tmp_path / "first", Follower()).report.num_errors == 79


def test_a_row_that_asks_for_too_much_beside_the_run_fails_alone(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.config.sampling_params.MAX_LOGIT_BIASES", 20)
    bias = {str(token): 1.0 for token in range(19)}
    rows = [{"id": "a", "prompt": "Tom"}, {"id": "b", "prompt": "Tom", "logit_bias": bias}]
    data = {"dataset": str(write_rows(tmp_path / "rows.jsonl", rows))}
    asked = with_changes(job, {"sampling": {"suppress_tokens": (5, 6)}, "data": data})
    assert run.run(asked, tmp_path / "run", Follower()).report.num_errors == 1
    assert ids(tmp_path / "run" / "completions.jsonl") == ["a"]
    (error,) = (tmp_path / "run" / "errors.jsonl").read_text().splitlines()
    assert "suppress-tokens and logit-bias name 21 tokens" in error


@pytest.mark.parametrize("number", mostly_slow([3, 11], 11))
def test_a_baseline_is_resumed_too(job: Job, tmp_path: Path, number: int) -> None:
    job = replace(job, baseline=True)
    stopped(job, tmp_path, number)
    report = run.run(job, tmp_path, Follower()).report
    assert (report.baseline.identical, report.baseline.num_compared) == (1.0, 8)
    assert ids(tmp_path / "baseline" / "completions.jsonl") == NAMES
    sessions = (tmp_path / "passes.jsonl").read_text().count('"row":"session"')
    assert sessions == (2 if number == 3 else 1), "what was done is not run again"


def test_a_baseline_may_be_asked_for_later(job: Job, tmp_path: Path) -> None:
    before = run.run(job, tmp_path, Follower()).report
    follower = Follower()
    report = run.run(replace(job, baseline=True), tmp_path, follower).report
    assert follower.started == [("plain decoding", 8, 0)]
    assert report.baseline.num_compared == 8
    assert report.acceptance == before.acceptance


def test_another_run_is_refused(job: Job, tmp_path: Path) -> None:
    own, out = tmp_path / "own.jsonl", tmp_path / "run"
    write_prompts(own)
    job = replace(job, data=DataSource(dataset=str(own)))
    stopped(job, out, 1)
    before = content(out)
    others: dict[str, dict[str, Any]] = {
        "--max-new-tokens 6 -> 7": {"sampling": {"max_tokens": 7}},
        "--seed 0 -> 3": {"sampling": {"seed": 3}},
        "--num-spec-tokens 4 -> 2": {"engine": {"num_spec_tokens": 2}},
        "--drafter-batch padded -> non-padded": {"engine": {"drafter_batch": "non-padded"}},
        "--num-prompts not given -> 7:": {"data": {"num_prompts": 7}},
        "--no-steps False -> True": {"no_steps": True},
        rf"files of the prompts: {own} \([\d,]+ bytes of .* UTC": {},  # which are changed before that
    }
    for words, changed in others.items():
        if not changed:
            write_prompts(own, p7="Stop")
        with refused(f"holds a run that differs in {words}.* --restart"):
            run.run(with_changes(job, changed), out, Follower())
        assert content(out) == before


def with_changes(job: Job, changed: dict[str, Any]) -> Job:
    return replace(
        job,
        **{
            name: replace(getattr(job, name), **value) if isinstance(value, dict) else value
            for name, value in changed.items()
        },
    )


def test_what_changes_no_text_may_differ(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(job, tmp_path / "run", 1)
    monkeypatch.setattr("specgen.jobs.run.load_models", load_models)  # and not those kept in memory
    models = tmp_path / "elsewhere"
    shutil.copytree(Path(job.engine.model).parent, models)  # with the prompts
    changed = {
        "model": str(models / "target"),
        "drafter": str(models / "drafter"),
        "max_batch_size": 3,
        "max_prefill_tokens": 64,
        "kv_memory": 1 << 20,
        "prefix_cache": False,
    }
    moved = {"dataset": str(models / "own.jsonl"), "num_prompts": len(NAMES)}
    read = list[Path]()
    digest = storage._read
    monkeypatch.setattr(storage, "_read", lambda file: read.append(file) or digest(file))
    run.run(with_changes(job, {"engine": changed, "data": moved}), tmp_path / "run", Follower())
    assert read.count(models / "own.jsonl") == 1, "it is hashed once, however often it is looked at"
    assert ids(tmp_path / "run" / "completions.jsonl") == NAMES


@pytest.mark.parametrize(
    "file",
    mostly_slow(
        ["target/model.safetensors", "drafter/config.json", "target/tokenizer.json"],
        "target/model.safetensors",
    ),
)
def test_another_checkpoint_of_the_same_name_is_refused(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setattr("specgen.jobs.run.load_models", load_models)  # and not those kept in memory
    models = tmp_path / "pair"
    shutil.copytree(Path(job.engine.model).parent, models)
    job = with_changes(job, {"engine": {"model": str(models / "target"), "drafter": str(models / "drafter")}})
    stopped(job, tmp_path / "run", 1)
    content = bytearray((models / file).read_bytes())
    content[-4:] = content[-4:].swapcase() if file.endswith("json") else b"\0\0\0\0"
    (models / file).write_bytes(content + (b" " if file.endswith("json") else b""))
    role, name = ("drafter" if file.startswith("drafter") else "model"), file.partition("/")[2]
    size = r"[\d,]+ bytes of 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    with pytest.raises(
        UserError, match=rf"differs in files of the {role}: {name} \({size}( ->|, with)"
    ) as refused:
        run.run(job, tmp_path / "run", Follower())
    assert not re.search("[0-9a-f]{12}", str(refused.value).partition("differs in")[2])


def test_a_restart_keeps_the_old_directory(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped(job, out, 1)
    old = content(out)
    job = with_changes(job, {"sampling": {"max_tokens": 3}, "restart": True})
    for _ in range(2):
        report = run.run(job, out, Follower()).report
        assert report.total_num_output_tokens == 8 * 3
    assert content(tmp_path / "run.1") == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]


def test_a_directory_without_a_run_is_not_touched_and_one_that_vanishes_is_one_line(
    job: Job, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for each in (job, replace(job, restart=True)):
        with refused("is not empty and holds no run"):
            run.run(each, tmp_path, Follower())
    assert os.listdir(tmp_path) == ["mine.txt"]
    out = tmp_path / "run"
    with refused(r"run' cannot be written \(No such file or directory\)"):
        run.run(job, out, Follower(lambda count: shutil.rmtree(out, ignore_errors=True)))


def test_the_status_has_the_progress(
    job: Job, tmp_path: Path, refusing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.record.progress._INTERVAL", 0.05)
    seen = []

    def look(count: int) -> None:
        time.sleep(0.06)
        seen.append(json.loads((tmp_path / "status.json").read_text()))

    refusing |= {"p1"}
    run.run(job, tmp_path, Follower(look))
    assert {(status["state"], status["total"], status["pid"]) for status in seen} == {
        ("running", 8, os.getpid())
    }
    assert sorted(status["done"] for status in seen) == [status["done"] for status in seen]
    middle = next(status for status in seen if status["done"] >= 3)
    assert middle["failed"] == 1
    assert middle["output_tokens"] >= 6 * middle["done"]
    assert middle["acceptance_length"] >= 1
    assert 0 < middle["eta_seconds"] < 60
    last = json.loads((tmp_path / "status.json").read_text())
    assert (last["state"], last["done"], last["failed"], last["eta_seconds"]) == ("finished", 7, 1, None)


def test_a_status_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    status = Status(tmp_path / "status.json")
    status.begin(total=1, done=0, startup={})
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    assert not synced


@pytest.mark.parametrize(
    ("name", "text"), [*(("status.json", text) for text in ("", "null", "[]", '"x"')), ("report.json", "")]
)
def test_a_file_that_says_nothing_is_made_anew(job: Job, tmp_path: Path, name: str, text: str) -> None:
    first = run.run(job, tmp_path, Follower())
    (tmp_path / name).write_text(text)
    assert run.run(job, tmp_path, Follower()) == first
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"
    assert json.loads((tmp_path / "report.json").read_text())["num_requests"] == 8


def test_a_resume_parses_few_rows(tmp_path: Path) -> None:
    """31 calls for each when this was written, 1 s for 100,000 of 50 verify steps: most are not parsed."""
    number, num_calls = 1000, 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    row = {"prompt": "Some words " * 40, "text": "more words " * 60, "token_ids": list(range(150, 300))}
    a_pass = (
        '{"row":"pass","number":7,"num_rejected":3,"num_preempted":0,"kind":"decode","time":12.3456789}\n'
    )
    write_prompts(tmp_path / "own.jsonl", (f"request-{n:06d}" for n in range(number)))
    prompts = DataSource(dataset=str(tmp_path / "own.jsonl")).open()
    found = index_prompts("own", prompts, WHOLE)
    with (tmp_path / "completions.jsonl").open("w") as rows, (tmp_path / "passes.jsonl").open("w") as passes:
        for n in range(number - 1):
            rows.write(json.dumps({"id": f"request-{n:06d}", **row}) + "\n")
            passes.write(a_pass * 5)
    sys.setprofile(count)
    try:
        with RunDirectory(tmp_path) as files:
            assert len(files.completions) == number - 1
            (last,) = prompts.select(found.pending(files.completions))
    finally:
        sys.setprofile(None)
    assert num_calls < 36 * number, num_calls
    assert last.id == f"request-{number - 1:06d}"


@pytest.fixture(autouse=True)
def _loaded(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in_memory(monkeypatch, job.engine)


@pytest.mark.parametrize(
    "file", mostly_slow(["model.safetensors", "tokenizer_config.json"], "model.safetensors")
)
def test_a_directory_in_which_nothing_was_done_belongs_to_the_corrected_command(
    job: Job, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first command fails for its checkpoint; a kill before the first answer leaves as little."""
    pair, out = Path(job.engine.model).parent, tmp_path / "run"
    broken = tmp_path / "broken"
    shutil.copytree(pair / "target", broken)
    (broken / file).write_text("{")
    monkeypatch.undo()  # the models in memory
    with pytest.raises(UserError):
        run.run(with_changes(job, {"engine": {"model": str(broken)}}), out, Follower())
    assert not out.exists()
    with pytest.raises(StoppedError):  # with a manifest, and no row
        run.run(with_changes(job, {"sampling": {"max_tokens": 7}}), out, Follower(), lambda: True)
    assert (out / "manifest.json").exists()
    (out / "notes.txt").write_text("mine")
    run.run(job, out, Follower())
    assert ids(out / "completions.jsonl") == NAMES
    assert json.loads((out / "manifest.json").read_text())["sampling"]["max_tokens"] == 6
    assert (out / "notes.txt").exists()


@pytest.fixture
def written(tmp_path: Path) -> Iterator[list[str]]:
    """What is opened for writing, made, moved or removed below ``tmp_path``, as Python's audit tells."""
    found, watching = list[str](), [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching[0] or not arguments or not str(arguments[0]).startswith(str(tmp_path)):
            return
        writes = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.truncate", "os.rmdir"):
            found.append(f"{event} {arguments[0]}")

    sys.addaudithook(hook)
    yield found
    watching[0] = False


@pytest.mark.parametrize("kept", mostly_slow(["jsonl", "openai"], "jsonl"))
def test_reading_a_finished_run_needs_no_right_to_write_it(
    job: Job, tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch, kept: FormatName
) -> None:
    out = tmp_path / "run"
    job = replace(job, format=kept, config="# again")
    first = run.run(job, out, Follower())
    assert written, "the hook sees what it is to see"
    (out / LOCK).unlink()
    written.clear()
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert run.run(job, out, Follower()).report == first.report
    printed("report", str(out))
    assert written == []
    with refused("holds a run that differs in --seed 0 -> 3"):
        run.run(with_changes(job, {"sampling": {"seed": 3}}), out, Follower())
    assert written == []
