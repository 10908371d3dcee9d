"""The table of the step bench: columns, rows and plots."""

from collections.abc import Mapping
from dataclasses import replace

from specgen import display
from specgen.bench.bound import Work
from specgen.bench.device_speed import DeviceSpeed
from specgen.bench.output import BenchTable, Plot
from specgen.bench.parts import PARTS, StepTime
from specgen.report.table import Column, Row, Table


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
    Column(name="excess", show=display.percent),
)
_KERNELS = (
    Column(name="batch"),
    Column(name="part"),
    Column(name="kernel"),
    Column(name="time", unit="us", show=display.rate),
    Column(name="calls", show=display.rate),
    Column(name="each", unit="us", show=display.plain),
    Column(name="share", show=display.percent),
)
_LEAST = 0.005  # of a step: kernels of less time are not shown
_PLOTS = (
    Plot(title="A step by part", x="batch", y="time", series="part"),
    Plot(title="Time over the bound", x="batch", y="over_bound", series="part"),
)


def empty_table(conditions: Row, num_spec_tokens: int) -> BenchTable:
    """The table of steps with K = ``num_spec_tokens``, without rows."""
    return BenchTable(
        name="step",
        title=f"A decode step with {num_spec_tokens} drafts, by part"
        if num_spec_tokens
        else "A plain decode step",
        conditions=conditions,
        columns=_COLUMNS,
        rows=(),
        plots=_PLOTS,
        num_keys=2,
    )


def step_rows(batch: int, time: StepTime, works: Mapping[str, Work], device: DeviceSpeed) -> list[Row]:
    """One row per part of ``time`` with its bound, then the idle time and the whole step.

    ``excess`` is the share of what the step takes beyond its bound: where there is most to gain.
    """
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
            "excess": (seconds - (bound or 0.0)) / beyond if beyond > 0 else None,
        }

    beyond = total - bounds["step"]
    return [row(part, seconds) for part, seconds in times.items()]


def with_kernels(table: BenchTable, batch: int, time: StepTime) -> BenchTable:
    """``table`` with the kernels of one step more, if they are known."""
    rows = tuple(
        {
            "batch": batch,
            "part": kernel.part,
            "kernel": kernel.name,
            "time": 1e6 * kernel.seconds,
            "calls": kernel.calls,
            "each": 1e6 * kernel.seconds / kernel.calls,
            "share": kernel.seconds / time.total,
        }
        for kernel in time.kernels
        if kernel.seconds >= _LEAST * time.total
    )
    if not rows:
        return table
    title, note = (
        "By kernel",
        "time a step that no earlier kernel overlaps; those of less than 0.5 % are left out",
    )
    details = {each.title: each for each in table.details}
    before = details[title].rows if title in details else ()
    details[title] = Table(title=title, note=note, columns=_KERNELS, rows=(*before, *rows), num_keys=3)
    return replace(table, details=tuple(details.values()))
