"""``specgen report --golden``: the curve by K is that of the steps, and only of runs that differ in K."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from specgen.experiments.golden import curve_of
from specgen.report.intervals import t_test
from tests.commands import printed, refused
from tests.streams import fold, request, write_session

STEPS = [[4, 0, 2, 1], [3, 3], [0, 1, 4, 4, 2], [2]]  # accepted drafts of each step of each request


def a_run(
    path: Path, k: int, steps: Sequence[Sequence[int]], drafted: int | None = None, **changes: Any
) -> Path:
    """The directory of a run with this K, whose steps drafted K tokens or ``drafted``; ``changes`` by section."""
    many = k if drafted is None else drafted
    rows = [
        row
        for number, accepted in enumerate(steps)
        for row in request(f"r{number}", [(many, each) for each in accepted])
    ]
    write_session(path, rows)
    (path / "report.json").write_text(json.dumps(fold(rows, num_spec_tokens=k).to_json()))
    manifest = {
        "engine": {"model": "org/target", "drafter": "org/head", "num_spec_tokens": k},
        "sampling": {"temperature": 0.0, "top_p": 1.0, "max_tokens": 9, "seed": 0},
        "data": {"dataset": "gsm8k", "sha256": "ab", "num_prompts": None},
        "fingerprints": {"model": "m", "drafter": "d"},
    }
    whole = {name: each | changes.get(name, {}) for name, each in manifest.items()}
    (path / "manifest.json").write_text(json.dumps(whole))
    return path


def test_one_run_gives_every_k(tmp_path: Path) -> None:
    """By the definition: min(accepted, K) of every step, pooled; the interval by hand over requests."""
    curve = curve_of([a_run(tmp_path / "a", 4, STEPS)])
    assert [(point.num_spec_tokens, point.measured_at) for point in curve.points] == [
        (k, 4) for k in (1, 2, 3, 4)
    ]
    for k, point in enumerate(curve.points, start=1):
        kept = [[min(each, k) for each in accepted] for accepted in STEPS]
        number = sum(map(len, kept))
        rate = sum(map(sum, kept)) / number
        assert point.length == pytest.approx(1 + rate)
        spread = sum((sum(each) - rate * len(each)) ** 2 for each in kept) / number**2
        low, high = t_test(1 + rate, (spread * 4 / 3) ** 0.5, 3)[0]
        assert point.ci95 == pytest.approx((max(1.0, low), min(k + 1.0, high)))


def test_a_run_at_its_own_k_is_measured_and_others_are_of_the_next_larger(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "four", 4, STEPS), a_run(tmp_path / "two", 2, [[2, 2, 0], [1], [1, 2]])]
    curve = curve_of(runs)
    assert [point.measured_at for point in curve.points] == [2, 2, 4, 4]
    one, two, three, four = (point.length for point in curve.points)
    assert (one, two) == (pytest.approx(1 + 5 / 6), pytest.approx(1 + 8 / 6))
    alone = curve_of(runs[:1])
    assert (three, four) == tuple(point.length for point in alone.points[2:])
    assert curve_of(runs[::-1]).points == curve.points
    assert (curve.conditions.num_spec_tokens, curve.num_requests) == (4, 4)


def test_steps_that_drafted_less_give_a_curve_over_all_steps(tmp_path: Path) -> None:
    """As of n-grams, which find drafts at times."""
    path = a_run(tmp_path / "few", 4, [[1, 2], [0]], drafted=3)
    write_session(path, request("at times", [(0, 0), (4, 4)]))
    found = [point.length for point in curve_of([path]).points]
    assert found == pytest.approx([1 + each / 5 for each in (3, 5, 6, 7)])


@pytest.mark.parametrize(
    ("kwargs", "mode"),
    [
        ({}, "thinking_unknown"),
        ({"enable_thinking": True}, "thinking_on"),
        ({"thinking": False}, "thinking_off"),
    ],
)
def test_the_file_has_one_model_and_one_mode(tmp_path: Path, kwargs: dict[str, bool], mode: str) -> None:
    engine = {"model": "org/target: new", "chat_template_kwargs": kwargs}
    sampling = {"temperature": 0.5, "repetition_penalty": 1.5, "logit_bias": [[40, 5.0]], "stop": []}
    run = a_run(tmp_path / "a", 4, STEPS, engine=engine, sampling=sampling)
    text = curve_of([run]).to_yaml()
    # of 12 steps 10, 8, 5 and 3 accepted more than 0, 1, 2 and 3 drafts
    assert yaml.safe_load(text) == {"org/target: new": {mode: {1: 1.83, 2: 2.5, 3: 2.92, 4: 3.17}}}
    comments = [line for line in text.splitlines() if line.startswith("#")]
    asked = "# data set: gsm8k | temperature: 0.5 | thinking: "
    assert any(
        line.startswith(asked)
        and line.endswith(
            " | with: repetition penalty 1.5, logit bias (1), at most 9 new tokens | requests: 4"
        )
        for line in comments
    )
    assert "# drafter: org/head | draft_sampling: greedy" in comments
    assert "# K 1, 2, 3: estimated by min(accepted, K) of the steps of the run with K 4" in comments


def test_the_command_writes_and_prints_it(tmp_path: Path) -> None:
    """Of the bundled pair: the length at its own K is the report's, and below it that of the joint rates."""
    run, file = tmp_path / "run", tmp_path / "curve.yaml"
    asked = ("--num-prompts", "6", "--max-new-tokens", "24", "--num-spec-tokens", "2")
    printed("generate", *asked, "--output", run, "--quiet")
    report = json.loads(printed("report", run, "--json"))
    found = json.loads(printed("report", run, "--golden", file, "--json"))
    one, two = found["points"]
    assert one["length"] == pytest.approx(1 + report["acceptance"][0]["rate"])
    assert (two["length"], two["ci95"]) == (
        report["mean_acceptance_length"],
        report["mean_acceptance_length_ci95"],
    )
    curve = {1: round(one["length"], 2), 2: round(two["length"], 2)}
    assert yaml.safe_load(file.read_text()) == {"demo/target": {"thinking_unknown": curve}}
    file.unlink()
    text = printed("report", run, "--golden", file)
    assert f"2                    {two['length']:.2f}" in text
    assert "K 1: estimated by min(accepted, K)" in text
    with refused(r"golden is '.*curve\.yaml', which is there already: name a new file"):
        printed("report", run, "--golden", file)
    with refused("whose directory does not exist: make it"):
        printed("report", run, "--golden", tmp_path / "none" / "curve.yaml")
    with refused("golden and against are both given: choose one"):
        printed("report", run, "--golden", tmp_path / "b.yaml", "--against", "vllm-ci-qwen3-8b")


@pytest.mark.parametrize(
    ("section", "changes", "says"),
    [
        ("sampling", {"temperature": 1.0}, r"sampling\.temperature \(0\.0 in .*, 1\.0 in"),
        ("sampling", {"max_tokens": 10}, r"sampling\.max_tokens"),
        ("data", {"sha256": "ef"}, r"data\.sha256"),
        ("data", {"dataset": "mine", "sha256": "ef" * 32}, r"data\.dataset"),
        ("fingerprints", {"drafter": "e"}, r"fingerprints\.drafter"),
        ("fingerprints", {"model": "e"}, r"fingerprints\.model"),
        ("engine", {"draft_sampling": "probabilistic"}, r"engine\.draft_sampling"),
        ("engine", {"chat_template_kwargs": {"thinking": True}}, r"engine\.chat_template_kwargs\.thinking"),
    ],
)
def test_runs_that_differ_in_more_than_k_are_refused(
    tmp_path: Path, section: str, changes: dict[str, Any], says: str
) -> None:
    first = a_run(tmp_path / "a", 4, STEPS)
    other = a_run(tmp_path / "b", 2, [[2], [1]], **{section: changes})
    with refused(f"cannot be compared, as they differ in {says}"):
        curve_of([first, other])


def test_what_has_no_curve_is_refused(tmp_path: Path) -> None:
    first = a_run(tmp_path / "a", 4, STEPS)
    with refused("/b is a second run with K 4: give one for each K"):
        curve_of([first, a_run(tmp_path / "b", 4, STEPS)])
    with refused("/plain has no steps with drafts"):
        curve_of([a_run(tmp_path / "plain", 0, [[0, 0], [0]])])
    with refused("chose K at every step"):
        curve_of([a_run(tmp_path / "auto", 4, STEPS, engine={"spec_length": "auto"})])
    with refused("rows of .*/own set their own max_tokens, top_k, so there is no one setting"):
        curve_of(
            [a_run(tmp_path / "own", 4, STEPS, data={"own_parameters": ["max_tokens", "seed", "top_k"]})]
        )
    (first / "status.json").write_text(json.dumps({"state": "stopped", "total": 9}))
    (first / "passes.jsonl").write_text("")
    with refused("This run is not finished"):
        curve_of([first])
