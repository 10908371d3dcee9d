# mypy: allow-untyped-decorators
"""A Triton kernel for few rows through a large matrix: as fast as the matrix can be read."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops.launch import PDL, fetch_ahead
from specgen.ops.rows import silu_mul


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a matrix is cut: a program computes ``block_out`` outputs of up to ``rows`` rows."""

    rows: int
    block_out: int
    block_in: int
    stages: int  # blocks of the weight in flight
    warps: int
    ahead: int  # bytes of each weight row that are fetched before the inputs are there


@triton.jit
def _fetch_rows(
    weight: tl.tensor,
    first: tl.tensor,
    width: int,
    ahead: int,
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    PIECES: tl.constexpr,  # noqa: N803
) -> None:
    """The first ``ahead`` bytes of BLOCK_OUT rows, each in PIECES pieces."""
    piece = tl.arange(0, BLOCK_OUT * PIECES)
    start = (first + piece // PIECES).to(tl.int64) * width + piece % PIECES * (ahead // PIECES // 2)
    fetch_ahead(weight + start, ahead // PIECES)


@triton.jit(do_not_specialize=["num_rows", "ahead"])
def _skinny_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    num_rows: int,
    num_out: int,
    width: int,
    ahead: int,
    GATED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    PIECES: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_OUT
    if ahead > 0:
        _fetch_rows(weight, first, width, ahead, BLOCK_OUT, PIECES)
        if GATED:
            _fetch_rows(weight, num_out + first, width, ahead, BLOCK_OUT, PIECES)
    out, row, inner = first + tl.arange(0, BLOCK_OUT), tl.arange(0, ROWS), tl.arange(0, BLOCK_IN)
    w_start = weight + out[:, None].to(tl.int64) * width + inner[None, :]
    up_start = weight + (num_out + out)[:, None].to(tl.int64) * width + inner[None, :]
    x_start = x + row[None, :] * width + inner[:, None]
    gdc_wait()
    acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    up_acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for start in tl.range(0, width, BLOCK_IN, num_stages=STAGES):
        columns = tl.load(x_start + start, row[None, :] < num_rows, 0)
        acc = tl.dot(tl.load(w_start + start), columns, acc)
        if GATED:
            up_acc = tl.dot(tl.load(up_start + start), columns, up_acc)
    result = acc.to(y.dtype.element_ty)
    if GATED:
        result = silu_mul(result, up_acc.to(y.dtype.element_ty))
    tl.store(y + row[None, :].to(tl.int64) * num_out + out[:, None], result, row[None, :] < num_rows)


def skinny_linear(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """``x [rows, in]`` through ``weight [out, in]``, both contiguous, with float32 sums.

    There are at most ``tile.rows`` rows; ``in`` and ``out`` are multiples of the tile's blocks.
    """
    return _launch(x, weight, weight.shape[0], tile, gated=False)


def skinny_gated_linear(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """``silu(gate) * up [rows, I]``; ``weight [2 * I, in]`` holds gate and up. See ``skinny_linear``."""
    return _launch(x, weight, weight.shape[0] // 2, tile, gated=True)


def _launch(x: Tensor, weight: Tensor, num_out: int, tile: Tile, *, gated: bool) -> Tensor:
    y = x.new_empty(x.shape[0], num_out)
    _skinny_kernel[(num_out // tile.block_out,)](
        *(x, weight, y, x.shape[0], num_out, x.shape[1], tile.ahead),
        GATED=gated,
        ROWS=tile.rows,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        STAGES=tile.stages,
        PIECES=max(tile.warps * 32 // tile.block_out, 1),  # every thread asks for one
        num_warps=tile.warps,
        **PDL,
    )
    return y
