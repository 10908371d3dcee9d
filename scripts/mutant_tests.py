"""Runs tests on changed sources, each trial in a forked process.

Importing torch takes longer than most tests, so the parent does it once. It never imports specgen: the forked process
does, with the changed source in place of one module's.
"""

import gc
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any, Literal

import pytest

ROOT = Path(__file__).parents[1]
Outcome = Literal["survived", "caught", "timeout"]

_PRELOADED = (
    "hypothesis",
    "jinja2",
    "pyarrow.parquet",
    "safetensors.torch",
    "scipy.stats",
    "statsmodels.api",
    "tokenizers",
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
_MORE_MEMORY = 6 << 30  # bytes that a forked process may map beyond this one


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Tests to run with ``source`` in place of that of ``path``."""

    path: Path | None = None  # of a module below ``root``; None: no change
    source: str = ""
    tests: tuple[str, ...]
    seconds: float  # time limit
    root: Path = ROOT


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a trial."""

    outcome: Outcome
    test: str  # the first that failed; empty if none did
    seconds: float
    output: str  # of pytest
    durations: dict[str, float]  # seconds by test, with its fixtures


@dataclass(frozen=True, kw_only=True)
class _Running:
    number: int
    trial: Trial
    directory: "tempfile.TemporaryDirectory[str]"
    began: float = field(default_factory=time.monotonic)

    def result(self, status: int | None) -> Result:
        """The result of the process that ended with ``status``; None: it was killed at its time limit."""
        path = Path(self.directory.name)
        report = path / "report.json"
        seen = json.loads(report.read_text()) if report.exists() else {"failed": "", "durations": {}}
        outcome: Outcome = "timeout" if status is None else "caught" if status else "survived"
        output = (path / "output").read_text(errors="replace")
        self.directory.cleanup()
        return Result(
            outcome=outcome,
            test=seen["failed"],
            seconds=time.monotonic() - self.began,
            output=output,
            durations=seen["durations"],
        )


def preload() -> None:
    """Import what most tests need, except specgen."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # or the collector of every forked process would touch all of it
    assert "specgen" not in sys.modules


def run_trials(trials: Iterable[Trial], workers: int) -> Iterator[tuple[int, Result]]:
    """Run ``workers`` of ``trials`` at a time; yields the index of each and its result as they end."""
    waiting, running = enumerate(trials), dict[int, _Running]()
    try:
        while True:
            while len(running) < workers and (following := next(waiting, None)) is not None:
                number, trial = following
                directory = tempfile.TemporaryDirectory(prefix="mutant-")
                running[_fork(trial, Path(directory.name))] = _Running(
                    number=number, trial=trial, directory=directory
                )
            if not running:
                return
            pid, status = _wait(running)
            done = running.pop(pid)
            yield done.number, done.result(status)
    finally:
        for pid, left in running.items():
            _kill(pid)
            left.directory.cleanup()


def _wait(running: dict[int, _Running]) -> tuple[int, int | None]:
    """The next process that ends, and its status; None if it was killed at its time limit."""
    while True:
        for pid, each in running.items():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _kill(pid, wait=False)  # child processes that it may have left
                return pid, status
            if time.monotonic() - each.began > each.trial.seconds:
                _kill(pid)
                return pid, None
        time.sleep(0.02)


def _kill(pid: int, *, wait: bool = True) -> None:
    """Kill the process group of ``pid``."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if wait:
        os.waitpid(pid, 0)


def _fork(trial: Trial, directory: Path) -> int:
    (directory / "output").touch()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        code = _run(trial, directory)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(code)


def _run(trial: Trial, directory: Path) -> int:
    """In the forked process: 0 if all tests pass on the changed source."""
    output = os.open(directory / "output", os.O_WRONLY)
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MORE_MEMORY,) * 2)
    sys.path.insert(0, str(trial.root))
    os.chdir(directory)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins take seconds to load
    changed = None if trial.path is None else _Changed(trial.path, trial.source, trial.root)
    if changed is not None:
        sys.meta_path.insert(0, changed)
    seen = _Seen()
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=short", f"--basetemp={directory / 'tests'}"]
    tests = [str(trial.root / test) for test in trial.tests]
    code = int(pytest.main([*options, f"--rootdir={trial.root}", *tests], plugins=[seen]))
    if changed is not None and not changed.imported:
        print(f"no test has imported {changed.name}")
        code = 0
    (directory / "report.json").write_text(json.dumps({"failed": seen.failed, "durations": seen.durations}))
    sys.stdout.flush()
    return code


class _Changed(MetaPathFinder):
    """Imports one module from changed source."""

    def __init__(self, path: Path, source: str, root: Path) -> None:
        self.name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        self.imported = False
        self._path = path
        self._source = source

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        self.imported = True
        loader = _Loader(fullname, str(self._path), compile(self._source, self._path, "exec"))
        return spec_from_file_location(fullname, self._path, loader=loader)


class _Loader(SourceFileLoader):
    """Loads given code; the file is read only for tracebacks."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code


class _Seen:
    """A pytest plugin that records durations and the first failure."""

    def __init__(self) -> None:
        self.failed = ""
        self.durations: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] = self.durations.get(report.nodeid, 0.0) + report.duration
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid
