"""The table of the step bench: columns, rows and plots."""

from collections.abc import Mapping

from specgen import display
from specgen.bench.bound import Work
from specgen.bench.device_speed import DeviceSpeed
from specgen.bench.output import BenchTable, Plot
from specgen.bench.parts import PARTS, StepTime
from specgen.report.table import Column, Row


def _ms(number: float | None) -> str:
    return display.DASH if number is None else f"{number:.3f}"


_COLUMNS = (
    Column(name="batch"),
    Column(name="part"),
    Column(name="time", unit="ms", show=_ms),
    Column(name="share", show=display.percent),
    Column(name="bound", unit="ms", show=_ms),
    Column(name="over_bound", show=display.ratio),
    Column(name="bound_by"),
)
_PLOTS = (
    Plot(title="A step by part", x="batch", y="time", series="part"),
    Plot(title="Time over the bound", x="batch", y="over_bound", series="part"),
)


def empty_table(conditions: Row, num_spec_tokens: int) -> BenchTable:
    """The table of steps with K = ``num_spec_tokens``, without rows."""
    return BenchTable(
        name="step",
        title=f"A decode step with {num_spec_tokens} drafts, by part",
        conditions=conditions,
        columns=_COLUMNS,
        rows=(),
        plots=_PLOTS,
        num_keys=2,
    )


def step_rows(batch: int, time: StepTime, works: Mapping[str, Work], device: DeviceSpeed) -> list[Row]:
    """One row per part of ``time`` with its bound, then the idle time and the whole step."""
    total = time.total
    bounds = {name: work.seconds(device) for name, work in works.items()}
    times = {**{part: time.parts[part] for part in PARTS}, "idle": time.idle, "step": total}
    bounds["step"] = sum(bounds.values())

    def row(part: str, seconds: float) -> Row:
        bound, work = bounds.get(part), works.get(part)
        return {
            "batch": batch,
            "part": part,
            "time": 1e3 * seconds,
            "share": seconds / total,
            "bound": None if bound is None else 1e3 * bound,
            "over_bound": None if bound is None else seconds / bound,
            "bound_by": work.limit(device) if work else display.DASH,
        }

    return [row(part, seconds) for part, seconds in times.items()]
