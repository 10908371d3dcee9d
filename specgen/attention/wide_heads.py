# mypy: allow-untyped-decorators
"""A Triton kernel for what the others do not serve: Gemma 4's heads of 512, in passes of any lengths, and layers that
store nothing, in decode passes.

FlashInfer has FA2 for such heads, which shares out its work on the host, so that no decode step could be captured.
Here all lengths are read on the device. The rows of a sequence times the heads of a KV head are cut into tiles, and
where these leave multiprocessors without work, the positions that a tile sees into shares, whose results a second
kernel adds up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.attention import LayerAttention
from specgen.kv.layout import Layout
from specgen.ops.jit_modules import num_sms
from specgen.ops.launch import PDL

_POSITIONS = 32  # that a program reads at once
_MOST_SHARES = 32
_TILES = (16, 32, 64)  # rows times heads; of more, numbers of 512 would not fit the registers of 8 warps
_LOG2_E = 1.4426950408889634


@triton.jit(
    do_not_specialize=["table_stride", "share_stride", "query_len", "num_tiles", "num_shares", "window"]
)
def _attend_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    tables: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    scale: float,
    v_scale: float,
    page_stride: int,
    slot_stride: int,
    head_stride: int,
    table_stride: int,
    share_stride: int,
    num_kv_heads: int,
    query_len: int,
    num_tiles: int,
    num_shares: int,
    window: int,
    GROUP: tl.constexpr,  # noqa: N803  heads of a KV head
    DIM: tl.constexpr,  # noqa: N803
    PAGE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    POSITIONS: tl.constexpr,  # noqa: N803
) -> None:
    """A tile and share: ``out`` [shares, rows, heads, DIM], ``sums`` [shares, rows, heads] as powers of 2, or None."""
    gdc_launch_dependents()
    tile, share = tl.program_id(0) % num_tiles, tl.program_id(1)
    kv_head = tl.program_id(0) // num_tiles % num_kv_heads
    sequence = (tl.program_id(0) // num_tiles // num_kv_heads).to(tl.int64)
    gdc_wait()
    start, num_rows, first = tl.load(starts + sequence).to(tl.int32), query_len, sequence * query_len
    if ends is not None:
        first = tl.load(ends + sequence - 1, sequence > 0, 0)
        num_rows = (tl.load(ends + sequence) - first).to(tl.int32)
    place = tile * TILE + tl.arange(0, TILE)
    row, inside = place // GROUP, place // GROUP < num_rows
    position = start + row
    behind = start + tl.minimum((tile * TILE + TILE - 1) // GROUP + 1, num_rows)
    # of the positions of the tile's rows; where there are none, nothing is behind it
    least = start + tile * TILE // GROUP
    begin = tl.where(least < behind, tl.maximum(least - window + 1, 0), behind)
    size = tl.cdiv(tl.cdiv(behind - begin, num_shares), POSITIONS) * POSITIONS
    begin += share * size
    behind = tl.minimum(begin + size, behind)

    column = tl.arange(0, DIM)
    head = (first + row) * (num_kv_heads * GROUP) + kv_head * GROUP + place % GROUP
    asked = tl.load(q + head[:, None] * DIM + column[None, :], inside[:, None], 0)
    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    found = tl.zeros([TILE, DIM], tl.float32)
    for here in range(begin, behind, POSITIONS):
        at = here + tl.arange(0, POSITIONS)
        there = at < behind
        page = tl.load(tables + sequence * table_stride + at // PAGE, there, 0).to(tl.int64)
        slot = page * page_stride + at % PAGE * slot_stride + kv_head * head_stride
        slot = slot[:, None] + column[None, :]
        key = tl.load(keys + slot, there[:, None], 0.0).to(asked.dtype)
        score = tl.dot(asked, tl.trans(key)) * scale
        seen = there[None, :] & (at[None, :] <= position[:, None])
        seen &= at[None, :] > position[:, None] - window
        score = tl.where(seen, score, float("-inf"))
        highest = tl.maximum(most, tl.max(score, 1))
        level = tl.where(highest == float("-inf"), 0.0, highest)  # rows that see nothing yet
        weight, before = tl.exp2(score - level[:, None]), tl.exp2(most - level)
        value = tl.load(values + slot, there[:, None], 0.0).to(asked.dtype)
        total = total * before + tl.sum(weight, 1)
        found = tl.dot(weight.to(asked.dtype), value, found * before[:, None])
        most = highest
    found = found * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    head += share * share_stride
    if sums is not None:
        tl.store(sums + head, most + tl.log2(total), inside)
    tl.store(out + head[:, None] * DIM + column[None, :], found.to(out.dtype.element_ty), inside[:, None])


@triton.jit(do_not_specialize=["share_stride"])
def _add_kernel(
    parts: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    share_stride: int,
    SHARES: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
) -> None:
    """A head of a row: the mean of its ``parts`` in which it sees something, weighted by ``sums``."""
    gdc_launch_dependents()
    head, column = tl.program_id(0).to(tl.int64), tl.arange(0, DIM)
    share = head + tl.arange(0, SHARES).to(tl.int64) * share_stride
    gdc_wait()
    level = tl.load(sums + share)
    seen = level != float("-inf")  # NaN is not lost
    weight = tl.where(seen, tl.exp2(level - tl.max(level)), 0.0)
    part = tl.load(parts + share[:, None] * DIM + column[None, :], seen[:, None], 0)
    found = tl.sum(part * weight[:, None], 0) / tl.maximum(tl.sum(weight), 1e-30)  # 0 in rows of no sequence
    tl.store(out + head * DIM + column, found.to(out.dtype.element_ty))


def attend_wide(layout: Layout, layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """As ``Kernel``, for heads of a power of two numbers in a pass of any ``layout``.

    It may be captured once it has run in a pass of that shape: kernels are compiled then.
    """
    assert layer.sinks is None, "this kernel would leave them out and say nothing"
    assert layer.value_dim is None, "values are stored"
    assert q.is_contiguous(), q.stride()
    assert keys.stride() == values.stride(), "keys and values must have the same strides"
    assert keys.stride(3) == layout.block_tables.stride(1) == 1, (keys.stride(), layout.block_tables.stride())
    rows, num_heads, dim = q.shape
    page_size, num_kv_heads = keys.shape[1:3]
    group, ends = num_heads // num_kv_heads, None if layout.uniform_q is not None else layout.ends
    longest = layout.max_query_len * group
    tile, at_once = next((each for each in _TILES if longest <= each), max(_TILES)), num_sms(q.device)
    groups = layout.num_sequences * num_kv_heads
    few = 2 * groups * triton.cdiv(longest, _TILES[0]) <= at_once
    if few:  # 8 sequences, 8 KV heads of 256, a row each, 335 positions, H200: 14.8 us, and 23.9 in the way of many
        tile, at_once = _TILES[0], 2 * at_once
    num_tiles = triton.cdiv(longest, tile)
    blocks = groups * num_tiles
    shares = _num_shares(blocks, layout.most_positions, at_once)
    # of rows that no sequence has nothing is written
    padded = ends is not None and not layout.full and layout.host is None
    out = torch.zeros_like(q) if padded else torch.empty_like(q)
    parts, sums = out, None
    if shares > 1:
        parts = q.new_empty(shares, *q.shape, dtype=torch.float32)
        sums = (
            parts.new_full(parts.shape[:-1], float("-inf")) if padded else parts.new_empty(parts.shape[:-1])
        )
    if not rows:
        return out.flatten(1)
    k_scale, v_scale = layer.kv_scales(keys)
    _attend_kernel[(blocks, shares)](
        *(q, keys, values, layout.starts, ends, layout.block_tables, parts, sums),
        *(layer.scale * k_scale * _LOG2_E, v_scale),
        *(*keys.stride()[:3], layout.block_tables.stride(0), rows * num_heads),
        *(num_kv_heads, layout.max_query_len, num_tiles, shares, layer.window or layout.most_positions),
        GROUP=group,
        DIM=dim,
        PAGE=page_size,
        TILE=tile,
        POSITIONS=_POSITIONS,
        num_warps=4 if few else 8,
        num_stages=3,
        **PDL,
    )
    if sums is not None:
        sizes = {"SHARES": shares, "DIM": dim}
        _add_kernel[(rows * num_heads,)](parts, sums, out, rows * num_heads, **sizes, num_warps=4, **PDL)
    return out.flatten(1)


def _num_shares(num_blocks: int, most_positions: int, num_multiprocessors: int) -> int:
    """In how many shares positions are cut: a power of two, as many as keep the GPU busy."""
    most = min(num_multiprocessors // num_blocks, most_positions // _POSITIONS, _MOST_SHARES)
    return 1 << max(most.bit_length() - 1, 0)
