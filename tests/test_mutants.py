"""Mutants: every operator makes the intended change only, and a planted mutant is caught."""

import ast
from pathlib import Path

import pytest
from mutant_tests import Trial, run_trials
from mutants import TESTS, key, previous_rows, sample, summary
from mutations import mutations

from tests.commands import write_rows

pytestmark = pytest.mark.scripts


@pytest.mark.parametrize(
    ("source", "operator", "changed"),
    [
        ("a < b <= c", "comparison", ["(a <= b <= c)", "(a < b < c)"]),
        ("a == b", "comparison", ["(a != b)"]),
        ("a not in b", "comparison", ["(a in b)"]),
        ("a is None", "comparison", ["(a is not None)"]),
        ("f(2, -1)", "constant", ["f(3, -1)", "f(2, -2)"]),
        ("f(0.5, True, 'a', None)", "constant", ["f(1.5, True, 'a', None)", "f(0.5, False, 'a', None)"]),
        ("a[0]", "index", ["a[1]"]),
        ("a[-1]", "index", ["a[-2]"]),
        ("a[:, None, 1]", "index", ["a[:, None, 2]"]),
        ("a[:n]", "index", ["a[:]", "a[:n + 1]"]),
        ("a[1:]", "index", ["a[:]", "a[2:]"]),
        ("a - b", "arithmetic", ["(a + b)"]),
        ("a //= b", "arithmetic", ["a *= b"]),
        ("min(a, b)", "arithmetic", ["max(a, b)"]),
        ("a and b or c", "condition", ["((a and b) and c)", "(a or b) or c"]),
        ("not a", "condition", ["(a)"]),
        ("b if a else c", "condition", ["b if (not a) else c"]),
        ("[a for a in b if a]", "condition", ["[a for a in b if (not a)]"]),
        ("a.f(b)", "call", ["pass"]),
        ("require(a < b, f'{c + 1}' + 'x')", "comparison", ["require((a <= b), f'{c + 1}' + 'x')"]),
    ],
)  # fmt: skip
def test_mutations_of_each_operator(source: str, operator: str, changed: list[str]) -> None:
    found = [change for change in mutations(source) if change.operator == operator]
    assert sorted(change.apply(source) for change in found) == sorted(changed)
    assert {change.shown(source) for change in found} == {(source, text) for text in changed}


@pytest.mark.parametrize(
    "source",
    [
        '"""Text with 1 < 2."""',
        "import a",
        "a: tuple[int, Literal[1]]",
        "a = Literal[1, 2]",
        "A = B | C",
        "__all__ = ['a'] + [1]",
        "assert a < 1",
        "c = zip(a, b, strict=True)",
        "raise ValueError(a[0] + 1)",
        "a = f'{b + 1}' + c",
        "if TYPE_CHECKING:\n    a = 1",
        "@dataclass(frozen=True)\nclass A(B[1]):\n    pass",
        "def f(a: Literal[1]) -> Literal[2]: ...",
    ],
)
def test_irrelevant_code_is_not_mutated(source: str) -> None:
    assert mutations(source) == []


def test_offsets_after_non_ascii_text_and_across_lines() -> None:
    source = 'x = "ä€😀"; a = [\n    "é", b <\n    c\n]\nd = 1\n'
    (first, second) = mutations(source)
    assert (first.line, first.shown(source)) == (2, ('"é", b < c', '"é", (b <= c)'))
    assert (second.line, second.shown(source)) == (5, ("d = 1", "d = 2"))
    assert first.apply(source) == 'x = "ä€😀"; a = [\n    "é", (b <= c)\n]\nd = 1\n'


def test_a_sample_is_reproducible_and_covers_every_module() -> None:
    sampled = sample(200, seed=0)
    names = [key(mutant.to_json()) for mutant in sampled]
    assert len(set(names)) == 200
    assert names == [key(mutant.to_json()) for mutant in sample(200, seed=0)]
    assert names != [key(mutant.to_json()) for mutant in sample(200, seed=1)]
    # modules with few mutations may get none
    assert len({mutant.module for mutant in sampled}) >= 0.9 * len(TESTS)
    for mutant in sampled:
        ast.parse(mutant.mutation.apply(mutant.source))


def test_listed_tests_exist() -> None:
    root = Path(__file__).parent
    assert all(TESTS.values())
    for test in {test for tests in TESTS.values() for test in tests}:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (root / file).read_text(), test


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of one module, and tests that cover one of its two functions."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted/__init__.py").touch()
    (tmp_path / "planted/sums.py").write_text(SOURCE)
    (tmp_path / "test_planted.py").write_text(
        "from planted.sums import larger, tail\n"
        "def test_first(): assert larger(1, 2) == 2 == larger(2, 1)\n"
        "def test_second(): assert tail([1, 2, 3]) == [2, 3]\n"
    )
    return tmp_path


SOURCE = """
def larger(a, b):
    return a if a > b else b

def tail(items):
    while len(items) > 2:
        items = items[1:]
    return items
"""


@pytest.mark.slow
def test_planted_mutants(package: Path) -> None:
    changes = {change.apply(SOURCE): change.shown(SOURCE)[1] for change in mutations(SOURCE)}
    trials = [
        Trial(
            path=package / "planted/sums.py",
            source=source,
            tests=("test_planted.py",),
            seconds=3 if changes.get(source) == "items = items[:]" else 60,  # this one never ends
            root=package,
        )
        for source in (SOURCE, *changes)
    ]
    found = dict(run_trials(trials, workers=2))
    became = {
        text: (found[n].outcome, found[n].test) for n, text in enumerate(["as it is", *changes.values()])
    }
    second = "test_planted.py::test_second"
    assert became == {
        "as it is": ("survived", ""),
        "return a if (a >= b) else b": ("survived", ""),  # the same function
        "while (len(items) >= 2):": ("caught", second),
        "while len(items) > 3:": ("caught", second),
        "items = items[:]": ("timeout", ""),
        "items = items[2:]": ("caught", second),
    }
    assert set(found[0].durations) == {"test_planted.py::test_first", second}


def test_a_mutant_of_a_module_that_no_test_imports_survives(package: Path) -> None:
    (package / "planted/other.py").write_text("a = 1\n")
    trial = Trial(
        path=package / "planted/other.py",
        source="a = 2\n",
        tests=("test_planted.py",),
        seconds=9,
        root=package,
    )
    ((_, result),) = run_trials([trial], workers=1)
    assert result.outcome == "survived"
    assert "no test has imported planted.other" in result.output


def test_results_are_resumed_and_summarised(tmp_path: Path) -> None:
    names = ("module", "line", "operator", "before", "after", "outcome")
    found = [
        ("a", 3, "call", "f()", "pass", "survived"),
        ("a", 4, "index", "b[0]", "b[1]", "caught"),
        ("c", 5, "index", "d[0]", "d[1]", "timeout"),
    ]
    rows = [dict(zip(names, each, strict=True)) for each in found]
    output = tmp_path / "mutants.jsonl"
    assert previous_rows(output, again=False) == {}
    write_rows(output, rows)
    assert list(previous_rows(output, again=False).values()) == rows
    assert list(previous_rows(output, again=True).values()) == rows[1:]
    lines = [line.split() for line in summary(rows).splitlines()]
    assert ["a", "1", "2", "50%"] in lines
    assert ["index", "2", "2", "100%"] in lines
    assert ["all", "2", "3", "67%"] in lines
    assert summary(rows).endswith("1 survived:\na.py:3 (call)\n  - f()\n  + pass")
