"""The throughput bench: the arms of a matrix on one workload, in one process.

Arms alternate within a round (a b c, a b c) as far as their engines fit together into half of the memory that the
weights leave; the other half is for activations and captures. Neighbours form a group. An arm that does not fit with
others runs all its repeats before the next arm, because building its engine again for every repeat would take longer
than the measurement. The conditions list the groups. See ``turns`` for what is timed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.config import EngineConfig, require
from specgen.engine.build import room_for_turns
from specgen.engine.choices import attention_note
from specgen.experiments.matrices import Matrix, Workload
from specgen.experiments.output import BenchTable, Plot, Value, selected
from specgen.experiments.plans import Plan, Prepared, Yardstick, forecast, prepare, side_by_side, yardstick_of
from specgen.experiments.rounds import (
    MedianRange,
    Repeat,
    Repeats,
    disturbed,
    kept_rounds,
    record_of,
    seen_rounds,
)
from specgen.experiments.timing import conditions
from specgen.experiments.turns import Turns, Watch, nobody
from specgen.report import display
from specgen.report.charts import DRAFT_LENGTHS
from specgen.report.table import Column, Row, Table
from specgen.report.terminal import Part


@dataclass(frozen=True, kw_only=True)
class ThroughputJob:
    """One run of ``specgen bench throughput``; ``engine`` is the configuration that arms change."""

    matrix: Matrix
    workload: Workload
    engine: EngineConfig
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
        return {"axes": axes, "workload": self.workload.to_json(), "repeats": self.repeats}


def prepared(job: ThroughputJob, output: Path | None = None) -> Prepared:
    """Its arms, prompts and memory, before a weight is read."""
    return prepare(
        job.matrix.arms,
        job.engine,
        job.workload,
        axes=[axis.name for axis in job.matrix.axes],
        record=None if output is None else record_of(output, job.name),
    )


def forecast_of(job: ThroughputJob, output: Path | None) -> Iterator[Part]:
    """What ``--dry-run`` prints: what is left to do beside the rounds in ``output``."""
    ready = prepared(job, output)
    settings = ready.manifest(job.to_json(), with_fingerprints=False)
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
    settings = ready.manifest(job.to_json()) if output is not None else {}
    with kept_rounds(output, job.name, settings) as rounds:
        yardstick = yardstick_of(ready)
        models = ready.load()
        groups = side_by_side(ready.plans, room_for_turns(ready.base, models))
        under = {**_conditions(job, ready, groups, yardstick), **yardstick.conditions}
        turns = Turns(lambda plan: models, yardstick, rounds, watch)

        def so_far() -> BenchTable:
            measured = rounds.measured(plan.arm.name for plan in ready.plans)
            return table(job.matrix, under, measured, [*ready.notes, *turns.notes], yardstick)

        for number, group in enumerate(groups):
            turns.turns_behind = sum(map(len, groups[number + 1 :])) * (job.repeats + 1)
            for _ in turns.run(group, most=job.repeats):
                yield so_far()
        yield so_far()


def _conditions(job: ThroughputJob, ready: Prepared, groups: list[list[Plan]], yardstick: Yardstick) -> Row:
    config, workload = ready.base, job.workload
    fixed = {axis.name for axis in job.matrix.axes}
    # what attends in the arms: of those of one backend, in the one with the most drafts
    configs = sorted((plan.config for plan in ready.plans), key=lambda config: config.draft_length.most)
    attentions = {each.attention: attention_note(each, ready.checkpoints) for each in configs}
    found = {
        **conditions(config, ready.models),
        "draft tokens (K)": None if "K" in fixed else config.draft_length.most,
        "batch": None if "batch" in fixed else f"at most {config.max_batch_size}",
        "attention": "; ".join(attentions.values()),
        "CUDA graphs": None if "cuda_graphs" in fixed else config.cuda_graphs,
        "prompts": f"{ready.prompts.description}{workload.size}, greedy, {workload.lengths}",
        "time": "of generate, prefill included; no prefix cache; after one warm-up run of the workload",
        "repeats": f"{job.repeats}, the median, with the lowest and the highest; ratios are of the same repeat, and of "
        "all pairs of repeats where two arms did not take turns",
        "arms that took turns": "; ".join(str(len(group)) for group in groups),
        "same_texts": None
        if config.synthetic_acceptance
        else "share of the texts that are equal to those of the first row with the same prompts",
        "wall time": TERMS.format(speed=yardstick.flops_per_second / 1e12),
        "acceptance": "share of the steps that accepted more than 0, 1, ... drafts",
    }
    return {name: text for name, text in found.items() if text is not None}


# --- the table ------------------------------------------------------------------------------------


_SPREADS = ("ttft", "tpot", "itl")
_PARTS = ("mean", "median", "p99")
PLAIN = "x_plain"  # the ratio to plain decoding


def table(
    matrix: Matrix,
    conditions: Row,
    measured: Mapping[str, Repeats],
    notes: Sequence[str],
    yardstick: Yardstick,
) -> BenchTable:
    """The table of what was ``measured``, by arm, with one yardstick for all bounds.

    ``notes`` say which arms are missing and why.
    """
    results = [(arm.changes, measured[arm.name]) for arm in matrix.arms if arm.name in measured]
    rows = [_row(matrix, *each, results, yardstick) for each in results]
    busy, others = disturbed(measured)
    columns = tuple(_columns(matrix))
    return BenchTable(
        name=f"throughput-{matrix.name}",
        title=matrix.title,
        conditions=conditions,
        columns=columns,
        rows=selected(columns, rows),
        plots=tuple(_plots(matrix)),
        answers=(*best_lengths(rows), *busy),
        notes=(*others, *notes),
        details=tuple(wall_tables(results, yardstick.flops_per_second)),
        num_keys=2,
    )


def _columns(matrix: Matrix) -> Iterator[Column]:
    yield from (Column(name=axis.name) for axis in matrix.axes)
    yield from (
        Column(name=name, unit="tokens/s", show=display.rate) for name in ("speed", "lowest", "highest")
    )
    for ratio in matrix.ratios:
        yield from (Column(name=f"{ratio}{end}", show=display.ratio) for end in ("", "_lowest", "_highest"))
        if ratio == PLAIN:
            yield Column(name=f"{PLAIN}_bound", show=display.ratio)
    yield from (Column(name=name) for name in ("repeats", "acceptance_length", "acceptance"))
    yield from (Column(name=name, unit="ms") for name in ("step", "bound"))
    yield Column(name="over_bound", show=display.ratio)
    yield Column(name="same_texts", show=display.percent)
    yield Column(name="wrong_tokens")
    if matrix.latencies:
        yield from (Column(name=f"{name}_{part}", unit="ms") for name in _SPREADS for part in _PARTS)


def _row(
    matrix: Matrix,
    changes: Mapping[str, Any],
    repeats: Repeats,
    results: Sequence[tuple[Mapping[str, Any], Repeats]],
    yardstick: Yardstick,
) -> Row:
    """The values of every column there may be."""
    row: dict[str, Value] = {**changes, **_range(("speed", "lowest", "highest"), repeats.speed)}
    for ratio, labels in matrix.ratios.items():
        base = next((other for arm, other in results if arm == {**changes, **labels}), None)
        times = None if base is None or base is repeats else repeats.times(base)
        row |= _range((ratio, f"{ratio}_lowest", f"{ratio}_highest"), times)
        if ratio == PLAIN:
            row[f"{PLAIN}_bound"] = None if base is None else _by_bytes(repeats, base)
    step, num_bytes = repeats.median(lambda r: r.step_seconds), repeats.median(lambda r: r.step_bytes)
    bound = None if num_bytes is None else num_bytes / yardstick.bytes_per_second
    latencies = {
        f"{name}_{part}": milliseconds(repeats.median(_latency(name, part)))
        for name in _SPREADS
        for part in _PARTS
    }
    return {
        **row,
        "repeats": len(repeats.each),
        "acceptance_length": repeats.acceptance_length,
        "acceptance": repeats.acceptance,
        "step": milliseconds(step),
        "bound": milliseconds(bound),
        "over_bound": step / bound if step and bound else None,
        "same_texts": None
        if yardstick.synthetic_acceptance
        else repeats.same_texts(next(other for _, other in results if other.ids == repeats.ids)),
        "wrong_tokens": repeats.num_wrong,
        **latencies,
    }


def _by_bytes(repeats: Repeats, plain: Repeats) -> float | None:
    """How many times as fast it would be where steps took as long as reading their bytes; None of the plain arm."""
    read, read_plain = (each.median(lambda r: r.step_bytes) for each in (repeats, plain))
    emitted = repeats.median(lambda r: r.tokens_per_step)
    if repeats is plain or not read or not read_plain or emitted is None:
        return None
    return emitted * read_plain / read


def _range(names: tuple[str, str, str], found: MedianRange | None) -> dict[str, Value]:
    if found is None:
        return dict.fromkeys(names)
    return dict(zip(names, (found.median, found.lowest, found.highest), strict=True))


def _latency(name: str, part: str) -> Callable[[Repeat], float | None]:
    return lambda repeat: getattr(getattr(repeat, name), part, None)


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _plots(matrix: Matrix) -> Iterator[Plot]:
    """Speed, ratios and latencies over the first axis, one line per value of the second."""
    x, series = (axis.name for axis in matrix.axes)
    shown = {"speed": "Output tokens per second"}
    shown |= {ratio: f"Speed, {ratio.replace('_', ' ')}" for ratio in matrix.ratios}
    shown |= {f"{name}_median": f"Median {name.upper()}" for name in (_SPREADS if matrix.latencies else ())}
    ranges = {"speed": ("lowest", "highest")}
    ranges |= {ratio: (f"{ratio}_lowest", f"{ratio}_highest") for ratio in matrix.ratios}
    for y, title in shown.items():
        yield Plot(
            title=title,
            x=x,
            y=y,
            series=series,
            ends=ranges.get(y),
            reference=1.0 if y in matrix.ratios else None,
            order=DRAFT_LENGTHS if series == "K" else (),
        )


def best_lengths(rows: Sequence[Row]) -> Iterator[str]:
    """The fastest K of each batch size and its speedup; nothing without these columns."""
    if not rows or not {"batch", "K"} <= rows[0].keys():
        return
    for batch in dict.fromkeys(row["batch"] for row in rows):
        mine = [row for row in rows if row["batch"] == batch]
        fixed = [row for row in mine if isinstance(row["K"], int)]
        if not fixed:
            continue
        best = max(fixed, key=_speed)
        text = f"batch {batch}: K {best['K']} is best, {display.count(_speed(best))} tokens/s"
        if isinstance(best[PLAIN], float):
            text += f", {display.ratio(best[PLAIN])} plain decoding"
        auto = [
            f"; {row['K']} has {display.percent(_speed(row) / _speed(best))} of it"
            for row in mine
            if row not in fixed
        ]
        yield text + "".join(auto) + "."


def _speed(row: Row) -> float:
    speed = row["speed"]
    assert isinstance(speed, float)
    return speed


TERMS = (
    "full: what the decode steps would take if each had the largest batch; filling and tail: what smaller steps take "
    "beyond that, while prompts wait and when none is left; idle: the device has nothing to do; rest: before the first "
    "pass and after the last one; of_gemms: what of prefill must be, the target's GEMMs for the prompts at the "
    "{speed:.3g} TFLOP/s of a large one"
)
_WALL = ("full", "filling", "tail", "idle", "captures", "rest")


def wall_tables(
    arms: Sequence[tuple[Mapping[str, Any], Repeats]], flops_per_second: float
) -> Iterator[Table]:
    """The parts of the wall time of each arm's middle repeat, so that they add up; arms by what they change."""
    each = [(changes, _middle(repeats)) for changes, repeats in arms]
    rows = [
        _wall_row(changes, repeat, flops_per_second) for changes, repeat in each if repeat.wall is not None
    ]
    if not rows:  # rounds of earlier versions
        return
    changed = arms[0][0]
    columns = (
        *(Column(name=name) for name in changed),
        Column(name="wall", unit="s", show=display.plain),
        *(Column(name=name, show=display.percent) for name in ("prefill", "of_gemms")),
        Column(name="passes"),
        *(Column(name=name, show=display.percent) for name in _WALL),
    )
    yield Table(
        title="Where the wall time went",
        note="of the repeat in the middle, in shares of its wall time",
        columns=columns,
        rows=selected(columns, rows),
        num_keys=len(changed),
    )


def _middle(repeats: Repeats) -> Repeat:
    """The repeat of the median speed; of an even number, the slower of two."""
    ordered = sorted(repeats.each.values(), key=lambda repeat: repeat.tokens_per_second)
    return ordered[(len(ordered) - 1) // 2]


def _wall_row(changes: Mapping[str, Any], repeat: Repeat, flops_per_second: float) -> Row:
    assert repeat.wall is not None
    shares = repeat.wall.shares(repeat.seconds)
    return {
        **changes,
        **shares,
        "wall": repeat.seconds,
        "of_gemms": repeat.prefill_flops / flops_per_second / repeat.seconds,
        "passes": repeat.prefill_passes,
        "idle": shares["idle_outside"] + shares["idle_engine"],
    }
