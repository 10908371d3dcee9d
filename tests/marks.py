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


def on_gpu(*, hopper: bool = False) -> list[pytest.MarkDecorator]:
    """Of a module that needs an NVIDIA GPU, or one that the kernels for Hopper run on."""
    import torch

    from specgen.ops.jit_modules import runs_on

    found = torch.cuda.is_available() and (not hopper or runs_on(torch.device("cuda")))
    what = "GPU of capability 9.0" if hopper else "GPU"
    return [pytest.mark.gpu, pytest.mark.skipif(not found, reason=f"needs an NVIDIA {what}")]
