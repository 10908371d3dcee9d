"""Shared fixtures: pairs and reference drafters."""

import fcntl
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing
from torch.utils import collect_env

from specgen.checkpoints.checkpoint import Checkpoint, load_drafter, load_target
from specgen.config.bundled import data_directory
from specgen.core.graphs import Runner, bucket
from specgen.device import Ranks
from specgen.engine import build, choices
from specgen.models.protocols import Head, Target
from tests.commands import printed
from tests.engines import Pair, load_pair
from tests.reference_heads import DenseTarget, ReferenceHead, reference_head
from tests.tiny_checkpoints import write_head, write_target


class Padded(Runner):
    """Runs eagerly with the padding rows of a CUDA graph, and short prompts in blocks."""

    captures = True

    def num_rows(self, num_sequences: int) -> int:
        return bucket(num_sequences) + 2


@pytest.fixture
def device_like(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """When called, engines run as on a GPU: with lookahead, padding rows and packed drafter rows."""

    def switch(when: bool = True) -> None:
        if not when:
            return
        engine = build.EngineCore

        def ahead(**parts: Any) -> Any:
            return engine(**parts | {"lookahead": 1})

        monkeypatch.setattr(build, "EngineCore", ahead)
        monkeypatch.setitem(choices.RUNNERS, "off", Padded)
        monkeypatch.setattr(build, "NonPaddedBatch", build.PackedBatch)

    return switch


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time is that of processors, of which other programs take none; when called, so many more seconds have passed."""
    passed = 0.0

    def let_pass(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr("time.perf_counter", lambda: _process_time() + passed)
    return let_pass


@pytest.fixture
def flashinfer_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What backends support is asked as where FlashInfer is installed; on a Mac it is not."""
    monkeypatch.setattr("specgen.attention.find_spec", lambda package: package)


@pytest.fixture(autouse=True)
def _threads() -> None:
    """One, also where torch ignores the environment set in tests/__init__.py, and behind what has set another number.

    Two that wait for each other on a busy machine took 12 times the time of processors.
    """
    torch.set_num_threads(1)


QUICK = 2.0  # seconds of processors that a test of the quick set may take, its processes included
OF_A_MODULE = 0.01  # seconds, about: which test is the first to import a library is chance
_times, _process_time, _load = os.times, time.process_time, os.getloadavg  # tests patch them
_SLACK = 3  # tensors slow down by more than the loop that counts: 4.3 s for 2 beside other work
_COUNTED = 0.02  # seconds, of the loop in ``_slowness`` on the machine that ``QUICK`` is meant for


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A quick test that takes long fails: with each of them `make test` is run less often.

    In time of processors, as other programs make every test longer, and more of it on a machine that counts slowly
    or has more to do than it has processors, whose caches others fill.
    """
    if any(item.get_closest_marker(name) for name in ("slow", "scripts", "gpu")):
        yield
        return
    before, modules = _processor_seconds(), len(sys.modules)
    yield
    used = _processor_seconds() - before - OF_A_MODULE * (len(sys.modules) - modules)
    if used > QUICK and used > (allowed := _SLACK * QUICK * _slowness()):
        pytest.fail(
            f"{item.nodeid} takes {used:.1f} s of processors, and a quick test at most {allowed:.1f} s: make it "
            "smaller, share what it builds, or mark it slow beside a quick one (tests/marks.py: mostly_slow)",
            pytrace=False,
        )


def _processor_seconds() -> float:
    return sum(_times()[:4])


def _slowness() -> float:
    """How many times as long as usual a test may take here and now."""
    before = _process_time()
    sum(n * n % 7 for n in range(500_000))
    counted = (_process_time() - before) / _COUNTED
    return max(1.0, counted, _load()[0] / (os.cpu_count() or 1))


def pytest_sessionstart() -> None:
    """Nothing is garbage while thousands of tests are collected, and looking for it took 4 s."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nor is what all test modules have imported: an engine that closes need not search it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _imported_later() -> Iterator[None]:
    """Nor is what a module's tests have imported, which may be as much again; on a GPU it would keep memory."""
    yield
    if not torch.cuda.is_available() and len(gc.get_objects()) > 50_000:  # a failed test may hold an engine
        gc.collect()
        gc.freeze()


def _bundled_models() -> tuple[Callable[..., Target], Callable[..., Head]]:
    """``load_target`` and ``load_drafter``; what they read of the bundled pair for a CPU is kept: do not modify."""
    targets: dict[tuple[Any, ...], Target] = {}
    heads: dict[tuple[Any, ...], Head] = {}

    def target(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> Target:
        if checkpoint.path.parent != data_directory() / "demo" or device.type == "cuda" or ranks.size > 1:
            return load_target(checkpoint, dtype, device, ranks)
        key = checkpoint.path, dtype, device.type
        if key not in targets:
            targets[key] = load_target(checkpoint, dtype, device, ranks)
        return targets[key]

    def head(checkpoint: Checkpoint, of: Target, fp8_output: bool = False) -> Head:
        if checkpoint.path.parent != data_directory() / "demo" or not any(of is x for x in targets.values()):
            return load_drafter(checkpoint, of, fp8_output)
        key = checkpoint.path, id(of), fp8_output
        if key not in heads:
            heads[key] = load_drafter(checkpoint, of, fp8_output)
        return heads[key]

    return target, head


@pytest.fixture(scope="session", autouse=True)
def _once_in_a_process() -> Iterator[None]:
    """What every command would do again: parse options, ask about the machine, read the bundled pair, and warm up."""
    read_target, read_head = _bundled_models()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(typer.testing._get_command))
        patch.setattr("torch.utils.collect_env.get_env_info", cache(collect_env.get_env_info))
        patch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))  # what else runs here is in no report
        patch.setattr("specgen.engine.loading.load_target", read_target)
        patch.setattr("specgen.engine.loading.load_drafter", read_head)
        patch.setattr("specgen.core.engine_core.WARM_UP_TOKENS", 2)
        yield


@pytest.fixture
def weights_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines read the bundled pair themselves, so that nothing else holds their weights."""
    monkeypatch.setattr("specgen.engine.loading.load_target", load_target)
    monkeypatch.setattr("specgen.engine.loading.load_drafter", load_drafter)


@pytest.fixture(scope="session")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny random pair: its drafts are almost never accepted."""
    path = tmp_path_factory.mktemp("random_pair")
    write_head(path / "drafter", write_target(path / "target"))
    return load_pair(path)


@dataclass(frozen=True, kw_only=True)
class FinishedRuns:
    """Directories of finished runs of the bundled pair over the same 6 prompts, for all to read: change a copy."""

    padded: Path  # with a baseline
    non_padded: Path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    """Made once, by the first of pytest's processes that asks."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all processes
    runs = FinishedRuns(padded=root / "finished-padded", non_padded=root / "finished-non-padded")
    with (root / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "finished").exists():
            asked = (
                *("generate", "--num-prompts=6", "--max-new-tokens=16"),
                *("--device=cpu", "--quiet", "--output"),
            )
            printed(*asked, runs.padded, "--baseline")
            printed(*asked, runs.non_padded, "--drafter-batch=non-padded")
            (root / "finished").touch()
    return runs


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The bundled pair."""
    return data_directory() / "demo"


@pytest.fixture(scope="session")
def gpu_pair(demo_path: Path) -> Pair:
    return load_pair(demo_path, device="cuda")


@pytest.fixture(scope="session")
def bfloat16_pair(demo_path: Path) -> Pair:
    return load_pair(demo_path, torch.bfloat16, "cuda")


@pytest.fixture(scope="session")
def demo_pair(demo_path: Path) -> Pair:
    """The bundled pair, loaded: its drafts are sometimes accepted, at every position."""
    return load_pair(demo_path)


@pytest.fixture(scope="session")
def random_reference(random_pair: Pair) -> ReferenceHead:
    """An independent reference of the random pair."""
    return reference_head(random_pair.path / "drafter", DenseTarget(random_pair.path / "target"))


@pytest.fixture(scope="session")
def demo_reference(demo_path: Path) -> ReferenceHead:
    """An independent reference of the bundled pair."""
    return reference_head(demo_path / "drafter", DenseTarget(demo_path / "target"))


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and an EAGLE3 head of `scripts/make_calibrated_pair.py`, whose text is known; to be read alone."""
    from tests.timed_engines import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))
