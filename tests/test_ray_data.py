"""``BatchGenerator`` in real Ray Data: two workers, calls that overlap, a killed worker and a killed job."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from specgen import BatchGenerator, Engine
from specgen.record.record_rows import EngineRow
from tests.test_batch_generator import CONFIG, QUESTIONS, SAMPLING, texts
from tests.waiting import wait_until

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.xdist_group("ray"),  # no two clusters at once
]
CHECKPOINT, HELD, AT_ONCE = "checkpoint", 4, 3


@pytest.fixture(scope="module")
def data() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        yield started("local", num_cpus=4, include_dashboard=False)
    ray.shutdown()


def started(address: str, **options: Any) -> Any:
    """Ray Data with room for two engines, the filter of its checkpoints and a task."""
    import ray.data

    ray.init(address=address, log_to_driver=False, logging_level=50, **options)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    return ray.data


class Watched(BatchGenerator):
    """Writes the ``number`` of rows to ``log``, in lines, as it is called.

    The first process that comes to a third pass kills itself if there is a file ``doomed``, which it removes. Calls
    after ``HELD`` others wait while there is a file ``held``, and all while there is a file ``alone``, which the first
    process with ``AT_ONCE`` of them removes.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(CONFIG, SAMPLING)
        self._directory, self._begun, self._num_calls = directory, 0, 0

    def __call__(self, batch: Any) -> dict[str, Any]:
        self._num_calls += 1
        with (self._directory / "log").open("a") as log:
            log.write("".join(f"{os.getpid()} {number}\n" for number in batch["number"]))
        self._begun += 1
        if self._num_calls == AT_ONCE:
            (self._directory / "alone").unlink(missing_ok=True)
        wait_until(lambda: not (self._directory / "alone").exists())
        while self._begun > HELD and (self._directory / "held").exists():
            time.sleep(0.05)
        try:
            return super().__call__(batch)
        finally:
            self._num_calls -= 1

    def _make(self, *, record: Callable[[EngineRow], None]) -> Engine:
        passes = 0

        def see(row: EngineRow) -> None:
            nonlocal passes
            passes += 1
            if passes == 3 and (self._directory / "doomed").exists():
                (self._directory / "doomed").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            record(row)

        return super()._make(record=see)


def answered(rows: Any, directory: Path, *, size: int, num_calls: int, batch_size: int) -> Any:
    return rows.map_batches(
        Watched,
        fn_constructor_kwargs={"directory": directory},
        batch_size=batch_size,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(
            size=size,
            max_tasks_in_flight_per_actor=num_calls,
            max_concurrent_calls_per_actor=num_calls,
            enable_true_multi_threading=True,
        ),
    )


def require_all(found: list[dict[str, Any]]) -> None:
    """Each question is answered once, with the text of an engine alone."""
    assert sorted(row["number"] for row in found) == list(range(len(QUESTIONS)))
    assert {row["prompt"]: row["generated_text"] for row in found} == texts()


def questions() -> list[dict[str, Any]]:
    return [{"number": n, "prompt": question} for n, question in enumerate(QUESTIONS)]


def test_calls_of_two_workers_overlap_and_one_may_be_killed(data: Any, tmp_path: Path) -> None:
    """Ray starts another one, which is asked again: nothing is lost and no row comes twice."""
    for name in ("alone", "doomed"):
        (tmp_path / name).touch()
    rows = data.from_items([*questions(), {"number": -1, "prompt": None}], override_num_blocks=8)
    found = answered(rows, tmp_path, size=2, num_calls=AT_ONCE, batch_size=2).take_all()
    (bad,) = [row for row in found if row["number"] < 0]
    assert "no prompt" in bad["error"]
    require_all([row for row in found if row is not bad])
    assert {each.name for each in tmp_path.iterdir()} == {"log"}, "calls were at once, and one worker is gone"
    asked = Counter(line.split()[1] for line in (tmp_path / "log").read_text().splitlines())
    assert max(asked.values()) > 1, "it was within a call"


def answer_with_checkpoints(directory: Path) -> None:
    """A job from files to files, which leaves in ``CHECKPOINT`` what is done."""
    from ray.data.checkpoint import CheckpointConfig

    context = ray.data.DataContext.get_current()
    context.target_max_block_size = 1  # blocks of a row: they are what is done or not
    context.checkpoint_config = CheckpointConfig(
        id_column="number", checkpoint_path=str(directory / CHECKPOINT), delete_checkpoint_on_success=False
    )
    rows = ray.data.read_parquet(str(directory / "in"))
    answered(rows, directory, size=1, num_calls=2, batch_size=1).write_parquet(str(directory / "out"))


def numbers_in(directory: Path) -> list[int]:
    files = [file for file in directory.glob("*.parquet") if ".pending" not in file.name]
    return [number for file in files for number in parquet.read_table(file)["number"].to_pylist()]


def test_a_killed_job_goes_on_with_rays_checkpoints(data: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(questions()), tmp_path / "in" / "0.parquet")
    code = "import sys, pathlib; from tests import test_ray_data as it; it.started(sys.argv[2]); \
it.answer_with_checkpoints(pathlib.Path(sys.argv[1]))"
    cluster = ray.get_runtime_context().gcs_address
    (tmp_path / "held").touch()
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), cluster]) as job:
        wait_until(lambda: len(numbers_in(tmp_path / CHECKPOINT)) == HELD or job.poll() is not None)
        job.kill()
    done = numbers_in(tmp_path / CHECKPOINT)
    assert len(done) == HELD
    workers = {line.split()[0] for line in (tmp_path / "log").read_text().splitlines()}
    wait_until(
        lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers)
    )  # Ray ends them behind the job
    (tmp_path / "held").unlink()
    (tmp_path / "log").unlink()
    answer_with_checkpoints(tmp_path)
    asked = [int(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted([*asked, *done]) == list(range(len(QUESTIONS))), "what is done is not asked again"
    require_all(parquet.read_table(tmp_path / "out").to_pylist())
