"""The throughput bench: the arms of a matrix on one workload, in one process.

Arms alternate within a round (a b c, a b c) as far as their engines fit together into half of the memory that the
weights leave; the other half is for activations and captures. Neighbours form a group. An arm that does not fit with
others runs all its repeats before the next arm, because building its engine again for every repeat would take longer
than the measurement. The conditions list the groups. See ``turns`` for what is timed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specgen.bench.environment import conditions
from specgen.bench.matrices import Matrix, Workload
from specgen.bench.output import BenchTable
from specgen.config import EngineConfig, require
from specgen.engine.choices import attention_note
from specgen.engine.memory import room_for_turns
from specgen.experiments.plans import Plan, Prepared, Yardstick, forecast, prepare, side_by_side, yardstick_of
from specgen.experiments.rounds import Rounds, kept_rounds, record_of, seen_rounds
from specgen.experiments.throughput_table import TERMS, Result, table
from specgen.experiments.turns import Turns, Watch, nobody
from specgen.report.table import Row
from specgen.report.terminal import Part


@dataclass(frozen=True, kw_only=True)
class ThroughputJob:
    """One run of ``specgen bench throughput``; ``engine`` is the configuration that arms change."""

    matrix: Matrix
    workload: Workload
    engine: EngineConfig
    data_path: Path | None
    repeats: int

    def __post_init__(self) -> None:
        require(self.repeats >= 1, f"repeats is {self.repeats}: use at least 1")
        require(
            self.engine.draft_length.most >= 1,
            "num-spec-tokens is 0, but plain decoding is a separate arm: use 1 to 16",
        )

    @property
    def name(self) -> str:
        """That of its files."""
        return f"throughput-{self.matrix.name}"

    def to_json(self) -> dict[str, Any]:
        """What the manifest of its engine and data does not say."""
        axes = {axis.name: ", ".join(axis.values) for axis in self.matrix.axes}
        return {"axes": axes, "workload": asdict(self.workload), "repeats": self.repeats}


def prepared(job: ThroughputJob, output: Path | None = None) -> Prepared:
    """Its arms, prompts and memory, before a weight is read."""
    return prepare(
        job.matrix.arms,
        job.engine,
        job.workload,
        job.data_path,
        axes=[axis.name for axis in job.matrix.axes],
        record=None if output is None else record_of(output, job.name),
    )


def forecast_of(job: ThroughputJob, output: Path | None) -> Iterator[Part]:
    """What ``--dry-run`` prints: what is left to do beside the rounds in ``output``."""
    ready = prepared(job, output)
    settings = ready.manifest(job.workload, job.data_path, job.to_json(), with_fingerprints=False)
    rounds = seen_rounds(output, job.name, settings)
    missing = {plan.arm.name: job.repeats - rounds.count(plan.arm.name) for plan in ready.plans}
    left = {arm: (number, number) for arm, number in missing.items() if number > 0}
    return forecast(ready, yardstick_of(ready), left)


def throughput(job: ThroughputJob, output: Path | None = None, watch: Watch = nobody) -> Iterator[BenchTable]:
    """Yield the growing table after each round of each group of arms, and the whole one at the end.

    Rounds are kept in ``output``, and those kept there by the same bench are not measured again. An arm that cannot
    run, or fails, is a note. ``UserError`` if nothing can run.
    """
    ready = prepared(job, output)
    settings = ready.manifest(job.workload, job.data_path, job.to_json()) if output is not None else {}
    with kept_rounds(output, job.name, settings) as rounds:
        yield from _measure(job, ready, rounds, watch)


def _measure(job: ThroughputJob, ready: Prepared, rounds: Rounds, watch: Watch) -> Iterator[BenchTable]:
    yardstick = yardstick_of(ready)
    models = ready.load()
    groups = side_by_side(ready.plans, room_for_turns(ready.base, models))
    under = {**_conditions(job, ready, groups, yardstick), **yardstick.conditions}
    turns = Turns(lambda plan: models, yardstick, rounds, watch)

    def so_far() -> BenchTable:
        repeats = rounds.measured(plan.arm.name for plan in ready.plans)
        results = [
            Result(arm=plan.arm, repeats=repeats[plan.arm.name])
            for plan in ready.plans
            if plan.arm.name in repeats
        ]
        return table(job.matrix, under, results, [*ready.notes, *turns.notes], yardstick)

    def due(arms: Sequence[str], rounds: Rounds) -> list[str]:
        return rounds.incomplete(arms, job.repeats)

    for number, group in enumerate(groups):
        turns.turns_behind = sum(map(len, groups[number + 1 :])) * (job.repeats + 1)
        for _ in turns.run(group, due, most=job.repeats):
            yield so_far()
    yield so_far()


def _attentions(ready: Prepared) -> Iterable[str]:
    """What attends in the arms: of those of one backend, in the one with the most drafts."""
    configs = sorted((plan.config for plan in ready.plans), key=lambda config: config.draft_length.most)
    found = {config.attention: attention_note(config, ready.checkpoints) for config in configs}
    return found.values()


def _conditions(job: ThroughputJob, ready: Prepared, groups: list[list[Plan]], yardstick: Yardstick) -> Row:
    config, workload = ready.base, job.workload
    fixed = {axis.name for axis in job.matrix.axes}
    return {
        **conditions(config, ready.models),
        **({} if "K" in fixed else {"draft tokens (K)": config.draft_length.most}),
        **({} if "batch" in fixed else {"batch": f"at most {config.max_batch_size}"}),
        "attention": "; ".join(_attentions(ready)),
        **({} if "cuda_graphs" in fixed else {"CUDA graphs": config.cuda_graphs}),
        "prompts": f"{ready.prompts.description}{workload.size}, greedy, {workload.lengths}",
        "time": "of generate, prefill included; no prefix cache; after one warm-up run of the workload",
        "repeats": f"{job.repeats}, the median, with the lowest and the highest; ratios are of the same repeat, and of "
        "all pairs of repeats where two arms did not take turns",
        "arms that took turns": "; ".join(str(len(group)) for group in groups),
        "same_texts": "share of the texts that are equal to those of the first row with the same prompts",
        "wall time": TERMS.format(speed=yardstick.flops_per_second / 1e12),
        "acceptance": "share of the steps that accepted more than 0, 1, ... drafts",
    }
