"""``BatchGenerator`` in real Ray Data: two workers, calls that overlap, and a bad row."""

from collections.abc import Iterator
from typing import Any

import pytest

from specgen import BatchGenerator
from tests.test_batch_generator import CONFIG, QUESTIONS, SAMPLING, texts

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.xdist_group("ray"),  # no two clusters at once
]


@pytest.fixture(scope="module")
def data() -> Iterator[Any]:
    """Ray Data on two processes of this machine."""
    import ray.data

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=50)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    yield ray.data
    ray.shutdown()


def test_rows_are_answered_on_two_workers(data: Any) -> None:
    answers = texts()
    rows = [{"number": n, "prompt": question} for n, question in enumerate(QUESTIONS)]
    rows.append({"number": len(rows), "prompt": None})
    found = (
        data.from_items(rows, override_num_blocks=4)
        .map_batches(
            BatchGenerator,
            fn_constructor_kwargs={"config": CONFIG, "sampling": SAMPLING},
            batch_size=5,
            num_cpus=1,
            compute=data.ActorPoolStrategy(size=2),
        )
        .take_all()
    )
    by_number = {row["number"]: row for row in found}
    assert len(found) == len(by_number) == len(rows)
    for number, question in enumerate(QUESTIONS):
        assert by_number[number]["generated_text"] == answers[question]
        assert by_number[number]["error"] is None
    assert "no prompt" in by_number[len(QUESTIONS)]["error"]


def test_calls_of_one_worker_overlap(data: Any) -> None:
    """Ray runs several calls of an actor at once where it is told to."""
    found = (
        data.from_items([{"prompt": question} for question in QUESTIONS], override_num_blocks=8)
        .map_batches(
            BatchGenerator,
            fn_constructor_kwargs={"config": CONFIG, "sampling": SAMPLING},
            batch_size=5,
            num_cpus=1,
            max_concurrency=3,
            compute=data.ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=3),
        )
        .take_all()
    )
    assert {row["prompt"]: row["generated_text"] for row in found} == texts()
