"""``specgen tune``: who is measured, dropped and kept, and that its sentences say what was measured."""

import json
import math
import re
import shlex
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats
from typer.testing import CliRunner

from specgen.bench import plans as plans_of
from specgen.bench import tune as tuning
from specgen.bench.advice import command
from specgen.bench.matrices import Workload
from specgen.bench.output import BenchTable
from specgen.bench.tune import TuneJob, tune
from specgen.cli.main import app
from specgen.cli.tuning import draft_lengths, seconds
from specgen.config import DraftLength, EngineConfig, UserError
from specgen.display import duration
from specgen.engine.arms import Arm
from tests.timed_engines import Timed, install, write_tiny

RUN = {
    (0, "padded"): 3.0,
    (2, "padded"): 2.0,
    (2, "non-padded"): 2.02,
    (4, "padded"): 4.0,
    (4, "non-padded"): 4.1,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("pair"))


def usual(config: EngineConfig, number: int) -> float:
    """K 2 is fastest in both modes and K 4 slower than plain decoding; noise of a percent."""
    key = config.draft_length.most, config.drafter_batch
    noise = 1 + 0.005 * ((7 * number + 3 * list(RUN).index(key)) % 5 - 2)
    return RUN[key] * noise * config.max_batch_size**0.25


def job_of(pair: Path, **changes) -> TuneJob:
    engine = EngineConfig(
        model=str(pair / "target"),
        drafter=str(pair / "drafter"),
        page_size=4,
        device="cpu",
        prefix_cache=False,
        max_batch_size=4,
    )
    settings = {
        "batches": (1, 4),
        "draft_lengths": (DraftLength(most=2), DraftLength(most=4)),
        "drafter_batches": ("padded", "non-padded"),
        "workload": Workload(dataset="random", prompt_tokens=5, max_new_tokens=8),
        "repeats": 8,
        "precision": 0.02,
        "budget": None,
    }
    return TuneJob(engine=engine, data_path=None, **settings | changes)


def last(
    job: TuneJob, output: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> BenchTable:
    return list(tune(job, output, say=say))[-1]


def turns_of(timed: Timed) -> Counter[tuple[int, int, str]]:
    """Measured runs by batch, K and mode, warm-ups not counted."""
    runs = Counter((c.max_batch_size, c.draft_length.most, c.drafter_batch) for c in timed.order)
    return runs - Counter((c.max_batch_size, c.draft_length.most, c.drafter_batch) for c in timed.built)


def test_arms_of_a_batch_take_turns_and_slow_ones_are_dropped(pair: Path, monkeypatch) -> None:
    timed, said = install(monkeypatch, usual), []
    table = last(job_of(pair, precision=0.001), say=said.append)
    runs = turns_of(timed)
    for batch in (1, 4):
        assert runs[batch, 2, "padded"] == runs[batch, 2, "non-padded"] == 8, "they are as fast"
        assert 3 <= runs[batch, 4, "padded"] < 8
    assert [c.max_batch_size for c in timed.order] == sorted(c.max_batch_size for c in timed.order)
    first = [(c.draft_length.most, c.drafter_batch) for c in timed.order[5:15]]
    assert first[:5] == first[5:] == [(0, "padded"), *list(RUN)[1:]], "after the warm-ups, in turns"
    assert sum("dropped: batch 1, K 4, padded: 0.50x of K 2, padded" in text for text in said) == 1
    assert {text.partition(":")[0] for text in said} == {"dropped"}
    verdicts = {(row["batch"], row["K"], row["drafter_batch"]): row["verdict"] for row in table.rows}
    assert verdicts[4, 2, "padded"] == "best"
    assert verdicts[4, 4, "non-padded"] == "dropped"
    assert verdicts[4, 0, "-"] == "slower", "plain decoding is what others are measured by"
    arms = [(row["batch"], row["K"], row["drafter_batch"] if row["K"] else "padded") for row in table.rows]
    assert [row["repeats"] for row in table.rows] == [runs[arm] for arm in arms]


def test_it_ends_when_intervals_are_narrow(pair: Path, monkeypatch) -> None:
    timed = install(monkeypatch, usual)
    last(job_of(pair, precision=0.5))
    assert set(turns_of(timed).values()) == {3}


def test_sentences_are_what_the_kept_rounds_say(pair: Path, monkeypatch, tmp_path: Path) -> None:
    """The numbers are computed again from the file, by scipy."""
    install(monkeypatch, usual)
    table = last(job_of(pair), tmp_path)
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
        twin, low, high = ratio(f"batch {batch}, K 2, non-padded", f"batch {batch}, K 2, padded")
        shown = f"{twin:.2f}x [{low:.2f}, {high:.2f}]"
        alike = f"; non-padded no different, {shown}" if low <= 1 <= high else f"; non-padded {shown} of that"
        assert alike in answer
    row = next(row for row in table.rows if (row["batch"], row["K"]) == (4, 4))
    assert (row["x_plain"], *row["x_plain_ci95"]) == pytest.approx(
        ratio("batch 4, K 4, padded", "batch 4, plain")
    )
    assert (row["x_best"], *row["x_best_ci95"]) == pytest.approx(
        ratio("batch 4, K 4, padded", "batch 4, K 2, padded")
    )
    assert "--max-batch-size 4 --num-spec-tokens 2 --drafter-batch padded" in table.answers[-1]


def test_plain_decoding_may_be_the_best(pair: Path, monkeypatch) -> None:
    install(monkeypatch, lambda config, number: 1 + config.draft_length.most + number / 1000)
    (answer, _) = last(job_of(pair, batches=(4,), drafter_batches=("padded",))).answers
    assert answer.startswith("At batch 4: plain, ")
    assert re.search(r"; with drafts at best K 2, padded, 0.33x \[0.33, 0.33\] of plain\.$", answer)


# --- going on -------------------------------------------------------------------------------------


def test_a_stopped_tune_goes_on_with_what_is_missing(pair: Path, monkeypatch, tmp_path: Path) -> None:
    whole = install(monkeypatch, usual)
    last(job_of(pair), tmp_path / "whole")

    def stopped(config: EngineConfig, number: int) -> float:
        if len(timed.order) == 5 + 2 * 5 + 3:  # in the middle of the third round
            raise KeyboardInterrupt
        return usual(config, number)

    timed = install(monkeypatch, stopped)
    with pytest.raises(KeyboardInterrupt):
        last(job_of(pair), tmp_path / "run")
    path = tmp_path / "run" / "tune.rounds.jsonl"
    kept = path.read_bytes()
    assert len(kept.splitlines()) == 2
    again = install(monkeypatch, usual)
    last(job_of(pair), tmp_path / "run")
    assert path.read_bytes().startswith(kept)
    missing = {key: number - 2 * (key[0] == 1) for key, number in turns_of(whole).items()}
    assert {key: n for key, n in turns_of(again).items() if key[0] == 4} == {
        key: n for key, n in missing.items() if key[0] == 4
    }
    assert turns_of(again)[1, 4, "padded"] == missing[1, 4, "padded"] > 0
    finished = install(monkeypatch, usual)
    table = last(job_of(pair), tmp_path / "run")
    assert finished.built == []
    assert len(table.rows) == 10


def test_a_torn_line_is_not_a_round(pair: Path, monkeypatch, tmp_path: Path) -> None:
    install(monkeypatch, usual)
    last(job_of(pair, batches=(1,)), tmp_path)
    path = tmp_path / "tune.rounds.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    last(job_of(pair, batches=(1,)), tmp_path)
    lines = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    assert lines == [f"round {n}" for n in range(1, len(lines) + 1)]
    assert len(lines) == whole.count(b"\n")


def test_another_question_needs_another_directory(pair: Path, monkeypatch, tmp_path: Path) -> None:
    install(monkeypatch, usual)
    last(job_of(pair), tmp_path)
    before = (tmp_path / "tune.rounds.jsonl").read_bytes()
    other = job_of(pair, draft_lengths=(DraftLength(most=2),))
    for job, field in (
        (other, r"bench.k \(2, 4, now 2\)"),
        (
            job_of(pair, workload=Workload(dataset="random", prompt_tokens=6, max_new_tokens=8)),
            "data.requests",
        ),
    ):
        with pytest.raises(
            UserError, match=rf"holds a run that differs in .*{field}.*: name a new directory"
        ):
            last(job, tmp_path)
    assert (tmp_path / "tune.rounds.jsonl").read_bytes() == before
    last(job_of(pair, repeats=9, precision=0.001, budget=1e9), tmp_path)  # more of the same
    assert (tmp_path / "tune.rounds.jsonl").read_bytes().startswith(before)


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_budget_ends_it_and_the_rest_is_named(pair: Path, monkeypatch, tmp_path: Path) -> None:
    timed = install(monkeypatch, usual)
    monkeypatch.setattr("time.monotonic", lambda: timed.clock)
    table = last(job_of(pair, budget=60.0), tmp_path)
    assert 60 < timed.clock < 60 + 60, "a round that has begun is ended"
    assert {row["batch"] for row in table.rows} == {1, 4}, "each batch size has its share"
    assert 0 < turns_of(timed)[1, 2, "padded"] < 8
    timed = install(monkeypatch, usual)
    one = last(job_of(pair, budget=4.0))
    assert [c.draft_length.most for c in timed.built] == [0], "its warm-up takes three of the four seconds"
    assert "batch 1, K 2, padded; " in one.notes[-1]
    assert one.notes[-1].endswith("; batch 4, K 4, non-padded: the same command goes on")


def test_an_arm_that_fails_costs_the_others_nothing(pair: Path, monkeypatch) -> None:
    def broken(config: EngineConfig, number: int) -> float:
        if config.draft_length.most == 4 and number == (config.drafter_batch == "padded") * 2:
            raise RuntimeError("no kernel")
        return usual(config, number)

    timed = install(monkeypatch, broken)
    table = last(job_of(pair, batches=(4,)))
    assert [note for note in table.notes if note.startswith("failed")] == [
        "failed: batch 4, K 4, non-padded: RuntimeError: no kernel",
        "failed: batch 4, K 4, padded: RuntimeError: no kernel",
    ]
    assert [(row["K"], row["repeats"]) for row in table.rows][-1] == (4, 1), "what it did is kept"
    assert turns_of(timed)[4, 2, "padded"] >= 3
    assert "K 2, padded" in table.answers[0]


def test_without_plain_decoding_there_is_still_a_fastest(pair: Path, monkeypatch) -> None:
    def broken(config: EngineConfig, number: int) -> float:
        if config.draft_length.most == 0:
            raise RuntimeError("no kernel")
        return usual(config, number)

    install(monkeypatch, broken)
    table = last(job_of(pair, batches=(4,)))
    assert table.answers[0].startswith(
        "At batch 4: K 2, padded, the fastest; plain decoding was not measured, "
    )
    assert {row["x_plain"] for row in table.rows} == {None}


def test_nothing_that_ran_is_said(pair: Path, monkeypatch) -> None:
    def broken(config: EngineConfig, number: int) -> float:
        raise RuntimeError("no kernel")

    install(monkeypatch, broken)
    table = last(job_of(pair, batches=(4,)))
    assert (table.rows, table.answers) == ((), ())
    assert [note.partition(":")[0] for note in table.notes] == ["failed"] * 5
    assert "no kernel" in table.to_html()


def test_arms_that_do_not_fit_together_meet_the_best_in_heats(pair: Path, monkeypatch) -> None:
    install(monkeypatch, usual)
    job = job_of(pair, batches=(4,))
    need = max(plan.num_bytes for plan in tuning.prepared(job).plans)
    monkeypatch.setattr(plans_of, "_CPU_BYTES", 3 * need)
    timed = install(monkeypatch, usual)
    table = last(job)
    assert len(table.rows) == 5
    heats = Counter((c.draft_length.most, c.drafter_batch) for c in timed.built)
    assert heats[0, "padded"] > 1, "plain decoding is in every heat"
    assert heats[2, "padded"] > 1, "so is the best so far"
    assert all(row["x_plain_ci95"] for row in table.rows[1:])
    assert "K 2, padded, 1.5" in table.answers[0]
    monkeypatch.setattr(plans_of, "_CPU_BYTES", 0)
    apart = last(job)
    assert [row["x_plain"] for row in apart.rows] == pytest.approx(
        [r["x_plain"] for r in table.rows], rel=0.02
    )
    assert all(row["x_plain_ci95"] for row in apart.rows[1:])


# --- the command ----------------------------------------------------------------------------------


def invoke(pair: Path, *arguments: str):
    given = ["tune", "--model", str(pair / "target"), "--drafter", str(pair / "drafter"), "--device", "cpu"]
    return CliRunner().invoke(app, [*given, *arguments])


DATA = ("--dataset", "bundled", "--max-new-tokens", "6")


def test_a_dry_run_runs_nothing(pair: Path, monkeypatch, tmp_path: Path) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(tuning, "load_models", forbidden)
    monkeypatch.setattr("specgen.checkpoints.tensor_reader.read_tensors", forbidden)
    timed = install(monkeypatch, usual)
    arguments = (
        "--batch",
        "1,4",
        "--k",
        "2",
        "--repeats",
        "5",
        "--dry-run",
        "--output",
        str(tmp_path / "out"),
    )
    done = invoke(pair, *DATA, *arguments)
    assert done.exit_code == 0, done.output
    assert timed.built == []
    assert not (tmp_path / "out").exists()
    assert "batch 4, K 2, non-padded" in done.stdout
    assert re.search(r"6 arms of 3 to 5 repeats and a warm-up: about \d+ s to \d+ s", done.stdout)
    assert "Weights take 0.0" in done.stdout


def test_the_command_measures_real_engines_and_goes_on(pair: Path, tmp_path: Path) -> None:
    arguments = (*DATA, "--batch", "2", "--k", "2", "--drafter-batch", "padded", "--repeats", "2")
    done = invoke(pair, *arguments, "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "batch 2, K 2, padded: warmed up" in done.stderr
    assert re.search(
        r"\[\d+ s left\] batch 2, K 2, padded: [\d,.]+ tokens/s, repeat 2, \d.\d\dx of plain", done.stderr
    )
    document = json.loads((tmp_path / "tune.json").read_text())
    assert [(row["K"], row["repeats"], row["same_texts"]) for row in document["rows"]] == [
        (0, 2, 1),
        (2, 2, 1),
    ]
    assert document["notes"][0].startswith("At batch 2: ")
    assert document["rows"][1]["wrong_tokens"] == 0
    assert "Speed-up over plain decoding, padded" in (tmp_path / "tune.html").read_text()
    assert "x_plain_ci95_low" in (tmp_path / "tune.csv").read_text().splitlines()[0]
    again = invoke(pair, *arguments, "--output", str(tmp_path), "--json")
    assert "warmed up" not in again.stderr
    assert json.loads(again.stdout)["rows"] == document["rows"]
    refused = invoke(pair, *arguments, "--output", str(tmp_path), "--k", "1")
    assert isinstance(refused.exception, UserError)


def test_a_stop_says_what_is_kept(pair: Path, monkeypatch, tmp_path: Path) -> None:
    def stopped(config: EngineConfig, number: int) -> float:
        if number == 2:
            signal.raise_signal(signal.SIGTERM)
        return 1.0

    install(monkeypatch, stopped)
    done = invoke(pair, *DATA, "--batch", "2", "--k", "2", "--output", str(tmp_path))
    assert done.exit_code == 143
    assert f"specgen: interrupted; rounds in {tmp_path} are kept: the same command goes on\n" in done.stderr
    done = invoke(pair, *DATA, "--batch", "2", "--k", "2")
    assert "specgen: interrupted; nothing is kept without --output\n" in done.stderr


def test_the_time_that_is_left() -> None:
    shown = {1.4: "1 s", 99: "99 s", 100: "2 min", 3569: "59 min", 3590: "1 h 0 min", 7500: "2 h 5 min"}
    assert {seconds: duration(seconds) for seconds in shown} == shown


def test_lists_and_times_of_the_command_line() -> None:
    lengths = draft_lengths("0-2, 5,auto,1")
    assert lengths == (*(DraftLength(most=k) for k in (0, 1, 2, 5)), DraftLength(most=7, auto=True))
    assert [seconds(text) for text in ("90s", "1.5m", "2h")] == [90, 90, 7200]
    for wrong in ("", "x", "1-", "3-1", "auto-2"):
        with pytest.raises(UserError, match=f"k is {wrong!r}: "):
            draft_lengths(wrong)
    for wrong in ("", "10", "m", "0s", "-1s"):
        with pytest.raises(UserError, match=f"budget is {wrong!r}: write a time such as"):
            seconds(wrong)


def test_the_command_to_run_is_one_of_generate(pair: Path) -> None:
    job = job_of(pair, workload=Workload(dataset="sharegpt", max_new_tokens=99))
    engine = replace(job.engine, max_prefill_tokens=8192)
    arm = Arm(name="x", changes={"batch": 8, "K": "auto", "drafter_batch": "non-padded"})
    words = shlex.split(command(arm, engine, job.workload, Path("my file.json")))
    assert words[:2] == ["specgen", "generate"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options == {
        "--model": str(pair / "target"),
        "--drafter": str(pair / "drafter"),
        "--dataset": "sharegpt",
        "--data-path": "my file.json",
        "--max-batch-size": "8",
        "--num-spec-tokens": "auto",
        "--drafter-batch": "non-padded",
        "--max-new-tokens": "99",
        "--device": "cpu",
        "--max-prefill-tokens": "8192",
    }
    plain = command(Arm(name="x", changes={"batch": 8, "K": 0}), engine, job.workload, None)
    assert "--num-spec-tokens 0" in plain
    assert "drafter" not in plain.replace(str(pair), "")
