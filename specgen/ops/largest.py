# mypy: allow-untyped-decorators
"""The maximum of few long rows in two Triton kernels; torch runs each row on one multiprocessor."""

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
    ids: tl.tensor,
    index: tl.tensor,
    value: tl.tensor,
    num_chunks: int,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    gdc_wait()
    values = tl.load(best + row * num_chunks + chunks, chunks < num_chunks, float("-inf"))
    largest, chunk = tl.max(values, 0, return_indices=True)
    found = tl.load(where + row * num_chunks + chunk).to(tl.int64)
    if ids is not None:
        found = tl.load(ids + found)
    tl.store(index + row, found)
    tl.store(value + row, largest)


def largest(x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``Largest``; the maximum in float32, of a row with NaN infinite."""
    size = x.shape[-1]
    index = torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)
    value = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, num_chunks = index.numel(), triton.cdiv(size, _CHUNK)
    if rows:
        assert x.is_contiguous(), "rows must be contiguous"
        best = torch.empty(rows, num_chunks, dtype=torch.float32, device=x.device)
        where = torch.empty(rows, num_chunks, dtype=torch.int32, device=x.device)
        _chunk_kernel[(rows, num_chunks)](x, best, where, size, CHUNK=_CHUNK, num_warps=4, **PDL)
        block = triton.next_power_of_2(num_chunks)
        _row_kernel[(rows,)](best, where, ids, index, value, num_chunks, BLOCK=block, num_warps=1, **PDL)
    return index, value
