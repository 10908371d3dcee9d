"""The products of dense layers that ``measure_choices.py`` times on a GPU, tile by tile, and what they should be."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from specgen.bench.timing import num_layers, time_layers
from specgen.ops import measured_choices
from specgen.ops.fp8 import dequantised, rounded
from specgen.ops.measured_choices import Fp8Tile, Tile
from specgen.ops.weight import GROUP, Weight

CUDA, DTYPE = torch.device("cuda", 0), torch.bfloat16
Format = Literal["plain", "static", "token", "scales", "group"]  # scales: static, and several for the outputs
Shape = tuple[int, int]
QKV: tuple[Shape, ...] = ((6144, 4096),)  # of Llama-3.1-8B and Qwen3-8B, as all here
PARTS: tuple[Shape, ...] = ((4096, 4096), (4096, 14336), (4096, 12288))
GATE_UP: tuple[Shape, ...] = ((28672, 4096), (24576, 4096))
TABLES: dict[str, tuple[tuple[Tile, ...], tuple[Shape, ...]]] = {
    "linear": (measured_choices.LINEAR, QKV),
    "linear_parts": (measured_choices.LINEAR_PARTS, PARTS),
    "gated": (measured_choices.GATED, GATE_UP),
    "fp8_linear": (measured_choices.FP8_LINEAR, QKV + PARTS),
    "fp8_gated": (measured_choices.FP8_GATED, GATE_UP),
    "fp8_many": (measured_choices.FP8_MANY, QKV + PARTS),
    "fp8_gated_many": (measured_choices.FP8_GATED_MANY, GATE_UP),
}
NARROW: dict[str, tuple[Shape, ...]] = {  # of GLM-4.7-Flash and Qwen3-30B-A3B, for entries with most_outputs
    "linear": ((1344, 2048),),
    "linear_parts": ((2048, 5120), (2048, 4096), (2048, 1536)),
    "gated": ((3072, 2048),),
}
_REPEATS = 5


def format_of(table: str, tile: Tile) -> Format:
    """Of the weights that an entry is for: in FP8 those of blocks take 128 inputs at a time, others more."""
    if not table.startswith("fp8"):
        return "plain"
    return "group" if tile.block_in == GROUP else "static"


def shapes_of(table: str, tile: Tile) -> tuple[Shape, ...]:
    """Of the matrices at which an entry is measured."""
    return TABLES[table][1] if tile.most_outputs is None else NARROW[table]


def fixed(table: str) -> tuple[str, ...]:
    """Sizes of an entry that say which weights it is for."""
    return ("block_in",) if table.startswith("fp8") else ()


def a_weight(form: Format, shape: Shape, seed: int) -> Weight:
    """Random, such that results are as large as inputs."""
    (out, width), generator = shape, torch.Generator(CUDA).manual_seed(seed)
    data = torch.randn(out, width, device=CUDA, dtype=DTYPE, generator=generator)
    if form == "plain":
        return Weight(data=data.mul_(width**-0.5))
    columns = -(-width // GROUP) if form == "group" else 1
    scale = torch.full((out, columns), width**-0.5 / 60, device=CUDA)
    if form in ("scales", "token"):
        scale[: out // 2] *= 2
        scale[: out // 4] *= 2
    return Weight(
        data=(data * 60).clamp(-448, 448).to(torch.float8_e4m3fn),
        scale=scale,
        format="fp8",
        activations=form if form in ("group", "token") else "static",
        input_scale=torch.tensor(0.01, device=CUDA) if form in ("static", "scales") else None,
    )


@cache
def weights(form: Format, shape: Shape) -> tuple[Weight, ...]:
    """As many as no cache holds; ``weights.cache_clear`` frees them."""
    size = shape[0] * shape[1] * (2 if form == "plain" else 1)
    return tuple(a_weight(form, shape, seed) for seed in range(max(num_layers(size, CUDA), 2)))


def inputs(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, device=CUDA, generator=torch.Generator(CUDA).manual_seed(rows)).to(DTYPE)


def gated(product: Tensor) -> Tensor:
    gate, up = product.to(DTYPE).float().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@cache
def reference(form: Format, shape: Shape, rows: int, is_gated: bool) -> Tensor:
    """Of the last weight, in float32 of what is rounded."""
    weight, x = weights(form, shape)[-1], inputs(rows, shape[1])
    product = (
        x.float() @ weight.data.float().T if form == "plain" else rounded(x, weight) @ dequantised(weight).T
    )
    return gated(product) if is_gated else product


def right(got: Tensor, expected: Tensor) -> bool:
    """Whether each row is as near as rounding to bfloat16 and the sums of tensor cores allow."""
    error = (got.float() - expected).norm(dim=1) / expected.norm(dim=1)
    return bool((error < 2**-8 + 4e-3).all())


def by_tile(weight: Weight, x: Tensor, tile: Tile, is_gated: bool) -> Tensor:
    """[parts, rows, out], or gated [1, rows, out / 2]."""
    from specgen.ops import fp8_kernels, skinny  # need Triton

    if not isinstance(tile, Fp8Tile):
        call = skinny.skinny_gated_linear if is_gated else skinny.skinny_linear
        y = call(x, weight.data, weight.bias, tile)
        return y[None] if is_gated else y
    assert weight.scale is not None
    grouped, static = weight.activations == "group", weight.static_scale
    scale = weight.scale[::GROUP].contiguous() if grouped else weight.scale.flatten()
    matrix = fp8_kernels.Fp8Matrix(data=weight.data, scale=scale, grouped=grouped, bias=None)
    if tile.rounds:
        rows = fp8_kernels.Fp8Rows(data=x, scale=static, static=static is not None)
    else:
        rows = fp8_kernels.rounded_rows(x, static, GROUP if grouped else None)
    if is_gated:
        return fp8_kernels.fp8_gated_linear(rows, matrix, DTYPE, tile)[None]
    return fp8_kernels.fp8_linear(rows, matrix, DTYPE, tile)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A product of a shape: its time, None where it is not to be used, and why."""

    seconds: float | None
    why: str = ""


def timed(call: Callable[[int], Tensor], form: Format, shape: Shape, rows: int, is_gated: bool) -> Timed:
    """``call(i)`` -> [parts, rows, out] or [rows, out], in a captured graph over all ``weights``.

    Not usable: one that needs more than the GPU has, that is wrong, or that differs between two runs.
    """
    count = len(weights(form, shape))
    try:
        found = time_layers(call, count, _REPEATS, CUDA)
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return Timed(seconds=None, why="needs more than the GPU has")
    if not torch.equal(call(count - 1), found.output):
        return Timed(seconds=None, why="differs between two runs")
    whole = found.output.float().sum(0) if found.output.dim() == 3 else found.output
    if not right(whole, reference(form, shape, rows, is_gated)):
        return Timed(seconds=None, why="WRONG")
    return Timed(seconds=found.mean)


def time_tile(table: str, form: Format, tile: Tile, shape: Shape) -> Timed:
    """An entry of ``table`` at as many rows as it takes; of one for any number, 160."""
    rows, is_gated = (160 if table.endswith("many") else tile.rows), "gated" in table
    out = shape[0] // (2 if is_gated else 1)
    if not tile.fits(out, shape[1]):
        return Timed(seconds=None, why="does not fit")
    if table == "fp8_linear" and shape in PARTS:  # as ops/fp8_cuda.py derives them
        tile = replace(tile, parts=2, stages=min(tile.stages, 6))
    x, scaled, tile = inputs(rows, shape[1]), weights(form, shape), replace(tile, row_blocks=16)
    return timed(lambda i: by_tile(scaled[i], x, tile, is_gated), form, shape, rows, is_gated)
