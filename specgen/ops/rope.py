# mypy: allow-untyped-decorators
"""Triton kernels that rotate a layer's queries and keys and store keys and values, or latents, in the cache."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.kv.layout import Layout
from specgen.ops import Store
from specgen.ops.launch import PDL

_HEADS = 8  # per program


@triton.jit
def _slot(
    row: tl.tensor,
    where: tl.tensor,
    tables: tl.tensor,
    table_stride: int,
    table_width: int,
    page_size: int,
    QUERY_LEN: tl.constexpr,  # noqa: N803
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Position of a row of ``Layout``, its page and offset in the page; padding rows go to page 0 (see ``Layout``)."""
    if QUERY_LEN:  # where: starts [B]
        sequence = row // QUERY_LEN
        position = tl.load(where + sequence) + row % QUERY_LEN
        index = position // page_size
        page = tl.load(tables + sequence * table_stride + index, index < table_width, 0).to(tl.int64)
        offset = position % page_size
    else:
        position = tl.load(where + row)  # positions [rows]
        slot = tl.load(tables + row).to(tl.int64)  # slots [rows]
        page = slot // page_size
        offset = slot % page_size
    return position, page, offset


@triton.jit
def _rotated(x: tl.tensor, other: tl.tensor, cos: tl.tensor, signed_sin: tl.tensor) -> tl.tensor:
    """x * cos + other * sin, each product rounded to the dtype of x as in ``transformers``."""
    kept = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
    turned = (other.to(tl.float32) * signed_sin).to(x.dtype).to(tl.float32)
    return (kept + turned).to(x.dtype)


@triton.jit
def _cast(x: tl.tensor, pages: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """``x`` in the dtype of ``pages``, over ``scale`` where that has 8 bits; there large values saturate, NaN stays."""
    if pages.dtype.element_ty == tl.float8e4nv:
        quotient = tl.div_rn(x.to(tl.float32), scale)
        x = tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(pages.dtype.element_ty)


@triton.jit(do_not_specialize=["table_stride", "table_width"])
def _rope_store_kernel(
    qkv: tl.tensor,
    frequencies: tl.tensor,
    where: tl.tensor,
    tables: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    page_stride: int,
    slot_stride: int,
    head_stride: int,
    table_stride: int,
    table_width: int,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    QUERY_LEN: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    TURNED: tl.constexpr,  # noqa: N803  pairs that are rotated; the halves of the others lie behind them
    BLOCK: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)
    inside = (head < num_heads + 2 * num_kv_heads) & (pair < HALF)[None, :]
    frequency = tl.load(frequencies + pair, pair < TURNED, 0)
    gdc_wait()
    position, page, offset = _slot(row, where, tables, table_stride, table_width, page_size, QUERY_LEN)
    angle = position.to(tl.float32) * frequency
    cos = (tl.cos(angle) * scale).to(qkv.dtype.element_ty).to(tl.float32)[None, :]
    sin = (tl.sin(angle) * scale).to(qkv.dtype.element_ty).to(tl.float32)[None, :]

    is_q, is_v = head < num_heads, head >= num_heads + num_kv_heads
    if TURNED == HALF:
        first, second, plain = pair[None, :], pair[None, :] + HALF, is_v
    else:
        first = (pair + tl.where(pair < TURNED, 0, TURNED))[None, :]
        second = (pair + tl.where(pair < TURNED, TURNED, HALF))[None, :]
        plain = is_v | (pair >= TURNED)[None, :]
    source = qkv + (row * (num_heads + 2 * num_kv_heads) + head) * 2 * HALF
    low, high = tl.load(source + first, inside, 0), tl.load(source + second, inside, 0)
    new_low = tl.where(plain, low, _rotated(low, high, cos, -sin))
    new_high = tl.where(plain, high, _rotated(high, low, cos, sin))

    to_q = q + (row * num_heads + head) * 2 * HALF
    tl.store(to_q + first, new_low, inside & is_q)
    tl.store(to_q + second, new_high, inside & is_q)
    kv_head = tl.where(is_v, head - num_heads - num_kv_heads, head - num_heads)
    slot = page * page_stride + offset * slot_stride + kv_head * head_stride
    is_k = inside & (head >= num_heads) & (head < num_heads + num_kv_heads)
    tl.store(keys + slot + first, _cast(new_low, keys, k_scale), is_k)
    tl.store(keys + slot + second, _cast(new_high, keys, k_scale), is_k)
    tl.store(values + slot + first, _cast(new_low, values, v_scale), inside & is_v)
    tl.store(values + slot + second, _cast(new_high, values, v_scale), inside & is_v)


@triton.jit(do_not_specialize=["table_stride", "table_width"])
def _latent_store_kernel(
    latent: tl.tensor,
    key: tl.tensor,
    q: tl.tensor,
    frequencies: tl.tensor,
    where: tl.tensor,
    tables: tl.tensor,
    pages: tl.tensor,
    out: tl.tensor,
    scale: float,
    latent_stride: int,
    key_stride: int,
    q_stride: int,
    q_head_stride: int,
    out_stride: int,
    out_head_stride: int,
    page_stride: int,
    slot_stride: int,
    table_stride: int,
    table_width: int,
    page_size: int,
    num_heads: int,
    rank: int,
    QUERY_LEN: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
) -> None:
    """The first program of a row stores, the others rotate HEADS of its heads each."""
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    pair, column = tl.arange(0, BLOCK), tl.arange(0, RANK)
    frequency = tl.load(frequencies + pair, pair < HALF, 0)
    gdc_wait()
    position, page, offset = _slot(row, where, tables, table_stride, table_width, page_size, QUERY_LEN)
    angle = position.to(tl.float32) * frequency
    cos = (tl.cos(angle) * scale).to(key.dtype.element_ty).to(tl.float32)[None, :]
    sin = (tl.sin(angle) * scale).to(key.dtype.element_ty).to(tl.float32)[None, :]
    slot, stores = pages + page * page_stride + offset * slot_stride, tl.program_id(1) == 0
    if stores:
        tl.store(slot + column, tl.load(latent + row * latent_stride + column, column < rank), column < rank)
    # the key is the last before the first
    head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
    source = (
        tl.where(stores, key + row * key_stride, q + row * q_stride + head * q_head_stride) + pair[None, :]
    )
    target = tl.where(stores, slot + rank, out + row * out_stride + head * out_head_stride) + pair[None, :]
    inside = tl.where(stores, head == -1, head < num_heads) & (pair < HALF)[None, :]
    low, high = tl.load(source, inside, 0), tl.load(source + HALF, inside, 0)
    tl.store(target, _rotated(low, high, cos, -sin), inside)
    tl.store(target + HALF, _rotated(high, low, cos, sin), inside)


@dataclass(frozen=True)
class TritonRope:
    """In a uniform layout the kernel of each layer computes positions and slots itself."""

    frequencies: Tensor  # [R / 2] float32
    scale: float = 1.0  # of cos and sin

    def __call__(self, layout: Layout) -> Store:
        uniform = layout.uniform_q is not None
        return _TritonStore(
            frequencies=self.frequencies,
            scale=self.scale,
            where=layout.starts if uniform else layout.positions,
            tables=layout.block_tables if uniform else layout.slots,
            query_len=layout.uniform_q or 0,
        )


@dataclass(frozen=True, kw_only=True)
class _TritonStore:
    frequencies: Tensor
    scale: float
    where: Tensor  # starts [B] of a uniform layout, positions [rows] of a ragged one
    tables: Tensor  # block tables [B, max_pages] of a uniform layout, slots [rows] of a ragged one
    query_len: int  # 0: ragged

    def latents(self, latent: Tensor, key: Tensor, pages: Tensor, q: Tensor, out: Tensor) -> None:
        (rows, rank), width, num_heads = latent.shape, key.shape[1], q.shape[1]
        assert pages.shape[2:] == (1, rank + width), (pages.shape, rank, width)
        assert q.shape == out.shape == (rows, num_heads, width), (q.shape, out.shape)
        assert {each.stride(-1) for each in (latent, key, pages, q, out)} == {1}, "rows must be contiguous"
        if rows:
            _latent_store_kernel[(rows, 1 + triton.cdiv(num_heads, _HEADS))](
                *(latent, key, q, self.frequencies, self.where, self.tables, pages, out, self.scale),
                *(latent.stride(0), key.stride(0), *q.stride()[:2], *out.stride()[:2], *pages.stride()[:2]),
                *(self.tables.stride(0), self.tables.shape[-1], pages.shape[1], num_heads, rank),
                QUERY_LEN=self.query_len,
                HALF=width // 2,
                BLOCK=triton.next_power_of_2(width // 2),
                RANK=triton.next_power_of_2(rank),
                HEADS=_HEADS,
                num_warps=2,
                enable_fp_fusion=False,  # as below
                **PDL,
            )

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> Tensor:
        rows, num_all, head_dim = qkv.shape
        num_kv_heads = keys.shape[2]
        num_heads = num_all - 2 * num_kv_heads
        assert qkv.is_contiguous(), "qkv must be contiguous"
        assert keys.stride() == values.stride(), "keys and values must have the same strides"
        q = qkv.new_empty(rows, num_heads, head_dim)
        if rows:
            half = head_dim // 2
            _rope_store_kernel[(rows, triton.cdiv(num_all, _HEADS))](
                *(qkv, self.frequencies, self.where, self.tables, q, keys, values),
                *(self.scale, k_scale, v_scale),
                *keys.stride()[:3],
                *(self.tables.stride(0), self.tables.shape[-1], keys.shape[1], num_heads, num_kv_heads),
                QUERY_LEN=self.query_len,
                HALF=half,
                TURNED=len(self.frequencies),
                BLOCK=triton.next_power_of_2(half),
                HEADS=_HEADS,
                num_warps=2,
                enable_fp_fusion=False,  # a fused multiply-add would skip the rounding of the product
                **PDL,
            )
        return q
