"""What stops a run from outside: signals, a full or read-only disk, another run; the command resumes it."""

import fcntl
import gc
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from specgen.cli import main as cli
from specgen.config import Cluster, EngineConfig
from specgen.config.bundled import pair
from specgen.config.errors import DeviceLost
from specgen.core.engine_core import EngineCore
from specgen.core.step import Steps
from specgen.jobs import ray_engine
from specgen.record import interrupt
from specgen.record.interrupt import breakable, interruptible
from specgen.record.results import LOCK, locked
from specgen.report.report import load_so_far
from tests.commands import refused, rows, write_rows
from tests.jobs import keep_in_memory, untimed
from tests.waiting import LIMIT, wait_until

pytestmark = pytest.mark.xdist_group("stopped")  # one run that nothing stops for all

NUM_PROMPTS = 24  # more than the full disk of a test holds


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

    def __init__(
        self,
        prompts: Path,
        output: Path,
        *arguments: object,
        file_size: int | None = None,
        given: Sequence[object] = (),
    ) -> None:
        self.log = prompts.with_name(f"stderr {time.monotonic_ns()}")
        self.log.touch()
        options = ["--device", "cpu", "--max-batch-size", 4, "--max-new-tokens", 16, "--ignore-eos"]
        given = given or ["generate", "--dataset", prompts, "--output", output, *options, *arguments]
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
    path = output / "completions.jsonl"
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= number)


@pytest.fixture(scope="module")
def completions(prompts: Path) -> bytes:
    """The rows of a run that nothing stops."""
    output = prompts.with_name("whole")
    assert Command(prompts, output).end() == 0
    return untimed(output / "completions.jsonl")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
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


def asleep(here: Path) -> Callable[..., None]:
    """In place of work: waits for a minute, which exceptions end."""

    def sleep(*arguments: object, **named: object) -> None:
        here.touch()
        time.sleep(60)

    return sleep


def deaf(here: Path) -> Callable[..., None]:
    """In place of work: computes for minutes in C, where no handler runs."""

    def compute(*arguments: object, **named: object) -> None:
        here.touch()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)

    return compute


def terminated(prompts: Path, output: Path, what: str, work: Callable[[Path], Callable[..., None]]) -> str:
    """The state of a run that receives SIGTERM while it is in ``what``, where it does ``work`` instead."""
    here = output.with_name("here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupt, "_TO_POLL", 0.2)
        patch.setattr(interrupt, "_TO_END", 0.4)
        patch.setattr(EngineCore, "warm_up", lambda self: None)
        patch.setattr(what, work(here))
        command = Command(prompts, output)
        wait_until(here.exists)
        os.kill(command.pid, signal.SIGTERM)
        os.kill(command.pid, signal.SIGTERM)  # as from a launcher, where its scheduler sends it to all
        begun = time.monotonic()
        assert command.end() == 75
    assert time.monotonic() - begun < 30, "it would have slept for a minute"
    assert command.last_words == "specgen: interrupted; the same command resumes the run"
    return str(json.loads((output / "status.json").read_text())["state"])


@pytest.mark.parametrize(
    ("what", "work", "state"), [("index_prompts", asleep, "interrupted"), ("load_models", deaf, "preparing")]
)
def test_a_start_that_does_not_poll_ends_in_time_too(
    prompts: Path, tmp_path: Path, what: str, work: Any, state: str
) -> None:
    assert terminated(prompts, tmp_path / "run", f"specgen.jobs.run.{what}", work) == state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "work", "state"),
    [
        ("core.step.Steps.decode", asleep, "interrupted"),
        ("core.step.Steps.decode", deaf, "running"),
        ("jobs.run.FinishedRun.write_report", asleep, "interrupted"),
    ],
)
def test_a_run_that_was_stopped_where_it_does_not_poll_resumes(
    prompts: Path, completions: bytes, tmp_path: Path, what: str, work: Any, state: str
) -> None:
    output = tmp_path / "run"
    assert terminated(prompts, output, f"specgen.{what}", work) == state
    assert Command(prompts, output).end() == 0
    assert untimed(output / "completions.jsonl") == completions


def test_a_signal_ends_a_command_that_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.checkpoints.inspect_checkpoint.describe", asleep(tmp_path / "here"))
    command = Command(tmp_path / "none", tmp_path, given=["inspect", "none"])
    wait_until((tmp_path / "here").exists)
    os.kill(command.pid, signal.SIGTERM)
    assert (command.end(), command.last_words) == (75, "specgen: interrupted")


def test_a_signal_while_ray_starts_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def init(**options: object) -> None:  # as Ray's own, which stands in for the process's handler
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    with interruptible(lambda: "not in time") as stop:
        with pytest.raises(KeyboardInterrupt):
            ray_engine._start(Cluster(num_workers=1))
        assert stop.exit_code == 75


@pytest.mark.slow
def test_a_stopped_command_waits_for_no_thread_of_a_library() -> None:
    program = (
        "import os, signal, sys, threading, time\n"
        "from specgen.checkpoints import inspect_checkpoint\n"
        "from specgen.cli.main import main\n"
        "def describe(*paths):\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "inspect_checkpoint.describe, sys.argv = describe, ['specgen', 'inspect', 'none']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (75, "specgen: interrupted\n")


def test_a_second_ctrl_c_ends_it_at_once(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Steps, "decode", asleep(tmp_path / "here"))
    monkeypatch.setattr(EngineCore, "warm_up", lambda self: None)
    command = Command(prompts, tmp_path / "run")
    wait_until((tmp_path / "here").exists)
    while os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        os.kill(command.pid, signal.SIGINT)  # two that a busy machine hands over at once are one
        time.sleep(0.2)
    assert command.end() == -signal.SIGINT


def test_a_lost_device_is_one_line(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: EngineCore) -> None:
        raise DeviceLost("planted", ())

    monkeypatch.setattr(EngineCore, "step", lost)
    monkeypatch.setattr(EngineCore, "warm_up", lambda self: None)
    command = Command(prompts, tmp_path / "run")
    assert command.end() == 1
    assert command.last_words.endswith("continue in a new process; the same command resumes the run")


def test_handlers_are_restored() -> None:
    all_of_them = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before, num_threads = [signal.getsignal(each) for each in all_of_them], threading.active_count()
    with interruptible(lambda: "not in time") as stop:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        assert stop()
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "it is heard"
        assert stop.exit_code == 75
    with interruptible(lambda: "not in time"):
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(each) for each in all_of_them] == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == num_threads


def test_a_signal_that_a_library_swallows_stops_what_comes_next_and_a_second_breaks_off_nothing() -> None:
    with breakable(lambda: "not in time") as stop:
        with suppress(KeyboardInterrupt):  # as while PyTorch is imported
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), interruptible(lambda: "not in time"):
            raise AssertionError
    assert stop.exit_code == 75
    with breakable(lambda: "not in time") as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.exit_code == 75


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
    os.kill(first.pid, signal.SIGSTOP)
    second = Command(prompts, tmp_path / "run", "--restart")
    assert second.end() == 2
    os.kill(first.pid, signal.SIGCONT)
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


def test_whoever_asks_whether_a_run_is_at_work_keeps_none_from_starting(tmp_path: Path) -> None:
    with locked(tmp_path):
        pass
    with (tmp_path / LOCK).open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)  # as for a moment ``is_gone`` does
        threading.Timer(0.03, asking.close).start()
        with locked(tmp_path):
            pass
