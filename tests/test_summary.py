"""Runs that record sums of their events, or none: the same numbers, also after a stop, and what is missing is said."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.config import EventsName, UserError
from specgen.events import (
    Answered,
    Event,
    Finished,
    Merged,
    Preempted,
    Prefilled,
    Resumed,
    Sharded,
    Stepped,
    Submitted,
    Switched,
    Touched,
    Verified,
    from_line,
    read,
    to_line,
)
from specgen.jobs import run
from specgen.jobs.job import Job
from specgen.report.report import fold
from specgen.report.summary import Summary
from specgen.report.tables import of_run
from specgen.report.terminal import render
from specgen.report.unfinished import load_so_far
from specgen.rundir.interrupt import StoppedError
from tests.jobs import HOW_IT_WENT, Silent, conversations, keep_in_memory


def request(
    name: str, at: float, accepted: Iterable[int], *, reason: str = "stop", **more: Any
) -> Iterator[Event]:
    """A request with a step of two drafts, or of none, for each of ``accepted``; its reasoning ends within."""
    yield Submitted(sequence=name, time=at, num_prompt_tokens=3, **more)
    yield Prefilled(sequence=name, time=at + 0.5, emitted=1, num_cached=1)
    yield Stepped(kind="prefill", time=at + 0.6, **STEP)
    tokens = 1
    for step, number in enumerate(accepted, start=1):
        if step == 2:
            yield Switched(sequence=name, time=at + step, part="reasoning", at=0)
            yield Preempted(sequence=name, time=at + step)
        drafts = (1, 2) if step % 3 else ()
        yield Verified(
            sequence=name, time=at + step, drafts=drafts, accepted=number if drafts else 0, emitted=1
        )
        tokens += 1
        touched = Touched(experts=3.5, plain=2.0, num_experts=8, num_bytes=100 * step)
        yield Stepped(
            kind="decode",
            time=at + step + 0.25,
            **STEP | {"experts": touched, "num_spec_tokens": len(drafts)},
        )
        if step == 3:
            yield Switched(sequence=name, time=at + step + 0.5, part="answer", at=3)
    yield Finished(
        sequence=name, time=at + 9, reason=reason, num_output_tokens=0 if reason == "error" else tokens
    )


STEP: dict[str, Any] = {
    "seconds": 0.25,
    "num_sequences": 3,
    "num_spec_tokens": 0,
    "target_rows": 7,
    "first_pass_rows": 5,
    "first_pass_kept": 2,
    "loop_rows": 4,
}
EVENTS = [
    *request("a", 1, [0, 1, 0, 2], category="x"),
    *request("b", 2, [2], turn=2),
    *request("c", 3, [1, 1], reason="error"),
    Resumed(time=0.0),
    *request("c", 1, [1, 2], reason="length"),
    *request("d", 2, [], reason="error"),
    Sharded(time=0.0, shard="1/2"),
    *request("e", 1, [2, 2, 0, 1, 1], category="x"),
    Merged(time=0.0),
    *request("f", 5, [0]),
]


def summed(events: Iterable[Event]) -> list[Event]:
    """What a run records of ``events`` in sums, written and read."""
    summary, found = Summary(2), list[Event]()
    for event in events:
        for ended in summary.take(event):
            found += [*summary.worked(), ended]
    return [from_line(to_line(event)) for event in (*found, *summary.worked())]


def test_sums_have_every_number_of_the_events() -> None:
    sums = summed(EVENTS)
    assert len(sums) < len(EVENTS) / 2
    whole = fold(EVENTS, num_spec_tokens=2).to_json()
    assert fold(sums, num_spec_tokens=2).to_json() == whole
    assert json.loads(json.dumps(summed(sums), default=vars)) == json.loads(json.dumps(sums, default=vars))
    assert whole["parts"]
    assert whole["experts"]
    assert (whole["num_errors"], whole["num_preemptions"], whole["num_requests"]) == (1, 4, 5)


def test_events_may_change_to_sums_and_back() -> None:
    at = next(number for number, event in enumerate(EVENTS) if isinstance(event, Resumed))
    whole = fold(EVENTS, num_spec_tokens=2)
    assert fold([*summed(EVENTS[:at]), *EVENTS[at:]], num_spec_tokens=2) == whole
    assert fold([*EVENTS[:at], *summed(EVENTS[at:])], num_spec_tokens=2) == whole


def test_sums_of_another_k_are_refused() -> None:
    with pytest.raises(UserError, match="are not of K = 3"):
        fold(summed(EVENTS), num_spec_tokens=3)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    rows = [
        {"question_id": n, "category": "ab"[n % 2], "turns": [f"Tom has {n} apples.", "And?"]}
        for n in range(5)
    ]
    job = replace(
        conversations(tmp_path, rows), sampling=replace(conversations(tmp_path, rows).sampling, max_tokens=40)
    )
    keep_in_memory(monkeypatch, job.engine)
    return job


def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return {name: value for name, value in found.items() if name not in HOW_IT_WENT}


def stop_and_resume(job: Job, out: Path) -> None:
    """A run that is stopped, loses the last completion as a kill may, and goes on."""
    follower = Silent()
    ended: list[int] = []
    follower.advance = lambda: ended.append(1)  # type: ignore[method-assign]
    with pytest.raises(StoppedError):
        run.run(job, out, follower, lambda: len(ended) >= 4)
    lines = (out / "completions.jsonl").read_bytes().splitlines(keepends=True)
    (out / "completions.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:-9])
    run.run(job, out, Silent())


def test_a_stopped_run_in_sums_ends_with_the_numbers_of_a_whole_one(job: Job, tmp_path: Path) -> None:
    run.run(job, tmp_path / "full", Silent())
    in_sums = replace(job, events="summary")
    stop_and_resume(in_sums, tmp_path / "sums")
    assert report(tmp_path / "sums") == report(tmp_path / "full")
    sizes = [(tmp_path / name / "events.jsonl").stat().st_size for name in ("full", "sums")]
    assert sizes[1] < sizes[0] * 0.75  # with these short texts; with 256 tokens a thirteenth
    answered = [
        event.sequence for event in read(tmp_path / "sums" / "events.jsonl") if isinstance(event, Answered)
    ]
    assert len(answered) == len(set(answered)) == 10
    with pytest.raises(UserError, match=r"differs in --events summary -> full"):
        run.run(job, tmp_path / "sums", Silent())


_TOLD_BY_EVENTS = {"num_preemptions", "num_steps_without_drafts", "events"}


def test_without_events_the_counts_are_the_same_and_the_rest_is_null(job: Job, tmp_path: Path) -> None:
    job = replace(job, baseline=True)
    run.run(job, tmp_path / "full", Silent())
    stop_and_resume(replace(job, events="none"), tmp_path / "none")
    full, none = report(tmp_path / "full"), report(tmp_path / "none")
    assert {name for name in none if none[name] != full.get(name)} == _TOLD_BY_EVENTS | {"baseline"}
    whole = json.loads((tmp_path / "none" / "report.json").read_text())
    untold = *_TOLD_BY_EVENTS - {"events"}, "wall_seconds", "num_cached_tokens", "output_tokens_per_second"
    assert [whole[name] for name in (*untold, "ttft_seconds")] == [None] * 6
    assert (set(whole["rows"].values()), whole["steps"]) == ({None}, {})
    assert none["baseline"] == {**full["baseline"], "output_tokens_per_second": None, "ratio": None}
    assert (tmp_path / "none" / "events.jsonl").read_bytes() == b""
    shown = render(of_run(whole, {}), 100)
    assert "This run recorded no events (--events none)" in shown
    assert "target rows" not in shown


@pytest.mark.parametrize("events", ["summary", "none"])
def test_a_stopped_run_without_events_reports_what_it_has(
    job: Job, tmp_path: Path, events: EventsName
) -> None:
    follower, ended = Silent(), list[int]()
    follower.advance = lambda: ended.append(1)  # type: ignore[method-assign]
    with pytest.raises(StoppedError):
        run.run(replace(job, events=events), tmp_path / "run", follower, lambda: len(ended) >= 4)
    found, _ = load_so_far(tmp_path / "run")
    assert (found["num_requests"], found["num_unfinished"]) == (len(ended), 0)
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert found["total_num_output_tokens"] == sum(len(row["token_ids"]) for row in rows) > 0
    assert found["num_drafts"] == sum(row["metrics"]["num_spec_steps"] for row in rows)


@pytest.mark.parametrize("changed", [{"drafter": "ngram"}, {"num_spec_tokens": "auto"}])
def test_drafts_that_vary_need_events(job: Job, changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"events is none, but .*: use summary"):
        replace(job, events="none", engine=replace(job.engine, **changed))
