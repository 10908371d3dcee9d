"""``specgen compare``: its figures, what it refuses, its formats, and how it goes on after a stop."""

import csv
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgen.config import EngineConfig, SamplingParams, UserError
from specgen.config.bundled import data_directory, heads
from specgen.engine import loading
from specgen.engine.warm_engine import Run, WarmEngine
from specgen.experiments import heads_job
from specgen.experiments.head_figures import (
    Comparison,
    as_directory,
    compare_runs,
    read_comparison,
    short_names,
)
from specgen.experiments.heads_job import HeadsJob, HeadsRun
from specgen.experiments.heads_tables import exported, leads, notes, page, tables, verdicts
from specgen.experiments.rounds import BUSY, PLAIN, Repeat, Rounds, Speeds, rounds_by_data
from specgen.jobs import run as run_module
from specgen.prompts.load import DataSource
from specgen.record import columns
from specgen.record.files import RowFile
from specgen.record.interrupt import StoppedError
from specgen.record.record_rows import RequestRow, turn_id
from specgen.record.results import RunDirectory
from specgen.report.paired_requests import shared_requests
from specgen.text.tokenizer import Tokenizer, load_tokenizer
from tests.commands import printed, refused, specgen, write_rows
from tests.jobs import Silent, untimed
from tests.streams import fold, request
from tests.timed_engines import rounds_of
from tests.tiny_checkpoints import change_json

pytestmark = pytest.mark.xdist_group("compare_heads")  # one comparison for all

K = 3
MATH = [
    {"question": f"Tom has {n} apples and buys {n + 2} bags. How many?", "answer": "#### 1"} for n in range(5)
]


def call(*arguments: object) -> str:
    """What ``specgen compare`` prints; a ``UserError`` comes through."""
    return printed("compare", *arguments, columns=160)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """The directory of a comparison of three drafters on two data sets, its command, and what it printed."""
    root = tmp_path_factory.mktemp("compare")
    write_rows(root / "test.jsonl", MATH)
    model, (one, two, _) = data_directory() / "demo" / "target", heads()
    asked = f"--num-prompts 5 --max-new-tokens 10 --num-spec-tokens {K} --repeats 2 --output {root / 'out'}"
    command = ["--model", str(model), "--drafter", one, "--drafter", two, "--drafter", "ngram"]
    command += ["--dataset", f"bundled, gsm8k={root / 'test.jsonl'}", *asked.split()]
    loaded = Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        read = loading.load_target
        patch.setattr(loading, "load_target", lambda *asked: loaded.update(["target"]) or read(*asked))
        printed = call(*command)
    assert loaded == {"target": 1}
    return root / "out", command, printed


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, (path / "completions.jsonl").open())}


def counts(row: dict[str, Any]) -> tuple[int, int]:
    """Accepted drafts and steps, those without drafts too."""
    found = RequestRow.of_row(row).counts
    return sum(found.accepted), found.num_steps + found.without_drafts


def conversations(found: dict[str, dict[str, Any]]) -> list[tuple[int, int]]:
    """The same of each conversation."""
    sums: dict[str, np.ndarray[Any, Any]] = {}
    for name, row in found.items():
        unit = name.partition("/turn-")[0]
        sums[unit] = sums.get(unit, np.zeros(2, dtype=int)) + counts(row)
    return [(int(hits), int(trials)) for hits, trials in sums.values()]


def interval_by_scipy(units: list[tuple[int, int]]) -> tuple[float, float, float, int]:
    """The length with its interval's half, and the variance and degrees of freedom that it is made of."""
    from scipy import stats

    h, t = np.array(units).T
    n, rate = len(units), h.sum() / t.sum()
    variance = n / (n - 1) * np.sum((h - rate * t) ** 2) / t.sum() ** 2
    return 1 + rate, stats.t.ppf(0.975, n - 1) * np.sqrt(variance), variance, n - 1


def change_manifest(run: Path, section: str, **changes: object) -> Path:
    """Other values in a section of the manifest of ``run``."""
    manifest = json.loads((run / "manifest.json").read_text())
    change_json(run / "manifest.json", **{section: manifest[section] | changes})
    return run


# --- figures --------------------------------------------------------------------------------------


def test_figures_are_those_of_the_rows(compared: tuple[Path, list[str], str]) -> None:
    from scipy import stats

    path, *_ = compared
    found = json.loads((path / "comparison.json").read_text())
    assert {(run["data"], run["head"]) for run in found["runs"]} == {
        (data, head) for data in ("bundled", "gsm8k") for head in ("drafter", "drafter-two-layers", "ngram:3")
    }
    for run in found["runs"]:
        of_run = rows(Path(run["directory"]))
        units = conversations(of_run)
        # bundled conversations have two turns
        assert len(units) == 5 < len(of_run) + (run["data"] == "gsm8k")
        length, half, *_ = interval_by_scipy(units)
        assert run["length_over_all_steps"] == pytest.approx(length)
        assert 1 + sum(run["acceptance_over_all_steps"]) == pytest.approx(length)
        low, high = max(1, length - half), min(K + 1, length + half)
        assert run["length_over_all_steps_ci95"] == pytest.approx([low, high])
        recorded = [step for row in of_run.values() for step in RequestRow.of_row(row).steps or ()]
        assert length == 1 + sum(each.accepted for each in recorded) / len(recorded)
        whole = all(each.drafts for each in recorded)
        assert whole == (run["head"] != "ngram:3")
        assert whole == (run["report"]["mean_acceptance_length"] == pytest.approx(length))
    raw = []
    for pair in found["pairs"]:
        ours, first = (
            rows(path / pair["data"] / head.replace(":", "-")) for head in (pair["head"], pair["against"])
        )
        assert all(ours[each]["prompt"] == first[each]["prompt"] for each in ours)
        both = [
            (*a, *b)
            for a, b in zip(
                conversations(ours), conversations({each: first[each] for each in ours}), strict=True
            )
        ]
        h, t, oh, ot = np.array(both).T
        parts = (h - h.sum() / t.sum() * t) / t.sum() - (oh - oh.sum() / ot.sum() * ot) / ot.sum()
        error = np.sqrt(len(both) / (len(both) - 1) * np.sum(parts**2))
        length = pair["figures"][0]
        each = [figure["difference"] for figure in pair["figures"][1:]]
        assert len(each) == K
        assert sum(each) == pytest.approx(length["difference"]), "of n-grams too"
        difference = h.sum() / t.sum() - oh.sum() / ot.sum()
        half = stats.t.ppf(0.975, len(both) - 1) * error
        assert length["difference"] == pytest.approx(difference)
        assert length["ci95"] == pytest.approx([difference - half, difference + half])
        raw.append(2 * stats.t.sf(abs(difference) / error, len(both) - 1))
        assert pair["num_requests"] == pair["num_identical"] == len(ours)
    from statsmodels.stats.multitest import multipletests

    lengths = [pair["figures"][0]["p_holm"] for pair in found["pairs"]]
    assert lengths == pytest.approx(multipletests(raw, method="holm")[1])


def test_the_mean_of_data_sets_has_an_interval(tmp_path: Path) -> None:
    from scipy import stats

    runs = [
        a_run(tmp_path / f"{head}-{data}", head, simulated(share, seed, num), data)
        for seed, (data, head, share, num) in enumerate(
            [("one", "a", 0.4, 12), ("one", "b", 0.7, 12), ("two", "a", 0.3, 30), ("two", "b", 0.4, 30)]
        )
    ]
    found = compare_runs(runs)
    units = [
        [(sum(each), len(each)) for each in requests]
        for requests in (simulated(0.4, 0, 12), simulated(0.3, 2, 30))
    ]
    (one, _, v, f), (two, _, w, g) = map(interval_by_scipy, units)
    freedom = (v + w) ** 2 / (v**2 / f + w**2 / g)
    mean, half = (one + two) / 2, stats.t.ppf(0.975, freedom) * np.sqrt(v + w) / 2
    length = found.length(None, "a")
    assert length.value == pytest.approx(mean)
    assert length.interval == pytest.approx((mean - half, mean + half))
    shown = f"{mean:.2f}  [{mean - half:.2f}, {mean + half:.2f}]"
    assert shown in next(line for line in call(*runs).splitlines() if line.startswith("mean "))
    for name in ("md", "latex"):
        assert f"[{mean - half:.2f}, {mean + half:.2f}]" in exported(found, name)


def test_it_is_printed_again_from_directories(compared: tuple[Path, list[str], str]) -> None:
    path, _, printed = compared
    assert call(path) == printed
    report = specgen("report", str(path), columns=160)
    assert report.stdout == printed
    runs = [path / "gsm8k" / head for head in ("drafter", "ngram-3")]
    alone = json.loads(call(*runs, "--json"))
    assert [(pair["head"], pair["against"]) for pair in alone["pairs"]] == [("ngram:3", "drafter")]
    assert alone["speeds"] == {}
    assert "tokens/s" not in call(*runs)


def test_categories_are_paired(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    low = [list(map(int, rng.integers(0, 2, 9))) for _ in range(20)]
    high = [[each + 1 for each in steps] for steps in low]
    mixed = [high[n] if n % 2 else low[n] for n in range(20)]  # better in one category of two
    found = comparison(tmp_path, a=low, b=mixed)
    (pair,) = found.pairs
    assert pair.categories["group 1"].paired.difference == pytest.approx(1)
    assert pair.categories["group 0"].paired.difference == 0
    assert pair.length.ours - pair.length.first == pytest.approx(0.5)


def test_categories_are_corrected_over_the_rows_that_the_table_shows(tmp_path: Path) -> None:
    """Those against the first head."""
    found = comparison(tmp_path, **{head: simulated(0.5 + n / 50, n) for n, head in enumerate("abcd")})
    tested = [each for pair in found.pairs for each in pair.categories.values()]
    assert {pair.first for pair in found.pairs if pair.categories} == {"a"}
    assert len(tested) == 3 * 2
    least = min(tested, key=lambda each: each.paired.p)
    assert least.p == pytest.approx(min(1.0, len(tested) * least.paired.p))


def test_two_runs_have_the_same_p_in_report(tmp_path: Path) -> None:
    found = comparison(tmp_path, a=simulated(0.5, 1), b=simulated(0.56, 2))
    (shared,) = shared_requests([columns.read(tmp_path / head, K) for head in "ab"])
    (pair,) = found.pairs
    assert (pair.length, *pair.positions) == shared.figures
    assert pair.length.p == pair.length.paired.p, "one test needs no correction"
    assert any(each.p != each.paired.p for each in pair.positions)


# --- published figures ---------------------------------------------------------------------------


def test_heads_beside_published_figures(tmp_path: Path) -> None:
    """Every head on its own data, by the figures of its own report."""
    steps = {"good": [[3, 2], [2, 3], [3, 1]], "bad": [[0, 1], [1, 0], [0, 0]]}
    paths = [a_run(tmp_path / head, head, each, data="mt-bench:vllm") for head, each in steps.items()]
    told = ("--against", "vllm-ci-llama-3.1-8b")
    found = json.loads(call(*paths, *told, "--json"))
    assert (found["against"]["name"], found["against"]["model"]) == (
        told[1],
        "meta-llama/Llama-3.1-8B-Instruct",
    )
    good, bad = found["against"]["runs"]
    assert [(each["data"], each["head"]) for each in (good, bad)] == [
        ("mt-bench:vllm", "good"),
        ("mt-bench:vllm", "bad"),
    ]
    for each, run in zip((good, bad), found["runs"], strict=True):
        length, *places = each["figures"]
        assert (length["theirs"], length["ours"]) == (2.60, run["report"]["mean_acceptance_length"])
        assert length["ci95"] == run["report"]["mean_acceptance_length_ci95"]
        assert [place["ours"] for place in places] == [at["rate"] for at in run["report"]["acceptance"]]
    text = call(*paths, *told)
    assert text.startswith(call(*paths))  # the comparison itself does not change
    row = r"^mt-bench:vllm +bad +mean acceptance length +2\.60 +1\.33 +\[.*\] +no$"
    assert re.search(row, text, re.MULTILINE)


def test_what_was_not_measured_is_refused_before_anything_runs(tmp_path: Path) -> None:
    told = ("--against", "vllm-ci-llama-3.1-8b")
    with refused("figures for data set mt-bench:vllm .* of data set mine: generate with the same"):
        call(*(a_run(tmp_path / head, head, [[1], [2]]) for head in "ab"), *told)
    prompts = data_directory() / "prompts" / "mt_bench.jsonl"
    asked = ("--dataset", f"mt-bench:vllm={prompts}", *told, "--output", tmp_path / "out")
    with refused("figures for K 3 .* of K 4:"):
        call(*asked)
    with refused("figures for temperature 0 .* of temperature 0.5:"):
        call(*asked, "--num-spec-tokens", "3", "--temperature", "0.5")
    assert not (tmp_path / "out").exists()


def test_a_comparison_that_ran_is_put_beside_published_figures(tmp_path: Path) -> None:
    """Also by ``specgen report``; of MT-Bench the first turns alone are asked."""
    prompts, out = data_directory() / "prompts" / "mt_bench.jsonl", tmp_path / "out"
    told = ("--against", "vllm-ci-gemma-4-e4b")
    asked = ("--dataset", f"mt-bench:vllm={prompts}", "--num-prompts", "3", "--num-spec-tokens", "2")
    text = call(
        *("--model", data_directory() / "demo" / "target", "--drafter", heads()[0], *asked),
        "--max-new-tokens",
        "16",
        "--repeats",
        "0",
        "--output",
        out,
        *told,
    )
    row = re.search(r"^mt-bench:vllm +drafter +mean length over requests +2\.28 +(\S+) ", text, re.MULTILINE)
    (run,) = json.loads(printed("report", out, "--json", *told))["against"]["runs"]
    (length,) = run["figures"]
    assert row is not None
    assert row[1] == f"{length['ours']:.2f}"
    assert len((out / "mt-bench-vllm" / "drafter" / "completions.jsonl").read_text().splitlines()) == 3


# --- verdicts -------------------------------------------------------------------------------------


def a_run(
    path: Path,
    head: str,
    requests: Sequence[Sequence[int | None]],
    data: str = "mine",
    groups: int = 2,
    turns: int = 1,
    group: str = "group",
) -> Path:
    """The directory of a run of ``head`` whose steps accepted so many drafts, or had none; every turn has them."""
    path.mkdir(parents=True)
    records: list[RequestRow] = []
    with RunDirectory(path) as files:
        for at, (number, accepted) in enumerate(list(enumerate(requests)) * turns):
            turn, category = at // len(requests) + 1, f"{group} {number % groups}"
            name = turn_id(f"<{number}>", turn)
            asked: dict[str, Any] = {
                "num_prompt_tokens": 1,
                "category": category,
                "turn": turn,
                "num_turns": turns,
            }
            steps = [(0, 0) if each is None else (K, each) for each in accepted]
            asked["num_output_tokens"] = 9
            (found,) = request(name, steps, drafts=[(1,) * drafted for drafted, _ in steps], **asked)
            records.append(found)
            row = {"id": name, "prompt": name, "token_ids": [1], "turn": turn, "category": category}
            row |= {"text": "x", "finish_reason": "stop", "num_prompt_tokens": 1}
            files.add_completion(row, found)
    (path / "report.json").write_text(json.dumps(fold(records, num_spec_tokens=K).to_json()))
    manifest = {
        "engine": {"model": "target", "drafter": f"heads/{head}", "num_spec_tokens": K, "dtype": "float32"},
        "sampling": {"temperature": 0.0, "max_tokens": 9},
        "data": {"dataset": data, "sha256": sha256(data.encode()).hexdigest(), "num_prompts": None},
        "fingerprints": {"model": "cd" * 32, "drafter": head * 9},
        "settings": {"model": "target", "drafter": head, "data": data, "sampling": "greedy"},
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def comparison(root: Path, speeds: Speeds | None = None, **runs: Sequence[Sequence[int]]) -> Comparison:
    paths = [a_run(root / head, head, requests) for head, requests in runs.items()]
    return compare_runs(paths, speeds or {})


def simulated(share: float, seed: int, num: int = 30) -> list[list[int]]:
    """Requests of which some are easy for every head, and whose drafts are accepted more often with ``share``."""
    easy = np.random.default_rng(0).uniform(-0.25, 0.25, num)
    rng = np.random.default_rng(seed)
    return [list(map(int, rng.binomial(K, share + each, 12))) for each in easy]


def test_a_line_says_which_is_best_and_whether_the_second_differs(tmp_path: Path) -> None:
    found = comparison(tmp_path, a=simulated(0.4, 1), b=simulated(0.65, 2), c=simulated(0.4, 3))
    second = max("ac", key=lambda head: found.length("mine", head).value)
    assert list(verdicts(found)) == [
        f"mine, by length: best b; second {second}, which differs significantly."
    ]
    assert leads(found, "mine")
    alike = compare_runs([tmp_path / "a", tmp_path / "c"])
    (line,) = verdicts(alike)
    assert re.fullmatch(
        r"mine, by length: best [ac]; second [ac], which does not differ significantly\.", line
    )
    assert not leads(alike, "mine")


@pytest.mark.parametrize(
    ("a", "b"), [([[1], [2, 3]], [[1], [2, 3]]), ([[2]] * 9, [[0]] * 9), ([[3]], [[0]]), ([[]], [[]])]
)
def test_what_cannot_be_tested_does_not_differ_significantly(
    tmp_path: Path, a: list[list[int]], b: list[list[int]]
) -> None:
    found = comparison(tmp_path, a=a, b=b)
    assert list(verdicts(found)) == [
        "mine, by length: best a; second b, which does not differ significantly."
    ]
    assert list(verdicts(compare_runs([tmp_path / "a"]))) == []


def test_a_head_that_drafts_in_some_steps_is_judged_by_all(tmp_path: Path) -> None:
    """Its drafts are accepted more often, but it seldom has one: most steps give one token."""
    often = simulated(0.4, 1)
    seldom = [[each, *[None] * 3] for request in simulated(0.7, 2) for each in [request[0]]]
    paths = [a_run(tmp_path / "a", "a", often), a_run(tmp_path / "b", "b", seldom)]
    reports = [json.loads((path / "report.json").read_text()) for path in paths]
    assert reports[0]["mean_acceptance_length"] < reports[1]["mean_acceptance_length"]
    found = compare_runs(paths)
    a, b = found.length("mine", "a"), found.length("mine", "b")
    assert a.value == reports[0]["mean_acceptance_length"]
    empty = replace(found.runs[0], report=replace(found.runs[0].report, num_empty=3))
    assert any("a on mine: 3 of 30 texts are empty" in note for note in notes(replace(found, runs=(empty,))))
    assert b.value == pytest.approx(1 + reports[1]["num_accepted_tokens"] / (4 * 30))
    assert leads(found, "mine")
    (pair,) = found.pairs
    assert (pair.length.first, pair.length.ours) == (a.value, b.value)
    assert f"b & {b.value:.2f} " in exported(found, "latex")
    assert "b on mine: 90 of 120 steps had no drafts and gave one token each." in call(*paths).replace(
        "\n  ", " "
    )


def test_short_names_differ() -> None:
    paths = ["runs/one/head", "runs/two/head", "org/EAGLE3-1.1", "data/mine.jsonl", "data/table.tsv"]
    assert list(short_names(paths).values()) == ["head", "two/head", "EAGLE3-1.1", "mine", "table"]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_speeds_of_no_answer_are_refused(tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "long.jsonl", [{"prompt": "x " * 20_000}])
    asked = ("--dataset", prompts, "--drafter", "ngram", "--drafter", "suffix", "--output", tmp_path / "out")
    with refused("no request on long was answered, so there is no speed to measure: see `error` in"):
        raise specgen("compare", *asked).exception or AssertionError


@pytest.mark.parametrize("option", ["--num-prompts", "--num-spec-tokens", "--repeats"])
def test_options_without_effect_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(UserError, match=f"^{option[2:]} is given with directories"):
        call(a_run(tmp_path / "a", "a", [[1], [2]]), option, "3")


@pytest.mark.parametrize(
    ("section", "field", "value", "says"),
    [
        ("engine", "num_spec_tokens", 4, r"engine.num_spec_tokens \(3 in .*/a, 4 in .*/b\)"),
        ("sampling", "temperature", 0.7, r"sampling.temperature \(0.0 in .*/a, 0.7 in .*/b\)"),
        ("sampling", "max_tokens", 10, r"sampling.max_tokens \(9 in .*/a, 10 in .*/b\)"),
        ("fingerprints", "model", "ef" * 32, r"fingerprints.model \(cdcdcdcdcdcd in"),
        ("data", "sha256", "ef" * 32, r"data.sha256 \(\w{12} in .*/a, efefefefefef in"),
        ("data", "shard", "0/2", r"data.shard \(None in .*/a, 0/2 in"),
        ("fingerprints", "drafter", "a" * 9, r"/a and .*/b are both of heads/b on mine: leave one out"),
    ],
)
def test_unlike_runs_are_refused(tmp_path: Path, section: str, field: str, value: object, says: str) -> None:
    paths = [a_run(tmp_path / head, head, [[1, 2], [3]]) for head in "ab"]
    compare_runs(paths)
    change_manifest(paths[1], section, **{field: value})
    with pytest.raises(UserError, match=says):
        compare_runs(paths)


def test_equal_prompts_are_one_data_set_by_any_name(tmp_path: Path) -> None:
    paths = [a_run(tmp_path / head, head, [[1, 2], [3]]) for head in "ab"]
    change_manifest(paths[1], "data", dataset="/elsewhere/mine.jsonl", num_prompts=2)
    assert compare_runs(paths).data == ("mine",)


def test_other_settings_are_named(tmp_path: Path) -> None:
    paths = [a_run(tmp_path / head, head, [[1, 2], [3]]) for head in "ab"]
    change_json(paths[1] / "manifest.json", versions={"torch": "3.0"})
    assert "The runs also differ in versions.torch: None, 3.0." in call(*paths)


def test_parameters_that_rows_of_one_data_set_set_are_named_and_hide_no_other(tmp_path: Path) -> None:
    paths = [
        a_run(tmp_path / f"{head}-{data}", head, [[1, 2], [3]], data)
        for data in ("mix", "plain")
        for head in "ab"
    ]
    for path in paths[:2]:
        change_manifest(path, "data", own_parameters=["temperature"])
    text = call(*paths)
    assert "sampling greedy" in text
    assert "Rows of mix set their own temperature." in text


def test_a_comparison_that_has_not_finished_is_refused(
    compared: tuple[Path, list[str], str], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(compared[0], tmp_path / "out"))
    shutil.rmtree(out / "gsm8k" / "ngram-3")
    with pytest.raises(UserError, match=r"not finished \(5 of 6 runs begun\): the same command resumes it"):
        call(out)


def test_runs_that_have_not_finished_or_drafted_are_refused(tmp_path: Path) -> None:
    paths = [a_run(tmp_path / head, head, [[1, 2], [3]]) for head in "ab"]
    (paths[1] / "status.json").write_text(json.dumps({"state": "interrupted", "total": 9}))
    (paths[1] / "passes.jsonl").touch()
    with pytest.raises(UserError, match=r"/b: This run is not finished .* same command resumes it"):
        compare_runs(paths)
    for changes, says in (
        ({"num_spec_tokens": 0}, "is plain decoding"),
        ({"spec_length": "auto"}, "chose K at every step"),
    ):
        with pytest.raises(UserError, match=says):
            compare_runs([change_manifest(a_run(tmp_path / says, "c", [[1], [2]]), "engine", **changes)])


def test_a_drafter_that_never_drafted_costs_the_others_nothing(tmp_path: Path) -> None:
    """N-grams find nothing in short or random texts: that is a result."""
    paths = [a_run(tmp_path / "a", "a", [[1, 2], [3]]), a_run(tmp_path / "ngram", "n", [[], []])]
    paths += [a_run(tmp_path / f"{head} on yours", head, [[1, 2], [3]], data="yours") for head in "an"]
    printed = call(*paths)
    (line,) = [line.split() for line in printed.splitlines() if line.startswith("mine ")][:1]
    assert line[:3] == ["mine", "2", "3.00"], printed
    assert line[-2:] == ["-", "-"], "no steps with drafts, no length"


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    target = str(data_directory() / "demo" / "target")
    two = ("--drafter", "ngram", "--drafter", "ngram:3")
    copy = shutil.copytree(heads()[0], tmp_path / "copy")
    same = ("--model", target, "--drafter", heads()[0], "--drafter", heads()[1], "--drafter", str(copy))
    rows, again = tmp_path / "rows.jsonl", tmp_path / "again.jsonl"
    for file in (rows, again):
        file.write_text('{"prompt": "Tom has"}\n')
    refusals = {
        ("--repeats", "1"): "one run has no spread",
        two: "drafter 'ngram:3' is given twice",
        same: f"^drafters '{heads()[0]}' and '{copy}' have the same weights: leave one out$",
        ("--dataset", "bundled,bundled"): "dataset 'bundled' is given twice",
        (
            "--dataset",
            f"{rows},{again}",
        ): f"^data sets '{rows}' and '{again}' have the same content: leave one",
        ("--dataset", "bundled,"): "write names or files with commas",
        ("--dataset", "bundled,nothing"): "neither a known name nor a file",
        ("--dataset", "-"): "can be read only once",
        ("--num-spec-tokens", "0"): "nothing to compare",
        ("--num-spec-tokens", "auto"): "every head would draft another number",
        ("--drafter", heads()[0]): f"^drafter '{heads()[0]}' is given without a model: name its target",
        ("--model", str(tmp_path)): "has no drafter to compare",
        (str(tmp_path), "--drafter", "ngram"): "^drafter, output are given with directories",
        ("--export", "md", "--json"): "^export and json are both given: choose one",
        ("--export", "md", "--against", "vllm-ci-qwen3-8b"): "^export and against are both given",
        ("--against", "nothing"): "against is 'nothing', which is not a reference: use one of",
    }
    for arguments, says in refusals.items():
        with pytest.raises(UserError, match=says):
            call(*arguments, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- speeds ---------------------------------------------------------------------------------------


def test_ratios_are_within_a_round_and_one_round_has_none() -> None:
    rounds = [{PLAIN: 100.0, "a": 150.0}, {PLAIN: 50.0, "a": 100.0}, {PLAIN: 200.0, "a": 200.0}]
    found = rounds_of(rounds)
    logs = np.log([1.5, 2.0, 1.0])
    half = 4.302653 * logs.std(ddof=1) / 3**0.5  # the t quantile of two degrees of freedom
    times = found.speedup("a", PLAIN)
    assert times.value == pytest.approx(np.exp(logs.mean()))
    assert times.interval == pytest.approx((np.exp(logs.mean() - half), np.exp(logs.mean() + half)))
    assert found.speed("a") == 150
    one = rounds_of(rounds[:1])
    assert one.speedup("a", PLAIN) is one.speed("a") is None


def test_rounds_of_other_conditions_and_torn_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "compare.rounds.jsonl"

    def speeds(under: str, *added: int) -> list[dict[str, float]]:
        file = RowFile(path)
        (found,) = rounds_by_data(file.values(), {"mine": under}, file).values()
        for speed in added:
            found.add({"a": Repeat(seconds=1.0, num_tokens=speed)})
        return found.speeds()

    assert speeds("before", 1) == [{"a": 1.0}]
    assert speeds("now") == []
    speeds("now", 2)
    with path.open("a") as torn:
        torn.write('{"id": "mine now round 2", "under": "mine now", "ar')
    assert speeds("now") == [{"a": 2.0}]
    assert speeds("now", 3) == [{"a": 2.0}, {"a": 3.0}]
    assert speeds("before") == [{"a": 1.0}]


@pytest.mark.slow
def test_every_arm_is_warm_and_has_the_same_requests_tokenized_before_and_another_begins_in_every_round(
    compared: tuple[Path, list[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, list[tuple[int, ...]]]] = []
    running: list[str] = []

    class Watched(WarmEngine):
        def run(self, **asked: Any) -> Run:
            running.append("a run")
            found = super().run(**asked)
            running.clear()
            requests = [request.prompt_token_ids for request in self._requests]
            runs.append(
                (Path(str(self.config.drafter)).name if self.config.draft_length.most else PLAIN, requests)
            )
            return found

    def idle(self: Tokenizer, text: str) -> list[int]:
        assert not running, "nothing is tokenized while a run is timed"
        return encode(self, text)

    encode = Tokenizer.encode_rendered
    monkeypatch.setattr(Tokenizer, "encode_rendered", idle)
    monkeypatch.setattr("specgen.experiments.turns.WarmEngine", Watched)
    bundled = replace(
        a_job(compared[0]), data=(DataSource(dataset="bundled", num_prompts=2),), drafters=heads()[:2]
    )
    at_work(bundled, tmp_path, Stop(1 << 30))
    at_work(replace(bundled, repeats=3), tmp_path, Stop(1 << 30))  # goes on with the third
    arms = [PLAIN, "drafter", "drafter-two-layers"]
    turns = [*(0, 1, 2), *(0, 1, 2), *(1, 0, 2), *(0, 1, 2), *(2, 0, 1)]  # warm-ups first, of both commands
    assert [name for name, _ in runs] == [arms[at] for at in turns]
    done = rows(tmp_path / "bundled" / "drafter")
    tokenizer = load_tokenizer(str(data_directory() / "demo" / "target"))
    asked = sorted(tuple(encode(tokenizer, row["prompt"])) for row in done.values())
    assert len(asked) == 4
    assert [sorted(requests) for _, requests in runs] == [asked] * len(runs)


def test_what_makes_speeds_doubtful_stands_beside_them(tmp_path: Path) -> None:
    rounds, (one, two) = Rounds(), ({"x": "1"}, {"x": "2"})
    for texts in (one, two):
        plain = Repeat(seconds=1.0, num_tokens=9, texts=one, disturbances=(BUSY,))
        rounds.add({PLAIN: plain, "a": replace(plain, texts=texts)})
    found = comparison(tmp_path, {"mine": rounds}, a=simulated(0.4, 1))
    busy = f"Speeds on mine: every arm: {BUSY}."
    shown = page(found, {}, tmp_path)
    assert 0 < shown.index(busy) < shown.index("<svg"), "with the answer"
    assert "Speeds on mine: a: 1 of 1 texts differ from repeat to repeat." in shown
    assert busy in exported(found, "md")


# --- going on -------------------------------------------------------------------------------------


class Stop:
    """Tells from the ``number``-th time on that it is to stop."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def a_job(path: Path, drafters: tuple[str, ...] = heads()[:2], repeats: int = 2) -> HeadsJob:
    return HeadsJob(
        engine=EngineConfig(
            model=str(data_directory() / "demo" / "target"), drafter="ngram", num_spec_tokens=K, device="cpu"
        ),
        drafters=drafters,
        sampling=SamplingParams(max_tokens=16),
        data=(DataSource(dataset="gsm8k", data_path=path, num_prompts=4),),
        repeats=repeats,
    )


def at_work(job: HeadsJob, out: Path, stop: Stop) -> Speeds:
    run = HeadsRun(job, out, lambda name: Silent(), stop)
    return run.measure(run.generate())


@pytest.mark.slow
def test_a_stopped_comparison_goes_on(compared: tuple[Path, list[str], str], tmp_path: Path) -> None:
    data, out = compared[0].parent / "test.jsonl", tmp_path / "out"
    never = 1 << 30
    whole = at_work(a_job(data), tmp_path / "whole", Stop(never))
    assert list(map(len, whole.values())) == [2]
    stops, lines = 0, list[str]()
    for asked in (3, 30, 55, never):
        try:
            speeds = at_work(a_job(data), out, Stop(asked))
        except StoppedError:
            stops += 1
        kept = (
            (out / "compare.rounds.jsonl").read_text().splitlines()
            if (out / "compare.rounds.jsonl").exists()
            else []
        )
        assert kept[: len(lines)] == lines
        lines = kept
    assert stops == 3
    assert len(lines) == 2
    assert list(map(len, speeds.values())) == [2]
    for head in ("drafter", "drafter-two-layers"):
        left = [untimed(path / "gsm8k" / head / "completions.jsonl") for path in (out, tmp_path / "whole")]
        assert left[0] == left[1]


def test_all_heads_see_the_date_of_the_first(
    compared: tuple[Path, list[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = iter(f"2026-01-{day:02}" for day in range(1, 32))
    dated = heads_job.resolve

    def resolve_later(config: EngineConfig, checkpoints: Any) -> EngineConfig:
        kwargs = config.template_kwargs.with_date(next(days))  # as of a template that writes the date
        return replace(dated(config, checkpoints), chat_template_kwargs=kwargs)

    monkeypatch.setattr(run_module, "resolve", resolve_later)
    job = a_job(compared[0].parent / "test.jsonl", repeats=0)
    at_work(job, tmp_path, Stop(1 << 30))
    runs = read_comparison([tmp_path]).runs
    first, second = (run.manifest["engine"]["chat_template_kwargs"]["strftime_now"] for run in runs)
    assert first == second


def test_heads_can_be_added(compared: tuple[Path, list[str], str], tmp_path: Path) -> None:
    data, one = compared[0].parent / "test.jsonl", heads()[0]
    at_work(a_job(data, (one,), repeats=0), tmp_path, Stop(1 << 30))
    before = (tmp_path / "gsm8k" / "drafter" / "report.json").stat().st_mtime_ns
    at_work(a_job(data, (one, "ngram"), repeats=0), tmp_path, Stop(1 << 30))
    assert (tmp_path / "gsm8k" / "drafter" / "report.json").stat().st_mtime_ns == before
    assert read_comparison([tmp_path]).heads == ("drafter", "ngram:3")


def test_other_settings_do_not_go_into_the_same_runs(
    compared: tuple[Path, list[str], str], tmp_path: Path
) -> None:
    shutil.copytree(compared[0], tmp_path / "out")
    command = [*compared[1][:-1], str(tmp_path / "out")]
    command[command.index("10")] = "11"
    with pytest.raises(UserError, match=r"differs in --max-new-tokens 10 -> 11.*: name another directory$"):
        call(*command)


# --- formats --------------------------------------------------------------------------------------


def test_csv_has_a_line_for_every_run_and_category(compared: tuple[Path, list[str], str]) -> None:
    found = json.loads((compared[0] / "comparison.json").read_text())
    lines = list(csv.DictReader(io.StringIO(call(compared[0], "--export", "csv"))))
    assert all(None not in line and None not in line.values() for line in lines)
    named = {(line["data"], line["head"]): line for line in lines if not line["category"]}
    means = [
        named.pop(("(mean of the data sets)", head)) for head in ("drafter", "drafter-two-layers", "ngram:3")
    ]
    assert all(float(mean["length_low"]) < float(mean["length_over_all_steps"]) for mean in means)
    assert len(named) == len(found["runs"])
    for run in found["runs"]:
        line = named[run["data"], run["head"]]
        assert float(line["length_over_all_steps"]) == run["length_over_all_steps"]
        assert int(line["num_steps_without_drafts"]) == run["report"]["num_steps_without_drafts"]
        assert float(line["acceptance_2"]) == run["acceptance_over_all_steps"][2]
        assert float(line["acceptance_2_low"]) == run["acceptance_over_all_steps_ci95"][2][0]
        assert float(line["conditional_1_high"]) == run["report"]["acceptance"][1]["conditional_ci95"][1]
        assert float(line["auc"]) == run["report"]["confidence"]["auc"]
        levels = run["report"]["confidence"]["levels"]
        assert [int(line[f"confidence_{each['at_least']:g}_drafts"]) for each in levels] == [
            each["drafts"] for each in levels
        ]
        assert int(line["num_conversations"]) == 5
        rounds = found["speeds"][run["data"]]
        ratios = [each[run["head"]] / each[PLAIN] for each in rounds]
        assert float(line["times_plain"]) == pytest.approx(np.exp(np.log(ratios).mean()))
        assert float(line["times_plain_low"]) < min(ratios), "two rounds say little"
        of_run = [each for each in lines if (each["data"], each["head"]) == (run["data"], run["head"])]
        assert {each["category"] for each in of_run} - {""} == set(run["report"]["categories"])
    for pair in found["pairs"]:
        if pair["against"] == "drafter":
            line = named[pair["data"], pair["head"]]
            assert float(line["p_holm"]) == pair["figures"][0]["p_holm"]
            assert float(line["difference_1"]) == pair["figures"][2]["difference"]


def test_no_name_in_a_csv_is_a_formula(tmp_path: Path) -> None:
    runs = [
        a_run(tmp_path / str(n), head, simulated(0.6 - 0.2 * n, n), group="@group")
        for n, head in enumerate(["=1+1", "-b"])
    ]
    lines = list(csv.DictReader(io.StringIO(call(*runs, "--export", "csv"))))
    assert {line["head"] for line in lines} == {"'=1+1", "'-b"}
    assert {line["category"] for line in lines} == {"", "'@group 0", "'@group 1"}
    assert any(float(line["difference"] or 0) < 0 for line in lines), "numbers are numbers"
    assert "against" in lines[0]


def test_markdown_rows_have_the_same_cells(compared: tuple[Path, list[str], str]) -> None:
    table, _, note = call(compared[0], "--export", "md").partition("\n\n")
    lines = table.splitlines()
    assert len(lines) == 2 + 3
    assert {line.count("|") for line in lines} == {1 + 1 + 2 * 2 + 1}
    assert "95 % intervals" in note


def test_latex_is_balanced(tmp_path: Path) -> None:
    found = comparison(tmp_path, a_100=simulated(0.3, 1), b=simulated(0.7, 2))
    text = exported(found, "latex")
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 3
    columns = 0
    for line in text.splitlines():
        assert line.count("{") == line.count("}")
        if line.startswith(r"\begin{tabular}"):
            columns = len(line.removeprefix(r"\begin{tabular}{").removesuffix("}"))
        if line.endswith(r"\\"):
            assert line.count("&") == columns - 1
    assert r"data & head & token 0 & token 1 & token 2 \\" in text
    assert r"data & category & a\_100 & b & b - a\_100 & p \\" in text
    assert r"a\_100 & " in text
    caption = text.partition(r"\caption{Mean acceptance length over all steps")[2].partition("\n")[0]
    assert "model target" in caption
    assert "p \\textless{} 0.05" in caption
    assert [line for line in text.splitlines() if line.startswith("%")] == ["% needs the package booktabs"]
    (best,) = (run for run in found.runs if (run.data, run.head) == ("mine", "b"))
    assert rf"b & \textbf{{{best.report.mean_acceptance_length:.2f}}} {{\scriptsize [" in text
    assert text.count("textbf") == 1


def test_a_caption_has_no_path_and_no_machine(tmp_path: Path) -> None:
    path = a_run(tmp_path / "a", "a", simulated(0.4, 1))
    own = {"model": "/home/me/org/target", "attention": "sdpa", "batch": "at most 32", "sampling": "greedy"}
    change_json(path / "manifest.json", settings=own)
    for name, comment in (
        ("latex", "% attention sdpa; batch at most 32"),
        ("md", "<!-- attention sdpa; batch"),
    ):
        text = exported(compare_runs([path]), name)
        assert "model org/target; sampling greedy." in text
        assert "/home" not in text
        assert text.count("sdpa") == text.count(comment) == 1


def test_nothing_is_bold_that_the_data_cannot_tell(tmp_path: Path) -> None:
    found = comparison(tmp_path, a=simulated(0.4, 1), b=simulated(0.4, 3))
    assert "textbf" not in exported(found, "latex")
    assert "**" not in exported(found, "md")


def test_no_name_of_a_head_is_that_of_a_column(tmp_path: Path) -> None:
    heads = ("x", "x ends", "requests", "p of x", "data", "difference")
    found = comparison(tmp_path, **{name: simulated(0.3 + 0.05 * n, n) for n, name in enumerate(heads)})
    assert found.heads == heads
    for table in tables(found):
        keys = [key for column in table.columns for key in (column.name, column.interval) if key]
        assert len(set(keys)) == len(keys), table.title
    shown = next(
        line for line in call(*(run.directory for run in found.runs)).splitlines() if "mine  " in line
    )
    lengths = [found.length("mine", head) for head in heads]
    assert re.findall(r"(\d\.\d\d)  \[", shown)[:2] == [f"{each.value:.2f}" for each in lengths if each][:2]


def test_no_head_is_called_as_something_else_in_a_table() -> None:
    names = short_names(
        ["heads/data", "runs/plain decoding", "plain decoding", "a/ngram-4", "ngram:4"], taken=PLAIN
    )
    assert list(names.values()) == [
        *("data", "runs/plain decoding", "plain decoding (2)", "ngram-4", "ngram:4 (2)")
    ]
    assert len({as_directory(name) for name in names.values()}) == 5
    assert [as_directory(name) for name in (".", "../a")] == ["_", "_--a"]
