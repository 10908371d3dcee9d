# mypy: allow-untyped-decorators
"""Which rows of a pass go to which expert, in blocks of rows that one program multiplies."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops.launch import PDL

# How a program finds its block:
BY_PAIR = tl.constexpr(0)  # the block of a pair is that of its expert, if it is the expert's first pair
BY_EXPERT = tl.constexpr(1)  # a block for each expert, looked up in the ids
SORTED = tl.constexpr(2)  # the list that _sort_kernel made

_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Pairs of a row and one of its experts, numbered ``row * k + slot``, as blocks of one expert each."""

    kind: int
    count: int  # of blocks; some are empty
    ids: Tensor  # [rows, k] int64
    order: Tensor  # SORTED: the pairs by expert, int32 [rows * k]
    listed: Tensor  # SORTED: expert, or -1, and where its pairs begin and end in order, int32 [count, 3]


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    ids: tl.tensor,
    order: tl.tensor,
    listed: tl.tensor,
    num_pairs: int,
    ROWS: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
) -> None:
    """A program per expert, which counts the pairs of the experts before it.

    Expert e has the blocks from ``before // ROWS + e`` on: as many as it needs or one more, whatever the others have.
    """
    gdc_launch_dependents()
    expert = tl.program_id(0)
    inner = tl.arange(0, CHUNK)
    smaller, equal = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int32)
    gdc_wait()
    for start in tl.range(0, num_pairs, CHUNK):
        pair = start + inner
        found = tl.load(ids + pair, pair < num_pairs, 1 << 30).to(tl.int32)
        smaller += (found < expert).to(tl.int32)
        equal += (found == expert).to(tl.int32)
    first, end = tl.sum(smaller), tl.sum(smaller) + tl.sum(equal)
    place = first
    for start in tl.range(0, num_pairs, CHUNK):
        pair = start + inner
        mine = tl.load(ids + pair, pair < num_pairs, 1 << 30).to(tl.int32) == expert
        tl.store(order + place + tl.cumsum(mine.to(tl.int32)) - 1, pair, mine)
        place += tl.sum(mine.to(tl.int32))
    for block in tl.range(first // ROWS + expert, end // ROWS + expert + 1):
        at = first + (block - first // ROWS - expert) * ROWS
        tl.store(listed + 3 * block, tl.where(at < end, expert, -1))
        tl.store(listed + 3 * block + 1, at)
        tl.store(listed + 3 * block + 2, tl.minimum(at + ROWS, end))


@triton.jit
def block_of(
    ids: tl.tensor,
    order: tl.tensor,
    listed: tl.tensor,
    num_rows: int,
    KIND: tl.constexpr,  # noqa: N803
    K: tl.constexpr,  # noqa: N803
    K_BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The expert of block ``program_id(0)``, or -1; its pairs [ROWS] and which of these there are."""
    block = tl.program_id(0)
    if KIND == SORTED:
        expert = tl.load(listed + 3 * block)
        place = tl.load(listed + 3 * block + 1) + tl.arange(0, ROWS)
        inside = place < tl.load(listed + 3 * block + 2)
        pairs = tl.load(order + place, inside, 0)
    else:
        row, slot = tl.arange(0, ROWS)[:, None], tl.arange(0, K_BLOCK)[None, :]
        pair = row * K + slot
        known = tl.load(ids + pair, (row < num_rows) & (slot < K), -1).to(tl.int32)
        expert = block
        if KIND == BY_PAIR:
            expert = tl.load(ids + block).to(tl.int32)
        mine = known == expert
        first = tl.min(tl.where(mine, pair, ROWS * K))
        there = first == block if KIND == BY_PAIR else first < ROWS * K
        expert = tl.where(there, expert, -1)
        inside = tl.max(mine.to(tl.int32), 1) > 0
        pairs = tl.sum(tl.where(mine, pair, 0), 1)
    return expert, pairs, inside


def find_blocks(ids: Tensor, num_experts: int, rows: int) -> Blocks:
    """Blocks of at most ``rows`` rows for the experts ``ids`` [rows, k] int64; the ids of a row differ.

    A pass of at most 16 rows, and no more than a block has, needs no kernel for it.
    """
    num_pairs = ids.numel()
    if len(ids) <= min(rows, 16):
        kind, count = (BY_PAIR, num_pairs) if num_pairs <= num_experts else (BY_EXPERT, num_experts)
        return Blocks(kind=kind.value, count=count, ids=ids, order=ids, listed=ids)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    listed = torch.empty(num_pairs // rows + num_experts, 3, dtype=torch.int32, device=ids.device)
    _sort_kernel[(num_experts,)](ids, order, listed, num_pairs, ROWS=rows, CHUNK=_CHUNK, num_warps=4, **PDL)
    return Blocks(kind=SORTED.value, count=len(listed), ids=ids, order=order, listed=listed)
