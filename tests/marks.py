"""Which cases of a test are in the quick set."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """``cases`` of a parameter, or tuples of several; all but ``quick`` are marked slow."""
    found = list(cases)
    assert all(each in found for each in quick), quick
    return [each if each in quick else _slow(each) for each in found]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
