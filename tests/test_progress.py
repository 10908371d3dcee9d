"""Progress on stderr: lines in a file, a bar in a terminal, warnings alone with --quiet."""

import io
import json
import re

import pytest
from typer.testing import CliRunner

from specgen.cli import main as cli
from specgen.cli import progress_bar
from specgen.cli.progress_bar import progress
from specgen.config import Cluster, EngineConfig
from specgen.jobs.ray_engine import _resources
from specgen.record.progress import Tally
from specgen.record.record_rows import Captured, OutOfMemory
from specgen.report.display import clock

SHORT = OutOfMemory(time=0.0, max_batch_size=2, max_prefill_tokens=64)
GRAPH = Captured(time=0.0, what="step", num_sequences=8, seconds=1.5, fits=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def followed(monkeypatch: pytest.MonkeyPatch, file: io.StringIO, *, quiet: bool = False) -> str:
    """What is written to ``file`` of ten requests, of which three were done and a second goes by between two."""
    now = 0.0
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress_bar, "_BETWEEN", 3)
    shown = progress(quiet)
    shown.warn("look out")
    shown.start("padded", Tally(), 10, 3)
    for event in (SHORT, GRAPH):
        shown.see(event)
    for _ in range(7):
        now += 1
        shown.advance()
    shown.finish()
    return file.getvalue()


def test_a_file_gets_a_line_now_and_then(monkeypatch):
    lines = followed(monkeypatch, io.StringIO()).split("\n")
    assert lines == [
        "specgen: warning: look out",
        "padded: 3 of 10 requests",
        "out of GPU memory: continuing with a batch of 2 and 64 prefill tokens",
        "CUDA graph of a step of 8 sequences: captured in 1.5 s",
        "padded: 6 of 10 requests in 0:03, 0:04 to go, 0 tok/s, acceptance length 1.00",
        "padded: 9 of 10 requests in 0:06, 0:01 to go, 0 tok/s, acceptance length 1.00",
        "padded: 10 of 10 requests in 0:07, 0:00 to go, 0 tok/s, acceptance length 1.00",
        "",
    ]


def test_a_terminal_gets_a_bar(monkeypatch):
    drawn = followed(monkeypatch, Terminal())
    assert re.search(r"\rpadded: 100%.*10/10 .*0 tok/s, acceptance length 1.00", drawn)
    assert "look out\n" in drawn


def test_a_quiet_run_shows_what_goes_wrong(monkeypatch):
    assert followed(monkeypatch, Terminal(), quiet=True) == (
        "specgen: warning: look out\nout of GPU memory: continuing with a batch of 2 and 64 prefill tokens\n"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")]
)
def test_seconds_as_on_a_clock(seconds, text):
    assert clock(seconds) == text


def test_a_quiet_command_prints_its_result_alone(tmp_path):
    asked = ["generate", "--num-prompts=1", "--max-new-tokens=4", "--quiet"]
    result = CliRunner().invoke(cli.app, [*asked, f"--output={tmp_path}"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Prompt:" not in result.stdout
    assert "mean acceptance length" in result.stdout
    loud = CliRunner().invoke(cli.app, [*asked[:-1], f"--output={tmp_path}"])
    assert "Prompt:" in loud.stdout
    assert "Files are in" in loud.stderr


def test_rows_on_stdout_are_not_shown_again_beside_them():
    result = CliRunner().invoke(cli.app, ["generate", "--num-prompts=1", "--max-new-tokens=4", "--output=-"])
    assert json.loads(result.stdout.splitlines()[0])["text"]
    assert "Prompt:" not in result.stderr
    assert "\r" not in result.stderr
    assert re.search(r"speculative decoding: \d+ of \d+ requests in 0:00", result.stderr)


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {5, 9}, raising=False)
    monkeypatch.setattr("specgen.config.find_spec", lambda name: True)
    config = EngineConfig(model="m", drafter=None, num_spec_tokens=0, device="cpu")
    assert _resources(Cluster(num_workers=2), config) == {"num_cpus": 1}


def compiled(monkeypatch: pytest.MonkeyPatch, file: io.StringIO, *, quiet: bool = False) -> str:
    """What is written while four modules are compiled, four seconds apart, and behind that."""
    now = 0.0
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now)
    shown, names = progress(quiet), ["FA3", "XQA, 1 row", "XQA, 5 rows", "FA2"]
    for done in range(5):
        shown.compiling(done, 4, names[: 4 - done])
        now += 4
    shown.ready("padded", {"kernels": 88.04, "weights": 5.0})
    return file.getvalue()


def test_a_file_has_lines_of_what_is_compiled(monkeypatch):
    assert compiled(monkeypatch, io.StringIO()).split("\n") == [
        "compiling kernels, once on this machine: 0 of 4 modules; to do: FA3; XQA, 1 row; XQA, 5 rows; FA2",
        "compiling kernels, once on this machine: 3 of 4 modules; to do: FA3",
        "compiling kernels, once on this machine: 4 of 4 modules",
        "padded: ready after 93.0 s (kernels 88.0, weights 5.0)",
        "",
    ]
    assert compiled(monkeypatch, io.StringIO(), quiet=True) == ""


def test_a_terminal_gets_a_bar_that_names_what_is_compiled(monkeypatch):
    drawn = compiled(monkeypatch, Terminal())
    assert "0/4" in drawn
    assert "FA3; XQA, 1 row; XQA, 5 rows; FA2" in drawn
    assert "4/4" in drawn
    assert "padded: ready after 93.0 s" in drawn.split("4/4")[-1]
