"""The GEMMs that ``measure_choices.py`` times on a GPU, tile by tile, which tile is taken, and the new text."""

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, Literal, TypeVar

import torch
from bench.layer_timing import num_layers, time_layers
from torch import Tensor

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
# Of GLM-4.7-Flash and Qwen3-30B-A3B, and of small models: a Gemma 4 assistant, Qwen3-0.6B and Llama-3.2-1B
NARROW_PARTS: tuple[Shape, ...] = ((2048, 5120), (2048, 4096), (2048, 1536), (1024, 8192), (1024, 3072))
NARROW_GATE_UP: tuple[Shape, ...] = ((3072, 2048), (6144, 1024), (16384, 2048))
TABLES: dict[str, tuple[tuple[Tile, ...], tuple[Shape, ...]]] = {
    "linear": (measured_choices.LINEAR, (*QKV, (1344, 2048))),
    "linear_parts": (measured_choices.LINEAR_PARTS, PARTS + NARROW_PARTS),
    "gated": (measured_choices.GATED, GATE_UP + NARROW_GATE_UP),
    "fp8_linear": (measured_choices.FP8_LINEAR, QKV),
    "fp8_linear_parts": (measured_choices.FP8_LINEAR_PARTS, PARTS),
    "fp8_gated": (measured_choices.FP8_GATED, GATE_UP),
    "fp8_many": (measured_choices.FP8_MANY, QKV + PARTS),
    "fp8_gated_many": (measured_choices.FP8_GATED_MANY, GATE_UP),
}
_REPEATS = 5


def format_of(table: str, tile: Tile) -> Format:
    """Of the weights that an entry is for: in FP8 those of blocks take 128 inputs at a time, others more."""
    if not table.startswith("fp8"):
        return "plain"
    return "group" if tile.block_in == GROUP else "static"


def shapes_of(table: str, tile: Tile) -> tuple[Shape, ...]:
    """Of the matrices at which an entry is measured: of those of its table, for which it is taken."""

    def kind(one: Tile) -> tuple[object, ...]:
        return one.rows, format_of(table, one), getattr(one, "rounds", False)

    def is_taken(shape: Shape) -> bool:
        sizes = shape[0] // (2 if "gated" in table else 1), shape[1]
        alike = (each for each in TABLES[table][0] if kind(each) == kind(tile))
        return next((each for each in alike if each.fits(*sizes)), None) == tile

    return tuple(filter(is_taken, TABLES[table][1]))


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


def gated(both: Tensor) -> Tensor:
    gate, up = both.to(DTYPE).float().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@cache
def reference(form: Format, shape: Shape, rows: int, is_gated: bool) -> Tensor:
    """Of the last weight, in float32 of what is rounded."""
    weight, x = weights(form, shape)[-1], inputs(rows, shape[1])
    y = x.float() @ weight.data.float().T if form == "plain" else rounded(x, weight) @ dequantised(weight).T
    return gated(y) if is_gated else y


def right(got: Tensor, expected: Tensor) -> bool:
    """Whether each row is as near as rounding to bfloat16 and the sums of tensor cores allow."""
    error = (got.float() - expected).norm(dim=1) / expected.norm(dim=1)
    return bool((error < 2**-8 + 4e-3).all())


def by_tile(weight: Weight, x: Tensor, tile: Tile, is_gated: bool) -> Tensor:
    """[parts, rows, out], or gated [1, rows, out / 2]."""
    from specgen.ops import fp8_kernels, skinny  # need Triton

    if not isinstance(tile, Fp8Tile):
        call = partial(skinny.skinny_gated_linear, "swish") if is_gated else skinny.skinny_linear
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
        return fp8_kernels.fp8_gated_linear(rows, matrix, DTYPE, tile, "swish")[None]
    return fp8_kernels.fp8_linear(rows, matrix, DTYPE, tile)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A GEMM of a shape: its time, None where it is not to be used, and why."""

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
    x, scaled, tile = inputs(rows, shape[1]), weights(form, shape), replace(tile, row_blocks=16)
    return timed(lambda i: by_tile(scaled[i], x, tile, is_gated), form, shape, rows, is_gated)


MARGIN = (
    0.02  # by which a new tile must be faster than the present one: the same measurement again is 1 % off
)
_STEPS: dict[str, tuple[int, ...]] = {
    "block_out": (16, 32, 64, 128),
    "block_in": (64, 128, 256),
    "stages": (2, 3, 4, 5, 6, 8),
    "warps": (2, 4, 8),
    "prefetch_bytes": (0, 512, 1024, 2048),
}
T = TypeVar("T", bound=Tile)


def neighbours(tile: T, fixed: Sequence[str] = ()) -> list[T]:
    """``tile`` and those that are one step from it in one of its sizes, but for the ``fixed`` ones."""
    found = [tile]
    for name, steps in _STEPS.items():
        if name in fixed:
            continue
        at = steps.index(getattr(tile, name))
        found += [
            replace(tile, **{name: step}) for step in (*steps[max(at - 1, 0) : at], *steps[at + 1 : at + 2])
        ]
    return found


def fastest(present: T, seconds: Mapping[T, Sequence[float | None]]) -> T:
    """The tile with the smallest geometric mean of its ``seconds`` over the shapes; None: not usable for one.

    ``present`` stays unless another is faster by ``MARGIN``, or it is not usable itself.
    """
    means = {
        tile: math.fsum(math.log(each) for each in known) / len(known)
        for tile, times in seconds.items()
        if len(known := [each for each in times if each is not None]) == len(times) > 0
    }
    if not means:
        return present
    best = min(means, key=lambda tile: means[tile])
    if present in means and means[best] > means[present] + math.log1p(-MARGIN):
        return present
    return best


def first_faster(ratios: Mapping[int, float]) -> int | None:
    """Where the kernel for many rows takes over: of ``ratios``, its seconds by those of the other, by rows.

    That is the fewest rows from which it is never slower; None: it is slower at the most rows.
    """
    found = None
    for rows in sorted(ratios, reverse=True):
        if ratios[rows] > 1:
            break
        found = rows
    return found


def entry(tile: Tile) -> str:
    """``tile`` as a line of the file has it, without what is the default."""
    shown = []
    for field in fields(tile):
        value = getattr(tile, field.name)
        if field.name != "prefetch_bytes" and value == field.default:
            continue
        shown.append(f"{field.name} = {str(value).lower()}")
    return "{ " + ", ".join(shown) + " }"


def rewritten(
    text: str, table: str, tiles: Mapping[int, Tile], numbers: Mapping[str, int], measured: str
) -> str:
    """The file's ``text`` with other entries of ``table`` by index, other ``numbers``, and what it was ``measured`` on.

    All other lines, comments included, stay as they are. ``ValueError`` where the table does not hold what is replaced,
    or the result is not what was meant.
    """
    lines = text.splitlines(keepends=True)
    begin = lines.index(f"[{table}]\n") + 1
    end = next((i for i in range(begin, len(lines)) if lines[i].startswith("[")), len(lines))
    wanted: dict[str, Any] = tomllib.loads(text)
    here = wanted[table]
    values = {**{name: str(number) for name, number in numbers.items()}, "measured": f'"{measured}"'}
    here |= {**numbers, "measured": measured}
    for name, value in values.items():
        at = next(i for i in range(begin, end) if re.match(rf"{name} = ", lines[i]))
        pattern = rf'({name} = )("[^"]*"|\S+)'
        lines[at] = re.sub(pattern, lambda match, value=value: match[1] + value, lines[at], count=1)
    rows = [i for i in range(begin, end) if lines[i].lstrip().startswith("{ ")]
    for index, tile in tiles.items():
        lines[rows[index]] = re.sub(r"\{.*\}", entry(tile), lines[rows[index]], count=1)
        here["tiles"][index] = tomllib.loads(f"tile = {entry(tile)}")["tile"]
    new = "".join(lines)
    if tomllib.loads(new) != wanted:
        raise ValueError(f"the table {table} cannot be rewritten line by line")
    return new
