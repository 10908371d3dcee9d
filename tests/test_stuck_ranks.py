"""Rank 0 where its main thread cannot come back for want of another rank: the process ends, in one line."""

import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

STUCK = """
import os, sys, time
from specgen.core.step import Steps
from specgen.engine import worker_group
from specgen.engine.engine import Engine
from tests.test_tensor_parallel import config

if __name__ == "__main__":
    worker_group.GRACE = 1.0
    engine = Engine(config(2))
    engine.models.peers._workers._supervisor.timeout = 2.0
    def stuck(self, columns, num_drafts):
        os.kill(engine.models.peers._workers._supervisor.workers[0].process.pid, int(sys.argv[1]))
        time.sleep(60)
    Steps.decode = stuck
    list(engine.generate(["Tom has"]))
"""


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "it was ended by SIGKILL"), (signal.SIGSTOP, "no answer for 2 s")]
)
def test_rank_0_ends_where_it_cannot_come_back_from_a_pass(number: int, why: str) -> None:
    """On a GPU it may wait in a kernel for a rank that is gone, or hangs."""
    command = [sys.executable, "-c", STUCK, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    line = f"the device is lost (rank 1 of 2 on cpu: {why}); run the command again to continue"
    assert done.stderr.strip().endswith(f"specgen: {line}")
    assert done.returncode == 1


IDLE = """
import os, signal, time
from specgen.core.step import Steps
from specgen.engine import worker_group
from specgen.engine.engine import Engine
from tests.test_tensor_parallel import config

if __name__ == "__main__":
    worker_group.GRACE = 1.0
    engine = Engine(config(2))
    def stuck(self, *given):
        time.sleep(60)
    Steps.prefill = stuck
    os.kill(engine.models.peers._workers._supervisor.workers[0].process.pid, signal.SIGKILL)
    time.sleep(4)  # the caller reads prompts meanwhile
    list(engine.generate(["Tom has"]))
"""


def test_no_pass_begins_when_a_rank_was_lost_between_two() -> None:
    done = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, timeout=40)
    assert "DeviceLost: the device is lost (rank 1 of 2 on cpu: it was ended by SIGKILL)" in done.stderr
    assert done.returncode == 1


MEETING = """
import os, signal
from specgen.engine import worker_group
from specgen.engine.loading import load_models, open_checkpoints
from tests.test_tensor_parallel import config

if __name__ == "__main__":
    worker_group.GRACE = 1.0
    started, joined = worker_group.launch, worker_group.join
    members = []
    def launch(place):
        members.append(started(place))
        return members[-1]
    def join(*given):
        os.kill(members[0].process.pid, signal.SIGKILL)
        return joined(*given)
    worker_group.launch, worker_group.join = launch, join
    load_models(config(2), open_checkpoints(config(2)))
"""


def test_a_rank_that_is_lost_while_all_meet_ends_rank_0() -> None:
    """Which waits for it without a limit of its own, where GPUs meet."""
    done = subprocess.run([sys.executable, "-c", MEETING], capture_output=True, text=True, timeout=60)
    assert "(rank 1 of 2 on cpu: it was ended by SIGKILL)" in done.stderr
    assert done.returncode == 1
