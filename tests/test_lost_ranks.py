"""A rank that dies, hangs or fails: one line that names it, what has finished is kept, and nobody is left behind."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from specgen.config import SamplingParams, UserError
from specgen.config.bundled import data_directory
from specgen.config.errors import DeviceLost
from specgen.core.step import Steps
from specgen.engine import loading, worker_group
from specgen.engine.engine import Engine
from specgen.engine.loading import Models, load_models, open_checkpoints
from specgen.engine.worker_group import ModelPeers
from specgen.jobs.run import run
from tests.engines import ranks_config
from tests.jobs import Silent, conversations, untimed
from tests.rank_forks import launch
from tests.rank_plants import compare_every_pass, fail_in_decode, find_others, together
from tests.waiting import LIMIT, wait_until

pytestmark = pytest.mark.xdist_group("ranks")
DEMO = data_directory() / "demo"
NUM_TURNS = 20  # of the first 10 bundled prompts
PROMPTS = [f"Tom has {n} apples." for n in range(8)]
SAMPLING = SamplingParams(max_tokens=40, ignore_eos=True)
MEMORY = "no memory for a pass: lower --max-batch-size, --max-prefill-tokens or --gpu-memory-utilization"


def processes(models: Models) -> list[int]:
    assert isinstance(models.peers, ModelPeers)
    return [worker.process.pid for worker in models.peers._workers._supervisor.workers]


def exists(process: int) -> bool:
    """Whether it runs; one that nobody has waited for has ended too."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    """The bundled pair in two ranks, which meet in every pass."""
    monkeypatch.setattr(worker_group, "TIMEOUT", LIMIT)
    monkeypatch.setattr(worker_group, "launch", launch)
    asked = ranks_config(2)
    models = load_models(asked, open_checkpoints(asked))
    together(models, compare_every_pass, asked)
    compare_every_pass(None, models, monkeypatch.setattr)
    yield models
    for process in processes(models):  # whatever a test did to it
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    del models
    gc.collect()


def lose(models: Models, plant: Callable[[], None]) -> DeviceLost:
    """Do ``plant`` when the first text has ended; the error, after which no rank is left."""
    finished: list[str] = []

    def work() -> None:
        for output in Engine(ranks_config(2), models=models).generate(PROMPTS, SAMPLING):
            finished.append(output.id)
            if len(finished) == 1:
                plant()

    with pytest.raises(DeviceLost) as raised:
        work()
    assert set(raised.value.requests).isdisjoint(finished)
    assert raised.value.requests
    assert not any(map(exists, processes(models)))
    return raised.value


@pytest.mark.slow
def test_a_rank_that_dies(models: Models) -> None:
    lost = lose(models, lambda: os.kill(processes(models)[0], signal.SIGKILL))
    assert lost.reason == "rank 1 of 2 on cpu: it was ended by SIGKILL"


@pytest.mark.slow
def test_a_rank_that_hangs(models: Models) -> None:
    def stop() -> None:
        os.kill(processes(models)[0], signal.SIGSTOP)
        assert isinstance(models.peers, ModelPeers)
        group, team = models.peers.ranks.group, models.peers._workers
        _set_pg_timeout(timedelta(seconds=2), group)  # type: ignore[arg-type]
        team._supervisor.timeout = 2.0

    assert lose(models, stop).reason == "rank 1 of 2 on cpu: no answer for 2 s"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "why"), [("memory", MEMORY), ("bug", "KeyError: 'planted' is missing")])
def test_a_rank_that_fails(models: Models, name: str, why: str) -> None:
    lost = lose(models, lambda: together(models, fail_in_decode, ranks_config(2), name))
    assert lost.reason == f"rank 1 of 2 on cpu: {why}"


@pytest.mark.slow
def test_rank_0_has_no_memory(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    lost = lose(models, lambda: monkeypatch.setattr(Steps, "decode", short))
    assert lost.reason == f"rank 0 of 2 on cpu: {MEMORY}"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["end", "draft", "page"])
def test_a_rank_that_finds_something_else(models: Models, what: str) -> None:
    """It is said before the next pass of a batch that is not rank 0's, and before any text is written."""
    lost = lose(models, lambda: together(models, find_others, ranks_config(2), what))
    assert lost.reason == "rank 1 of 2 on cpu: it has other tokens or another batch than rank 0"


@pytest.mark.slow
def test_nothing_goes_on_behind_a_pass_that_was_interrupted(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    engine = Engine(ranks_config(2), models=models)
    with monkeypatch.context() as patch:
        patch.setattr(Steps, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(PROMPTS, SAMPLING))
    with pytest.raises(DeviceLost, match="rank 0 of 2 on cpu: interrupted within a pass"):
        list(engine.generate(PROMPTS, SAMPLING))


def test_a_process_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(DeviceLost, match="rank 1 of 2 on cpu: it ended with exit code 1"):
        load_models(ranks_config(2), open_checkpoints(ranks_config(2)))


@pytest.mark.slow
def test_signals_to_another_rank_mean_nothing(models: Models) -> None:
    engine = Engine(ranks_config(2), models=models)
    outputs = engine.generate(PROMPTS, SAMPLING)
    next(outputs)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(processes(models)[0], number)
    assert len(list(outputs)) == len(PROMPTS) - 1


@pytest.mark.slow
def test_ranks_end_when_nothing_refers_to_their_model() -> None:
    asked = ranks_config(2)
    models = load_models(asked, open_checkpoints(asked))
    engine = Engine(asked, models=models)
    list(engine.generate(PROMPTS[:1], SAMPLING))
    (process,) = processes(models)
    assert exists(process)
    del models, engine
    gc.collect()
    assert not exists(process)


@pytest.mark.slow
def test_what_another_rank_cannot_load_is_an_error_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 finds the weights in memory, so that only the other one sees the file."""
    share = loading.load_share

    def from_elsewhere(asked: Any, checkpoints: Any, peers: Any) -> Models:
        whole = replace(asked, model=str(DEMO / "target"))
        return share(whole, open_checkpoints(whole), peers)

    shutil.copytree(DEMO / "target", tmp_path / "target")
    weights = next((tmp_path / "target").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    monkeypatch.setattr(loading, "load_share", from_elsewhere)
    asked = replace(ranks_config(2), model=str(tmp_path / "target"))
    whole = ranks_config(2)
    with pytest.raises(UserError, match=r"^rank 1 of 2 on cpu: .*target"):
        load_models(asked, open_checkpoints(whole))
    gc.collect()


@pytest.mark.slow
def test_a_run_goes_on_without_what_the_lost_rank_had(
    models: Models, tmp_path: Path, monkeypatch: Any
) -> None:
    # the text of the first takes the most steps, so that it is in flight when others have ended
    turns = {n: [f"Tom has {n} apples.", "Why?"] for n in (5, 0, 1, 2, 3, 4)}
    job = conversations(tmp_path, ({"question_id": f"q{n}", "turns": each} for n, each in turns.items()))
    several = replace(job, engine=replace(job.engine, tensor_parallel=2))

    class Killing(Silent):
        def advance(self) -> None:
            with suppress(ProcessLookupError):  # of the next that ends before it is noticed
                os.kill(processes(models)[0], signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr("specgen.jobs.run.load_models", lambda *asked: models)
        with pytest.raises(DeviceLost, match="rank 1 of 2 on cpu: it was ended by SIGKILL"):
            run(several, tmp_path / "out", Killing())
    assert not any(map(exists, processes(models)))
    noted = [json.loads(row) for row in (tmp_path / "out" / "lost.jsonl").read_text().splitlines()]
    assert {row["reason"] for row in noted} == {"rank 1 of 2 on cpu: it was ended by SIGKILL"}
    assert (tmp_path / "out" / "completions.jsonl").read_text().count("\n") >= 1
    run(job, tmp_path / "out", Silent())  # with another number of ranks, as nothing of it is in the texts
    run(job, tmp_path / "whole", Silent())
    texts = [untimed(tmp_path / name / "completions.jsonl") for name in ("out", "whole")]
    assert texts[0] == texts[1]


class Command:
    """``specgen generate`` with two ranks, in a process of its own."""

    def __init__(self, output: Path) -> None:
        given = ["generate", "--num-prompts=10", "--max-new-tokens=32", "--ignore-eos", f"--output={output}"]
        given += ["--tensor-parallel=2", "--device=cpu", "--max-batch-size=4"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specgen", *given],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.rows = output / "completions.jsonl"

    @property
    def ranks(self) -> list[int]:
        """Its other processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(child) for child in children.split() if exists(int(child))]

    def begin(self) -> list[int]:
        """Wait until three requests have finished; its other processes."""
        wait_until(lambda: self.rows.exists() and self.rows.read_bytes().count(b"\n") >= 3)
        return self.ranks

    def end(self) -> tuple[int, str]:
        """Wait until it ends: its exit code, and the last line of stderr."""
        _, said = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, said.strip().splitlines()[-1]


@pytest.mark.slow
def test_the_command_goes_on_by_itself_when_a_rank_dies(tmp_path: Path) -> None:
    command = Command(tmp_path / "out")
    (rank,) = command.begin()
    os.kill(rank, signal.SIGKILL)
    _, said = command.process.communicate(timeout=LIMIT)
    line = "the device is lost (rank 1 of 2 on cpu: it was ended by SIGKILL): continuing in a new process"
    assert f"specgen: {line}\n" in said
    assert command.process.returncode == 0
    assert command.rows.read_bytes().count(b"\n") == NUM_TURNS
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["settings"]["runs on"] == "2 x cpu, float32"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_no_rank_is_left_when_rank_0_ends(tmp_path: Path, number: int, code: int) -> None:
    command = Command(tmp_path / "out")
    (rank,) = command.begin()
    os.kill(command.process.pid, number)
    ended, line = command.end()
    assert ended == code
    if number != signal.SIGKILL:
        done = command.rows.read_bytes().count(b"\n")
        assert (
            line
            == f"specgen: interrupted with {done} of {NUM_TURNS} requests done; the same command resumes the run"
        )
    wait_until(lambda: not exists(rank))
