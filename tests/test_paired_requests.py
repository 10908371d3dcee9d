"""What `report` says of two runs beyond their columns: unlike settings, shared requests, paired differences."""

import json

import numpy as np
import pytest

from specgen.record import columns
from specgen.report.intervals import Ratio, holm, paired_ratio
from specgen.report.origin import unlike_settings
from specgen.report.paired_requests import LENGTH, SharedRequests, shared_requests
from specgen.report.report import Report
from specgen.report.side_by_side import of_runs
from specgen.report.terminal import render
from tests.commands import refused
from tests.streams import request
from tests.test_tables import a_run, cells


def row(name, accepted, *, k=3, prompt="", tokens=(1, 2), drafted=None):
    """A row of completions.jsonl with the numbers of drafts that its steps accepted, of K or so many each."""
    steps = [*zip([k] * len(accepted) if drafted is None else drafted, accepted, strict=True)]
    (found,) = request(name, steps)
    own = {"id": name, "prompt": prompt or f"prompt {name}", "token_ids": list(tokens)}
    return {**own, "finish_reason": "stop", "num_prompt_tokens": 5, "record": found.to_json(with_steps=False)}


def a_directory(path, rows, end="\n"):
    path.mkdir()
    (path / "completions.jsonl").write_text("\n".join(map(json.dumps, rows)) + end)
    return path


ROW = row("a", [1])["record"]


@pytest.fixture
def compared(tmp_path_factory):
    def compare(*runs) -> tuple[SharedRequests, ...]:
        root = tmp_path_factory.mktemp("runs")
        most = [max(len(each.get("record", ROW)["counts"]["drafted"]) for each in rows) for rows in runs]
        paths = [a_directory(root / str(at), rows) for at, rows in enumerate(runs)]
        return shared_requests(list(map(columns.read, paths, most)))

    return compare


# --- statistics -----------------------------------------------------------------------------------


def simulated(rng, num, gain=0.0):
    """Groups whose rates vary much from one to the next and are ``gain`` higher in the first ratio."""
    rates = rng.uniform(0.1, 0.8, num)
    trials = rng.integers(5, 40, num)
    others = trials + rng.integers(0, 4, num)
    hits, other_hits = rng.binomial(trials, rates + gain), rng.binomial(others, rates)
    return [tuple(map(int, group)) for group in zip(hits, trials, other_hits, others, strict=True)]


def test_equal_trials_give_the_paired_t_test_of_scipy():
    from scipy import stats

    rng = np.random.default_rng(1)
    ours, others = rng.integers(0, 11, 25), rng.integers(0, 11, 25)
    found = paired_ratio([(int(a), 10, int(b), 10) for a, b in zip(ours, others, strict=True)])
    test = stats.ttest_rel(ours / 10, others / 10)
    assert found.p == pytest.approx(test.pvalue)
    assert found.interval == pytest.approx(tuple(test.confidence_interval()))


def test_intervals_cover_and_tests_keep_their_level():
    rng = np.random.default_rng(2)
    found = [paired_ratio(simulated(rng, 30)) for _ in range(600)]
    assert 0.03 < np.mean([each.p < 0.05 for each in found]) < 0.07
    assert 0.93 < np.mean([each.interval[0] < 0 < each.interval[1] for each in found]) < 0.97


def test_pairing_finds_what_separate_intervals_do_not():
    groups = simulated(np.random.default_rng(3), 80, 0.07)
    hits, trials, *rest = np.array(groups).T
    ours, others = Ratio(hits, trials), Ratio(*rest)
    assert ours.mean_interval()[0] < others.mean_interval()[1]
    assert paired_ratio(groups).p < 0.01


@pytest.mark.parametrize(
    ("groups", "p"),
    [
        ([(1, 3, 1, 3), (2, 7, 2, 7)], 1),
        ([(1, 3, 2, 3)], None),  # one group
        ([(3, 3, 1, 3), (6, 6, 2, 6), (9, 9, 3, 9)], None),
        ([(2, 10, 1, 10), (8, 10, 7, 10), (5, 10, 4, 10)], None),  # the requests are unlike
        ([(h, 11, 3 * h - 3, 33) for h in (1, 3, 8, 9)], None),  # rounding must not be a spread
    ],
)
def test_differences_that_are_all_alike_are_not_tested(groups, p):
    found = paired_ratio(groups)
    assert (found.interval, found.p) == (None, p)
    assert found.difference == 0 if p else abs(found.difference) > 0.03


def test_holm_is_that_of_statsmodels():
    from statsmodels.stats.multitest import multipletests

    tests = [0.01, 0.04, 0.03, 0.005, 0.9, 0.03]
    assert holm(tests) == pytest.approx(multipletests(tests, method="holm")[1])
    assert holm([None, 0.02, None, 0.01]) == [None, 0.02, None, 0.02]


# --- requests -------------------------------------------------------------------------------------


def test_requests_with_the_same_id_and_prompt_are_paired(compared):
    first = [row("a", [3, 3]), row("b", [0, 1], tokens=(4,)), row("c", [2], prompt="other"), row("d", [1])]
    ours = [row("b", [1, 2, 3]), row("a", [2, 2]), row("c", [3]), row("e", [3])]
    (found,) = compared(first, ours)
    assert (found.num_requests, found.num_identical) == (2, 1)
    length, *positions = found.figures
    assert (length.figure, length.first, length.ours) == (LENGTH, 1 + 7 / 4, 1 + 10 / 5)
    assert [(each.first, each.ours) for each in positions] == [(3 / 4, 5 / 5), (2 / 4, 4 / 5), (2 / 4, 1 / 5)]
    assert length.paired.num_groups == 2
    assert length.p >= length.paired.p


def drawn(seed, num_runs):
    rng = np.random.default_rng(seed)
    return [[row(str(n), list(map(int, rng.integers(0, 4, 9)))) for n in range(12)] for _ in range(num_runs)]


def test_p_is_corrected_over_all_runs_and_lengths_apart_from_positions(compared):
    one, two = compared(*drawn(4, 3))
    for part, number in ((slice(1), 2), (slice(1, None), 6)):
        figures = [each for found in (one, two) for each in found.figures[part]]
        assert [each.p for each in figures] == pytest.approx(holm([each.paired.p for each in figures]))
        assert len(figures) == number


def test_positions_of_steps_of_several_lengths_are_over_all_steps(compared):
    first = [row("a", [3, 1]), row("b", [2])]
    (found,) = compared(first, [row("a", [3, 0], drafted=[3, 1]), row("b", [2])])
    length, *positions = found.figures
    assert [each.figure for each in positions] == [
        f"acceptance at token {i} over all steps" for i in range(3)
    ]
    assert [each.ours for each in positions] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert sum(each.paired.difference for each in positions) == pytest.approx(length.paired.difference)
    (shorter,) = compared(first, [row("a", [1], k=1), row("b", [0], k=1)])
    assert [each.figure for each in shorter.figures] == [LENGTH, "acceptance at token 0"]


def test_rows_of_an_evaluation_have_texts_alone(compared):
    ours, first = (row("hash-1", [0], k=0, tokens=tokens) for tokens in ([1, 2], [1]))
    assert compared([first], [first])[0].num_identical == 1
    (found,) = compared([first], [ours])
    assert (found.num_requests, found.num_identical, found.figures) == (1, 0, ())


def test_a_run_without_rows_shares_none(tmp_path):
    rows = a_directory(tmp_path / "rows", [row("a", [3])])
    nothing = SharedRequests(num_requests=0, num_identical=0, figures=())
    some, none = columns.read(rows, 3), columns.read(tmp_path, 3)
    assert shared_requests([some, none]) == shared_requests([none, some]) == (nothing,)
    assert shared_requests([some]) == ()


def test_a_torn_last_line_is_left_out_and_a_damaged_row_refused(tmp_path):
    whole = a_directory(tmp_path / "whole", [row("a", [3]), row("b", [1])])
    torn = a_directory(tmp_path / "torn", [row("a", [3])], end='\n{"id": "b", "prompt": {}')
    assert len(columns.read(torn, 3)) == 1 < len(columns.read(whole, 3))
    bad = a_directory(tmp_path / "bad", [row("a", [3]), row("b", [1]) | {"prompt": {}}])
    with refused(r"completions.jsonl: the row of 'b' is damaged .*prompt.*: remove that line"):
        columns.read(bad, 3)


def test_rows_of_earlier_versions_are_refused(compared):
    first = [row("a", [3, 1])]
    with refused("the row of 'a' has no record, as in earlier versions: generate into a new"):
        compared([{name: each for name, each in first[0].items() if name != "record"}], first)


# --- settings -------------------------------------------------------------------------------------


def manifest(model="target", weights="ab" * 32, dataset="bundled", sha256="cd" * 32, **engine):
    return {
        "created": "now",
        "argv": [model],
        "settings": {"model": model},
        "engine": {"model": model, "num_spec_tokens": 3} | engine,
        "data": {"dataset": dataset, "sha256": sha256},
        "fingerprints": {"model": weights},
    }


@pytest.mark.parametrize(
    ("others", "unlike"),
    [
        ([manifest()], {}),
        (
            [manifest(num_spec_tokens=4), manifest(dtype="bfloat16")],
            {"engine.num_spec_tokens": (3, 4, 3), "engine.dtype": (None, None, "bfloat16")},
        ),
        ([manifest(sha256="ef" * 32)], {"data.sha256": ("cd" * 6, "ef" * 6)}),
        ([manifest() | {"created": "later", "argv": ["other"], "state": {"load": 2.5}}], {}),
        ([manifest(model="a copy")], {}),  # checkpoints are compared by their weights
        ([manifest(model="another", weights="ef" * 32)], {"engine.model": ("target", "another")}),
        ([manifest(weights="ef" * 32)], {"fingerprints.model": ("ab" * 6, "ef" * 6)}),
    ],
)
def test_settings_that_differ_are_named(others, unlike):
    assert unlike_settings([manifest(), *others]) == unlike
    without = [{"engine": {"model": name}} for name in ("one", "two")]  # as by `eval`
    assert unlike_settings(without) == {"engine.model": ("one", "two")}


# --- the terminal ---------------------------------------------------------------------------------


def shown(shared: SharedRequests, settings=None) -> str:
    runs = [(name, Report.from_json(a_run())) for name in ("one", "two")]
    return render(of_runs(runs, settings or {}, [shared]))


def test_paired_differences_are_shown(compared):
    rng = np.random.default_rng(5)
    runs = [[row(str(n), list(map(int, rng.integers(low, 4, 9)))) for n in range(40)] for low in (0, 1)]
    text = shown(*compared(*runs))
    assert "two against one on the 40 requests of both: 40 of 40 texts identical. Paired" in text
    length, token_0 = compared(*runs)[0].figures[:2]
    expected = f"{length.first:.2f} {length.ours:.2f} {length.paired.difference:.2f}".split()
    assert [line for line in text.splitlines() if line.split()[4:7] == expected]
    low, high = (100 * end for end in token_0.paired.interval)
    assert f"{100 * token_0.paired.difference:.1f}  [{low:.1f}, {high:.1f}]  < 0.001" in text
    assert "paired difference =" in text


def test_equal_acceptance_is_one_sentence(compared):
    rows = [row("a", [3, 1]), row("b", [2])]
    text = shown(*compared(rows, rows))
    assert "2 of 2 texts identical; the acceptance of every request is the same." in " ".join(text.split())
    assert "paired difference =" not in text


def test_nothing_in_common_is_said(compared):
    text = shown(*compared([row("a", [1])], [row("b", [1])]), {"data.dataset": ("bundled", None)})
    assert "two and one have no request in common" in text
    assert text.startswith("The runs differ in:\n")
    assert cells(text, "data.dataset") == ["bundled", "-"]


def test_samples_of_a_prompt_are_one_unit(compared):
    first = [row(f"a-{i}", [0, 1, 2, i % 4], prompt="same") for i in range(8)]
    ours = [row(f"a-{i}", [3, 3, 2, i % 4], prompt="same") for i in range(8)]
    others = [row("b", [1, 2]), row("c", [3, 0])]
    (found,) = compared([*first, *others], [*ours, *others])
    assert {each.figure: each.paired.num_groups for each in found.figures}[LENGTH] == 3
    joined = [
        row("a", [each for i in range(8) for each in (*some, i % 4)]) for some in ([0, 1, 2], [3, 3, 2])
    ]
    (whole,) = compared([joined[0], *others], [joined[1], *others])
    assert [each.paired for each in found.figures] == [each.paired for each in whole.figures]
