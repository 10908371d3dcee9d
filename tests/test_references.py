"""Published figures are validated, and a run is compared with each of them."""

import json
import re
from typing import Any

import pytest

from specgen.cli import main as cli
from specgen.config import UserError
from specgen.config.bundled import evaluation_directory
from specgen.report.intervals import wilson
from specgen.report.references import (
    compare_figures,
    load_reference,
    load_results,
    of_figures,
    read_reference,
)
from specgen.report.terminal import render as in_terminal
from tests.commands import specgen
from tests.streams import fold, request

NAMES = sorted(path.stem for path in (evaluation_directory() / "reference").glob("*.json"))
GOOD: dict[str, Any] = {
    "source": "https://example.org/figures",
    "model": "a target",
    "drafter": "a head",
    "setting": "some prompts",
    "num_spec_tokens": 2,
    "mean_acceptance_length": 1.9,
    "acceptance": [0.6, 0.3],
    "accuracy": [{"measure": "gsm8k exact_match,strict-match", "value": 0.7, "stderr": 0.02}],
}


def read(tmp_path, **changes):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD | changes))
    return read_reference(path)


def render(*figures, width=80):
    return in_terminal(of_figures(*figures), width)


def report(num_spec_tokens, *accepted):
    """The report of requests whose steps accepted these numbers of drafts."""
    events = [
        event
        for number, steps in enumerate(accepted)
        for event in request(f"r{number}", [(num_spec_tokens, many) for many in steps])
    ]
    return fold(events, num_spec_tokens=num_spec_tokens)


@pytest.mark.parametrize("name", NAMES)
def test_bundled_references_are_valid(name):
    reference = load_reference(name)
    assert reference.name == name
    assert reference.acceptance or reference.accuracy
    if reference.acceptance:  # the published mean is rounded to hundredths
        assert 1 + sum(reference.acceptance) == pytest.approx(reference.mean_acceptance_length, abs=0.01)


def test_the_anchors_are_there():
    assert {"vllm-ci-llama-3.1-8b", "vllm-ci-qwen3-8b", "vllm-ci-gpt-oss-20b"} < set(NAMES)
    llama = load_reference("vllm-ci-llama-3.1-8b")
    assert (llama.mean_acceptance_length, llama.acceptance) == (2.60, (0.7296, 0.5208, 0.3545))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"acceptance": [0.6]}, "1 figures: write one for each of 2 drafts"),
        ({"acceptance": [0.3, 0.6]}, "shares that never rise"),
        ({"acceptance": [60, 30]}, "shares that never rise"),
        ({"mean_acceptance_length": 3.1}, "a step yields 1 to 3 tokens"),
        ({"num_spec_tokens": 0}, "at least 1"),
        ({"source": "a friend"}, "write the address"),
        ({"accuracy": [{"measure": "m", "value": 79.6, "stderr": 1.8}]}, "share in"),
        ({"accuracy": [{"measure": "m", "value": 0.796}]}, "stderr is missing"),
        ({"accuracy": [{"measure": "gsm8k", "value": 0.7, "stderr": 0}]}, "the task, a space and the metric"),
        ({"speed": 12}, "speed is not known"),
        ({"acceptance": None}, "is not a reference"),
    ],
)
def test_impossible_figures_are_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as refused:
        read(tmp_path, **changes)
    assert "mine.json is not a reference" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_json_or_lacks_a_key(tmp_path):
    (tmp_path / "mine.json").write_text("[1]")
    with pytest.raises(UserError, match="is not a JSON object: fix it"):
        read_reference(tmp_path / "mine.json")
    (tmp_path / "mine.json").write_text("{")
    with pytest.raises(UserError, match=r"mine\.json is not valid JSON .*: fix it"):
        read_reference(tmp_path / "mine.json")


def test_a_run_beside_a_reference(tmp_path):
    run = report(2, [2, 1, 0], [1, 1, 0], [2, 0, 0], [1, 2, 1])
    length, first, second, accuracy = compare_figures(run, {}, read(tmp_path, acceptance=[0.6, 0.9 * 0.1]))
    assert (length.ours, length.theirs, length.inside) == (pytest.approx(23 / 12), 1.9, True)
    assert length.ci95 == run.mean_acceptance_length_ci95
    assert (first.ours, first.inside) == (pytest.approx(8 / 12), True)
    assert second.ours == pytest.approx(3 / 12)
    assert (accuracy.ours, accuracy.inside) == (None, None)
    assert (accuracy.figure, accuracy.theirs, accuracy.stderr) == (
        "gsm8k exact_match,strict-match",
        0.7,
        0.02,
    )


def test_figures_outside_the_interval_are_named(tmp_path):
    run = report(2, *[[2, 2, 2, 1, 2]] * 40)
    reference = read(tmp_path)
    lines = list(compare_figures(run, {}, reference))
    assert [line.inside for line in lines[1:]] == [False, False, None]
    text = render("runs/a", 2, reference, lines)
    assert "Outside the run's intervals: acceptance at token 0, acceptance at token 1 (2 of 2" in " ".join(
        text.split()
    )
    assert all(len(line) <= 80 for line in text.splitlines())


def test_other_draft_lengths_and_plain_decoding(tmp_path):
    reference = read(tmp_path)
    length, first, second, _ = compare_figures(report(1, [1, 0], [0, 1]), {}, reference)
    assert (length.ours, length.inside) == (None, None)
    assert first.ours == 0.5
    assert (second.ours, second.inside) == (None, None)
    plain = list(compare_figures(report(0, [0, 0]), {}, reference))
    assert "no figure to compare" in render("plain", 0, reference, plain)


def results(**tasks):
    """lm-eval's document for tasks that each have a number of right answers of 500, by both filters of GSM8K."""
    return {
        "results": {
            task: {
                "alias": task,
                "exact_match,strict-match": right / 500,
                "exact_match_stderr,strict-match": 0.02,
                "exact_match,flexible-extract": (right + 20) / 500,
                "exact_match_stderr,flexible-extract": 0.02,
            }
            for task, right in tasks.items()
        },
        "n-samples": {task: {"original": 1319, "effective": 500} for task in tasks},
    }


@pytest.mark.parametrize(("right", "inside"), [(350, True), (300, False), (367, True), (372, False)])
def test_accuracy_is_compared_over_the_samples(tmp_path, right, inside):
    *_, accuracy = compare_figures(report(2, [2, 1]), results(gsm8k=right), read(tmp_path))
    assert (accuracy.ours, accuracy.ci95) == (right / 500, wilson(right / 500, 500))
    assert accuracy.inside is inside


def test_the_accuracy_of_another_task_is_not_taken_for_it(tmp_path):
    reference = read(tmp_path)
    lines = list(compare_figures(report(2, [2, 1, 0], [1, 1, 2]), results(word_problems=350), reference))
    assert lines[-1].ours is None
    text = render("runs/a", 2, reference, lines)
    assert re.search(
        r"^gsm8k exact_match,strict-match +- +- +70\.0 % ± 2\.0  not compared$", text, re.MULTILINE
    )
    assert "Not measured by this run: gsm8k exact_match,strict-match; `specgen eval` measures" in " ".join(
        text.split()
    )


def test_accuracy_that_is_there_is_not_called_missing(tmp_path):
    reference = read(tmp_path)
    lines = list(compare_figures(report(2, [2, 1, 0], [1, 1, 2]), results(gsm8k=250), reference))
    text = render("runs/a", 2, reference, lines)
    assert re.search(r"strict-match +50\.0 %  \[45\.6, 54\.4\]  70\.0 % ± 2\.0 +no$", text, re.MULTILINE)
    assert "Not measured" not in text
    assert "Outside the run's intervals: gsm8k exact_match,strict-match (1 of 4" in " ".join(text.split())


def test_an_accuracy_that_is_no_share_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"gsm8k exact_match,strict-match of the run is 1\.2, not a share"):
        list(compare_figures(report(2, [2, 1]), results(gsm8k=600), read(tmp_path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not valid JSON"), ("[]", "is not a JSON object"), ('{"results": {}}', "holds no results")],
)
def test_results_that_are_not_lm_evals_are_refused(tmp_path, text, message):
    assert load_results(tmp_path) == {}
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=message) as refused:
        load_results(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.fixture
def run_directory(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report(3, [3, 1, 0], [1, 2, 0], [2, 3, 1]).to_json()))
    (tmp_path / "manifest.json").write_text("{}")
    return tmp_path


def invoke(*arguments):
    return specgen("report", *arguments)


def test_the_command_prints_it(run_directory):
    result = invoke(run_directory, "--against", "vllm-ci-qwen3-8b")
    assert result.exit_code == 0
    assert re.search(r"^acceptance at token 2 +22\.2 % +\[.*\] +20\.2 % +yes$", result.stdout, re.MULTILINE)
    assert "tests/v1/spec_decode/test_acceptance_length.py" in "".join(result.stdout.split())
    document = json.loads(invoke(run_directory, "--against", "vllm-ci-qwen3-8b", "--json").stdout)
    assert document["num_drafts"] == 9
    assert [line["theirs"] for line in document["against"]["figures"]] == [2.26, 0.6541, 0.3993, 0.202]


def test_the_command_finds_the_accuracy_of_an_arm(run_directory):
    padded = ("--against", "vllm-25196-padded")
    assert "Not measured by this run: gsm8k" in invoke(run_directory, *padded).stdout
    (run_directory / "results.json").write_text(json.dumps(results(gsm8k=387)))
    printed = invoke(run_directory, *padded).stdout
    assert "The run's intervals hold every figure compared (2)." in printed
    assert re.search(r"strict-match +77\.4 % .* 77\.4 % ± 1\.9 +yes$", printed, re.MULTILINE)


def test_the_command_refuses_in_one_line(run_directory, monkeypatch, capsys):
    for arguments, message in (
        (["--against", "llama"], f"use one of {', '.join(NAMES)}"),
        ([str(run_directory), "--against", NAMES[0]], "give one directory"),
    ):
        monkeypatch.setattr("sys.argv", ["specgen", "report", str(run_directory), *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        assert exited.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
