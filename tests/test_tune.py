"""``specgen tune``: who is measured, dropped and kept, and that its sentences say what was measured."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from specgen.config import DraftLength, EngineConfig, UserError
from specgen.engine import build
from specgen.engine.arms import Arm
from specgen.experiments.output import BenchTable
from specgen.experiments.plans import prepare
from specgen.experiments.rounds import Ranking
from specgen.experiments.tune import sentence, tune
from specgen.experiments.tune_job import TuneJob, Workload
from tests.commands import refused
from tests.timed_engines import RUN, Timed, install, job_of, rounds_of, usual


def last(job: TuneJob, output: Path | None = None) -> BenchTable:
    return list(tune(job, output))[-1]


def turns_of(timed: Timed) -> Counter[tuple[int, int, str]]:
    """Measured runs by batch, K and mode, warm-ups not counted."""
    runs = Counter((c.max_batch_size, c.draft_length.most, c.drafter_batch) for c in timed.order)
    return runs - Counter((c.max_batch_size, c.draft_length.most, c.drafter_batch) for c in timed.built)


def test_arms_of_a_batch_take_turns_and_slow_ones_are_dropped(tiny_pair: Path, monkeypatch) -> None:
    timed = install(monkeypatch, usual)
    table = last(job_of(tiny_pair, precision=0.001))
    runs = turns_of(timed)
    for batch in (1, 4):
        assert runs[batch, 2, "padded"] == runs[batch, 2, "non-padded"] == 8, "they are as fast"
        assert 3 <= runs[batch, 4, "padded"] < 8
    assert [c.max_batch_size for c in timed.order] == sorted(c.max_batch_size for c in timed.order)
    first = [(c.draft_length.most, c.drafter_batch) for c in timed.order[5:15]]
    arms = [(0, "padded"), *list(RUN)[1:]]
    orders = [(0, 1, 4, 2, 3), (1, 0, 2, 4, 3)]
    assert first == [arms[at] for order in orders for at in order], "after the warm-ups, in balanced turns"
    verdicts = {(row["batch"], row["K"], row["drafter_batch"]): row["verdict"] for row in table.rows}
    assert verdicts[4, 2, "padded"] == "best"
    assert verdicts[4, 4, "non-padded"] == "dropped"
    assert verdicts[4, 0, "-"] == "slower", "plain decoding is what others are measured by"
    arms = [(row["batch"], row["K"], row["drafter_batch"] if row["K"] else "padded") for row in table.rows]
    assert [row["repeats"] for row in table.rows] == [runs[arm] for arm in arms]


def test_it_ends_when_intervals_are_narrow(tiny_pair: Path, monkeypatch) -> None:
    timed = install(monkeypatch, usual)
    last(job_of(tiny_pair, precision=0.5))
    assert set(turns_of(timed).values()) == {3}


def test_sentences_are_what_the_kept_rounds_say(tiny_pair: Path, monkeypatch, tmp_path: Path) -> None:
    """The numbers are computed again from the file, by scipy."""
    install(monkeypatch, usual)
    table = last(job_of(tiny_pair), tmp_path)
    rounds = [json.loads(line)["arms"] for line in (tmp_path / "tune.rounds.jsonl").read_text().splitlines()]

    def ratio(arm: str, other: str) -> tuple[float, float, float]:
        speeds = [
            [each[name]["num_tokens"] / each[name]["seconds"] for name in (arm, other)]
            for each in rounds
            if {arm, other} <= each.keys()
        ]
        test = stats.ttest_1samp([math.log(one / two) for one, two in speeds], 0)
        ends = test.confidence_interval(0.95)
        centre = sum(math.log(one / two) for one, two in speeds) / len(speeds)
        return tuple(math.exp(each) for each in (centre, ends.low, ends.high))

    for batch, answer in zip((1, 4), table.answers, strict=False):
        best, low, high = ratio(f"batch {batch}, K 2, padded", f"batch {batch}, plain")
        assert f"At batch {batch}: K 2, padded, {best:.2f}x [{low:.2f}, {high:.2f}] of plain, " in answer
        assert low < best < high
        _, low, high = ratio(f"batch {batch}, K 2, non-padded", f"batch {batch}, K 2, padded")
        assert answer.endswith("; no different: K 2, non-padded.") == (low <= 1 <= high)
    row = next(row for row in table.rows if (row["batch"], row["K"]) == (4, 4))
    assert (row["x_plain"], *row["x_plain_ci95"]) == pytest.approx(
        ratio("batch 4, K 4, padded", "batch 4, plain")
    )
    assert (row["x_best"], *row["x_best_ci95"]) == pytest.approx(
        ratio("batch 4, K 4, padded", "batch 4, K 2, padded")
    )
    assert "--max-batch-size 4 --num-spec-tokens 2 --drafter-batch padded" in table.answers[-1]


def test_plain_decoding_may_be_the_best(tiny_pair: Path, monkeypatch) -> None:
    install(monkeypatch, lambda config, number: 1 + config.draft_length.most + number / 1000)
    (answer, _) = last(job_of(tiny_pair, batches=(4,), drafter_batches=("padded",))).answers
    assert re.fullmatch(r"At batch 4: plain, [\d,]+ tokens/s\.", answer)


def test_sentences_are_of_what_arms_change_and_not_of_their_names(tiny_pair: Path) -> None:
    changes = {
        "a": {"K": 0},
        "b": {"K": 2, "drafter_batch": "padded"},
        "c": {"K": 2, "drafter_batch": "non-padded"},
    }
    changes["d, K 2, padded"] = {"K": "auto", "drafter_batch": "padded"}
    arms = {name: Arm(name=name, changes={"batch": 4, **each}) for name, each in changes.items()}
    speeds = [(100, 150, 140, 120), (101, 152, 141, 119)]
    ranking = Ranking(
        plain="a", arms=rounds_of([dict(zip(arms, each, strict=True)) for each in speeds]).measured(arms)
    )
    assert sentence(4, ranking, arms).startswith("At batch 4: K 2, padded, 1.50x [")
    assert "no different" not in sentence(4, ranking, arms)
    alone = Ranking(plain="a", arms=rounds_of([{"a": 100.0}]).measured(["a"]))  # a short budget
    assert "no spread (plain alone was measured): raise --budget" in sentence(4, alone, arms)


# --- going on -------------------------------------------------------------------------------------


def test_a_stopped_tune_goes_on_with_what_is_missing(tiny_pair: Path, monkeypatch, tmp_path: Path) -> None:
    whole = install(monkeypatch, usual)
    last(job_of(tiny_pair), tmp_path / "whole")

    def stopped(config: EngineConfig, number: int) -> float:
        if len(timed.order) == 5 + 2 * 5 + 3:  # in the middle of the third round
            raise KeyboardInterrupt
        return usual(config, number)

    timed = install(monkeypatch, stopped)
    with pytest.raises(KeyboardInterrupt):
        last(job_of(tiny_pair), tmp_path / "run")
    path = tmp_path / "run" / "tune.rounds.jsonl"
    kept = path.read_bytes()
    assert len(kept.splitlines()) == 2
    again = install(monkeypatch, usual)
    last(job_of(tiny_pair), tmp_path / "run")
    assert path.read_bytes().startswith(kept)
    missing = {key: number - 2 * (key[0] == 1) for key, number in turns_of(whole).items()}
    assert {key: n for key, n in turns_of(again).items() if key[0] == 4} == {
        key: n for key, n in missing.items() if key[0] == 4
    }
    assert turns_of(again)[1, 4, "padded"] == missing[1, 4, "padded"] > 0
    finished = install(monkeypatch, usual)
    table = last(job_of(tiny_pair), tmp_path / "run")
    assert finished.built == []
    assert len(table.rows) == 10


def test_a_torn_line_is_not_a_round(tiny_pair: Path, monkeypatch, tmp_path: Path) -> None:
    install(monkeypatch, usual)
    last(job_of(tiny_pair, batches=(1,)), tmp_path)
    path = tmp_path / "tune.rounds.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    last(job_of(tiny_pair, batches=(1,)), tmp_path)
    lines = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    assert lines == [f"round {n}" for n in range(1, len(lines) + 1)]
    assert len(lines) == whole.count(b"\n")


@pytest.mark.parametrize("edited", [{}, {"arms": {"plain": {"seconds": "3"}}}, {"arms": []}])
def test_a_round_that_was_edited_is_named(
    tiny_pair: Path, monkeypatch, tmp_path: Path, edited: dict[str, object]
) -> None:
    install(monkeypatch, usual)
    last(job_of(tiny_pair, batches=(1,)), tmp_path)
    path = tmp_path / "tune.rounds.jsonl"
    path.write_text(json.dumps({"id": "round 1", **edited}) + "\n")
    with refused("'round 1' of the kept rounds is damaged .*: remove its line"):
        last(job_of(tiny_pair, batches=(1,)), tmp_path)


def test_another_question_needs_another_directory(tiny_pair: Path, monkeypatch, tmp_path: Path) -> None:
    install(monkeypatch, usual)
    last(job_of(tiny_pair), tmp_path)
    before = (tmp_path / "tune.rounds.jsonl").read_bytes()
    other = job_of(tiny_pair, draft_lengths=(DraftLength(most=2),))
    for job, field in (
        (other, r"bench.k 2, 4 -> 2"),
        (
            job_of(tiny_pair, workload=Workload(dataset="random", prompt_tokens=6, max_new_tokens=8)),
            "data.requests",
        ),
    ):
        with refused(rf"holds a run that differs in .*{field}.*: name a new directory"):
            last(job, tmp_path)
    assert (tmp_path / "tune.rounds.jsonl").read_bytes() == before
    last(job_of(tiny_pair, repeats=9, precision=0.001, budget=1e9), tmp_path)  # more of the same
    assert (tmp_path / "tune.rounds.jsonl").read_bytes().startswith(before)


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_budget_ends_it_and_the_rest_is_named(tiny_pair: Path, monkeypatch, tmp_path: Path) -> None:
    timed = install(monkeypatch, usual)
    monkeypatch.setattr("time.monotonic", lambda: timed.clock)
    table = last(job_of(tiny_pair, budget=60.0), tmp_path)
    assert 45 < timed.clock <= 60, "what would not have ended in time did not begin"
    assert any(
        note.startswith("budget: 60 s for prompts, weights, warm-ups and rounds") for note in table.notes
    )
    assert {row["batch"] for row in table.rows} == {1, 4}, "each batch size has its share"
    assert 0 < turns_of(timed)[1, 2, "padded"] < 8
    timed = install(monkeypatch, usual)
    one = last(job_of(tiny_pair, budget=4.0), tmp_path / "kept")
    assert [c.draft_length.most for c in timed.built] == [0], "its warm-up takes three of the four seconds"
    assert "batch 1, K 2, padded; " in one.notes[-1]
    assert one.notes[-1].endswith("; batch 4, K 4, non-padded: the same command goes on")
    install(monkeypatch, usual)
    assert last(job_of(tiny_pair, budget=4.0)).notes[-1].endswith(": with --output it can go on")


def test_a_budget_does_not_leave_out_the_same_arms_again(
    tiny_pair: Path, monkeypatch, tmp_path: Path
) -> None:
    measured = []
    for _ in range(2):
        timed = install(monkeypatch, usual)
        monkeypatch.setattr("time.monotonic", lambda now=timed: now.clock)
        measured.append(len(last(job_of(tiny_pair, batches=(4,), budget=32.0), tmp_path).rows))
        assert timed.clock <= 32
    assert measured[0] < measured[1] == 5


def test_where_a_round_no_longer_fits_the_fastest_get_theirs(tiny_pair: Path, monkeypatch) -> None:
    timed = install(monkeypatch, lambda config, number: {0: 3.0, 2: 4.0, 4: 2.0}[config.draft_length.most])
    monkeypatch.setattr("time.monotonic", lambda: timed.clock)
    table = last(job_of(tiny_pair, batches=(4,), budget=42.0))  # 15 s for the warm-ups and for each round
    assert [(row["K"], row["repeats"]) for row in table.rows] == [(0, 3), (2, 1), (2, 1), (4, 3), (4, 2)]
    assert table.answers[0].startswith("At batch 4: K 4, padded, 1.50x")
    timed = install(monkeypatch, usual)
    monkeypatch.setattr("time.monotonic", lambda: timed.clock)
    short = last(job_of(tiny_pair, batches=(4,), budget=25.0))  # too short for all: fewer arms, and a verdict
    assert len(short.rows) < 5
    assert "best" in {row["verdict"] for row in short.rows}


def test_one_repeat_is_no_verdict_and_has_no_command(tiny_pair: Path, monkeypatch, tmp_path: Path) -> None:
    install(monkeypatch, usual)
    table = last(job_of(tiny_pair, repeats=1), tmp_path)
    assert {row["verdict"] for row in table.rows} == {"unknown"}
    assert [answer.partition(" (")[0] for answer in table.answers] == [
        f"At batch {batch}: no verdict, one repeat has no spread" for batch in (1, 4)
    ]
    assert "K 2, padded was ahead" in table.answers[0]
    assert "specgen generate" not in table.to_html()
    twice = last(job_of(tiny_pair, repeats=2), tmp_path)
    assert [row["verdict"] for row in twice.rows].count("best") == 2
    assert twice.answers[-1].startswith("Most tokens per second: specgen generate")


def test_prompts_that_never_fill_the_batch_are_refused(tiny_pair: Path) -> None:
    workload = Workload(dataset="random", num_prompts=3, prompt_tokens=5, max_new_tokens=8)
    with pytest.raises(UserError, match=r"^num-prompts is 3, which never fill a batch of 4: use at least 4$"):
        job_of(tiny_pair, workload=workload)
    job_of(tiny_pair, workload=replace(workload, num_prompts=4))


def test_an_arm_that_fails_costs_the_others_nothing(tiny_pair: Path, monkeypatch) -> None:
    def broken(config: EngineConfig, number: int) -> float:
        if config.draft_length.most == 4 and number == (config.drafter_batch == "padded") * 2:
            raise RuntimeError("no kernel")
        return usual(config, number)

    timed = install(monkeypatch, broken)
    table = last(job_of(tiny_pair, batches=(4,)))
    assert [note for note in table.notes if note.startswith("failed")] == [
        "failed: batch 4, K 4, non-padded: RuntimeError: no kernel",
        "failed: batch 4, K 4, padded: RuntimeError: no kernel",
    ]
    assert [(row["K"], row["repeats"]) for row in table.rows][-1] == (4, 1), "what it did is kept"
    assert turns_of(timed)[4, 2, "padded"] >= 3
    assert "K 2, padded" in table.answers[0]


def test_without_plain_decoding_there_is_still_a_fastest(tiny_pair: Path, monkeypatch) -> None:
    def broken(config: EngineConfig, number: int) -> float:
        if config.draft_length.most == 0:
            raise RuntimeError("no kernel")
        return usual(config, number)

    install(monkeypatch, broken)
    table = last(job_of(tiny_pair, batches=(4,)))
    assert table.answers[0].startswith(
        "At batch 4: K 2, padded, the fastest; plain decoding was not measured, "
    )
    assert {row["x_plain"] for row in table.rows} == {None}


def test_an_arm_with_other_texts_is_named(tiny_pair: Path, monkeypatch) -> None:
    timed = install(monkeypatch, usual)
    timed.token_ids = lambda config: (5 + (config.draft_length.most == 4),) * 100
    notes = last(job_of(tiny_pair, batches=(4,))).notes
    (differing,) = [note for note in notes if note.startswith("texts differ")]
    arms = "batch 4, K 4, padded; batch 4, K 4, non-padded"
    assert differing == (
        f"texts differ from plain decoding in {arms}: specgen verify says whether rounding explains it"
    )
    wrong = [note for note in notes if note.startswith("wrong: batch 4, K 2, padded: ")]
    assert len(wrong) == 1, "a cycle of tokens is no row of fives"


def test_texts_of_one_token_give_no_verdict(tiny_pair: Path, monkeypatch) -> None:
    install(monkeypatch, usual).token_ids = lambda config: (5,)
    table = last(job_of(tiny_pair, batches=(4,)))
    said = "At batch 4: no verdict, as every text ended at its first token: no step had drafts."
    assert table.answers == (said,)
    for row in table.rows:
        assert row["verdict"] == "unknown"
        assert row["x_plain"] is row["x_best"] is row["same_texts"] is None


def test_a_busy_machine_is_named_where_the_answer_is(tiny_pair: Path, monkeypatch) -> None:
    install(monkeypatch, usual)
    quiet = last(job_of(tiny_pair, batches=(4,)))
    assert not any("BUSY" in text for text in (*quiet.answers, *quiet.notes))
    monkeypatch.setattr("os.getloadavg", lambda: (1e6, 0.0, 0.0))
    table = last(job_of(tiny_pair, batches=(4,)))
    said = "every arm: other programs kept the machine BUSY, so speeds are doubtful"
    assert [answer for answer in table.answers if "BUSY" in answer] == [said]


def test_a_tune_whose_arms_all_fail_says_why(tiny_pair: Path, monkeypatch) -> None:
    def broken(config: EngineConfig, number: int) -> float:
        raise RuntimeError("no kernel")

    install(monkeypatch, broken)
    table = last(job_of(tiny_pair, batches=(4,)))
    assert (table.rows, table.answers) == ((), ())
    assert [note.partition(":")[0] for note in table.notes] == ["failed"] * 5
    assert "no kernel" in table.to_html()


def test_arms_that_do_not_fit_together_meet_the_best_in_groups(tiny_pair: Path, monkeypatch) -> None:
    install(monkeypatch, usual)
    job = job_of(tiny_pair, batches=(4,))
    need = max(plan.num_bytes for plan in prepare(job).plans)
    monkeypatch.setattr(build, "_CPU_REST", 2 * 3 * need)
    timed = install(monkeypatch, usual)
    table = last(job)
    assert len(table.rows) == 5
    groups = Counter((c.draft_length.most, c.drafter_batch) for c in timed.built)
    assert groups[0, "padded"] > 1, "plain decoding is in every group"
    assert groups[2, "padded"] > 1, "so is the best so far"
    assert all(row["x_plain_ci95"] for row in table.rows[1:])
    assert "K 2, padded, 1.5" in table.answers[0]
    hurried = install(monkeypatch, usual)
    monkeypatch.setattr("time.monotonic", lambda: hurried.clock)
    last(replace(job, budget=20.0))
    assert 0 < len(hurried.built) <= 3, "no group begins after the deadline"
    monkeypatch.undo()
    install(monkeypatch, usual)
    monkeypatch.setattr(build, "_CPU_REST", 0)
    apart = last(job)
    assert [row["x_plain"] for row in apart.rows] == pytest.approx(
        [r["x_plain"] for r in table.rows], rel=0.02
    )
    assert all(row["x_plain_ci95"] for row in apart.rows[1:])
