"""The terminal's tables show the report, aligned, and no line is wider than the terminal."""

import itertools

import pytest

from specgen.report.paired_requests import SharedRequests
from specgen.report.report import Report
from specgen.report.side_by_side import of_runs
from specgen.report.tables import of_run
from specgen.report.terminal import render as in_terminal
from tests.streams import as_json, refusal, request
from tests.test_report_html import of_several_lengths


def a_run(num_spec_tokens=3):
    steps = [(num_spec_tokens, i % (num_spec_tokens + 1)) for i in range(8)]
    return as_json(
        itertools.chain(
            request("a", steps, category="a category with a name too long for its column"),
            request("b", steps[:5], category="math", turn=2),
            refusal("c"),
        ),
        num_spec_tokens,
    )


def render(report, settings, width=100):
    return in_terminal(of_run(Report.from_json(report), settings), width)


def compare(runs, width=100):
    shared = [SharedRequests(num_requests=0, num_identical=0, figures=())] * (len(runs) - 1)
    read = [(name, Report.from_json(report)) for name, report in runs]
    return in_terminal(of_runs(read, {}, shared), width)


def cells(text, label):
    """The words of the one line that starts with ``label``, after it."""
    (line,) = (line for line in text.splitlines() if line.startswith(label + "  "))
    return line.removeprefix(label).split()


def test_lengths_of_drafters_that_drafted_at_times_are_also_shown_over_all_steps():
    at_times = as_json(request("a", [(3, 3), (0, 0), (0, 0), (3, 1)]), 3)
    text = compare([("head", a_run()), ("ngram", at_times)])
    assert cells(text, "mean acceptance length")[1] == "3.00"
    assert cells(text, "  over all steps")[:2] == [cells(text, "mean acceptance length")[0], "2.00"]
    assert "over all steps" not in compare([("head", a_run()), ("again", a_run())])
    ended = as_json(request("a", [(3, 3)], dropped=3), 3)
    assert cells(compare([("head", at_times), ("ended", ended)]), "tokens per step")[:2] == ["2.00", "1.00"]


def whole_label(text, start):
    """The words of the first column from the line that starts with ``start`` to the next row."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(start))
    width = lines[at].index("  ")
    return [word for line in lines[at : at + 4] for word in line[:width].split()]


def test_a_run_is_shown_in_full():
    text = render(a_run(), {"model": "target", "K": "3"})
    assert text.startswith("model target · K 3\n")
    assert cells(text, "num_drafts") == ["13"]
    assert cells(text, "num_draft_tokens") == ["39"]
    assert cells(text, "num_accepted_tokens") == ["18"]
    assert cells(text, "total_num_output_tokens") == ["33"]
    assert cells(text, "mean acceptance length")[0] == "2.38"
    assert cells(text, "token 1")[:4] == ["13", "6", "46.2", "%"]
    assert cells(text, "2 accepted")[:3] == ["3", "23.1", "%"]
    assert cells(text, "math")[:3] == ["1", "5", "2.20"]
    assert "a category with a name too long for its column" in " ".join(whole_label(text, "a category"))
    assert cells(text, "ended by") == ["2", "stop,", "1", "errors"]
    assert cells(text, "target rows")[-5:] == ["0", "(-)", "held", "rejected", "drafts"]
    assert "acceptance at token i = steps that accepted more than i drafts" in text
    assert "against plain decoding" not in text


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("num_spec_tokens", [1, 3, 16])
def test_lines_fit_and_columns_align(num_spec_tokens, width):
    text = render(a_run(num_spec_tokens), {f"setting {i}": "a value" for i in range(12)}, width)
    assert max(map(len, text.splitlines())) <= width
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("token ")]
    assert len({line.index("%") for line in rows}) == 1
    heading = text.split("\n\n")[0]
    assert sum(heading.count(f"setting {i} a value") for i in range(12)) == 12, "none is broken over lines"
    if (num_spec_tokens, width) == (3, 100):
        assert [line.count("█") for line in rows] == [20 * 9 // 13, 20 * 6 // 13, 20 * 3 // 13]


def test_the_draft_lengths_that_ran_are_shown():
    text = render(of_several_lengths(*[4] * 1500, 2, 2), {})
    start = [line.split() for line in text.splitlines()].index(["by", "draft", "length", "decode", "steps"])
    assert [line.split() for line in text.splitlines()[start + 1 :][:3]] == [
        ["K", "=", "4", "1,500"],
        ["K", "=", "2", "2"],
        [],
    ]
    assert cells(text, "token 3")[:2] == ["1,500", "0"]
    assert cells(text, "token 5")[:3] == ["0", "0", "-"]
    many = compare([("many", of_several_lengths(*(k for k in range(8) for _ in range(k + 1))))])
    assert "many: K by step: 7 in 8, 6 in 7, 5 in 6, 4 in 5, others in 10 steps" in many
    assert "by draft length" not in render(of_several_lengths(4, 4), {})
    earlier = of_several_lengths(3, 5)
    del earlier["steps"]["decode"]["by_num_spec_tokens"]
    assert "by draft length" not in render(earlier, {})


def test_runs_of_other_draft_lengths_and_plain_ones_compare():
    text = compare([("k3", a_run()), ("auto", of_several_lengths(3, 3, 5)), ("plain", a_run(0))])
    assert "auto: K by step: 3 in 2, 5 in 1 steps" in text
    assert text.count("K by step") == 1
    assert cells(text, "acceptance at token 4") == ["-", "0.0", "%", "-"]
    assert "None" not in text


def test_runs_stand_side_by_side_with_their_ratio_to_the_first():
    one, two = as_json(request("a", [(3, 1)] * 4)), as_json(request("a", [(3, 3)] * 2))
    text = compare([("one", one), ("two", two)])
    assert text.splitlines()[:2] == ["The runs have the same settings.", ""]
    assert text.splitlines()[2].split() == ["one", "two", "ratio"]
    assert cells(text, "mean acceptance length") == ["2.00", "4.00", "2.00x"]
    assert cells(text, "num_drafts") == ["4", "2", "0.50x"]
    assert cells(text, "output tokens/s") == ["1.8", "3.0"]  # of one run each
    assert "Speeds are of one run each" in text
    assert cells(text, "acceptance at token 2") == ["0.0", "%", "100.0", "%"]  # no ratio to nothing


def test_many_runs_wrap_into_blocks_that_repeat_the_first():
    text = compare([(f"run-{i}", a_run()) for i in range(8)])
    headers = [line.split() for line in text.splitlines() if line.startswith(" ") and "run-" in line]
    assert [header[0] for header in headers] == ["run-0"] * 3
    assert [header.count("ratio") for header in headers] == [3, 3, 1]
    assert sum(header.count("run-7") for header in headers) == 1
    assert max(map(len, text.splitlines())) <= 100
    text = compare([("runs/a-very-long-name", a_run()), ("runs/another-long-name", a_run())])
    assert text.splitlines()[:2] == ["run 1  runs/a-very-long-name", "run 2  runs/another-long-name"]
    assert compare([("alone", a_run())]).splitlines()[0].split() == ["alone"]


def test_failures_and_dead_drafters_are_named_beside_others():
    plain = {"output_tokens_per_second": 1.0, "ratio": 2.0, "identical": 1.0}
    plain |= {"num_compared": 1, "num_requests": 3}
    text = compare([("one", a_run() | {"baseline": plain}), ("two", a_run())], width=200)
    failed = "1 request failed in plain decoding and 2 requests failed in the run"
    for line in (
        *(f"{each}: 1 of 3 requests failed, which are in no number." for each in ("one", "two")),
        failed,
    ):
        assert line in text
    alive, dead = (as_json(request("a", [(3, accepted)] * 30)) for accepted in (1, 0))
    text = compare([("good", alive), ("bad", dead)])
    assert "bad: Almost no draft was accepted" in text
    assert "good:" not in text
