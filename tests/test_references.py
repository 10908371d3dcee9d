"""What published figures may say, and a run that is compared with each of them."""

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from specgen.cli import main as cli
from specgen.config.bundled import evaluation_directory
from specgen.report.intervals import t_test, wilson
from specgen.report.references import (
    Conditions,
    Reference,
    compare_run,
    conditions_of,
    load_reference,
    load_references,
    load_results,
    of_figures,
)
from specgen.report.terminal import render as in_terminal
from tests.commands import refused, specgen, write_rows
from tests.streams import fold, request, write_session

NAMES = sorted(each.name for each in load_references())
MEASURED: dict[str, Any] = {
    "dataset": "gsm8k",
    "num_spec_tokens": 2,
    "temperature": 0,
    "mean": "pooled",
    "mean_acceptance_length": 1.9,
    "acceptance": [0.6, 0.3],
    "accuracy": [{"measure": "gsm8k exact_match,strict-match", "value": 0.7, "stderr": 0.02}],
}
GOOD: dict[str, Any] = {
    "name": "mine",
    "source": "https://example.org/figures",
    "model": "a target",
    "drafter": "a head",
    "setting": "some prompts",
    "measurements": [MEASURED],
}


def read(*, others=(), **changes) -> Reference:
    """The reference ``mine``, whose first figures have these changes."""
    measured = [MEASURED | changes, *(MEASURED | each for each in others)]
    return msgspec.convert(GOOD | {"measurements": measured}, Reference)


def report(num_spec_tokens, *accepted):
    """The report of requests whose steps accepted these numbers of drafts."""
    events = [
        event
        for number, steps in enumerate(accepted)
        for event in request(f"r{number}", [(num_spec_tokens, many) for many in steps])
    ]
    return fold(events, num_spec_tokens=num_spec_tokens)


def manifest(dataset="gsm8k", num_spec_tokens=2, temperature=0.0, kwargs=None, **engine) -> dict[str, Any]:
    engine = {"num_spec_tokens": num_spec_tokens, "chat_template_kwargs": kwargs or {}} | engine
    data = {"tasks": [dataset[5:]]} if dataset.startswith("eval ") else {"dataset": dataset}
    return {"engine": engine, "sampling": {"temperature": temperature}, "data": data}


def against(path, run, reference, **said):
    """``run`` beside ``reference``; its results are in the directory ``path``."""
    return compare_run(path, run, manifest(**{"num_spec_tokens": run.num_spec_tokens} | said), reference)


def printed(path, run, reference, **said):
    """What the terminal shows of ``run`` beside ``reference``, at 80 columns."""
    return in_terminal(of_figures(reference, [against(path, run, reference, **said)]), 80)


def in_one_line(text):
    return " ".join(text.split())


def test_bundled_references_say_what_can_be():
    """Each measurement is found by its own conditions, and is alone with them."""
    for reference in load_references():
        own = evaluation_directory().parent / reference.source  # figures of heads in this checkout
        assert reference.source.startswith("https://") or own.is_file(), reference
        assert reference.measurements, reference
        for each in reference.measurements:
            assert each is reference.of(each)
            assert each.num_spec_tokens >= 1, each
            assert each.temperature >= 0, each
            assert each.draft_sampling in (None, "greedy", "probabilistic"), each
            assert each.mean_acceptance_length or each.accuracy, each
            assert (each.mean is None) == (each.mean_acceptance_length is None), each
            assert 1 <= (each.mean_acceptance_length or 1) <= each.num_spec_tokens + 1, each
            if each.acceptance:  # the published mean is rounded to hundredths
                assert len(each.acceptance) == each.num_spec_tokens, each
                assert 1 + sum(each.acceptance) == pytest.approx(each.mean_acceptance_length, abs=0.01)
            assert all(1 >= a >= b >= 0 for a, b in itertools.pairwise((1, *each.acceptance, 0))), each
            for accuracy in each.accuracy:
                assert (len(accuracy.measure.split(" ")), 0 <= accuracy.value <= 1) == (2, True), each
                assert 0 <= accuracy.stderr < 1, each


def test_bundled_references_have_no_key_that_nothing_reads():
    found = json.loads((evaluation_directory() / "references.json").read_text())
    read = msgspec.to_builtins(load_references())
    assert len({each["name"] for each in found}) == len(found)
    for theirs, ours in zip(found, read, strict=True):
        assert theirs.keys() == ours.keys()
        for each, known in zip(theirs["measurements"], ours["measurements"], strict=True):
            assert each.keys() <= known.keys()


def length(name: str, dataset: str, k: int, *, thinking: bool | None = False, temperature: float = 1.0):
    asked = Conditions(dataset=dataset, num_spec_tokens=k, temperature=temperature, thinking=thinking)
    found = load_reference(name).of(asked)
    return found.mean_acceptance_length, found.mean


def test_published_tables_are_there_with_all_they_measured():
    """Corners of the tables, copied here a second time."""
    kinds = ("dspark-", "inferencex-", "vllm-ci-")
    numbers = [
        [len(load_reference(name).measurements) for name in NAMES if name.startswith(kind)] for kind in kinds
    ]
    assert [(len(each), set(each)) for each in numbers[:2]] == [(12, {9}), (9, {8, 16})]
    assert {"vllm-ci-llama-3.1-8b", "vllm-ci-qwen3-8b", "vllm-ci-gpt-oss-20b"} < set(NAMES)
    assert length("dspark-qwen3-8b-eagle3", "gsm8k:dspark", 7) == (5.30, "pooled")
    assert length("dspark-gemma-4-12b-dspark", "humaneval:dspark", 7) == (5.64, "pooled")
    assert length("inferencex-kimik2.5-eagle3", "speed-bench-coding", 8, thinking=True) == (3.77, "pooled")
    vllm = ("vllm-ci-qwen3-8b-dflash", "humaneval:vllm", 16)
    assert length(*vllm, temperature=0) == (6.50, "requests")
    (llama,) = load_reference("vllm-ci-llama-3.1-8b").measurements
    assert (llama.mean_acceptance_length, llama.acceptance) == (2.60, (0.7296, 0.5208, 0.3545))


# --- what is compared with what -------------------------------------------------------------------


def conditions(**changes) -> Conditions:
    return Conditions(**{"dataset": "gsm8k", "num_spec_tokens": 2, "temperature": 0} | changes)


def test_conditions_are_those_of_the_manifest():
    assert conditions_of(manifest()) == conditions()
    assert conditions_of(manifest("data/my set.jsonl.gz")).dataset == "my set"
    assert conditions_of(manifest("gsm8k:dspark")).dataset == "gsm8k:dspark"
    assert conditions_of(manifest("eval gsm8k")).dataset == "eval gsm8k"
    # greedy drafts are what both kinds of sampling give at temperature 0
    assert conditions_of(manifest(draft_sampling="probabilistic")).draft_sampling is None
    assert conditions_of(manifest(temperature=1.0, draft_sampling="greedy")).draft_sampling == "greedy"
    assert conditions_of(manifest(kwargs={"enable_thinking": False}), has_reasoning=True).thinking is False
    assert conditions_of(manifest(kwargs={"thinking": True})).thinking is True
    assert conditions_of(manifest(), has_reasoning=True).thinking is True
    asked = manifest(temperature=1.0)
    asked["sampling"] |= {
        "max_tokens": 30,
        "top_k": 1,
        "min_p": 0.0,
        "repetition_penalty": 1.5,
        "logit_bias": [[40, 5]],
    }
    said = "top k 1, repetition penalty 1.5, logit bias (1), at most 30 new tokens"
    assert conditions_of(asked).besides == said
    asked["data"]["own_parameters"] = ["logprobs", "seed", "stop", "top_p"]
    assert conditions_of(asked).besides == f"{said}, where rows do not set their own stop, top_p"
    asked["data"] = {"dataset": "gsm8k", "num_prompts": 20}
    assert conditions_of(asked).besides == f"{said}, on the first 20 prompts"
    with refused("chose K at every step .*: generate with a fixed K"):
        conditions_of(manifest(spec_length="auto"))


def test_what_was_measured_otherwise_is_refused_with_both_sides():
    seven = {"num_spec_tokens": 7, "acceptance": [], "thinking": False, "draft_sampling": "probabilistic"}
    reference = read(others=[seven])
    for changes, says in (
        ({"dataset": "mt-bench"}, "data set gsm8k .* of data set mt-bench: generate with the same"),
        ({"num_spec_tokens": 3}, r"K 2, 7 \(gsm8k, K 2, .* this run is of K 3:"),
        ({"temperature": 0.5}, "temperature 0 .* of temperature 0.5:"),
        ({"num_spec_tokens": 7, "thinking": True}, "thinking off .* of thinking on:"),
        (
            {"num_spec_tokens": 7, "draft_sampling": "greedy"},
            "draft sampling probabilistic .* of draft sampling greedy:",
        ),
    ):
        with refused(f"^mine has figures for {says}"):
            reference.of(conditions(**changes))
    first, second = reference.measurements
    assert reference.of(conditions()) is first
    assert reference.of(conditions(num_spec_tokens=7, thinking=False)) is second
    assert reference.of(conditions(num_spec_tokens=7)) is second


def test_two_ways_of_thinking_need_a_word():
    reference = read(thinking=True, others=[{"thinking": False, "mean_acceptance_length": 2.0}])
    with refused(r"2 figures for gsm8k, K 2, temperature 0 \(.*thinking on; .*thinking off\): say with"):
        reference.of(conditions())
    assert reference.of(conditions(thinking=False)).mean_acceptance_length == 2.0


def test_what_else_a_run_sampled_with_stands_beside_a_reference(tmp_path):
    found = against(tmp_path, report(2, [2, 1, 0], [1, 1, 0]), read())
    said = replace(found, run=conditions(besides="at most 9 new tokens"))
    texts = [in_terminal(of_figures(read(), [each]), 80) for each in (said, found)]
    assert "sampled here with at most 9 new tokens; see that the reference was" in texts[0]
    assert "sampled here" not in texts[1]


# --- a run beside a reference ---------------------------------------------------------------------


def test_a_run_beside_a_reference(tmp_path):
    run = report(2, [2, 1, 0], [1, 1, 0], [2, 0, 0], [1, 2, 1])
    found = against(tmp_path, run, read(acceptance=[0.6, 0.9 * 0.1]))
    length, first, second, accuracy = found.figures
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


def completions(path, steps):
    """Rows of requests by id, whose steps of 2 drafts accepted these numbers."""
    for name, accepted in steps.items():
        turn = int(name.partition("/turn-")[2] or 1)
        num_turns = 2 if f"{name.partition('/turn-')[0]}/turn-2" in steps else 1
        write_session(path, request(name, [(2, each) for each in accepted], turn=turn, num_turns=num_turns))


def test_a_mean_over_requests_is_compared_with_one(tmp_path):
    """Long requests weigh no more than short ones, and the interval is the t interval of the lengths."""
    steps = {"a": [2, 2, 2, 0, 1, 2, 2, 1, 2, 2], "b": [0, 1], "c": [1], "d": [1, 1, 1], "e": [1, 0]}
    completions(tmp_path, steps)
    run = report(2, *steps.values())
    length, *_ = against(tmp_path, run, read(mean="requests")).figures
    lengths = [2.6, 1.5, 2, 2, 1.5]
    mean = sum(lengths) / 5
    assert (length.figure, length.ours) == ("mean length over requests", pytest.approx(mean))
    error = (sum((each - mean) ** 2 for each in lengths) / 4 / 5) ** 0.5
    assert length.ci95 == pytest.approx(t_test(mean, error, 4)[0])
    assert length.inside is True
    pooled, *_ = against(tmp_path, run, read()).figures
    assert pooled.ours == pytest.approx(1 + 22 / 18)
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    for row in rows:  # as n-grams, which find nothing in most steps
        row["record"]["counts"]["without_drafts"] = 7
    write_rows(tmp_path / "completions.jsonl", rows)
    at_times, *_ = against(tmp_path, run, read(mean="requests")).figures
    assert at_times == length
    (tmp_path / "few").mkdir()
    completions(tmp_path / "few", {"a": [2], "b": [0]})
    few, *_ = against(tmp_path / "few", report(2, [2], [0]), read(mean="requests")).figures
    assert few.ci95 == (1.0, 3.0), "within what a step can yield"


def test_turns_of_a_conversation_are_one_unit_of_a_mean_over_requests(tmp_path):
    """Copies of a request as later turns tell no more than the first turns alone."""
    turns = {"a": [2, 1], "b": [0, 1], "c": [1, 1]}
    alone = {name: [*steps] for name, steps in turns.items()}
    both = {f"{name}{turn}": steps for name, steps in turns.items() for turn in ("", "/turn-2")}
    intervals = []
    for steps in (alone, both):
        completions(tmp_path, steps)
        run = report(2, *steps.values())
        intervals.append(against(tmp_path, run, read(mean="requests")).figures[0].ci95)
    assert intervals[0] == pytest.approx(intervals[1])


def test_figures_outside_the_interval_are_counted(tmp_path):
    run = report(2, *[[2, 2, 2, 1, 2]] * 40)
    assert [line.inside for line in against(tmp_path, run, read()).figures[1:]] == [False, False, None]
    text = printed(tmp_path, run, read())
    assert "2 of 2 figures outside our intervals." in in_one_line(text)
    assert all(len(line) <= 80 for line in text.splitlines())
    alone = printed(tmp_path, report(2, [2, 1]), read(acceptance=[]))
    assert "0 of 0 figures outside our intervals." in alone


def test_thinking_that_nobody_told_of_is_named_and_reasoning_is_thinking(tmp_path):
    reference, run = read(thinking=False), report(2, [2, 1, 0], [1, 1, 0])
    said = "The reference has thinking off; whether this model thinks was not said"
    assert said in in_one_line(printed(tmp_path, run, reference))
    assert "thinks" not in printed(tmp_path, run, reference, kwargs={"enable_thinking": False})
    with refused("figures for thinking off .* of thinking on:"):
        against(tmp_path, replace(run, parts={"reasoning": run, "answer": run}), reference)


FILTERS = (("strict-match", 0), ("flexible-extract", 20))


def scored(path, **tasks):
    """Leave lm-eval's ``results.json`` of tasks that each have a number of right answers of 500, by both filters."""
    results = {
        task: {
            "alias": task,
            **{f"exact_match,{name}": (right + more) / 500 for name, more in FILTERS},
            **{f"exact_match_stderr,{name}": 0.02 for name, _ in FILTERS},
        }
        for task, right in tasks.items()
    }
    samples = {task: {"original": 1319, "effective": 500} for task in tasks}
    (path / "results.json").write_text(json.dumps({"results": results, "n-samples": samples}))


def test_accuracy_is_compared_over_the_samples(tmp_path):
    for right, inside in ((350, True), (300, False), (367, True), (372, False)):
        scored(tmp_path, gsm8k=right)
        *_, accuracy = against(tmp_path, report(2, [2, 1]), read()).figures
        assert (accuracy.ours, accuracy.ci95) == (right / 500, wilson(right / 500, 500))
        assert accuracy.inside is inside, right


def test_the_accuracy_of_another_task_is_not_taken_for_it(tmp_path):
    run = report(2, [2, 1, 0], [1, 1, 2])
    scored(tmp_path, word_problems=350)
    text = printed(tmp_path, run, read())
    assert re.search(
        r"^gsm8k exact_match,strict-match +70\.0 % ± 2\.0 +- +-  not compared$", text, re.MULTILINE
    )
    assert "`specgen eval` measures accuracy." in in_one_line(text)
    scored(tmp_path, gsm8k=250)
    text = printed(tmp_path, run, read())
    assert re.search(r"strict-match +70\.0 % ± 2\.0 +50\.0 %  \[45\.6, 54\.4\] +no$", text, re.MULTILINE)
    assert "specgen eval" not in text
    assert "1 of 4 figures outside our intervals." in in_one_line(text)


def test_results_that_are_not_lm_evals_are_refused(tmp_path):
    assert load_results(tmp_path) == {}
    for text, message in (
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ('{"results": {}}', "holds no results"),
    ):
        (tmp_path / "results.json").write_text(text)
        with refused(message):
            load_results(tmp_path)
    scored(tmp_path, gsm8k=600)
    with refused(r"gsm8k exact_match,strict-match of the run is 1\.2, not a share"):
        against(tmp_path, report(2, [2, 1]), read())


@pytest.fixture
def run_directory(tmp_path):
    """Of a run with K = 3, as vLLM's tests ask MT-Bench."""
    (tmp_path / "report.json").write_text(json.dumps(report(3, [3, 1, 0], [1, 2, 0], [2, 3, 1]).to_json()))
    (tmp_path / "manifest.json").write_text(json.dumps(manifest("mt-bench:vllm", 3)))
    return tmp_path


def invoke(*arguments):
    return specgen("report", *arguments)


def test_the_command_prints_it(run_directory):
    result = invoke(run_directory, "--against", "vllm-ci-qwen3-8b")
    assert result.exit_code == 0
    assert re.search(r"^acceptance at token 2 +20\.2 % +22\.2 % +\[.*\] +yes$", result.stdout, re.MULTILINE)
    assert "tests/v1/spec_decode/test_acceptance_length.py" in "".join(result.stdout.split())
    assert "on mt-bench:vllm, K 3, temperature 0" in result.stdout
    document = json.loads(invoke(run_directory, "--against", "vllm-ci-qwen3-8b", "--json").stdout)
    assert document["num_drafts"] == 9
    found = document["against"]
    assert [line["theirs"] for line in found["figures"]] == [2.26, 0.6541, 0.3993, 0.202]
    assert (found["name"], found["model"]) == ("vllm-ci-qwen3-8b", "Qwen/Qwen3-8B")
    assert (found["run"]["dataset"], found["measurement"]["mean"]) == ("mt-bench:vllm", "pooled")


def test_the_command_finds_the_accuracy_of_an_arm(run_directory):
    (run_directory / "report.json").write_text(json.dumps(report(4, [3, 1, 0], [1, 2, 0]).to_json()))
    (run_directory / "manifest.json").write_text(json.dumps(manifest("eval gsm8k", 4)))
    padded = ("--against", "vllm-25196-padded")
    assert "`specgen eval` measures accuracy." in invoke(run_directory, *padded).stdout
    scored(run_directory, gsm8k=387)
    printed = invoke(run_directory, *padded).stdout
    assert "0 of 2 figures outside our intervals." in printed
    assert re.search(r"strict-match +77\.4 % ± 1\.9 +77\.4 % .* +yes$", printed, re.MULTILINE)


def test_the_command_refuses_in_one_line(run_directory, monkeypatch, capsys):
    for arguments, message in (
        (["--against", "llama"], f"use one of {', '.join(NAMES)}"),
        ([str(run_directory), "--against", NAMES[0]], "give one directory"),
        (["--against", "vllm-ci-qwen3-8b-dflash"], "figures for K 16 (mt-bench:vllm, K 16"),
        (["--against", "inferencex-dsv4-mtp"], "data set speed-bench-coding"),
    ):
        monkeypatch.setattr("sys.argv", ["specgen", "report", str(run_directory), *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        assert exited.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
