"""Reports of hand-made rows, in ordinary and edge cases."""

import itertools
import json
import random
import re
import tracemalloc
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from specgen.record import columns
from specgen.record.record_rows import StepCounts, count_parts, turn_id
from specgen.report import tables, terminal
from specgen.report.acceptance import metrics_of
from specgen.report.intervals import Ratio, wilson
from specgen.report.report import Report, load, report_categories
from specgen.report.tables import DEAD_LENGTH, remarks
from tests.commands import refused
from tests.streams import (
    as_json,
    decode_steps,
    fold,
    padded_step,
    pass_row,
    recorded,
    refusal,
    reported,
    request,
)


def test_counters_and_lengths():
    events = [*request("a", [(3, 3), (3, 1)]), *request("b", [(3, 0)]), *refusal("c")]
    expected = {"num_requests": 2, "num_prompt_tokens": 10, "num_errors": 1, "finish_reasons": {"stop": 2}}
    expected |= {"num_drafts": 3, "num_draft_tokens": 9, "num_accepted_tokens": 4}
    expected |= {"total_num_output_tokens": (1 + 4 + 2) + (1 + 1), "acceptance_histogram": [1, 1, 0, 1]}
    expected |= {
        "mean_acceptance_length": pytest.approx(1 + 4 / 3),
        "draft_acceptance_rate": pytest.approx(4 / 9),
    }
    expected |= {"mean_acceptance_length_per_request": pytest.approx(((1 + 4 / 2) + 1) / 2)}
    report = as_json(events)
    assert {name: report[name] for name in expected} == expected


def test_acceptance_by_position_joint_and_conditional():
    events = request("a", [(3, 3), (3, 1), (3, 0), (3, 2)])
    first, second, third = as_json(events)["acceptance"]
    assert [row["rate"] for row in (first, second, third)] == [0.75, 0.5, 0.25]
    assert [row["reached"] for row in (first, second, third)] == [4, 3, 2]
    assert [row["conditional"] for row in (first, second, third)] == pytest.approx([0.75, 2 / 3, 0.5])
    assert third["ci95"] == pytest.approx(wilson(1 / 4, 4))
    assert third["conditional_ci95"] == pytest.approx(wilson(1 / 2, 2))


def test_steps_without_drafts_are_counted_apart():
    report = as_json(request("a", [(3, 1), (0, 0), (3, 3), (0, 0)]))
    assert (report["num_drafts"], report["num_steps_without_drafts"]) == (2, 2)
    assert report["mean_acceptance_length"] == 3
    text = terminal.render(tables.of_run(Report.from_json(report), {}))
    assert "steps with drafts; 2 had none" in text
    assert re.search(r"^mean acceptance length +3\.00 no interval", text, re.MULTILINE)
    assert re.search(r"^length over all steps +2\.00 ", text, re.MULTILINE), "as beside another run"
    assert "over all steps" not in terminal.render(
        tables.of_run(Report.from_json(as_json(request("a", [(3, 1)]))), {})
    )


def test_accepted_is_what_was_verified_and_tokens_are_what_was_kept():
    report = as_json(request("a", [(3, 3), (3, 3)], dropped=3))
    assert report["num_accepted_tokens"] == 6
    assert report["total_num_output_tokens"] == 1 + 4 + 1
    assert report["acceptance_histogram"] == [0, 0, 0, 2]
    # the length is vLLM's, which counts what was accepted behind the end; what texts got stands beside it
    assert (report["mean_acceptance_length"], report["tokens_per_step"]) == (4, (4 + 1) / 2)


def test_tokens_per_step_are_shown_where_they_are_not_about_the_length():
    short, long = ([*request("a", [(3, 3)] * n, dropped=3), *request("b", [(3, 0)])] for n in (1, 60))
    text = terminal.render(tables.of_run(Report.from_json(as_json(short)), {}))
    assert re.search(r"^mean acceptance length +2\.50 ", text, re.MULTILINE)
    assert re.search(r"^tokens per step +1\.00 in the texts", text, re.MULTILINE)
    assert "tokens per step = that texts got" in text
    assert as_json(long)["tokens_per_step"] == pytest.approx((59 * 4 + 1 + 1) / 61)
    assert "tokens per step" not in terminal.render(tables.of_run(Report.from_json(as_json(long)), {}))


def test_intervals_treat_requests_and_not_steps_as_independent():
    split = [*request("a", [(1, 1)] * 50), *request("b", [(1, 0)] * 50), *request("c", [(1, 1)] * 50)]
    alike = [event for name in "abc" for event in request(name, [(1, 1), (1, 1), (1, 0)] * 17)]
    wide, narrow = (as_json(events, 1)["acceptance"][0]["ci95"] for events in (split, alike))
    assert wide[1] - wide[0] > 0.8
    assert narrow[1] - narrow[0] < 0.5


def test_the_interval_of_the_length_is_that_of_its_requests_and_stays_possible():
    report = as_json([*request("a", [(3, 3)] * 9), *request("b", [(3, 0)])])
    low, high = report["mean_acceptance_length_ci95"]
    assert 1 <= low < report["mean_acceptance_length"] < high <= 4
    low, high = Ratio(np.array([1, 0, 1, 1, 0, 1]), np.array([2] * 6)).mean_interval()
    short = [event for n in range(6) for event in request(str(n), [(3, int(n not in (1, 4))), (3, 0)])]
    assert 0 < low < high < 1
    assert as_json(short)["mean_acceptance_length_ci95"] == pytest.approx((1 + low, 1 + high))


def test_categories_and_turns_only_where_there_are_several():
    events = [
        *request("a", [(3, 3)], category="math"),
        *request("b", [(3, 1)], category="chat"),
        *request("c", [(3, 0)], turn=2),
    ]
    report = as_json(events)
    assert {name: group["mean_acceptance_length"] for name, group in report["categories"].items()} == {
        "(none)": 1,
        "chat": 2,
        "math": 4,
    }
    assert {turn: group["num_requests"] for turn, group in report["turns"].items()} == {"1": 2, "2": 1}
    assert report["turns"]["1"]["acceptance"][0]["rate"] == 1
    shown = terminal.render(tables.of_run(fold(events, num_spec_tokens=3), {}))
    assert re.search("^category +requests +drafts +length +95 % +drafts accepted ", shown, re.MULTILINE)
    alone = as_json(events[:1])
    assert alone["categories"] == {}
    assert alone["turns"] == {}


def test_times():
    report = as_json([*request("a", [(3, 1), (3, 1)]), *request("b", [(3, 3)], begin=2.0)])
    assert report["wall_seconds"] == 4.0
    assert report["output_tokens_per_second"] == (5 + 5) / 4
    assert report["ttft_seconds"] == {"mean": 1.0, "median": 1.0, "p99": 1.0}
    # a: 2 s for 4 tokens after the first; b: 1 s for 4
    assert report["tpot_seconds"] == pytest.approx({"mean": 0.375, "median": 0.375, "p99": 0.4975})
    assert as_json(request("a", [(0, 0)]), 0)["tpot_seconds"]["mean"] == 1.0, "of a second token alone"


def test_preemptions_and_cached_tokens_are_counted():
    (step,) = decode_steps(3)
    report = as_json([*request("a", [(3, 2)], num_cached_tokens=2), replace(step, num_preempted=1)])
    assert report["num_preemptions"] == 1
    assert report["num_cached_tokens"] == 2
    assert "2 of 5 prompt tokens (40.0 %)" in terminal.render(tables.of_run(Report.from_json(report), {}))


def test_rows_and_steps():
    rows = {"num_sequences": 2, "first_pass_kept": 5, "loop_rows": 4}
    drafting = {"num_spec_tokens": 3, "target_rows": 8, "first_pass_rows": 8} | rows
    prefill = pass_row("prefill", seconds=1.0, target_rows=50, first_pass_rows=50, **rows)
    steps = (
        pass_row(time=1.5, seconds=0.5, num_rejected=2, **drafting),
        pass_row(time=1.7, seconds=0.2, **drafting),
    )
    report = as_json([prefill, *steps])
    counted = {"target": 16, "target_rejected": 2, "first_pass": 16, "first_pass_wasted": 6, "loop": 12}
    assert report["rows"] == counted
    decode = report["steps"]["decode"]
    assert (decode["num_steps"], decode["max_seconds"], decode["mean_sequences"]) == (2, 0.5, 2)
    assert decode["mean_seconds"] == pytest.approx(0.35)
    assert report["steps"]["prefill"]["target_rows"] == 50


@pytest.mark.parametrize(
    ("lengths", "by_number", "listed"),
    [
        ((0, 2, 2, 4, 2, 0), {"2": 3, "0": 2, "4": 1}, ["2", "0", "4"]),
        ((3, 3), {"3": 2}, []),  # a single one is not listed
        ((), None, []),
    ],
)
def test_steps_of_several_draft_lengths(lengths, by_number, listed):
    report = as_json(decode_steps(*lengths), 4)
    assert report["steps"].get("decode", {}).get("by_num_spec_tokens") == by_number
    assert list(Report.from_json(report).draft_lengths) == listed


def test_rows_computed_and_rows_wasted_are_of_the_same_steps():
    """Whatever became of the requests: passes alone say it."""
    passes = [padded_step(3, 3, 1), padded_step(3, 0, 2), padded_step(3, 2, num_preempted=1)]
    rows = reported(*recorded({"0/1-0": passes[:1], "0/1-1": passes[1:]}), 3).rows()
    assert rows["target"] == rows["first_pass"]
    assert rows["target_rejected"] == rows["first_pass_wasted"] == 2 + 4 + 1


NOTHING = {"num_requests": 0, "num_drafts": 0, "wall_seconds": 0, "num_errors": 0, "finish_reasons": {}}
NOTHING |= dict.fromkeys(("mean_acceptance_length", "mean_acceptance_length_per_request", "ttft_seconds"))
NOTHING |= {"output_tokens_per_second": None}


@pytest.mark.parametrize(
    ("rows", "k", "expected", "remark"),
    [
        ([], 3, NOTHING, "No verify step"),
        ([*refusal("a"), *refusal("b")], 3, NOTHING | {"num_errors": 2}, "No verify step"),
        (
            [*request("a", [])],
            3,
            {"total_num_output_tokens": 1, "tpot_seconds": None, "num_drafts": 0},
            "No verify step",
        ),
        (
            [*request("a", [(0, 0)] * 4)],
            0,
            {"total_num_output_tokens": 5, "num_drafts": 0, "acceptance": [], "acceptance_histogram": [0]},
            "Plain decoding",
        ),
    ],
)
def test_a_run_without_drafts(rows, k, expected, remark):
    report = as_json(rows, k)
    assert {name: report[name] for name in expected} == expected
    assert [row["rate"] for row in report["acceptance"]] == [None] * k
    assert next(remarks(Report.from_json(report))).startswith(remark)
    earlier = report | {"experts": [{"num_spec_tokens": 4, "touched": 5.5}]}  # which were counted once
    assert Report.from_json(earlier) == Report.from_json(report)


def test_a_failed_request_counts_as_an_error_only():
    failed, others = list(request("a", [(3, 2), (3, 1)], reason="error")), list(request("b", [(3, 3)]))
    whole, report = as_json(others), as_json([*failed, *others])
    assert report == {**whole, "num_errors": 1}


def test_the_order_of_requests_does_not_matter():
    """Not even in the last digit, as a resumed run finishes in another order."""
    rng = random.Random(0)
    requests = [
        list(request(str(n), [(3, rng.randrange(4)) for _ in range(rng.randrange(1, 12))])) for n in range(60)
    ]
    forward, backward = (
        as_json([event for each in order for event in each]) for order in (requests, requests[::-1])
    )
    times = {"ttft_seconds": 0, "tpot_seconds": 0}
    assert forward | times == backward | times


def test_a_dead_drafter_is_called_so():
    dead = as_json(request("a", [(3, 0)] * 30 + [(3, 1)]))
    alive = as_json(request("a", [(3, 0)] * 10 + [(3, 1)]))
    said = "Almost no draft was accepted: the mean acceptance length is under 1.05."
    assert list(remarks(Report.from_json(dead))) == [f"{said} N-grams need text that repeats itself."]
    of_head = fold([*request("a", [(3, 0)] * 30), padded_step(3, 0)], num_spec_tokens=3)
    (sentence,) = remarks(of_head)
    assert sentence.startswith(f"{said} Head and target probably do not match")
    assert list(remarks(Report.from_json(alive))) == []
    barely = as_json(request("a", [(3, 0)] * 19 + [(3, 1)]))
    assert barely["mean_acceptance_length"] == DEAD_LENGTH
    assert list(remarks(Report.from_json(barely))) == []


def test_a_report_with_a_baseline():
    run = fold(request("a", [(3, 3)] * 2), num_spec_tokens=3)
    plain = fold(request("a", [(0, 0)] * 8), num_spec_tokens=0)
    report = run.with_baseline(plain, [True, True, False, True]).to_json()
    assert report["baseline"] == {
        "output_tokens_per_second": 1.0,
        "ratio": pytest.approx((9 / 3) / 1.0),
        "identical": 0.75,
        "num_compared": 4,
        "num_requests": 1,
        "sampled": False,
    }
    assert run.to_json()["baseline"] is None
    without = fold(request("a", []), num_spec_tokens=3).with_baseline(plain, [True])
    assert (without.baseline.ratio, without.baseline.identical) == (None, None), "nothing was verified"
    text = terminal.render(tables.of_run(Report.from_json(without.to_json()), {}))
    assert "no step had drafts, so nothing was compared" in text
    assert "identical" not in text
    assert "without an interval" not in text
    text = terminal.render(tables.of_run(Report.from_json(report), {}))
    assert "against plain decoding = one run of each, one after the other, so without an interval" in text
    assert run.with_baseline(fold([], num_spec_tokens=0), []).to_json()["baseline"]["ratio"] is None


def test_what_one_of_the_run_and_its_baseline_has_failed_is_said():
    def of(names: str, k: int) -> Report:
        return fold(chain.from_iterable(request(name, [(k, k)]) for name in names), num_spec_tokens=k)

    ours, more, plain = of("a", 3), of("abc", 3), of("abc", 0)
    assert ours.with_baseline(plain, [True]).unlike_work.startswith("2 requests failed in the run alone, so")
    assert more.with_baseline(plain, [True, True]).unlike_work.startswith(
        "1 request failed in plain decoding and 1 request failed in the run alone, so"
    )
    alike = more.with_baseline(plain, [True] * 3)
    assert alike.unlike_work == ""
    older = replace(alike, baseline=replace(alike.baseline, num_requests=None))
    assert older.unlike_work == ""


def test_tokens_that_were_computed_in_vain_are_counted():
    """As of a run that was killed and asked again."""
    rows = [*request("a", [(3, 3)] * 2), *(pass_row(num_tokens=number) for number in (1, 4, 4, 7))]
    report = fold(rows, num_spec_tokens=3)
    assert report.num_lost_tokens == 7
    assert next(remarks(report)).startswith("7 tokens more than the texts have were computed")
    assert list(remarks(replace(report, state="running"))) == [], "they may become texts"
    assert fold(rows[:-1], num_spec_tokens=3).num_lost_tokens == 0


@pytest.mark.parametrize(
    ("steps", "reason"), [([(4, 0)], "4 drafts but K is 3"), ([(2, 3)], "accepted 3 of 2")]
)
def test_rows_of_no_single_run_are_refused(steps, reason):
    with refused(reason):
        fold(request("a", steps), num_spec_tokens=3)


def test_the_metrics_of_one_request():
    (row,) = request("a", [(3, 3), (2, 0), (0, 0), (3, 1)])
    per_step = [step.accepted for step in row.steps if step.drafts]
    assert metrics_of(row.counts, per_step, 3).to_json() == {
        "mean_acceptance_length": pytest.approx(1 + 4 / 3),
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": (1, 1, 0, 1),
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 8,
        "num_spec_tokens": 3,
        "per_step_accepted": (3, 0, 1),
        "num_steps_without_drafts": 1,
    }
    nothing = metrics_of(StepCounts.of([], 0), (), 3)
    assert nothing.mean_acceptance_length is nothing.draft_acceptance_rate is None
    assert nothing.acceptance_histogram == (0, 0, 0, 0)


def test_the_whole_is_the_sum_of_its_requests():
    choose = random.Random(1)
    steps = {str(i): [(k := choose.randint(0, 5), choose.randint(0, k)) for _ in range(9)] for i in range(40)}
    report = as_json(itertools.chain(*(request(name, each) for name, each in steps.items())), 5)
    flat = [step for each in steps.values() for step in each if step[0]]
    for row in report["acceptance"]:
        i = row["position"]
        assert row["drafted"] == sum(drafted > i for drafted, _ in flat)
        assert row["accepted"] == sum(accepted > i for _, accepted in flat)
        assert row["reached"] == sum(drafted > i and accepted >= i for drafted, accepted in flat)
        assert row["ci95"][0] <= row["rate"] <= row["ci95"][1]
    assert report["num_accepted_tokens"] == sum(row["accepted"] for row in report["acceptance"])
    assert report["num_draft_tokens"] == sum(row["drafted"] for row in report["acceptance"])
    assert sum(report["acceptance_histogram"]) == report["num_drafts"] == len(flat)
    assert report["mean_acceptance_length"] == pytest.approx(1 + report["num_accepted_tokens"] / len(flat))


def test_memory_does_not_grow_with_the_steps():
    (step,) = decode_steps(2)
    tracemalloc.start()
    reported([], (replace(step, number=i) for i in range(20_000)), 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_load_gives_back_what_was_written(tmp_path):
    report = as_json(request("a", [(3, 1)]))
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "manifest.json").write_text('{"version": "1"}')
    found, manifest = load(tmp_path)
    assert (json.loads(json.dumps(found.to_json())), manifest) == (report, {"version": "1"})


@pytest.mark.parametrize(
    ("report", "manifest", "reason"),
    [
        (None, "{}", "report.json cannot be read .*--output"),
        ('{"acceptance": []}', None, "manifest.json cannot be read .*--output"),
        ('{"acceptance": [', "{}", "report.json is not valid JSON .*--output"),
        ("[]", "{}", "report.json is not a JSON object.*--output"),
        ("{}", "{}", "is not the report of a run"),
    ],
)
def test_load_says_what_is_wrong_and_what_to_do(tmp_path, report, manifest, reason):
    for name, text in (("report.json", report), ("manifest.json", manifest)):
        if text is not None:
            (tmp_path / name).write_text(text)
    with refused(reason):
        load(tmp_path)


def test_empty_texts_are_counted_and_called_so():
    (first,), (other,) = request("a", [(3, 1)]), request("b", [(3, 1)])
    assert list(remarks(fold([first, other], num_spec_tokens=3))) == []
    other = replace(other, is_empty=True)
    report = fold([first, other], num_spec_tokens=3).to_json()
    assert report["num_empty"] == 1
    (empty,) = remarks(Report.from_json(report))
    assert empty.startswith("1 of 2 texts are empty: the model ended them at once.")
    assert "add --chat (eval: --apply-chat-template; compare: rows with messages)" in empty
    assert empty in " ".join(terminal.render(tables.of_run(Report.from_json(report), {}), 80).split())
    assert "texts are empty" in tables.page(Report.from_json(report), {}, "a run")
    reasoned = replace(other, parts=count_parts([(0, "reasoning")], other.steps, other.num_output_tokens, 3))
    assert fold([first, reasoned], num_spec_tokens=3).num_empty == 0, (
        "that one is counted as ended while reasoning"
    )


def test_categories_are_reported_alone_with_times_of_their_own():
    first = [*request("a", [(3, 3), (3, 1)], category="sums"), *request("b", [(3, 3)], category="sums")]
    again = [*request("c", [(3, 0), (3, 1)], category="chat"), *request("d", [(3, 3)])]
    rows, _ = recorded({"0/1-0": first, "0/1-1": again})
    reports = report_categories(columns.of(rows, 3))
    assert list(reports) == ["sums", "chat"]
    sums, chat = reports.values()
    assert sums == fold(first, num_spec_tokens=3)
    assert (chat.num_requests, chat.mean_acceptance_length) == (1, 1.5)
    assert (sums.wall_seconds, chat.wall_seconds) == (3.0, 3.0)


def test_the_turns_of_a_conversation_are_one_unit_of_intervals():
    from scipy import stats

    steps = {
        "a": ([(3, 3), (3, 2)], [(3, 3)] * 3),
        "b": ([(3, 0)], [(3, 1), (3, 0)]),
        "c": ([(3, 1)] * 4, [(3, 2)]),
    }
    events = [
        row
        for turn in (1, 2)
        for name, turns in steps.items()
        if (name, turn) != ("c", 2)  # it failed, say, so that its conversation has one
        for row in request(
            turn_id(name, turn), turns[turn - 1], turn=turn, num_turns=2, category="x" * (name == "a") or "y"
        )
    ]
    found = fold(events, num_spec_tokens=3)
    units = [[*steps["a"][0], *steps["a"][1]], [*steps["b"][0], *steps["b"][1]], steps["c"][0]]
    h, t = np.array([(sum(each for _, each in unit), len(unit)) for unit in units]).T
    rate = h.sum() / t.sum()
    half = stats.t.ppf(0.975, 2) * np.sqrt(3 / 2 * np.sum((h - rate * t) ** 2) / t.sum() ** 2)
    expected = (max(1, 1 + rate - half), min(4, 1 + rate + half))
    assert found.mean_acceptance_length_ci95 == pytest.approx(expected)
    assert (found.num_requests, found.num_drafts) == (5, 12)
    assert found.mean_acceptance_length_per_request == pytest.approx(1 + np.mean([2.5, 3, 0, 0.5, 1]))
    assert found.categories["x"].mean_acceptance_length_ci95 is None, "one conversation has no spread"
    assert found.turns["1"].num_requests == 3
    assert found.turns["1"].mean_acceptance_length_ci95 is not None
