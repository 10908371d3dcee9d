"""Cases that are one test: all run, and one message names those that fail."""

import os
from pathlib import Path

import pytest
import torch

from tests.marks import in_turn

pytestmark = pytest.mark.xdist_group("marks")  # one looks at what another has done
SEEN: list[tuple[str, int, float]] = []


@in_turn("kind", ["a", "b"])
@in_turn(("rows", "size"), [(1, 2), (3, 4)])
def of_all_cases(kind: str, rows: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert size == rows + 1
    assert "OF_ANOTHER_CASE" not in os.environ
    monkeypatch.setenv("OF_ANOTHER_CASE", kind)
    SEEN.append((kind, rows, float(torch.rand(1))))


def test_every_case_runs_once_with_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    of_all_cases(monkeypatch=monkeypatch)
    assert [(kind, rows) for kind, rows, _ in SEEN] == [("a", 1), ("a", 3), ("b", 1), ("b", 3)]
    assert len({drawn for *_, drawn in SEEN}) == 1


@in_turn("rows", [1, 2])
def test_a_test_takes_its_fixtures(rows: int, tmp_path: Path) -> None:
    assert tmp_path.is_dir()
    assert rows


@in_turn("rows", range(40))
def fails_of_some(rows: int) -> None:
    assert rows % 10 != 7, f"{rows} is wrong"


def test_all_that_fail_are_named() -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)^4 of 40 cases failed:.*rows=7: .*rows=17: .*rows=37: "
    ) as said:
        fails_of_some()
    assert "Traceback" in str(said.value)
    assert "rows=8" not in str(said.value)
