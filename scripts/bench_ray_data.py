"""What overlapping calls are worth in Ray Data: ``BatchGenerator`` on one actor with one and with two calls at once.

    python scripts/bench_ray_data.py

The bundled pair, on a CPU; rows have 8 to 160 tokens to generate. The settings alternate; medians are printed. The mean
running batch does not depend on what else the machine does, times do.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from specgen import BatchGenerator, Engine, EngineConfig, SamplingParams
from specgen.config.bundled import pair
from specgen.record.record_rows import EngineRow, PassRow

BATCH_SIZE, ROWS_PER_CALL = 8, 32


class Counting(BatchGenerator):
    """Writes the number of sequences of every decode step to a file, a line each."""

    def __init__(self, config: EngineConfig, sampling: SamplingParams, sizes: Path) -> None:
        super().__init__(config, sampling)
        self._sizes = sizes

    def _make(self, *, record: Callable[[EngineRow], None]) -> Engine:
        file = self._sizes.open("w", buffering=1)

        def count(row: EngineRow) -> None:
            record(row)
            if isinstance(row, PassRow) and row.kind == "decode":
                file.write(f"{row.num_sequences} {time.time() - row.seconds} {time.time()}\n")

        return super()._make(record=count)


def rows(number: int) -> list[dict[str, Any]]:
    lengths = random.Random(0)
    return [
        {
            "prompt": f"Tom has {n} apples and buys {2 * n} more.",
            "sampling_params": {"max_tokens": lengths.choice([8, 16, 32, 64, 160])},
        }
        for n in range(number)
    ]


def measure(num_calls: int, num_rows: int) -> tuple[int, float, float]:
    """Decode steps, the mean of their sequences, and seconds from the first to the last."""
    model, drafter = pair()
    config = EngineConfig(model=model, drafter=drafter, device="cpu", max_batch_size=BATCH_SIZE)
    with tempfile.TemporaryDirectory() as directory:
        sizes = Path(directory) / "sizes"
        answered = ray.data.from_items(
            rows(num_rows), override_num_blocks=num_rows // ROWS_PER_CALL
        ).map_batches(
            Counting,
            fn_constructor_kwargs={"config": config, "sampling": SamplingParams(), "sizes": sizes},
            batch_size=ROWS_PER_CALL,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(
                size=1,
                max_tasks_in_flight_per_actor=num_calls,
                max_concurrent_calls_per_actor=num_calls,
                enable_true_multi_threading=True,
            ),
        )
        assert all(row["error"] is None for row in answered.iter_rows())
        steps = [line.split() for line in sizes.read_text().splitlines()]
    seconds = float(steps[-1][2]) - float(steps[0][1])
    return len(steps), statistics.mean(int(size) for size, _, _ in steps), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-rows", type=int, default=480)
    parser.add_argument("--num-repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=50)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    found: dict[int, list[tuple[int, float, float]]] = {calls: [] for calls in arguments.calls}
    for _ in range(arguments.num_repeats):
        for calls, repeats in found.items():
            repeats.append(measure(calls, arguments.num_rows))
            print(calls, repeats[-1], flush=True)
    print("calls at once  decode steps  mean batch  seconds")
    for calls, repeats in found.items():
        steps, mean, seconds = map(statistics.median, zip(*repeats, strict=True))
        print(f"{calls:13}  {steps:12.0f}  {mean:10.2f}  {seconds:7.1f}")


if __name__ == "__main__":
    main()
