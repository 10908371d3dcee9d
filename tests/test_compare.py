"""A comparison pairs the right samples, finds what differs, and says no more than the data show."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch

from specgen.config import SamplingParams, UserError
from specgen.experiments import study_comparison as comparing
from specgen.experiments.audit import Judge
from specgen.experiments.study_comparison import Answer, ArmRun, Generated
from specgen.experiments.study_tables import of_comparison, page
from specgen.report.charts import Bars, Point, ticks_to
from specgen.report.display import p_value, plain
from specgen.report.intervals import mcnemar, tango
from specgen.report.terminal import render
from tests.streams import fold, request
from tests.test_report_html import SVG, Page, drawn

STRICT, FLEXIBLE = "exact_match,strict-match", "exact_match,flexible-extract"


def sample(doc_id, score, text="a b", token_ids=(1, 2), metric=STRICT, task="sums", greedy=True):
    sampling = SamplingParams(temperature=0.0 if greedy else 1.0)
    generated = Generated(prompt_token_ids=(7, 8), token_ids=token_ids, sampling=sampling)
    answer = Answer(scores={metric: score}, text=text, generated=generated, question=f"question {doc_id}?")
    return (task, doc_id), answer


def by_document(samples):
    found = {}
    for document, answer in samples:
        earlier = found[document].scores if document in found else {}
        found[document] = replace(answer, scores={**earlier, **answer.scores})
    return found


def arm(name, scores, accepted=0, seconds=2.0):
    """An arm whose verify steps all accept ``accepted`` of 3 drafts; 0 means no drafts."""
    drafts = 3 if accepted else 0
    events = itertools.chain(*(request(f"r{i}", [(drafts, accepted)] * 12) for i in range(3)))
    return ArmRun(
        name=name,
        dtype="float32",
        seconds=seconds,
        report=fold(events, num_spec_tokens=drafts),
        answers=dict(sample(i, score) for i, score in enumerate(scores)),
    )


def logits_after(token_ids):
    """Of ten tokens; 2 and 3 are the most likely after ``(7, 8, 1)``."""
    logits = torch.zeros(10)
    if list(token_ids) == [7, 8, 1]:
        logits[2:4] = 1
    return logits


TARGET = Judge(logits_after=logits_after, dtype=torch.float32, token_text=str)


def tables(comparison, width=100):
    return render(of_comparison(comparison, {"model": "a target", "runs on": "cpu"}), width)


def compare(arms):
    return comparing.compare(arms, TARGET)


def with_samples(run, *samples):
    return replace(run, answers=by_document(samples))


def changed(text, **changes):
    document, answer = sample(0, 1, text)
    return {document: replace(answer, **changes)}


@pytest.mark.parametrize(
    ("names", "reference"), [(("a", "baseline", "b"), "baseline"), (("a", "b"), "a"), (("a",), "a")]
)
def test_the_reference_is_the_baseline_or_the_first(names, reference):
    comparison = compare([arm(name, [1, 0]) for name in names])
    assert comparison.reference == reference
    assert [one.name for one in comparison.arms] == list(names)
    assert [one.name for one in comparison.others] == [name for name in names if name != reference]


def test_scores_pair_by_document_whatever_their_order():
    padded = arm("padded", [1, 0, 0, 0])
    padded = replace(padded, answers=dict(reversed(padded.answers.items())))
    (against,) = compare([padded, arm("baseline", [1, 1, 1, 0])]).others
    (change,) = against.metrics
    assert (change.paired.higher, change.paired.lower, change.paired.difference) == (0, 2, -0.5)
    assert change.paired.p == mcnemar(0, 2)
    assert change.paired.interval == tango(0, 2, 4)


def test_every_metric_of_every_task_is_compared():
    def samples(score):
        return [sample(0, 1), sample(0, score, metric=FLEXIBLE), sample(0, score, task="other")]

    runs = [with_samples(arm(name, []), *samples(score)) for name, score in (("padded", 0), ("baseline", 1))]
    comparison = compare(runs)
    found = {(c.task, c.metric): c.paired.difference for c in comparison.others[0].metrics}
    assert found == {("sums", STRICT): 0, ("sums", FLEXIBLE): -1, ("other", STRICT): -1}
    assert [score.mean for score in comparison.arms[0].metrics] == [1, 0, 0]
    assert len(comparison.others[0].answers) == 2


@pytest.mark.parametrize(
    ("token_ids", "position", "token", "reference_token"),
    [((1, 9, 3), 1, 9, 2), ((1, 2), 2, None, 3), ((1, 2, 3, 4), 3, 4, None)],
)
def test_the_first_divergence_is_found(token_ids, position, token, reference_token):
    runs = [
        with_samples(arm("padded", []), sample(0, 1), sample(7, 1, "other", token_ids)),
        with_samples(arm("baseline", []), sample(0, 1), sample(7, 1, "text", (1, 2, 3))),
    ]
    (against,) = compare(runs).to_json()["against"]
    (difference,) = against["differences"]
    assert (against["num_compared"], against["num_identical"]) == (2, 1)
    assert (difference["text"], difference["reference_text"]) == ("other", "text")
    assert (difference["doc_id"], difference["question"]) == (7, "question 7?")
    first = difference["first"]
    assert (first["position"], first["token"], first["reference_token"]) == (position, token, reference_token)


def test_only_texts_that_should_be_equal_are_judged():
    """Greedy texts of one dtype whose tokens are known and differ."""
    base = with_samples(arm("baseline", []), sample(0, 1, "text", (1, 2, 3)))

    def judged(run):
        (against,) = compare([run, base]).others
        assert len(against.differing) == 1
        return bool(against.firsts)

    other = with_samples(arm("padded", []), sample(0, 1, "other", (1, 9)))
    assert judged(other)
    assert not judged(replace(other, dtype="bfloat16"))
    assert not judged(with_samples(other, sample(0, 1, "other", (1, 9), greedy=False)))
    assert not judged(with_samples(other, sample(0, 1, "cut", (1, 2, 3))))
    assert not judged(replace(other, answers=changed("cached", generated=None)))


def test_a_divergence_beyond_rounding_is_an_alarm():
    """After the common prefix 2 is the most likely token, 3 is within rounding, 4 is not."""
    runs = [
        with_samples(arm(name, []), sample(0, 1, name, (1, token)), sample(1, 1, name, (1, token)))
        for name, token in (("baseline", 2), ("close", 3), ("wrong", 4))
    ]
    comparison = compare(runs)
    close, wrong = comparison.others
    assert [each.gap for each in close.firsts.values()] == [0, 0]
    assert [each.gap for each in wrong.firsts.values()] == [1, 1]
    assert comparison.num_unexplained == 2
    assert comparison.sentence.endswith(
        "2 texts diverge from the reference where rounding to float32 cannot explain it: decoding is wrong there."
    )
    printed = tables(comparison)
    assert printed.count("WRONG") == 2
    assert page(comparison, {}, "").count(": WRONG</") == 2
    assert "WRONG" not in tables(compare(runs[:2]))


def test_speed_and_acceptance_come_from_the_reports():
    fast, slow = arm("padded", [1], accepted=2), arm("baseline", [1], seconds=7.0)
    padded, baseline = compare([fast, slow]).arms
    expected = fast.report.output_tokens_per_second / slow.report.output_tokens_per_second
    assert padded.times() == pytest.approx(expected)
    assert (baseline.times(), baseline.seconds) == (1, 7.0)
    assert padded.report is fast.report
    written = padded.to_json()
    assert (written["ratio"], written["mean_acceptance_length"]) == (padded.times(), 3)
    assert [each["rate"] for each in written["acceptance"]] == [1, 1, 0]


SHOWN = "Significant differences in accuracy from"


def test_a_planted_loss_is_named_with_its_interval():
    comparison = compare([arm("padded", [0] * 20 + [1] * 180), arm("baseline", [1] * 200)])
    low, high = comparison.others[0].metrics[0].paired.interval
    assert comparison.sentence == (
        f"{SHOWN} baseline: 1 of 1 (smallest p after Holm < 0.001: padded -10.0 points "
        f"[{100 * low:.1f}, {100 * high:.1f}] on sums {STRICT}); 200 of 200 texts identical."
    )


def test_many_tests_together_keep_the_level():
    """p = 0.031 is significant as a single test, not as one of two, unless the other one is rejected."""
    losing, same, baseline = arm("a", [0] * 6 + [1] * 50), arm("b", [1] * 56), arm("baseline", [1] * 56)
    assert mcnemar(0, 6) == pytest.approx(0.031, abs=1e-3)
    assert f"{SHOWN} baseline: 1 of 1 (" in compare([losing, baseline]).sentence
    assert (
        f"{SHOWN} baseline: 0 of 2 (smallest p after Holm 0.062: a "
        in compare([losing, same, baseline]).sentence
    )
    both = compare([losing, arm("c", [0] * 20 + [1] * 36), baseline]).sentence
    assert f"{SHOWN} baseline: 2 of 2 (smallest p after Holm < 0.001: c -35.7 points" in both


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        ([arm("a", [1, 0])], "Accuracy is not compared: there is one arm."),
        ([arm("a", []), arm("b", [])], "Accuracy is not compared: no score is between 0 and 1."),
        ([arm("a", [0.5]), arm("b", [0.25])], "0 of 1 (smallest p after Holm -: b -25.0 points - on sums"),
        (
            [arm("a", [0.5, 0.6]), arm("b", [0.4, 0.5])],
            "0 of 1 (smallest p after Holm -: b -10.0 points - on sums",
        ),
    ],
)
def test_data_that_show_nothing_say_so(arms, expected):
    assert expected in compare(arms).sentence


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ([], "no arms"),
        ([arm("a", [1]), arm("a", [1])], "two arms are named 'a'"),
        ([arm("a", [1, 1]), arm("b", [1])], "differ in 1 samples, the first of them sums .* 1: evaluate all"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(arms, message):
    with pytest.raises(UserError, match=message):
        compare(arms)


def test_a_document_is_scored_once_by_every_filter():
    row = {"doc_id": 3, "doc": {}, "arguments": [["How many?"]], "resps": [["7"]], "metrics": ["match"]}
    rows = [{**row, "filter": name, "match": score} for name, score in (("strict", 0), ("flexible", 1.0))]
    (answer,) = comparing.answers({"sums": rows}, {}).values()
    assert (answer.scores, answer.text) == ({"match,strict": 0, "match,flexible": 1}, "7")
    with pytest.raises(UserError, match="document 3 of sums is there twice"):
        comparing.answers({"sums": [*rows, rows[0]]}, {})


def test_a_document_has_the_text_of_each_of_its_samples():
    """So that texts are not the same where only the first ones are."""
    row = {"doc_id": 3, "doc": {}, "arguments": [["?"]], "metrics": ["match"], "filter": "strict", "match": 0}
    ours, theirs = (comparing.answers({"sums": [{**row, "resps": [["7", last]]}]}, {}) for last in ("8", "9"))
    found = compare([replace(arm("a", [0]), answers=ours), replace(arm("b", [0]), answers=theirs)])
    assert found.others[0].num_identical == 0


@pytest.mark.parametrize("other", [[0.5, 80.0], [80.0, 0.5], [0.5, math.nan]])
def test_a_metric_that_is_not_between_0_and_1_is_left_out_as_a_whole(other):
    """Not just the documents where it is: that mean would be of no metric."""
    arms = [arm("a", [1, 0]), arm("b", [1, 1])]
    scaled = [
        replace(
            each,
            answers={
                key: replace(answer, scores={**answer.scores, "bleu,none": score})
                for (key, answer), score in zip(each.answers.items(), scores, strict=True)
            },
        )
        for each, scores in zip(arms, ([0.5, 0.7], other), strict=True)
    ]
    found, without = compare(scaled), compare(arms)
    assert [each.metrics for each in found.arms] == [each.metrics for each in without.arms]
    assert (
        found.sentence
        == f"{without.sentence} Not compared, as they are not between 0 and 1: bleu,none of sums."
    )
    alone = compare([with_scores(each, {"bleu,none": 30.0}) for each in arms])
    assert alone.sentence.startswith("Accuracy is not compared: no score is between 0 and 1.")
    assert len(alone.others[0].answers) == 2, "texts are"


def with_scores(run, scores):
    return replace(run, answers={key: replace(each, scores=scores) for key, each in run.answers.items()})


def test_the_choice_of_a_metric_of_mutual_information_is_one_of_the_choices():
    row = {"doc_id": 0, "doc": {}, "arguments": [["?"]], "filter": "none", "acc": 1.0, "acc_mutual_info": 0.0}
    row |= {"resps": [[(value, False)] for value in (-3.0, -1.0, -0.5, -0.1)]}
    for metrics, text in ((["acc"], "choice 3"), (["acc", "acc_mutual_info"], "choice 1")):
        (answer,) = comparing.answers({"sums": [{**row, "metrics": metrics}]}, {}).values()
        assert answer.text == text


@pytest.mark.parametrize(
    ("p", "text"), [(1.0, "1.00"), (0.314, "0.31"), (0.0312, "0.031"), (1e-9, "< 0.001")]
)
def test_p_values_are_short(p, text):
    assert p_value(p) == text


def a_study(name="padded"):
    texts = ["same", "same", "other"]
    padded = with_samples(arm(name, [], 2), *(sample(i, int(i < 2), texts[i], (i, 5)) for i in range(3)))
    return [padded, with_samples(arm("baseline", []), *(sample(i, 1, "same", (i,)) for i in range(3)))]


def test_the_tables_show_the_numbers():
    comparison = compare(a_study())
    text = tables(comparison)
    lines = [re.split(r"  +", line) for line in text.splitlines()]
    change = comparison.others[0].metrics[0].paired
    low, high = (f"{100 * end:.1f}" for end in change.interval)
    assert f"sums {STRICT}, 3 samples" in text
    accuracy = ["padded", "66.7 %", "[20.8, 93.9]", "-33.3", f"[{low}, {high}]", "1.00"]
    assert accuracy in [line[:6] for line in lines]
    assert ["padded", "2 of 3", "66.7 %", "1", "1", "-", "1"] in lines
    assert ["sums 2", "padded", "1", "(ended)", "-", "5 '5'"] in [line[:6] for line in lines]
    assert ["padded", "3.00", "-", "100.0 %", "100.0 %", "0.0 %"] in lines
    speed = comparison.arms[0]
    fast = ["padded", f"{speed.report.output_tokens_per_second:.1f}", f"{speed.times():.2f}x"]
    assert fast in [line[:3] for line in lines]
    assert " ".join(text.split()).endswith(comparison.sentence)


def test_the_page_shows_the_numbers_and_both_texts():
    comparison = compare(a_study())
    words = Page(page(comparison, {"model": "a target"}, "A study")).text
    low, high = comparison.others[0].metrics[0].paired.interval
    for expected in ("A study", "a target", comparison.sentence, f"sums {STRICT}", "Texts that changed"):
        assert expected in words
    assert f"[{100 * low:.1f}, {100 * high:.1f}]" in words
    assert "-33.3" in words
    assert "2 of 3" in words
    assert [word for word in words if word in ("other", "same")] == ["same", "other"]
    assert any("at token 1: 5 '5' instead of (ended), gap" in word for word in words)
    assert [
        f"{name}: {STRICT} {score}" in words for name, score in (("baseline", "1.00"), ("padded", "0.00"))
    ] == [True] * 2


def test_wrong_texts_are_shown_first_then_flips():
    """After ``(7, 8, 1)`` token 3 is within rounding of 2, token 4 is not."""
    tokens = [(1, 2), (1, 3), (1, 3), (1, 3), (1, 4)]
    scores = [(1, 1), (1, 1), (0, 1), (1, 0), (1, 1)]  # of padded and of the reference
    runs = [
        with_samples(
            arm("padded", []), *(sample(i, scores[i][0], f"text {ids}", ids) for i, ids in enumerate(tokens))
        ),
        with_samples(arm("baseline", []), *(sample(i, scores[i][1], "text (1, 2)") for i in range(5))),
    ]
    comparison = compare(runs)
    html = page(comparison, {}, "")
    assert re.findall(r"<summary>sums (\d) ", html) == ["4", "2", "3", "1"], "wrong, then another score"
    assert html.count('" open>') == 4
    bound = f"bound {next(iter(comparison.others[0].firsts.values())).rounding:.4g}"
    assert html.count(f"gap 1, {bound}: WRONG") == 1
    assert html.count(f"gap 0, {bound}: rounding") == 3
    assert "samples" not in comparison.to_json()
    assert "Texts that changed" not in page(compare([runs[1], replace(runs[1], name="same")]), {}, "")


@pytest.mark.parametrize(
    ("arms", "style"),
    [
        ([arm("alone", [1, 0])], "finding"),
        ([arm("a", []), arm("b", [])], "finding"),
        ([arm("a", [1, 0] * 200), arm("baseline", [1, 0] * 200)], "finding"),
        ([arm("a", [0] * 20 + [1] * 180), arm("baseline", [1] * 200)], "alert"),
        ([arm("a", [0] * 6 + [1] * 50), arm("baseline", [1] * 56)], "alert"),
        ([arm("a", [0] * 6 + [1] * 50), arm("b", [1] * 56), arm("baseline", [1] * 56)], "finding"),
        ([with_samples(arm("a", []), sample(0, 1, "x", (1, 4))), arm("baseline", [1])], "alert"),
        ([with_samples(arm("a", []), sample(0, 1, "x", (1, 3))), arm("baseline", [1])], "finding"),
    ],
)
def test_the_sentence_alarms_only_where_something_is_shown(arms, style):
    comparison = compare(arms)
    shown = re.search(rf"{SHOWN} baseline: [1-9]|wrong there", comparison.sentence) is not None
    assert shown == (style == "alert")
    assert f'<p class="{style}">{comparison.sentence[:9]}' in page(comparison, {}, "")


def test_texts_are_highlighted_from_the_first_difference():
    runs = [
        with_samples(arm(name, []), sample(0, 1, text))
        for name, text in (("a", "one two"), ("b", "one three"))
    ]
    text = page(compare(runs), {}, "A study")
    assert "<i>one t</i><i class=changed>wo</i></p>" in text
    assert "<i>one t</i><i class=changed>hree</i></p>" in text


@pytest.mark.parametrize(
    "arms",
    [
        a_study("a name " * 20),
        [arm("alone", [1, 0])],
        [arm("a", []), arm("b", [])],
        [arm("a", [0.5], 1), arm("b", [0.1])],
        [arm(f"arm {i}", [1, 0], 1 + i % 3) for i in range(6)],
    ],
)
def test_odd_studies_fit_the_terminal_and_make_a_self_contained_page(arms):
    comparison = compare(arms)
    found, text = Page(html := page(comparison, {}, "A study")), tables(comparison, 80)
    assert max(map(len, text.splitlines())) <= 80
    labels = [value for name, value in found.attributes if name == "aria-label" and ": " in value]
    assert len(set(labels)) == found.tags.count("svg")
    assert not {"None", "nan"} & {*text.split(), *" ".join(found.text).split()}
    assert not {"script", "link", "img"} & set(found.tags)
    assert "http" not in html


def test_bars_are_as_long_as_their_numbers():
    points = [
        Point(name="a", number=2.0, interval=(1.0, 4.0)),
        Point(name="b", number=1.0),
        Point(name="c", number=None),
    ]
    chart = drawn(Bars(title="Speed", ticks=ticks_to(4.0), show=plain, points=points))
    first, second = (float(bar.get("width")) for bar in chart.iter(f"{SVG}rect"))
    start = float(next(chart.iter(f"{SVG}rect")).get("x"))
    (whisker,) = (path.get("d") for path in chart.iter(f"{SVG}path") if path.get("class") == "whisker")
    low, high = (float(end) for end in re.findall(r"[MH]([\d.]+)", whisker))
    assert (first, low - start, high - start) == pytest.approx((2 * second, second, 4 * second), abs=0.2)
    assert high <= 400


def test_empty_answers_are_called_so_with_the_likely_remedy():
    runs = [arm(name, [1, 0], accepted=1) for name in ("padded", "baseline")]
    assert "Empty" not in comparing.compare(runs, TARGET, template_unused=True).sentence
    runs[0] = replace(runs[0], report=replace(runs[0].report, num_empty=2))
    compared = comparing.compare(runs, TARGET, template_unused=True)
    remedy = "the model has a chat template: add --apply-chat-template."
    assert compared.sentence.endswith(f" Empty answers: 2 of 3 of padded; {remedy}")
    assert [each.report.num_empty for each in compared.arms] == [2, 0]
    assert compare(runs).sentence.endswith(" Empty answers: 2 of 3 of padded.")


def test_answers_without_a_verify_step_are_no_comparison():
    runs = [arm("padded", [1, 0], accepted=1), arm("baseline", [1, 0])]
    assert "texts identical" in compare(runs).sentence
    ended = fold(itertools.chain(*(request(f"r{i}", []) for i in range(3))), num_spec_tokens=3)
    found = compare([replace(runs[0], report=ended), runs[1]])
    assert found.sentence.startswith("Nothing was tested: no step had drafts")
    assert (compare(runs).is_tested, found.is_tested, compare(runs[1:]).is_tested) == (True, False, True)
    assert "identical" not in found.sentence
    assert found.arms[0].times() is None


def test_answers_cut_by_the_token_limit_are_said():
    runs = [arm(name, [1, 0], accepted=1) for name in ("padded", "baseline")]
    assert "cut" not in compare(runs).sentence
    report = replace(
        runs[0].report, finish_reasons={"stop": 1, "length": 2}, ended_in_reasoning={"length": 1}
    )
    compared = compare([replace(runs[0], report=report), runs[1]])
    assert " Answers cut at the token limit: 1 of 3 of padded; raise --max-new-tokens." in compared.sentence
    assert [each.num_cut for each in compared.arms] == [1, 0]


def test_tokens_per_step_stand_beside_a_length_that_texts_did_not_get():
    runs = [arm("padded", [1, 0], accepted=3), arm("baseline", [1, 0])]
    assert "per step" not in tables(compare(runs))
    short = fold([*request("a", [(3, 3)], dropped=3), *request("b", [(3, 1)], dropped=1)], num_spec_tokens=3)
    found = compare([replace(runs[0], report=short), runs[1]])
    assert (found.arms[0].report.mean_acceptance_length, found.arms[0].report.received) == (3, 1)
    assert "per step" in " ".join(tables(found).split())


def test_steps_without_drafts_are_in_a_length_beside():
    runs = [arm("K3", [1, 0], accepted=2), arm("auto", [1, 0], accepted=2), arm("baseline", [1, 0])]
    assert "over all steps" not in tables(compare(runs))
    at_times = fold(request("a", [(3, 2)] * 4 + [(0, 0)] * 4), num_spec_tokens=3)
    shown = tables(compare([runs[0], replace(runs[1], report=at_times), runs[2]]))
    assert re.search(r"arm +acceptance length +95 % +over all steps ", shown)
    assert re.search(r"^K3 +3\.00 .*3\.00 +100\.0 %", shown, re.MULTILINE)
    assert re.search(r"^auto +3\.00 .*2\.00 +100\.0 %", shown, re.MULTILINE)


def test_several_tasks_have_figures_each():
    def with_tasks(run, *accepted):
        reports = (arm("", [], number).report for number in accepted)
        return replace(run, tasks=dict(zip(("sums", "chat"), reports, strict=False)))

    runs = [arm("padded", [1, 0], 2), arm("baseline", [1, 0])]
    comparison = compare([with_tasks(runs[0], 3, 1), with_tasks(runs[1], 0, 0)])
    ours, theirs = (each.tasks for each in comparison.arms)
    assert [report.mean_acceptance_length for report in ours.values()] == [4, 2]
    assert [comparison.arms[1].times(task) for task in theirs] == [1, 1]
    # a request has 1 + 12 x (1 + accepted) tokens, at the same times
    assert comparison.arms[0].times("sums") == pytest.approx(49 / 13)
    lines = [line.split()[:3] for line in tables(comparison).splitlines()]
    assert [line for line in lines if line[:1] in (["sums"], ["chat"])][-4:] == [
        ["sums", "padded", "4.00"],
        ["sums", "baseline", "-"],
        ["chat", "padded", "2.00"],
        ["chat", "baseline", "-"],
    ]
    assert "<h2>By task</h2>" in page(comparison, {}, "")
    alone = compare([with_tasks(runs[0], 3), with_tasks(runs[1], 0)])
    assert [each.tasks for each in alone.arms] == [{}, {}]
    assert "By task" not in page(alone, {}, "")
