# mypy: allow-untyped-decorators
"""Triton kernels for weights in FP8: GEMMs on the tensor cores' e4m3, and the rounding of activations before them.

Partial sums of at most ``BLOCK_IN`` inputs leave the tensor cores, which keep fewer bits than float32, and are added
in float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops.experts import Activation
from specgen.ops.launch import PDL, prefetch_l2
from specgen.ops.measured_choices import Fp8Tile
from specgen.ops.row_kernels import e4m3_scale, gate_mul, to_e4m3
from specgen.ops.weight import GROUP

_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _round_kernel(
    x: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    width: int,
    stride: int,
    scale_row: int,
    scale_group: int,
    groups: int,
    STATIC: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
) -> None:
    """GROUPS groups of SIZE inputs of a row to e4m3; unless STATIC the scale of each is found and written."""
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = columns < width
    if STATIC:
        used = tl.full((GROUPS,), 0, tl.float32) + tl.load(scale)
    gdc_wait()
    values = tl.load(x + row * stride + columns, inside, 0)
    if not STATIC:
        used = e4m3_scale(values, 1)
        tl.store(scale + row * scale_row + group * scale_group, used, group < groups)
    tl.store(out + row * width + columns, to_e4m3(values, (1.0 / used)[:, None]), inside)


@triton.jit
def _prefetch_rows(
    weight: tl.tensor,
    first: tl.tensor,
    width: int,
    prefetch_bytes: int,
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    PIECES: tl.constexpr,  # noqa: N803
) -> None:
    piece = tl.arange(0, BLOCK_OUT * PIECES)
    start = (first + piece // PIECES).to(tl.int64) * width + piece % PIECES * (prefetch_bytes // PIECES)
    prefetch_l2(weight + start, prefetch_bytes // PIECES)


@triton.jit(do_not_specialize=["num_rows", "prefetch_bytes"])
def _fp8_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    y_scale: tl.tensor,
    num_rows: int,
    num_out: int,
    width: int,
    part_width: int,
    prefetch_bytes: int,
    DTYPE: tl.constexpr,  # noqa: N803
    GATED: tl.constexpr,  # noqa: N803
    GELU: tl.constexpr,  # noqa: N803
    GROUPED: tl.constexpr,  # noqa: N803
    STATIC: tl.constexpr,  # noqa: N803
    ROUNDS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    PIECES: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
) -> None:
    """``x`` [rows, in] is e4m3 with scales x_scale, or, if it ROUNDS, in the model's DTYPE.

    Scales are [1] for x if STATIC, else [rows]; [out] for the weight; GROUPED by 128: [rows, groups] and
    [ceil(out / 128), groups]. With a y_scale [1] the result is e4m3 too.
    """
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
    there = row < num_rows
    w_start = weight + out[:, None].to(tl.int64) * width + inner[None, :]
    up_start = weight + (num_out + out)[:, None].to(tl.int64) * width + inner[None, :]
    x_start = x + row[None, :].to(tl.int64) * width + part * part_width + inner[:, None]
    acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    up_acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    if GROUPED:
        groups = width // BLOCK_IN
        s_start = scale + first // 128 * groups + part * (part_width // BLOCK_IN)
        up_s_start = scale + (num_out + first) // 128 * groups + part * (part_width // BLOCK_IN)
        if not ROUNDS:
            xs_start = x_scale + row * groups + part * (part_width // BLOCK_IN)
    else:
        out_scale = tl.load(scale + out)
        if GATED:
            up_scale = tl.load(scale + num_out + out)
    if STATIC:
        static = tl.load(x_scale)  # a weight as well
        inverse = 1.0 / static
    gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    for start in tl.range(0, part_width, BLOCK_IN, num_stages=STAGES):
        columns = tl.load(x_start + start, there[None, :], 0.0)
        if GROUPED:
            if ROUNDS:
                row_scale = e4m3_scale(columns, 0)
                columns = to_e4m3(columns, (1.0 / row_scale)[None, :])
            else:
                row_scale = tl.load(xs_start + start // BLOCK_IN, there, 0)
            acc += (
                tl.dot(tl.load(w_start + start), columns)
                * (row_scale * tl.load(s_start + start // BLOCK_IN))[None, :]
            )
            if GATED:
                up_acc += (
                    tl.dot(tl.load(up_start + start), columns)
                    * (row_scale * tl.load(up_s_start + start // BLOCK_IN))[None, :]
                )
        else:
            if ROUNDS:
                columns = to_e4m3(columns, inverse)
            acc += tl.dot(tl.load(w_start + start), columns)
            if GATED:
                up_acc += tl.dot(tl.load(up_start + start), columns)
    gdc_launch_dependents()
    if not GROUPED:
        if STATIC:
            acc *= (out_scale * static)[:, None]
            if GATED:
                up_acc *= (up_scale * static)[:, None]
        else:
            row_scale = tl.load(x_scale + row, there, 0)
            acc *= out_scale[:, None] * row_scale[None, :]
            if GATED:
                up_acc *= up_scale[:, None] * row_scale[None, :]
    if bias is not None:  # of the parts of a sum the first has it
        acc += tl.where(part == 0, tl.load(bias + out), 0).to(tl.float32)[:, None]
        if GATED:
            up_acc += tl.load(bias + num_out + out).to(tl.float32)[:, None]
    if GATED:
        result = gate_mul(acc.to(DTYPE), up_acc.to(DTYPE), GELU)
        if y_scale is not None:
            result = to_e4m3(result, 1.0 / tl.load(y_scale))
    else:
        result = acc.to(y.dtype.element_ty)
    y += (part * num_rows + row[None, :]).to(tl.int64) * num_out
    tl.store(y + out[:, None], result, there[None, :])


def rounded_rows(
    x: Tensor, input_scale: Tensor | None, group: int | None, *, multiple: int | None = None
) -> "Fp8Rows":
    """``x`` [rows, in] in e4m3 with float32 scales: [1] given, else found: [rows, 1] or [rows, in / group].

    With a ``multiple`` the rows are as many as one of it, of which those behind ``x`` hold anything, and a column of
    the scales found is contiguous.
    """
    rows, width = x.shape
    padded = rows if multiple is None else -(-rows // multiple) * multiple
    out = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=x.device)
    static = input_scale is not None
    size = 1024 if static else group or triton.next_power_of_2(width)
    count = triton.cdiv(width, size)
    if input_scale is not None:
        scale = input_scale
    elif multiple is None:
        scale = torch.empty(rows, count, device=x.device)
    else:
        scale = torch.empty(count, padded, device=x.device).t()
    if rows:
        together = min(triton.next_power_of_2(count), 32) if size == group else 1
        _round_kernel[(rows, triton.cdiv(count, together))](
            *(x, scale, out, width, x.stride(0), scale.stride(0), scale.stride(-1), count),
            STATIC=static,
            GROUPS=together,
            SIZE=size,
            num_warps=min(max(together * size // 512, 1), 16),
            **PDL,
        )
    return Fp8Rows(data=out, scale=scale, static=static)


@dataclass(frozen=True, kw_only=True)
class Fp8Matrix:
    """A weight [out, in] in e4m3 as the kernels read it, with float32 scales: [out], or by block (see ``GROUP``)."""

    data: Tensor
    scale: Tensor
    grouped: bool
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Fp8Rows:
    """Inputs [rows, in] of a GEMM: e4m3 with their ``scale`` (see ``rounded_rows``), or for a tile that rounds them.

    The latter are in the model's dtype, with a static scale, or None for those of their groups.
    """

    data: Tensor
    scale: Tensor | None
    static: bool  # the scale [1] is the checkpoint's


def fp8_linear(x: Fp8Rows, matrix: Fp8Matrix, dtype: torch.dtype, tile: Fp8Tile) -> Tensor:
    """``x`` through ``matrix``: [parts, rows, out] in the model's ``dtype``, or of several parts in float32."""
    shape = (tile.parts, x.data.shape[0], matrix.data.shape[0])
    y = torch.empty(shape, dtype=dtype if tile.parts == 1 else torch.float32, device=x.data.device)
    _launch(x, matrix, y, None, dtype, tile, None)
    return y


def fp8_gated_linear(
    x: Fp8Rows,
    matrix: Fp8Matrix,
    dtype: torch.dtype,
    tile: Fp8Tile,
    activation: Activation,
    y_scale: Tensor | None = None,
) -> Tensor:
    """``activation(gate) * up`` [rows, I]; ``matrix`` [2 * I, in] holds gate and up. With a ``y_scale`` [1] in e4m3."""
    assert tile.parts == 1, "partial sums cannot pass through an activation"
    shape = (x.data.shape[0], matrix.data.shape[0] // 2)
    y = torch.empty(shape, dtype=dtype if y_scale is None else torch.float8_e4m3fn, device=x.data.device)
    _launch(x, matrix, y, y_scale, dtype, tile, activation)
    return y


def _launch(
    x: Fp8Rows,
    matrix: Fp8Matrix,
    y: Tensor,
    y_scale: Tensor | None,
    dtype: torch.dtype,
    tile: Fp8Tile,
    activation: Activation | None,
) -> None:
    (num_rows, width), num_out = x.data.shape, y.shape[-1]
    assert num_rows <= tile.most_rows, (num_rows, tile)
    assert tile.fits(num_out, width), (matrix.data.shape, tile)
    assert not matrix.grouped or tile.block_in == GROUP, tile
    assert tile.rounds == (x.data.dtype != torch.float8_e4m3fn), (x.data.dtype, tile)
    if not num_rows:
        return
    part_width = width // tile.parts
    _fp8_kernel[(num_out // tile.block_out, tile.parts, triton.cdiv(num_rows, tile.rows))](
        *(x.data, x.scale, matrix.data, matrix.scale, matrix.bias, y, y_scale),
        *(num_rows, num_out, width, part_width),
        min(tile.prefetch_bytes, part_width),
        DTYPE=_TRITON[dtype],
        GATED=activation is not None,
        GELU=activation == "gelu tanh",
        GROUPED=matrix.grouped,
        STATIC=x.static,
        ROUNDS=tile.rounds,
        ROWS=tile.rows,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        STAGES=tile.stages,
        PIECES=max(tile.warps * 32 // tile.block_out, 1),
        EARLY=activation is None and tile.leaves_room,
        num_warps=tile.warps,
        **PDL,
    )
