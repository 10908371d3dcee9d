"""How long rank 0 waits for whom, and whose fault a failure is: workers that are no ranks, and a share read alone."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specgen.config import SamplingParams, UserError
from specgen.config.errors import DeviceLost
from specgen.core.peers import Peers
from specgen.core.sequence import Request, ScoreRequest
from specgen.device import HostCopy, Ranks, RankUnreachable
from specgen.engine import worker_group
from specgen.engine.build import build_engine, prefill_logits, room_for_turns
from specgen.engine.loading import load_models, open_checkpoints
from specgen.engine.rank_group import Alive, Failed, Place
from specgen.engine.worker import Worker
from specgen.engine.worker_group import Supervisor, WorkerProcess, exit_within
from tests.engines import ranks_config
from tests.rank_forks import launch
from tests.test_lost_ranks import processes
from tests.waiting import LIMIT, wait_until

pytestmark = pytest.mark.xdist_group("ranks")
WAITED = Failed(reason="connection closed", waited=True)
BUG = Failed(reason="KeyError: 'planted'", waited=False)


def place(rank: int, timeout: float = 1.0) -> Place:
    return Place(rank=rank, size=3, device="cpu", port=0, timeout=timeout, num_threads=1)


@pytest.fixture
def workers() -> Iterator[list[WorkerProcess]]:
    """Two processes that do nothing; ``stderr`` is the other end of each connection."""
    found = []
    for rank in (1, 2):
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(["sleep", "60"])
        other: Any = Connection(theirs.detach())
        found.append(
            WorkerProcess(
                place=place(rank), process=process, connection=Connection(ours.detach()), stderr=other
            )
        )
    yield found
    for worker in found:
        worker.process.kill()
        worker.process.wait()


class LeftError(Exception):
    """Rank 0's process would have ended here."""


class Watch:
    """A supervisor of ``workers`` that waits for 5 s, and 2 s for rank 0 to come back, in time that it makes itself."""

    def __init__(self, workers: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.supervisor = 100.0, Supervisor(workers=workers, timeout=5.0)
        monkeypatch.setattr(worker_group, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(worker_group, "GRACE", 2.0)
        monkeypatch.setattr(worker_group, "wait", self._wait)
        monkeypatch.setattr("os._exit", self._exit)

    def _wait(self, connections: list[Connection], seconds: float) -> list[Connection]:
        self.now += seconds
        self.supervisor.closing = self.now >= self._until
        return [each for each in connections if each.poll()]

    def _exit(self, code: int) -> None:
        raise LeftError(code, self.now - self._began)

    def look(self, seconds: float) -> None:
        """For so long; ``LeftError`` with the exit code and the time of it, from here."""
        self.supervisor.closing, self._began, self._until = False, self.now, self.now + seconds
        self.supervisor.watch()


@pytest.fixture
def watch(workers: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(workers, monkeypatch)


def say(worker: WorkerProcess, value: object) -> None:
    other: Any = worker.stderr
    other.send((7, value))


def test_rank_0_leaves_work_in_which_nobody_says_anything(watch: Watch, capfd: Any) -> None:
    watch.supervisor.begin()
    with pytest.raises(LeftError) as left:
        watch.look(60)
    assert left.value.args == (1, 7.5)
    assert "rank 1 of 3 on cpu and rank 2 of 3 on cpu: no answer for 5 s" in capfd.readouterr().err


@pytest.mark.parametrize("who", ["rank 0", "another"])
def test_work_that_gets_on_has_no_limit(watch: Watch, who: str) -> None:
    watch.supervisor.begin()
    for _ in range(4):
        watch.look(6)
        watch.supervisor.alive() if who == "rank 0" else say(watch.supervisor.workers[0], Alive())
    watch.supervisor.leave()
    watch.look(60)  # no work, no limit


@pytest.mark.parametrize(
    ("what", "code", "line"),
    [
        (UserError("no such file"), 2, "specgen: rank 2 of 3 on cpu: no such file\n"),
        (BUG, 1, "the device is lost (rank 2 of 3 on cpu: KeyError: 'planted'); run the command again"),
    ],
    ids=["refusal", "loss"],
)
def test_rank_0_leaves_work_that_another_has_left(
    watch: Watch, capfd: Any, what: object, code: int, line: str
) -> None:
    """It may come back by itself."""
    watch.supervisor.begin()
    watch.look(1)
    say(watch.supervisor.workers[1], what)
    with pytest.raises(LeftError) as left:
        watch.look(60)
    assert left.value.args == (code, 3.0)
    assert line in capfd.readouterr().err


def test_work_behind_a_refusal_goes_on(watch: Watch) -> None:
    """Rank 0 was asked for one thing, and does something else."""
    say(watch.supervisor.workers[1], UserError("no such file"))
    watch.look(1)
    assert watch.supervisor.answers
    watch.supervisor.begin()
    watch.look(6)


@pytest.mark.parametrize(
    ("lost", "error", "fault"),
    [
        ([(1, WAITED), (2, BUG)], RankUnreachable("closed", 0.0), "rank 2 of 3 on cpu: KeyError: 'planted'"),
        (
            [(1, BUG), (2, None)],
            RankUnreachable("closed", 0.0),
            "rank 2 of 3 on cpu: it was ended by SIGTERM",
        ),
        ([(1, WAITED)], RankUnreachable("a rank is gone", 0.0), ""),
        ([(1, WAITED)], RankUnreachable("nothing came", 0.9), "rank 2 of 3 on cpu: no answer for 1 s"),
        ([(1, WAITED), (2, WAITED)], RuntimeError("timed out"), ""),
        ([], RuntimeError("CUDA error: connection timed out"), ""),
        ([], RankUnreachable("refused at once", 0.0), ""),
    ],
)
def test_whose_fault_it_is(
    workers: list[WorkerProcess], lost: list[tuple[int, Failed | None]], error: RuntimeError, fault: str
) -> None:
    """By what has ended and the kind of an error, never by the words of one."""
    known = Supervisor(workers=workers, timeout=1.0)
    for rank, word in lost:
        worker = workers[rank - 1]
        if word is None:  # it takes a while to end behind its connection
            subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -TERM {worker.process.pid}"])
        known._lose(worker, word)
    assert known.fault(error) == fault


def test_a_rank_that_takes_nothing_in_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Half a message is on the way to it, so that another would not be understood."""
    script = tmp_path / "sleeps"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    worker = worker_group.launch(place(1, timeout=0.2))
    known = Supervisor(workers=[worker], timeout=0.2)
    known.send("x" * (8 << 20))
    assert known.gone == [worker]
    with pytest.raises(RankUnreachable):
        known.require_all()
    assert known.fault(None) == "rank 1 of 3 on cpu: no answer for 0 s"
    assert worker.process.wait(LIMIT) == -signal.SIGKILL
    known.send("more")  # to nobody, and at once


def test_a_process_that_cannot_end_is_ended_with_exit_code_1() -> None:
    child = os.fork()
    if child == 0:
        exit_within(0.2)
        time.sleep(20)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_on_gpus_a_lost_rank_limits_the_end_of_the_process(
    workers: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may wait for it without end."""
    registered: list[object] = []
    monkeypatch.setattr(worker_group, "_GATHER", 0.1)
    monkeypatch.setattr("atexit.register", lambda *given: registered.extend(given))
    team = worker_group.WorkerGroup(replace(place(0), device="cuda:0"), workers)
    assert team.diagnose(RuntimeError("CUDA error")) == "rank 0 of 3 on cuda:0: CUDA error"
    assert registered == [exit_within, worker_group.GRACE]
    assert all(worker.process.poll() == -signal.SIGKILL for worker in workers)


@pytest.mark.parametrize(("seconds", "most"), [(0.002, 22), (0.05, 100), (1.0, 1050)])
def test_a_long_pass_is_seldom_looked_at(monkeypatch: pytest.MonkeyPatch, seconds: float, most: int) -> None:
    now, looks = [0.0], list[float]()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda pause: now.append(now.pop() + pause))
    monkeypatch.setattr(worker_group, "time", clock)
    team = worker_group.WorkerGroup.__new__(worker_group.WorkerGroup)
    team._supervisor = Supervisor(workers=(), timeout=9.0)

    def ready() -> bool:
        looks.append(now[0])
        return now[0] >= seconds

    team.wait(ready)
    assert len(looks) <= most
    assert looks[-1] <= seconds * 17 / 16 + 1e-4, "seen soon"


def test_a_rank_says_that_it_still_reads_weights() -> None:
    ours, theirs = socket.socketpair()
    reading = Worker(Connection(theirs.detach()), 1)
    reading._place = place(1, timeout=0.0)
    reading._ranks = Ranks(rank=1, size=2, alive=reading._alive)
    rank_0 = Connection(ours.detach())
    reading.load(0, ranks_config(2))
    said = []
    while rank_0.poll():
        said.append(rank_0.recv()[1])
    assert said[-1] == "loaded"
    assert set(said[:-1]) == {Alive()}
    taken = [set(each.tensors) - {"d2t", "t2d"} for each in open_checkpoints(ranks_config(2)).values()]
    assert len(said[:-1]) >= sum(map(len, taken))  # of target and head


def room_on(config: Any, models: Any) -> int:
    """What a rank has, less on a later one."""
    return 100 - 10 * int(models.peers.ranks.rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "it was ended by SIGKILL"), (signal.SIGSTOP, "no answer for 1 s")]
)
def test_a_rank_that_is_lost_or_hangs_while_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, number: int, why: str
) -> None:
    """Rank 0 ends in order, in the first case whatever it has still to read."""
    num_read = 0

    def kill(team: worker_group.WorkerGroup) -> None:
        nonlocal num_read
        num_read += 1
        if num_read == 3:
            team._supervisor.timeout = 1.0
            os.kill(team._supervisor.workers[0].process.pid, number)
            wait_until(lambda: bool(team._supervisor.gone) or number == signal.SIGSTOP)

    start = worker_group.start
    monkeypatch.setattr(worker_group, "launch", launch)

    def started(*given: Any) -> worker_group.WorkerGroup:
        team = start(*given)
        alive = team.ranks.alive
        team.ranks = replace(team.ranks, alive=lambda: (kill(team), alive())[1])
        return team

    monkeypatch.setattr("specgen.engine.worker_group.start", started)
    with pytest.raises(DeviceLost, match=f"rank 1 of 2 on cpu: {why}"):
        load_models(ranks_config(2), open_checkpoints(ranks_config(2)))
    assert (num_read == 3) == (number == signal.SIGKILL)


@pytest.mark.slow
def test_ranks_share_a_machine_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before, num_threads = dict(os.environ), torch.get_num_threads()
    asked = ranks_config(2)
    models = load_models(asked, open_checkpoints(asked))
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    hosts = [listening(process) for process in (os.getpid(), *processes(models))]
    assert all(hosts)
    assert set().union(*hosts) == {"0100007F"}  # 127.0.0.1
    monkeypatch.setattr("specgen.engine.build._rest", room_on)
    assert room_for_turns(asked, models) == 45  # half of what the fullest has
    del models
    assert dict(os.environ) == before
    assert torch.get_num_threads() == num_threads


def listening(process: int) -> set[str]:
    """The addresses at which ``process`` listens, as the kernel writes them."""
    sockets = set()
    for each in os.listdir(f"/proc/{process}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{process}/fd/{each}"))
        except FileNotFoundError:  # that of the listing
            continue
    tables = (Path(f"/proc/{process}/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    rows = [row.split() for table in tables for row in table.splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


class Patient(Peers):
    """Notes for which numbers a pass has waited."""

    def __init__(self) -> None:
        self.waited: list[HostCopy] = []

    def wait(self, numbers: HostCopy) -> None:
        self.waited.append(numbers)


def test_every_pass_waits_for_its_numbers_where_a_rank_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, peers, read = ranks_config(1), Patient(), HostCopy.tensor
    models = replace(load_models(asked, open_checkpoints(asked)), peers=peers)

    def checked(self: HostCopy) -> torch.Tensor:
        assert self in peers.waited
        return read(self)

    monkeypatch.setattr(HostCopy, "tensor", checked)
    engine = build_engine(asked, models, lambda event: None)
    list(engine.generate([Request(id="a", prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=1))]))
    assert len(peers.waited) >= 1
    peers.waited.clear()
    list(engine.score([ScoreRequest(id="a", token_ids=(5, 6, 7), num_context=1)]))
    assert len(peers.waited) == 1
    prefill_logits(asked, models)([5, 6, 7])
    assert len(peers.waited) == 2
