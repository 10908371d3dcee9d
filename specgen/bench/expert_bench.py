"""The experts bench: the experts of one layer of a mixture, by shape and number of rows, against what bounds them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen import display
from specgen.bench.device_speed import DeviceSpeed, copy_bandwidth, matrix_flops
from specgen.bench.environment import environment, free_memory
from specgen.bench.expert_layers import SHAPES, ExpertShape, Routes, exact, expert_bytes, touched
from specgen.bench.kernels import relative_error
from specgen.bench.output import BenchTable, Plot
from specgen.bench.timing import COLD_BYTES, Timing, num_layers, time_layers
from specgen.config import require
from specgen.ops import bind_ops
from specgen.ops.experts import Experts, ExpertsMap, grouped_experts
from specgen.report.table import Column, Row

# largest relative error of a row: products of two matrices, rounded between them
_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
_MOST_LAYERS = 6  # with weights of their own; further ones use them again, with other routes
_COLUMNS = (
    Column(name="shape"),
    Column(name="rows"),
    Column(name="touched", show=display.plain),
    Column(name="mean", unit="us", show=display.plain),
    Column(name="std", unit="us", show=display.plain),
    Column(name="grouped_mean", unit="us", show=display.plain),
    Column(name="speedup", show=display.ratio),
    Column(name="bound", unit="us"),
    Column(name="over_bound", show=display.ratio),
    Column(name="difference", show=display.percent),
)


@dataclass(frozen=True, kw_only=True)
class ExpertJob:
    """One run of ``specgen bench experts``; ``UserError`` for invalid values."""

    shapes: tuple[str, ...]
    rows: tuple[int, ...]
    repeats: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        require(self.repeats >= 2, f"repeats is {self.repeats}: a deviation needs at least 2")
        for name in self.shapes:
            require(name in SHAPES, f"shapes has {name!r}: use {', '.join(SHAPES)}")


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """Layers of one shape, as they are and as the kernels read them."""

    shape: ExpertShape
    plain: tuple[Experts, ...]
    maps: tuple[ExpertsMap, ...]

    @property
    def expert_bytes(self) -> int:
        return expert_bytes(self.plain[0])


def measure(job: ExpertJob) -> Iterator[BenchTable]:
    """Yield the growing table after each number of rows."""
    speed = DeviceSpeed(
        bytes_per_second=copy_bandwidth(str(job.device)),
        flops_per_second=matrix_flops(str(job.device), job.dtype),
    )
    table = _empty_table(job, speed)
    for name in job.shapes:
        free_memory()
        loaded = _load(job, SHAPES[name])
        for rows in sorted(job.rows):
            row, wrong = _measure(job, loaded, name, rows, speed)
            if wrong:
                table = replace(
                    table, notes=(*table.notes, f"not in the table: {name}, {rows} rows: {wrong}")
                )
            else:
                table = replace(table, rows=(*table.rows, row))
            yield table
        del loaded


def _load(job: ExpertJob, shape: ExpertShape) -> _Loaded:
    bind = bind_ops(job.device, job.dtype).experts
    first = shape.layer(0, job.dtype, job.device)
    few = min(min(job.rows) * shape.k, shape.num_experts)
    count = min(_MOST_LAYERS, num_layers(few * expert_bytes(first), job.device))
    plain = (first, *(shape.layer(index, job.dtype, job.device) for index in range(1, count)))
    return _Loaded(shape=shape, plain=plain, maps=tuple(bind(experts) for experts in plain))


@torch.inference_mode()
def _measure(job: ExpertJob, loaded: _Loaded, name: str, rows: int, speed: DeviceSpeed) -> tuple[Row, str]:
    """One row, and what is wrong with the result, if anything."""
    shape = loaded.shape
    x = torch.randn(rows, shape.hidden, device=job.device).to(job.dtype)
    few = min(rows * shape.k, shape.num_experts)
    count = num_layers(few * loaded.expert_bytes, job.device)
    routes = [shape.routes(rows, index, job.dtype, job.device) for index in range(count)]
    num_touched = sum(len(touched(ids)) for ids, _ in routes) / count
    ours = _time(job, loaded.maps, x, routes)
    grouped = None
    if not (shape.mxfp4 or shape.fp8):
        maps = tuple(grouped_experts(experts) for experts in loaded.plain)
        grouped = _time(job, maps, x, routes)
    last = (count - 1) % len(loaded.maps)
    output = ours.output.float().sum(0)
    again = loaded.maps[last](x, *routes[-1])
    difference = relative_error(output, exact(loaded.plain[last], x, *routes[-1]))
    wrong = ""
    if not difference <= _TOLERANCES[job.dtype]:  # NaN is not
        wrong = f"differs from float32 by {display.percent(difference)}"
    elif not torch.equal(again, ours.output):
        wrong = "differs between runs"
    flops_per_second = speed.flops_per_second * (2 if shape.fp8 else 1)  # e4m3 on tensor cores
    bound = max(
        num_touched * loaded.expert_bytes / speed.bytes_per_second, shape.flops(rows) / flops_per_second
    )
    row = {
        "shape": name,
        "rows": rows,
        "touched": num_touched,
        "mean": 1e6 * ours.mean,
        "std": 1e6 * ours.std,
        "grouped_mean": None if grouped is None else 1e6 * grouped.mean,
        "speedup": None if grouped is None else grouped.mean / ours.mean,
        "bound": 1e6 * bound,
        "over_bound": ours.mean / bound,
        "difference": difference,
    }
    return row, wrong


def _time(job: ExpertJob, maps: tuple[ExpertsMap, ...], x: Tensor, routes: list[Routes]) -> Timing:
    """Calls of the layers in turn, each with routes of its own."""

    def call(index: int) -> Tensor:
        return maps[index % len(maps)](x, *routes[index])

    for index in range(min(len(maps), len(routes))):
        call(index)
    return time_layers(call, len(routes), job.repeats, job.device)


def _empty_table(job: ExpertJob, speed: DeviceSpeed) -> BenchTable:
    on_cpu, cold = job.device.type == "cpu", COLD_BYTES[job.device.type] >> 20
    timed = "wall time of calls" if on_cpu else "time on the GPU of calls in one CUDA graph"
    conditions: Row = {
        **environment(str(job.device)),
        "shapes": "; ".join(f"{name}: {SHAPES[name]}" for name in job.shapes),
        "dtype": str(job.dtype).removeprefix("torch."),
        "values": "random; every row's experts as likely as any others",
        "time": f"{timed} over layers of which {cold} MiB or more are read, so that no cache holds them; "
        "routing and the sum over experts are not in it",
        "touched": "experts that a layer's rows chose, the mean over layers",
        "grouped": "torch's grouped_mm between a sort and a sum",
        "bound": f"bytes of the experts touched over the bandwidth of a copy, {speed.bytes_per_second / 1e12:.3f} "
        f"TB/s, or the products at {speed.flops_per_second / 1e12:.3f} TFLOP/s where that is longer (FP8: at twice as "
        "many)",
        "difference": "largest relative error of a row against float32",
        "repeats": job.repeats,
    }
    return BenchTable(
        name="experts",
        title="The experts of one layer of a mixture",
        conditions=conditions,
        columns=_COLUMNS,
        rows=(),
        plots=(Plot(title="over the bound", x="rows", y="over_bound", series="shape"),),
        num_keys=2,
    )
