# mypy: allow-untyped-decorators
"""A Triton kernel for few rows times a large matrix, limited by how fast the matrix can be read."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops.experts import Activation
from specgen.ops.launch import PDL, prefetch_l2
from specgen.ops.measured_choices import Tile
from specgen.ops.row_kernels import gate_mul


@triton.jit
def _prefetch_rows(
    weight: tl.tensor,
    first: tl.tensor,
    width: int,
    prefetch_bytes: int,
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    PIECES: tl.constexpr,  # noqa: N803
) -> None:
    """The first ``prefetch_bytes`` of BLOCK_OUT rows, each in PIECES pieces."""
    piece = tl.arange(0, BLOCK_OUT * PIECES)
    start = (first + piece // PIECES).to(tl.int64) * width + piece % PIECES * (prefetch_bytes // PIECES // 2)
    prefetch_l2(weight + start, prefetch_bytes // PIECES)


@triton.jit(do_not_specialize=["num_rows", "prefetch_bytes"])
def _skinny_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    num_rows: int,
    num_out: int,
    width: int,
    part_width: int,
    prefetch_bytes: int,
    GATED: tl.constexpr,  # noqa: N803
    GELU: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    PIECES: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
) -> None:
    first, part = tl.program_id(0) * BLOCK_OUT, tl.program_id(1)
    weight += part * part_width
    if prefetch_bytes > 0:
        _prefetch_rows(weight, first, width, prefetch_bytes, BLOCK_OUT, PIECES)
        if GATED:
            _prefetch_rows(weight, num_out + first, width, prefetch_bytes, BLOCK_OUT, PIECES)
    out, row, inner = (
        first + tl.arange(0, BLOCK_OUT),
        tl.program_id(2) * ROWS + tl.arange(0, ROWS),
        tl.arange(0, BLOCK_IN),
    )
    w_start = weight + out[:, None].to(tl.int64) * width + inner[None, :]
    up_start = weight + (num_out + out)[:, None].to(tl.int64) * width + inner[None, :]
    x_start = x + row[None, :].to(tl.int64) * width + part * part_width + inner[:, None]
    acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    up_acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    if bias is not None:  # a weight as well; of the parts of a sum the first has it
        acc += tl.where(part == 0, tl.load(bias + out), 0).to(tl.float32)[:, None]
        if GATED:
            up_acc += tl.load(bias + num_out + out).to(tl.float32)[:, None]
    gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    for start in tl.range(0, part_width, BLOCK_IN, num_stages=STAGES):
        columns = tl.load(x_start + start, row[None, :] < num_rows, 0)
        acc = tl.dot(tl.load(w_start + start), columns, acc)
        if GATED:
            up_acc = tl.dot(tl.load(up_start + start), columns, up_acc)
    # Others not earlier: the successor's programs would crowd onto the multiprocessors that are free first.
    gdc_launch_dependents()
    result = acc.to(y.dtype.element_ty)
    if GATED:
        result = gate_mul(result, up_acc.to(y.dtype.element_ty), GELU)
    y += (part * num_rows + row[None, :]).to(tl.int64) * num_out
    tl.store(y + out[:, None], result, row[None, :] < num_rows)


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """``x [rows, in]`` through ``weight [out, in]``, both contiguous: ``[parts, rows, out]``, summed in float32.

    One part is rounded to the dtype of ``x``; several stay in float32, to be added by the caller. The tile must fit.
    """
    dtype = x.dtype if tile.parts == 1 else torch.float32
    y = torch.empty(tile.parts, x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
    _launch(x, weight, bias, y, tile, None)
    return y


def skinny_gated_linear(
    activation: Activation, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile
) -> Tensor:
    """``activation(gate) * up [rows, I]``; ``weight [2 * I, in]`` holds gate and up. See ``skinny_linear``."""
    assert tile.parts == 1, "partial sums cannot pass through an activation"
    y = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _launch(x, weight, bias, y, tile, activation)
    return y


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, tile: Tile, activation: Activation | None
) -> None:
    (num_rows, width), num_out = x.shape, y.shape[-1]
    assert num_rows <= tile.most_rows, (num_rows, tile)
    assert tile.fits(num_out, width), (weight.shape, tile)
    part_width = width // tile.parts
    _skinny_kernel[(num_out // tile.block_out, tile.parts, triton.cdiv(num_rows, tile.rows))](
        *(x, weight, bias, y, num_rows, num_out, width, part_width),
        min(tile.prefetch_bytes, part_width * x.element_size()),
        GATED=activation is not None,
        GELU=activation == "gelu tanh",
        ROWS=tile.rows,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        STAGES=tile.stages,
        EARLY=activation is None and tile.leaves_room,
        PIECES=max(tile.warps * 32 // tile.block_out, 1),  # one per thread
        num_warps=tile.warps,
        **PDL,
    )
