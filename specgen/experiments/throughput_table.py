"""The table of the throughput bench: columns, rows, plots, and the best K of each batch size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specgen.bench.matrices import Matrix
from specgen.bench.output import BenchTable, Plot, Value
from specgen.engine.arms import Arm
from specgen.experiments.plans import Yardstick
from specgen.experiments.repeat import MedianRange, Repeat, Repeats
from specgen.report import display
from specgen.report.charts import DRAFT_LENGTHS
from specgen.report.table import Column, Row, Table
from specgen.report.timings import LatencyStats

_SPREADS: Mapping[str, Callable[[Repeat], LatencyStats | None]] = {
    "ttft": lambda repeat: repeat.ttft,
    "tpot": lambda repeat: repeat.tpot,
    "itl": lambda repeat: repeat.itl,
}
_PARTS = ("mean", "median", "p99")
PLAIN = "x_plain"  # the ratio to plain decoding


@dataclass(frozen=True, kw_only=True)
class Result:
    """An arm and its repeats."""

    arm: Arm
    repeats: Repeats


def table(
    matrix: Matrix,
    conditions: Row,
    results: Sequence[Result],
    notes: Sequence[str],
    yardstick: Yardstick,
) -> BenchTable:
    """The table of ``results``, with one yardstick for all bounds; ``notes`` say which arms are missing and why."""
    mixture = any(result.repeats.touched for result in results)
    rows = tuple(_row(matrix, result, results, mixture, yardstick.bytes_per_second) for result in results)
    disturbed = [f"{r.arm.name}: {text}" for r in results for text in r.repeats.disturbances]
    return BenchTable(
        name=f"throughput-{matrix.name}",
        title=matrix.title,
        conditions=conditions,
        columns=tuple(_columns(matrix, mixture)),
        rows=rows,
        plots=tuple(_plots(matrix)),
        answers=tuple(best_lengths(rows)),
        notes=(*disturbed, *notes),
        details=tuple(wall_tables([(r.arm.changes, r.repeats) for r in results], yardstick.flops_per_second)),
        num_keys=2,
    )


def _columns(matrix: Matrix, mixture: bool) -> Iterator[Column]:
    """The columns of ``_row``."""
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
    if mixture:
        yield from (Column(name=name, show=display.rate) for name in ("experts", "experts_plain"))
        yield Column(name="experts_read", unit="ms")
    yield Column(name="same_texts", show=display.percent)
    yield Column(name="wrong_tokens")
    if matrix.latencies:
        yield from (Column(name=f"{name}_{part}", unit="ms") for name in _SPREADS for part in _PARTS)


def _row(
    matrix: Matrix, result: Result, results: Sequence[Result], mixture: bool, bytes_per_second: float
) -> Row:
    arm, repeats = result.arm, result.repeats
    row: dict[str, Value] = {**arm.changes, **_range(("speed", "lowest", "highest"), repeats.speed)}
    for ratio, labels in matrix.ratios.items():
        base = next((r for r in results if r.arm.changes == {**arm.changes, **labels}), None)
        times = None if base is None or base is result else repeats.times(base.repeats)
        row |= _range((ratio, f"{ratio}_lowest", f"{ratio}_highest"), times)
        if ratio == PLAIN:
            row[f"{PLAIN}_bound"] = None if base is None else _by_bytes(repeats, base.repeats)
    step, num_bytes = repeats.median(lambda r: r.step_seconds), repeats.median(lambda r: r.step_bytes)
    bound = None if num_bytes is None else num_bytes / bytes_per_second
    row |= {
        "repeats": len(repeats.each),
        "acceptance_length": repeats.acceptance_length,
        "acceptance": repeats.acceptance,
        "step": milliseconds(step),
        "bound": milliseconds(bound),
        "over_bound": step / bound if step and bound else None,
    }
    if mixture:
        touched = repeats.touched
        row |= {
            "experts": touched.experts if touched else None,
            "experts_plain": touched.plain if touched else None,
            "experts_read": milliseconds(touched.num_bytes / bytes_per_second) if touched else None,
        }
    row |= {
        "same_texts": repeats.same_texts(next(r.repeats for r in results if r.repeats.ids == repeats.ids)),
        "wrong_tokens": repeats.num_wrong,
    }
    if matrix.latencies:
        row |= {
            f"{name}_{part}": milliseconds(repeats.median(_figure(find, part)))
            for name, find in _SPREADS.items()
            for part in _PARTS
        }
    return row


def _by_bytes(repeats: Repeats, plain: Repeats) -> float | None:
    """How many times as fast it would be where steps took as long as reading their bytes; None of the plain arm."""
    read, read_plain = (each.median(lambda r: r.step_bytes) for each in (repeats, plain))
    emitted = repeats.median(lambda r: r.tokens_per_step)
    if repeats is plain or not read or not read_plain or emitted is None:
        return None
    return emitted * read_plain / read


def _range(names: tuple[str, str, str], found: MedianRange | None) -> dict[str, Value]:
    """Median, lowest and highest under ``names``."""
    if found is None:
        return dict.fromkeys(names)
    return dict(zip(names, (found.median, found.lowest, found.highest), strict=True))


def _figure(find: Callable[[Repeat], LatencyStats | None], part: str) -> Callable[[Repeat], float | None]:
    return lambda repeat: getattr(find(repeat), part, None)


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
        fixed = [row for row in mine if row["K"] != "auto"]
        if not fixed:
            continue
        best = max(fixed, key=_speed)
        text = f"batch {batch}: K {best['K']} is best, {display.count(_speed(best))} tokens/s"
        if isinstance(best[PLAIN], float):
            text += f", {display.ratio(best[PLAIN])} plain decoding"
        auto = [
            f"; auto has {display.percent(_speed(row) / _speed(best))} of it"
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
    "pass and after the last one; of_products: what of prefill must be, the target's products for the prompts at the "
    "{speed:.3g} TFLOP/s of a large one"
)
_WALL = {
    "prefill": ("prefill",),
    "full": ("full",),
    "filling": ("filling",),
    "tail": ("tail",),
    "idle": ("idle_outside", "idle_engine"),
    "captures": ("captures",),
    "rest": ("rest",),
}


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
    keys = tuple(Column(name=name) for name in arms[0][0])
    yield Table(
        title="Where the wall time went",
        note="of the repeat in the middle, in shares of its wall time",
        columns=(
            *keys,
            Column(name="wall", unit="s", show=display.plain),
            *(Column(name=name, show=display.percent) for name in ("prefill", "of_products")),
            Column(name="passes"),
            *(Column(name=name, show=display.percent) for name in _WALL if name != "prefill"),
        ),
        rows=tuple(rows),
        num_keys=len(keys),
    )


def _middle(repeats: Repeats) -> Repeat:
    """The repeat of the median speed; of an even number, the slower of two."""
    ordered = sorted(repeats.each.values(), key=lambda repeat: repeat.tokens_per_second)
    return ordered[(len(ordered) - 1) // 2]


def _wall_row(changes: Mapping[str, Any], repeat: Repeat, flops_per_second: float) -> Row:
    assert repeat.wall is not None
    shares = repeat.wall.shares(repeat.seconds)
    parts = {name: sum(shares[each] for each in of) for name, of in _WALL.items()}
    return {
        **changes,
        "wall": repeat.seconds,
        "prefill": parts.pop("prefill"),
        "of_products": repeat.prefill_flops / flops_per_second / repeat.seconds,
        "passes": repeat.prefill_passes,
        **parts,
    }
