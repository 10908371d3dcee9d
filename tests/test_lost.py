"""A device that is lost repeatedly: a new process resumes, and only the request to blame has no answer."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from specgen.cli import generating
from specgen.config import SamplingParams
from specgen.config.errors import DeviceLost
from specgen.core import engine_core
from specgen.core.engine_core import EngineCore
from specgen.core.step import Steps
from specgen.engine import engine
from specgen.jobs.job import Job
from specgen.jobs.run import run
from specgen.prompts.load import DataSource
from specgen.record.interrupt import StoppedError
from tests.jobs import HOW_IT_WENT, Silent, conversations, keep_in_memory, untimed
from tests.waiting import LIMIT

LONG = 120  # positions; the device is lost with a sequence that is longer
POISON = "q4/turn-2"
WORDS = "the device was lost while it ran alone: planted"


def lose_the_device(patch: pytest.MonkeyPatch) -> None:
    """Plant it."""
    decode = Steps.decode

    def planted(self: Steps, columns: Any, num_drafts: int) -> Any:
        if int(columns.state.positions.max()) > LONG:
            raise RuntimeError("what every pass says from then on")
        return decode(self, columns, num_drafts)

    def lost(device: torch.device, requests: tuple[str, ...] = ()) -> None:
        raise DeviceLost("planted", requests)

    patch.setattr(Steps, "decode", planted)
    patch.setattr(engine_core, "require_device", lost)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Conversations with the bundled pair; the second turn of one is long."""
    turns = [[f"Tom has {n} apples.", "And " * 100 if n == 4 else "And now?", "Why?"] for n in range(6)]
    rows = ({"question_id": f"q{n}", "turns": each} for n, each in enumerate(turns))
    job = conversations(tmp_path_factory.mktemp("lost"), rows)
    return replace(job, sampling=replace(job.sampling, max_tokens=8))


@pytest.fixture(autouse=True)
def _loaded(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in_memory(monkeypatch, job.engine)


def work(job: Job, out: Path) -> int:
    """Run ``job`` as often as the device is lost; how often it was begun."""
    for number in count(1):
        try:
            run(job, out, Silent())
            return number
        except DeviceLost as lost:
            assert len(lost.requests) <= job.engine.max_batch_size + 1  # noqa: PT017
    raise AssertionError


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, untimed(path).splitlines())}


def numbers(out: Path) -> dict[str, Any]:
    report = json.loads((out / "report.json").read_text())
    return {name: number for name, number in report.items() if name not in HOW_IT_WENT}


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_all_other_requests_are_answered_as_without_a_lost_device(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    job = replace(job, sampling=replace(job.sampling, temperature=temperature))
    run(job, tmp_path / "whole", Silent())
    whole = rows(tmp_path / "whole" / "completions.jsonl")
    lengths = {name: row["num_prompt_tokens"] for name, row in whole.items() if row["num_prompt_tokens"] > 80}
    assert POISON in lengths, lengths
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        lose_the_device(patch)
        assert work(job, out) == 3, "all together, the one alone, and without it"
    blamed = [POISON, "q4/turn-3"]
    assert rows(out / "completions.jsonl") == {n: row for n, row in whole.items() if n not in blamed}
    errors = {name: row["error"] for name, row in rows(out / "errors.jsonl").items()}
    assert errors == {POISON: f"line 5: {WORDS}", blamed[1]: "line 5: turn 2 before it has no answer"}
    assert numbers(out)["num_errors"] == 2
    assert not (out / "lost.jsonl").exists()
    run(job, out, Silent())
    for name in ("completions.jsonl", "errors.jsonl"):
        assert untimed(out / name) == untimed(tmp_path / "whole" / name), "what failed is tried again"
    assert numbers(out) == numbers(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_and_its_baseline_each_find_the_failing_request(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_device(monkeypatch)
    work(replace(job, baseline=True), tmp_path / "run")
    for path in (tmp_path / "run", tmp_path / "run" / "baseline"):
        assert len(rows(path / "completions.jsonl")) == 16
        assert rows(path / "errors.jsonl")[POISON]["error"] == f"line 5: {WORDS}"
        assert not (path / "lost.jsonl").exists()


def test_a_run_that_is_asked_to_end_ends(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes in the step that loses the device is not forgotten with the process."""
    lose_the_device(monkeypatch)
    asked = list[bool]()
    fail = engine_core.require_device

    def signalled(device: torch.device, requests: tuple[str, ...] = ()) -> None:
        asked.append(True)
        fail(device, requests)

    monkeypatch.setattr(engine_core, "require_device", signalled)
    with pytest.raises(StoppedError, match="interrupted with"):
        run(job, tmp_path / "run", Silent(), lambda: bool(asked))
    assert not (tmp_path / "run" / "lost.jsonl").exists()


def test_a_device_lost_at_the_start_is_no_request_s_failure(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is lost before the first request is lost again in a new process, and so on without end."""

    def tried(*settings: object, expected: SamplingParams) -> EngineCore:
        raise DeviceLost("planted", ("trial 0",))

    monkeypatch.setattr(engine, "build_engine", tried)
    with pytest.raises(DeviceLost) as lost:
        run(job, tmp_path / "run", Silent())
    assert lost.value.requests == ()
    assert not (tmp_path / "run" / "lost.jsonl").exists()


COMMAND = """
import pytest
from specgen.cli import main as cli
from tests.test_lost import lose_the_device

lose_the_device(pytest.MonkeyPatch())
cli.main()
"""


@pytest.mark.slow
def test_the_command_restarts_itself(job: Job, tmp_path: Path) -> None:
    """In new processes that replace each other: one command for its caller."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "manifest.json").write_text("{}")
    options = ["--dataset", job.data.dataset, "--data-path", str(job.data.data_path), "--restart"]
    options += ["--output", str(out)]
    limits = ["--max-new-tokens", "14", "--max-batch-size", "4", "--device", "cpu"]
    arguments = [sys.executable, "-c", COMMAND, "generate", *options, *limits]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as command:
        try:
            said = command.communicate(timeout=LIMIT)[1]
        finally:
            command.kill()
    assert command.returncode == 3, said
    assert said.count("specgen: the device is lost (planted): continuing in a new process\n") == 2
    assert said.count(f"specgen: failed: {POISON}: line 5: {WORDS}\n") == 1
    assert len(rows(out / "completions.jsonl")) == 16
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["pid"]) == ("finished", command.pid)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1"], "set aside once"


@pytest.mark.parametrize(
    ("output", "dataset", "requests", "words"),
    [
        (None, "bundled", ("a",), "nothing is kept"),
        ("-", "bundled", ("a",), "nothing is kept"),
        ("run", "-", ("a",), "the same command resumes the run"),
        ("run", "pipe", ("a",), "the same command resumes the run"),
        ("run", "bundled", (), "the same command resumes the run"),
    ],
)
def test_a_command_that_cannot_restart_itself_is_one_line(
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str | None,
    dataset: str,
    requests: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    monkeypatch.setattr(os, "execv", lambda *arguments: pytest.fail("this could not resume"))
    job = replace(job, data=DataSource(dataset=dataset))
    with pytest.raises(typer.Exit) as ended:
        generating.restart_process(
            DeviceLost("planted", requests), job, None if output is None else Path(output)
        )
    assert ended.value.exit_code == 1
    line = f"specgen: the device is lost (planted): continue in a new process; {words}\n"
    assert capsys.readouterr().err == line
