"""The experts bench: the experts of one layer of a mixture, by shape and number of rows, against what bounds them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from bound import copy_bandwidth, matrix_flops, shown_bandwidth
from layer_timing import COLD_BYTES, Timing, num_layers, relative_error, time_layers
from programs import OUTPUT, DeviceSpeed, program_of, publish
from torch import Tensor

from specgen.cli.main import main
from specgen.cli.options import AS_JSON, Only, repeating, with_options
from specgen.cli.progress_bar import QUIET
from specgen.config import EngineConfig, counts, option, require
from specgen.engine.choices import DTYPES, choose_device, choose_dtype
from specgen.experiments.output import BenchTable, Plot
from specgen.experiments.plans import environment, free_memory
from specgen.ops import bind_ops
from specgen.ops.experts import Experts, ExpertsMap, Gating, from_mxfp4, grouped_experts
from specgen.ops.fp8 import plain_matrix, rounded
from specgen.ops.weight import GROUP, Weight
from specgen.report import display
from specgen.report.table import Column, Row

_SWIGLU = Gating()
_CLAMPED = Gating(alpha=1.702, shift=1.0, limit=7.0)
Routes = tuple[Tensor, Tensor]  # ids [rows, k] int64 and weights [rows, k]


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts of one layer of a model."""

    num_experts: int
    hidden: int
    inner: int
    k: int  # experts per row
    gating: Gating = _SWIGLU
    biases: bool = False
    mxfp4: bool = False
    fp8: Literal["token", "group"] | None = None  # what shares a scale of inputs; see Weight

    def __str__(self) -> str:
        fp8 = {None: "", "token": ", FP8 by channel", "group": ", FP8 by block"}[self.fp8]
        kind = ", MXFP4" if self.mxfp4 else fp8
        return f"{self.num_experts} experts of {self.hidden} x {self.inner}, top {self.k}{kind}"

    def layer(self, seed: int, dtype: torch.dtype, device: torch.device) -> Experts:
        """Random weights that keep the size of their inputs; a ``seed`` each."""
        generator = torch.Generator(device).manual_seed(seed)
        matrices = (2 * self.inner, self.hidden), (self.hidden, self.inner)
        gate_up, down = (self._weight(*matrix, dtype, generator) for matrix in matrices)
        return Experts(gate_up=gate_up, down=down, gating=self.gating)

    def _weight(self, num_out: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Weight:
        device, shape = generator.device, (self.num_experts, num_out)
        bias = None
        if self.biases:
            bias = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        if not self.mxfp4:
            data = torch.randn(*shape, width, dtype=dtype, device=device, generator=generator)
            plain = Weight(data=data.mul_(width**-0.5), bias=bias)
            return plain if self.fp8 is None else _in_fp8(plain, self.fp8)
        sizes = {"dtype": torch.uint8, "device": device, "generator": generator}
        return Weight(
            data=torch.randint(0, 256, (*shape, width // 2), **sizes),  # type: ignore[call-overload]
            scale=torch.randint(117, 121, (*shape, width // 32), **sizes),  # type: ignore[call-overload]
            bias=bias,
            format="mxfp4",
        )

    def routes(self, rows: int, seed: int, dtype: torch.dtype, device: torch.device) -> Routes:
        """``k`` different experts for each row, all as likely."""
        generator = torch.Generator(device).manual_seed(seed)
        scores = torch.rand(rows, self.num_experts, device=device, generator=generator)
        kept = scores.topk(self.k)
        return kept.indices, kept.values.softmax(-1).to(dtype)

    def flops(self, rows: int) -> int:
        return rows * self.k * 2 * 3 * self.hidden * self.inner


def _in_fp8(weight: Weight, activations: Literal["token", "group"]) -> Weight:
    """With one scale for all, stored as ``activations`` go with: per channel or, for each 128 outputs, per block."""
    largest = 6 * weight.data.shape[-1] ** -0.5
    columns = 1 if activations == "token" else -(-weight.data.shape[-1] // GROUP)
    return replace(
        weight,
        data=weight.data.mul_(448 / largest).clamp_(-448, 448).to(torch.float8_e4m3fn),
        scale=torch.full((*weight.data.shape[:2], columns), largest / 448, device=weight.data.device),
        format="fp8",
        activations=activations,
    )


def expert_bytes(experts: Experts) -> int:
    """Bytes of one expert's weights, scales and biases."""
    weights = (experts.gate_up, experts.down)
    biases = sum(weight.bias.nbytes for weight in weights if weight.bias is not None)
    return (sum(weight.num_bytes for weight in weights) + biases) // len(experts.down.data)


def touched(ids: Tensor) -> list[int]:
    """The experts that any row chose, ascending."""
    return sorted(set(ids.flatten().tolist()))


def exact(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The sum of what the experts return, [rows, H] in float32, by a loop over experts.

    Those in FP8 round gate and up, and what is gated, to the dtype of ``x``, so that e4m3 rounds the same numbers.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in touched(ids):
        row, slot = (ids == expert).nonzero(as_tuple=True)
        between = x.dtype if experts.down.format == "fp8" else torch.float32
        gate, up = _linear(experts.gate_up, expert, x[row].float()).to(between).chunk(2, -1)
        result = _linear(experts.down, expert, experts.gating(gate, up).float())
        out.index_add_(0, row, result * weights[row, slot, None].float())
    return out


def _linear(weight: Weight, expert: int, x: Tensor) -> Tensor:
    out = (rounded(x, weight) if weight.format == "fp8" else x) @ _matrix(weight, expert).T
    return out if weight.bias is None else out + weight.bias[expert].float()


def _matrix(weight: Weight, expert: int) -> Tensor:
    scale = None if weight.scale is None else weight.scale[expert, None]
    one = replace(weight, data=weight.data[expert, None], scale=scale)
    return plain_matrix(from_mxfp4(one, torch.float32) if one.format == "mxfp4" else one, torch.float32)[0]


_QWEN3 = ExpertShape(num_experts=128, hidden=2048, inner=768, k=8)
_GPT_OSS = ExpertShape(num_experts=32, hidden=2880, inner=2880, k=4, gating=_CLAMPED, biases=True)
SHAPES = {
    "qwen3-30b-a3b": _QWEN3,
    "qwen3-30b-a3b-fp8": replace(_QWEN3, fp8="group"),
    "qwen3-30b-a3b-fp8-dynamic": replace(_QWEN3, fp8="token"),
    "glm-4.7-flash-fp8": ExpertShape(num_experts=64, hidden=2048, inner=1536, k=4, fp8="group"),
    "qwen3.6-35b-a3b-fp8": ExpertShape(num_experts=256, hidden=2048, inner=512, k=8, fp8="group"),
    "llama-4-scout": ExpertShape(num_experts=16, hidden=5120, inner=8192, k=1),
    "gpt-oss-20b": replace(_GPT_OSS, mxfp4=True),
    "gpt-oss-20b-bf16": _GPT_OSS,
    "small": ExpertShape(num_experts=8, hidden=64, inner=96, k=2, gating=_CLAMPED, biases=True),
}


# largest relative error of a row: two GEMMs, rounded between them
_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
_MOST_LAYERS = 6  # with their own weights; further ones use them again, with other routes
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
    """One run of the script; ``UserError`` for invalid values."""

    shapes: tuple[str, ...]
    rows: tuple[int, ...]
    repeats: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        require(self.repeats >= 2, f"repeats is {self.repeats}: a deviation needs at least 2")
        for name in self.shapes:
            require(name in SHAPES, f"shapes has {name!r}: use {', '.join(SHAPES)}")


def measure(job: ExpertJob) -> Iterator[BenchTable]:
    """Yield the growing table after each number of rows."""
    speed = DeviceSpeed(
        bytes_per_second=copy_bandwidth(str(job.device)),
        flops_per_second=matrix_flops(str(job.device), job.dtype),
    )
    table = _empty_table(job, speed)
    for name in job.shapes:
        free_memory()
        plain = _layers(job, SHAPES[name])
        maps = tuple(map(bind_ops(job.device, job.dtype).experts, plain))  # as the kernels read them
        for rows in sorted(job.rows):
            row, wrong = _measure(job, plain, maps, name, rows, speed)
            if wrong:
                table = replace(
                    table, notes=(*table.notes, f"not in the table: {name}, {rows} rows: {wrong}")
                )
            else:
                table = replace(table, rows=(*table.rows, row))
            yield table
        del plain, maps


def _layers(job: ExpertJob, shape: ExpertShape) -> tuple[Experts, ...]:
    first = shape.layer(0, job.dtype, job.device)
    few = min(min(job.rows) * shape.k, shape.num_experts)
    count = min(_MOST_LAYERS, num_layers(few * expert_bytes(first), job.device))
    return (first, *(shape.layer(index, job.dtype, job.device) for index in range(1, count)))


@torch.inference_mode()
def _measure(
    job: ExpertJob,
    plain: tuple[Experts, ...],
    maps: tuple[ExpertsMap, ...],
    name: str,
    rows: int,
    speed: DeviceSpeed,
) -> tuple[Row, str]:
    """One row, and what is wrong with the result, if anything."""
    shape, bytes_each = SHAPES[name], expert_bytes(plain[0])
    x = torch.randn(rows, shape.hidden, device=job.device).to(job.dtype)
    few = min(rows * shape.k, shape.num_experts)
    count = num_layers(few * bytes_each, job.device)
    routes = [shape.routes(rows, index, job.dtype, job.device) for index in range(count)]
    num_touched = sum(len(touched(ids)) for ids, _ in routes) / count
    ours = _time(job, maps, x, routes)
    grouped = None
    if not (shape.mxfp4 or shape.fp8):
        grouped = _time(job, tuple(map(grouped_experts, plain)), x, routes)
    last = (count - 1) % len(maps)
    output = ours.output.float().sum(0)
    again = maps[last](x, *routes[-1])
    difference = relative_error(output, exact(plain[last], x, *routes[-1]))
    wrong = ""
    if not difference <= _TOLERANCES[job.dtype]:  # NaN is not
        wrong = f"differs from float32 by {display.percent(difference)}"
    elif not torch.equal(again, ours.output):
        wrong = "differs between runs"
    flops_per_second = speed.flops_per_second * (2 if shape.fp8 else 1)  # e4m3 on tensor cores
    bound = max(num_touched * bytes_each / speed.bytes_per_second, shape.flops(rows) / flops_per_second)
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
    """Calls of the layers in turn, each with its own routes."""

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
        "bound": "bytes of the experts touched over the bandwidth of a copy, "
        f"{shown_bandwidth(speed.bytes_per_second)}, or the GEMMs at {speed.flops_per_second / 1e12:.3f} TFLOP/s "
        "where that is longer (FP8: at twice as many)",
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


# --- the command ----------------------------------------------------------------------------------


_EXPERTS = {
    "cuda": (
        "qwen3-30b-a3b,qwen3-30b-a3b-fp8,gpt-oss-20b,gpt-oss-20b-bf16",
        "1,5,8,32,40,64,128,160,320,640",
    ),
    "cpu": ("small", "1,5,40"),
}


@with_options
def experts(
    *,
    ctx: typer.Context,
    shapes: str | None = option(
        None,
        "Table",
        "Experts of qwen3-30b-a3b, qwen3-30b-a3b-fp8 (by block), qwen3-30b-a3b-fp8-dynamic (by channel), "
        "glm-4.7-flash-fp8 and qwen3.6-35b-a3b-fp8 (by block), llama-4-scout, gpt-oss-20b (MXFP4), gpt-oss-20b-bf16, "
        "or small; comma-separated.",
        shown="qwen3-30b-a3b, qwen3-30b-a3b-fp8 and both of gpt-oss-20b; on a CPU small",
    ),
    rows: str | None = option(
        None,
        "Table",
        "Rows per pass, comma-separated.",
        shown="1,5,8,32,40,64,128,160,320,640; on a CPU 1,5,40",
    ),
    engine: Annotated[EngineConfig, Only("dtype device")],
    repeats: int = option(20, "Table", "Measurements per number."),
    output: Path | None = OUTPUT,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Time the experts of one layer of a mixture by number of rows, against the bytes of those that are touched."""
    device = choose_device(engine.device)
    dtype = DTYPES[choose_dtype(engine.dtype, device)]
    defaults = _EXPERTS[device.type]
    job = ExpertJob(
        shapes=tuple(name.strip() for name in (shapes or defaults[0]).split(",")),
        rows=counts("rows", rows or defaults[1]),
        repeats=repeats,
        dtype=dtype,
        device=device,
    )
    publish("experts", measure(job), output, as_json, repeating(ctx), quiet)


app = program_of(experts)

if __name__ == "__main__":
    main(app, "python scripts/bench/experts.py")
