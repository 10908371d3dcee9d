"""Times the engine on a calibrated pair: against the bound of the memory, plain decoding, and vLLM's figures.

    python scripts/make_calibrated_pair.py PAIR --shape llama-3.1-8b --accept 0.75
    python scripts/bench_gpu.py PAIR --data-path ShareGPT.json

Greedy, K = 4; wall time of ``generate``, prefill included; loading, capturing graphs and one run of the same workload
come before. Every repeat has its own prompts, so that the luck of six texts decides nothing. Medians over the repeats
are printed; the last line is one JSON document. It also runs on a CPU.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench_runs import measure
from bench_table import VLLM, Row, head, line, profile_lines, times_vllm
from bench_workload import Workload, prompt_lengths
from calibrated_cycle import Cycle

from specgen.bench.bandwidth import copy_bandwidth
from specgen.bench.bound import StepBytes
from specgen.bench.environment import device_name, environment, free_memory
from specgen.config import EngineConfig
from specgen.engine.choices import resolve
from specgen.engine.loading import Models, load_models, open_checkpoints

MODES: dict[str, dict[str, Any]] = {
    "plain": {"num_spec_tokens": 0},
    "padded": {"drafter_batch": "padded"},
    "non-padded": {"drafter_batch": "non-padded"},
}
PROFILED = (1, 32, 128)  # batches


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all rows have in common."""

    config: EngineConfig  # of EAGLE3, resolved
    models: Models
    cycle: Cycle
    lengths: list[int]  # of prompts, to draw from
    bandwidth: float  # bytes a second
    new_tokens: int
    repeats: int

    def row(self, batch: int, mode: str, plain_speed: float | None) -> Row:
        """Measure ``batch`` in ``mode``; ``plain_speed`` is what plain decoding gave, in tokens a second."""
        config = replace(self.config, max_batch_size=batch, **MODES[mode])
        workloads = [
            Workload.draw(batch, self.cycle, self.lengths, self.new_tokens, seed=seed)
            for seed in range(self.repeats)
        ]
        mean_context = sum(workload.mean_context for workload in workloads) / self.repeats
        profiled = batch in PROFILED and config.device != "cpu"
        figures = measure(config, self.models, workloads, self.cycle, profiled=profiled)
        sizes = StepBytes.of(self.models)
        step_bytes = sizes.step(config.num_spec_tokens, batch, mean_context)
        speed = figures.output_tokens_per_second
        return Row(
            batch=batch,
            mode=mode,
            figures=figures,
            mean_context=mean_context,
            bound_ms=1e3 * step_bytes / self.bandwidth,
            times_plain=speed / plain_speed if plain_speed else None,
            times_vllm=times_vllm(speed, batch, mode, self.conditions),
        )

    @property
    def expected(self) -> list[float]:
        """Acceptance at each draft position, by the pair's construction."""
        return [self.cycle.accept ** (i + 1) for i in range(self.config.num_spec_tokens)]

    @property
    def conditions(self) -> dict[str, Any]:
        """What must be alike for figures to be compared."""
        return {
            "device": device_name(self.config.device),
            "num_layers": self.models.target.config.num_layers,
            "hidden_size": self.models.target.config.hidden_size,
            "dtype": self.config.dtype,
            "accept": self.cycle.accept,
            "num_spec_tokens": self.config.num_spec_tokens,
            "new_tokens": self.new_tokens,
        }

    def header(self, pair: Path) -> str:
        """What runs where, and the titles of the table."""
        config = self.config
        return "\n".join(
            [
                ", ".join(f"{name} {value}" for name, value in environment(config.device).items()),
                f"{pair.name}: synthetic weights, accept {self.cycle.accept:g}, {config.dtype}, K = "
                f"{config.num_spec_tokens}, {self.new_tokens} new tokens, median of {self.repeats}; "
                f"attention {config.attention}, CUDA graphs {config.cuda_graphs}",
                f"copy bandwidth {self.bandwidth / 1e12:.3f} TB/s, bounds by it in ms; x vLLM: {VLLM['source']}",
                "",
                head(self.expected),
            ]
        )

    def document(self, rows: list[Row], failures: list[str]) -> str:
        """Everything, as one line of JSON."""
        return json.dumps(
            {
                "environment": environment(self.config.device),
                "synthetic_weights": True,
                "copy_bytes_per_second": self.bandwidth,
                "expected_acceptance": self.expected,
                "config": asdict(self.config),
                "rows": [row.to_json() for row in rows],
                "failures": failures,
                "vllm": VLLM,
            }
        )


def parse() -> argparse.Namespace:
    """The command line; a message and exit code 2 where it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", type=Path, help="a directory that make_calibrated_pair.py wrote")
    parser.add_argument("--data-path", type=Path, required=True, help="ShareGPT, for the prompts' lengths")
    parser.add_argument("--batches", default="1,8,32,64,128,256")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--cuda-graphs", default="auto")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--json", type=Path, help="also keep the JSON document here, row by row")
    arguments = parser.parse_args()
    arguments.batches = [int(batch) for batch in arguments.batches.split(",")]
    arguments.modes = arguments.modes.split(",")
    if unknown := set(arguments.modes) - MODES.keys():
        parser.error(f"--modes has {min(unknown)!r}: use some of {', '.join(MODES)}")
    return arguments


def prepare(arguments: argparse.Namespace) -> Bench:
    """Load the pair; the bandwidth is measured first, while the memory is free."""
    cycle, lengths = Cycle.read(arguments.pair), prompt_lengths(arguments.data_path)
    asked = EngineConfig(
        model=str(arguments.pair / "target"),
        drafter=str(arguments.pair / "drafter"),
        attention=arguments.attention,
        cuda_graphs=arguments.cuda_graphs,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        max_prefill_tokens=8192,
        prefix_cache=False,  # every run computes its prompts, those of the warm-up again too
    )
    checkpoints = open_checkpoints(asked)
    config = resolve(asked, checkpoints)
    bandwidth = copy_bandwidth(config.device)
    free_memory()
    return Bench(
        config=config,
        models=load_models(config, checkpoints),
        cycle=cycle,
        lengths=lengths,
        bandwidth=bandwidth,
        new_tokens=arguments.new_tokens,
        repeats=arguments.repeats,
    )


def measure_rows(bench: Bench, arguments: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Every batch in every mode, printed as it comes, and what could not be measured."""
    rows: list[Row] = []
    failures: list[str] = []
    for batch in arguments.batches:
        plain: float | None = None
        for mode in arguments.modes:
            try:
                row = bench.row(batch, mode, plain)
            except Exception as error:  # whatever breaks one row must not cost the others
                failures.append(f"batch {batch}, {mode}: {type(error).__name__}: {error}")
                print(failures[-1], flush=True)
            else:
                plain = row.figures.output_tokens_per_second if mode == "plain" else plain
                rows.append(row)
                print(line(row), flush=True)
            free_memory()
            if arguments.json is not None:
                arguments.json.write_text(bench.document(rows, failures) + "\n", encoding="utf-8")
    return rows, failures


def main() -> None:
    arguments = parse()
    bench = prepare(arguments)
    print(bench.header(arguments.pair), flush=True)
    rows, failures = measure_rows(bench, arguments)
    for row in rows:
        if row.figures.profile is not None:
            print("\n".join(profile_lines(row, row.figures.profile)))
    print(f"\n{bench.document(rows, failures)}")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
