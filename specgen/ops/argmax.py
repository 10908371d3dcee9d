# mypy: allow-untyped-decorators
"""Argmax of few long rows in two Triton kernels; torch runs each row on one multiprocessor."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops.launch import PDL

_CHUNK = 4096  # elements per program


@triton.jit
def _chunk_kernel(
    x: tl.tensor,
    best: tl.tensor,
    where: tl.tensor,
    size: int,
    CHUNK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    gdc_wait()
    values = tl.load(x + row * size + columns, columns < size, float("-inf")).to(tl.float32)
    # NaN counts as infinite: it is found, and no index lies outside the row.
    values = tl.where(values != values, float("inf"), values)
    largest, index = tl.max(values, 0, return_indices=True)
    slot = row * tl.num_programs(1) + chunk
    tl.store(best + slot, largest)
    tl.store(where + slot, chunk * CHUNK + index)


@triton.jit
def _row_kernel(
    best: tl.tensor,
    where: tl.tensor,
    out: tl.tensor,
    num_chunks: int,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    gdc_wait()
    values = tl.load(best + row * num_chunks + chunks, chunks < num_chunks, float("-inf"))
    _, chunk = tl.max(values, 0, return_indices=True)
    tl.store(out + row, tl.load(where + row * num_chunks + chunk).to(tl.int64))


def argmax(x: Tensor) -> Tensor:
    """Index of the first maximum of each row, ``[...]`` int64, of contiguous ``x [..., V]``; NaN counts as infinite."""
    size = x.shape[-1]
    out = torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)
    rows, num_chunks = out.numel(), triton.cdiv(size, _CHUNK)
    if rows:
        assert x.is_contiguous(), "rows must be contiguous"
        best = torch.empty(rows, num_chunks, dtype=torch.float32, device=x.device)
        where = torch.empty(rows, num_chunks, dtype=torch.int32, device=x.device)
        _chunk_kernel[(rows, num_chunks)](x, best, where, size, CHUNK=_CHUNK, num_warps=4, **PDL)
        block = triton.next_power_of_2(num_chunks)
        _row_kernel[(rows,)](best, where, out, num_chunks, BLOCK=block, num_warps=1, **PDL)
    return out
