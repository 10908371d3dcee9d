"""Which cases of a test are in the quick set, which need a GPU, and which are one test together."""

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterable
from itertools import product
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


def in_turn(
    names: str | tuple[str, ...], values: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like ``pytest.mark.parametrize``, but all cases are one test, for kernels with hundreds of shapes.

    Stacked ones are multiplied. Every case starts with torch's seed 0, with the memory of the last one freed and its
    patches undone. One message names all that failed, with the traceback of the first.
    """
    several = isinstance(names, tuple)
    axis = [dict(zip(names, value, strict=True)) if several else {names: value} for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        body, axes = getattr(test, "in_turn", (test, []))
        axes = [axis, *axes]
        parameters = inspect.signature(body).parameters.values()
        missing = {name for each in axes for name in each[0]} - {each.name for each in parameters}
        assert not missing, f"{body.__name__} takes no {missing}"

        def run(**fixtures: Any) -> None:
            failed: list[str] = []
            cases = [{name: case[name] for case in each for name in case} for each in product(*axes)]
            for case in cases:
                reason = _reason(body, fixtures | case)
                if reason is not None:
                    shown = ", ".join(f"{name}={value}" for name, value in case.items())
                    failed.append(f"{shown}: {reason.splitlines()[-1] if failed else reason}")
            assert not failed, f"{len(failed)} of {len(cases)} cases failed:\n" + "\n".join(failed)

        run.__name__, run.__qualname__, run.__doc__ = body.__name__, body.__qualname__, body.__doc__
        run.__module__ = body.__module__
        kept = [each for each in parameters if all(each.name not in one[0] for one in axes)]
        run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        run.in_turn = body, axes  # type: ignore[attr-defined]
        run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        return run

    return decorate


def _reason(body: Callable[..., None], arguments: dict[str, Any]) -> str | None:
    """Why ``body`` fails, as text: an exception would hold the tensors of its frames."""
    import torch

    torch.manual_seed(0)
    try:
        body(**arguments)
    except Exception:
        return traceback.format_exc()
    finally:
        if "monkeypatch" in arguments:
            arguments["monkeypatch"].undo()
        if torch.cuda.is_available():
            with contextlib.suppress(RuntimeError):  # what no kernel survives, no later case does
                torch.cuda.empty_cache()
    return None
