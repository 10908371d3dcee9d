"""Rank 0 where its main thread cannot come back for want of another rank: the process ends, in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]
RANKS = """
import os, signal, time
from specgen.core.step import Steps
from specgen.engine import worker_group
from specgen.engine.engine import Engine
from specgen.engine.loading import load_models, open_checkpoints
from tests.engines import ranks_config

def stuck(self, *given):
    act()
    time.sleep(60)

def signal_rank(engine, number):
    supervisor = engine.models.peers._workers._supervisor
    print(worker := supervisor.workers[0].process.pid, flush=True)
    supervisor.timeout = 2.0
    os.kill(worker, number)

if __name__ == "__main__":
    worker_group.GRACE = 1.0
"""
# On a GPU it may wait in a kernel for a rank that is gone, or hangs.
IN_A_PASS = """
    engine = Engine(ranks_config(2))
    act = lambda: signal_rank(engine, signal.{})
    Steps.decode = stuck
    list(engine.generate(["Tom has"]))
"""
BETWEEN_TWO = """
    engine, act = Engine(ranks_config(2)), lambda: None
    Steps.prefill = stuck
    signal_rank(engine, signal.SIGKILL)
    time.sleep(2.5)  # the caller reads prompts meanwhile
    list(engine.generate(["Tom has"]))
"""
# Where all meet it waits without a limit of its own, where GPUs do.
MEETING = """
    started, joined, members = worker_group.launch, worker_group.join, []
    def launch(place):
        members.append(started(place))
        return members[-1]
    def join(*given):
        os.kill(members[0].process.pid, signal.SIGKILL)
        return joined(*given)
    worker_group.launch, worker_group.join = launch, join
    load_models(ranks_config(2), open_checkpoints(ranks_config(2)))
"""
KILLED = "it was ended by SIGKILL"


def alive(process: str) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.parametrize(
    ("script", "why", "restarts"),
    [
        (IN_A_PASS.format("SIGKILL"), KILLED, True),
        (IN_A_PASS.format("SIGSTOP"), "no answer for 2 s", True),
        (BETWEEN_TWO, KILLED, False),
        (MEETING, KILLED, False),
    ],
    ids=["in a pass", "hangs in a pass", "between two passes", "meeting"],
)
def test_rank_0_ends_where_it_cannot_come_back(script: str, why: str, restarts: bool) -> None:
    command = [sys.executable, "-c", RANKS + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert f"(rank 1 of 2 on cpu: {why})" in done.stderr
    assert done.returncode == 1
    wait_until(lambda: not any(map(alive, done.stdout.split())))  # also one that hangs
    if restarts:
        line = f"the device is lost (rank 1 of 2 on cpu: {why}); run the command again to continue"
        assert done.stderr.strip().endswith(f"specgen: {line}")
