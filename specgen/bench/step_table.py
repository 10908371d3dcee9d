"""The tables of the step bench: parts, kernels, kinds of kernels, and the roofline of the products.

A kernel's kind is recognised by its name. Weights are read by GEMMs and the KV cache by attention, so that each has its
own bound; what other kernels do has none.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from specgen.bench.bound import DeviceSpeed, Work
from specgen.bench.marks import PARTS, StepTime
from specgen.bench.output import BenchTable, Plot
from specgen.report import display
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
_BY_KERNEL = Table(
    title="By kernel",
    note="time a step that no earlier kernel overlaps; those of less than 0.5 % are left out",
    columns=(
        Column(name="batch"),
        Column(name="part"),
        Column(name="kernel"),
        Column(name="time", unit="us", show=display.rate),
        Column(name="calls", show=display.rate),
        Column(name="each", unit="us", show=display.plain),
        Column(name="share", show=display.percent),
    ),
    rows=(),
    num_keys=3,
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


def _digits(number: float | None) -> str:
    """Three digits that count: of a CPU's speeds few are in front of the point."""
    return display.DASH if number is None else f"{number:.3g}"


KINDS = ("products", "attention", "other")
_ATTENTION = re.compile(
    r"mha|xqa|mla|attention|(decode|prefill)with|hopper_decode|latent_plan|merge_?states|fmha|flash"
)
_PRODUCTS = re.compile(
    r"gemm|gemv|nvjet|splitk|skinny|hopper_linear|^linear_kernel|xmma|cutlass|^_fp8|^_gate_up|^_down"
)
_BY_KIND = Table(
    title="By kind of kernel",
    note="products read the weights and attention the KV cache: the least that takes; kinds are recognised by name",
    columns=(
        Column(name="batch"),
        Column(name="part"),
        Column(name="kind"),
        Column(name="time", unit="us", show=display.rate),
        Column(name="bound", unit="us", show=display.rate),
        Column(name="over_bound", show=display.ratio),
        Column(name="bound_by"),
    ),
    rows=(),
    num_keys=3,
)
_ROOFLINE = Table(
    title="Roofline of the products",
    note="the roof is {bandwidth:.3g} TB/s, then {peak:.3g} TFLOP/s. Dense weights of one byte count half, as FP8 is "
    "multiplied at twice the speed",
    columns=(
        Column(name="batch"),
        Column(name="part"),
        Column(name="intensity", title="FLOPs per byte", show=display.plain),
        Column(name="speed", unit="TFLOP/s", show=_digits),
        Column(name="roof", unit="TFLOP/s", show=_digits),
    ),
    rows=(),
    num_keys=2,
)


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name, without parameters."""
    name = kernel.lower()
    return "attention" if _ATTENTION.search(name) else "products" if _PRODUCTS.search(name) else "other"


def kind_rows(batch: int, time: StepTime, works: Mapping[str, Work], device: DeviceSpeed) -> list[Row]:
    """The time of each part's kernels by kind, with the bound of those that read weights or the KV cache.

    Parts without products, such as ``accept``, are left out.
    """
    times = Counter[tuple[str, str]]()
    for kernel in time.kernels:
        times[kernel.part, kind_of(kernel.name)] += kernel.seconds  # type: ignore[assignment]
    rows: list[Row] = []
    for part, work in works.items():
        split = {"products": work.without_cache, "attention": work.cache}
        for kind in KINDS if work.flops else ():
            seconds, least = times[part, kind], split.get(kind)
            if not seconds:
                continue
            bound = least.seconds(device) if least else 0.0
            rows.append(
                {
                    "batch": batch,
                    "part": part,
                    "kind": kind,
                    "time": 1e6 * seconds,
                    "bound": 1e6 * bound if bound else None,
                    "over_bound": seconds / bound if bound else None,
                    "bound_by": least.limit(device) if least and bound else display.DASH,
                }
            )
    return rows


def roofline_rows(batch: int, time: StepTime, works: Mapping[str, Work], device: DeviceSpeed) -> list[Row]:
    """The GEMMs of each part, with their own time if kernels are known; else the part's, with all it reads."""
    of_products = Counter[str]()
    for kernel in time.kernels:
        of_products[kernel.part] += (kind_of(kernel.name) == "products") * kernel.seconds  # type: ignore[assignment]
    rows: list[Row] = []
    for part, whole in works.items():
        work = whole.without_cache if time.kernels else whole
        seconds = of_products[part] if time.kernels else time.parts[part]
        if work.flops and seconds:
            rows.append(
                {
                    "batch": batch,
                    "part": part,
                    "intensity": work.flops / work.num_bytes,
                    "speed": work.flops / seconds / 1e12,
                    "roof": work.flops / work.seconds(device) / 1e12,
                }
            )
    return rows


def with_details(
    table: BenchTable, batch: int, time: StepTime, works: Mapping[str, Work], device: DeviceSpeed
) -> BenchTable:
    """``table`` with one step more in the tables of kernels, if they are known, and in the roofline of its page."""
    kernels = [
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
    ]
    peak, bandwidth = device.flops_per_second / 1e12, device.bytes_per_second / 1e12
    details = _extended(table.details, _BY_KERNEL, kernels)
    roofline = replace(_ROOFLINE, note=_ROOFLINE.note.format(bandwidth=bandwidth, peak=peak))
    return replace(
        table,
        details=_extended(details, _BY_KIND, kind_rows(batch, time, works, device)),
        more=_extended(table.more, roofline, roofline_rows(batch, time, works, device)),
    )


def _extended(tables: Sequence[Table], empty: Table, rows: Sequence[Row]) -> tuple[Table, ...]:
    """``tables`` with ``rows`` behind those of the table titled as ``empty``, which is made where it is missing."""
    found = {each.title: each for each in tables}
    if rows:
        before = found.get(empty.title, empty)
        found[empty.title] = replace(before, rows=(*before.rows, *rows))
    return tuple(found.values())
