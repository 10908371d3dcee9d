"""What stops a run from outside: signals, a full or read-only disk, another run; the command resumes it."""

import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specgen.cli import main as cli
from specgen.config import EngineConfig
from specgen.config.bundled import pair
from specgen.config.errors import DeviceLost
from specgen.core.engine_core import EngineCore
from specgen.core.step import Steps
from specgen.record.interrupt import interruptible
from specgen.record.results import locked
from specgen.report.report import load_so_far
from tests.commands import refused, rows, write_rows
from tests.jobs import keep_in_memory, untimed

pytestmark = pytest.mark.xdist_group("stopped")  # one run that nothing stops for all

NUM_PROMPTS = 24


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = ({"id": f"p{n}", "prompt": f"Tom has {n} apples."} for n in range(NUM_PROMPTS))
    return write_rows(tmp_path_factory.mktemp("stopped") / "prompts.jsonl", rows)


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    """Children find the weights in memory."""
    target, head = pair(None, None, 4)
    with pytest.MonkeyPatch.context() as patch:
        keep_in_memory(patch, EngineConfig(model=target, drafter=head, device="cpu"))
        yield


class Command:
    """``specgen generate`` in a child of this process."""

    def __init__(self, prompts: Path, output: Path, *arguments: object, file_size: int | None = None) -> None:
        self.log = prompts.with_name(f"stderr {time.monotonic_ns()}")
        self.log.touch()
        options = ["--device", "cpu", "--max-batch-size", 4, "--max-new-tokens", 24, "--ignore-eos"]
        given = ["generate", "--dataset", prompts, "--output", output, *options, *arguments]
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()  # or the child would look through, and so copy, all that its parent has
            os.dup2(os.open(self.log, os.O_WRONLY), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.argv = ["specgen", *map(str, given)]
            if file_size is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
            self._run()

    def _run(self) -> None:
        sys.stderr = os.fdopen(2, "w", buffering=1)
        code: Any = 70
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            os._exit(code)

    def end(self) -> int:
        """Wait for it; its exit code, or that of the signal that ended it below 0."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def last_words(self) -> str:
        """The last line of stderr."""
        return self.log.read_text().splitlines()[-1]


def wait_for_rows(output: Path, number: int) -> None:
    deadline = time.monotonic() + 60
    path = output / "completions.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def completions(prompts: Path) -> bytes:
    """The rows of a run that nothing stops."""
    output = prompts.with_name("whole")
    assert Command(prompts, output).end() == 0
    return untimed(output / "completions.jsonl")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_run_and_the_same_command_resumes(
    prompts: Path, completions: bytes, tmp_path: Path, number: int, code: int
) -> None:
    output = tmp_path / "run"
    command = Command(prompts, output)
    wait_for_rows(output, 3)
    os.kill(command.pid, number)
    assert command.end() == code
    done = len(rows(output / "completions.jsonl"))
    assert 3 <= done < NUM_PROMPTS
    expected = f"interrupted with {done} of {NUM_PROMPTS} requests done; the same command resumes the run"
    assert command.last_words == f"specgen: {expected}"
    status = json.loads((output / "status.json").read_text())
    assert (status["state"], status["done"], status["total"]) == ("interrupted", done, NUM_PROMPTS)
    so_far, _ = load_so_far(output)
    assert (so_far.num_requests, so_far.num_unfinished) == (done, NUM_PROMPTS - done)
    assert Command(prompts, output).end() == 0
    assert untimed(output / "completions.jsonl") == completions
    assert load_so_far(output)[0].state is None


def test_a_second_signal_ends_it_at_once(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: Steps, *arguments: Any) -> None:
        (tmp_path / "here").touch()
        time.sleep(60)

    monkeypatch.setattr(Steps, "decode", slow)
    monkeypatch.setattr(EngineCore, "warm_up", lambda self: None)
    command = Command(prompts, tmp_path / "run")
    while not (tmp_path / "here").exists():
        time.sleep(0.01)
    os.kill(command.pid, signal.SIGTERM)
    time.sleep(0.2)
    os.kill(command.pid, signal.SIGTERM)
    assert command.end() == -signal.SIGTERM


def test_a_lost_device_is_one_line(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: EngineCore) -> None:
        raise DeviceLost("planted", ())

    monkeypatch.setattr(EngineCore, "step", lost)
    monkeypatch.setattr(EngineCore, "warm_up", lambda self: None)
    command = Command(prompts, tmp_path / "run")
    assert command.end() == 1
    assert command.last_words.endswith("continue in a new process; the same command resumes the run")


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with interruptible() as interrupt:
        assert not interrupt()
        signal.raise_signal(signal.SIGTERM)
        assert interrupt()
        assert interrupt.exit_code == 143
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 64 KiB, or None where none may be mounted."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = mount(path, "size=64k", "-t", "tmpfs", "tmpfs")
    yield path if mounted else None
    if mounted:
        subprocess.run(["umount", path], check=True)


def mount(path: Path, options: str, *what: str) -> bool:
    try:
        return subprocess.run(["mount", "-o", options, *what, path], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_full_disk_loses_nothing(
    prompts: Path, completions: bytes, tmp_path: Path, disk: Path | None
) -> None:
    output = (disk or tmp_path) / "run"
    command = Command(prompts, output, file_size=None if disk else 20_000)
    assert command.end() == 2
    reason = "No space left on device" if disk else "File too large"
    assert f"run' cannot be written ({reason}): what is done is kept" in command.last_words
    assert command.log.read_text().count("Error") == 0, "and no traceback"
    kept = (output / "completions.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
    assert 0 < len(kept) < NUM_PROMPTS
    if disk:
        assert mount(disk, "remount,size=8m", "-t", "tmpfs", "tmpfs")
    assert Command(prompts, output).end() == 0
    assert untimed(output / "completions.jsonl") == completions
    assert set(kept) <= set((output / "completions.jsonl").read_bytes().splitlines())


def test_a_read_only_directory_is_one_line(prompts: Path, tmp_path: Path, disk: Path | None) -> None:
    parent = disk or tmp_path
    if disk:
        assert mount(disk, "remount,ro", "-t", "tmpfs", "tmpfs")
    elif os.geteuid() == 0:  # whom no mode bits stop
        parent = Path("/sys/kernel")
    else:
        parent.chmod(0o555)
    command = Command(prompts, parent / "run")
    assert command.end() == 2
    reason = "(Read-only file system|Permission denied|Operation not permitted)"
    assert re.search(rf"run' cannot be written \({reason}\)", command.last_words)


@pytest.mark.slow
def test_two_runs_in_one_directory(prompts: Path, tmp_path: Path) -> None:
    first = Command(prompts, tmp_path / "run")
    wait_for_rows(tmp_path / "run", 1)
    second = Command(prompts, tmp_path / "run", "--restart")
    assert second.end() == 2
    assert f"is in use by process {first.pid} on {os.uname().nodename}: wait for it" in second.last_words
    assert first.end() == 0
    assert len(rows(tmp_path / "run" / "completions.jsonl")) == NUM_PROMPTS


def test_a_lock_does_not_follow_a_moved_directory(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "run.1")
        holder = f"in use by process {os.getpid()} on {os.uname().nodename}: "
        with locked(tmp_path / "run"), refused(holder), locked(tmp_path / "run.1"):
            pass
    with locked(tmp_path / "run.1"):
        pass
