# mypy: allow-untyped-decorators
"""A Triton kernel for few rows through a matrix of each head, limited by how fast the matrices can be read."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops import PerHead
from specgen.ops.launch import PDL

_MOST_ROWS = 64  # more go to cuBLAS
_PROGRAMS = 128  # at least: with fewer, multiprocessors would have nothing to read


@triton.jit(do_not_specialize=["num_rows"])
def _per_head_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    num_out: int,
    width: int,
    x_stride: int,
    x_head_stride: int,
    head_stride: int,
    out_stride: int,
    in_stride: int,
    y_stride: int,
    y_head_stride: int,
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
) -> None:
    """A program computes BLOCK_OUT outputs of a head, for all rows."""
    head, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row, inner = tl.arange(0, ROWS), tl.arange(0, BLOCK_IN)
    w_start = weight + head * head_stride + column[:, None] * out_stride + inner[None, :] * in_stride
    x_start = x + row[None, :].to(tl.int64) * x_stride + head * x_head_stride + inner[:, None]
    real_row, real_column = row[None, :] < num_rows, column[:, None] < num_out
    acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    gdc_wait()
    for start in tl.range(0, width, BLOCK_IN, num_stages=STAGES):
        left = width - start
        columns = tl.load(x_start + start, real_row & (inner[:, None] < left), 0)
        rows = tl.load(w_start + start * in_stride, real_column & (inner[None, :] < left), 0)
        acc = tl.dot(rows, columns, acc)
    gdc_launch_dependents()
    y = out + row[None, :].to(tl.int64) * y_stride + head * y_head_stride + column[:, None]
    tl.store(y, acc.to(out.dtype.element_ty), real_column & real_row)


def per_head(weight: Tensor) -> PerHead:
    """See ``Ops.per_head``; in float32 and for many rows cuBLAS's batched product."""
    heads, num_out, width = weight.shape
    block_out = 64 if heads * num_out >= 64 * _PROGRAMS else 32

    def product(x: Tensor, out: Tensor) -> Tensor:
        rows = len(x)
        if rows > _MOST_ROWS or weight.dtype == torch.float32:
            torch.bmm(x.transpose(0, 1), weight.mT, out=out.transpose(0, 1))
            return out
        assert x.stride(2) == out.stride(2) == 1, (x.stride(), out.stride())
        if rows:
            _per_head_kernel[(triton.cdiv(num_out, block_out), heads)](
                *(x, weight, out, rows, num_out, width),
                *(*x.stride()[:2], *weight.stride(), *out.stride()[:2]),
                ROWS=max(triton.next_power_of_2(rows), 16),
                BLOCK_OUT=block_out,
                BLOCK_IN=64,
                STAGES=4,
                num_warps=4,
                **PDL,
            )
        return out

    return product
