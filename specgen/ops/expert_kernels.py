# mypy: allow-untyped-decorators
"""Triton kernels for the experts of few rows, limited by how fast the experts that are touched can be read.

Rows go to experts in blocks that one program multiplies.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops.expert_gemm import as_words, gemm, prefetch
from specgen.ops.experts import Experts, ExpertsMap, Gating
from specgen.ops.fp8 import block_scales
from specgen.ops.fp8_kernels import rounded_rows
from specgen.ops.launch import PDL
from specgen.ops.measured_choices import ExpertTile, ExpertTiles
from specgen.ops.row_kernels import sharpened
from specgen.ops.weight import GROUP, Weight

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


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """One ``Weight`` of a layer's experts as the kernels read it."""

    data: Tensor  # [E, out, in], or words; see as_words
    scale: Tensor | None  # of FP8 [E, out], or by block: see block_scales
    bias: Tensor | None  # [E, out]
    num_out: int
    width: int
    activations: Literal["static", "token", "group"] | None = None  # of FP8; see Weight
    input_scale: Tensor | None = None  # [E], of static activations

    @classmethod
    def of(cls, weight: Weight, halves: int = 1) -> "Matrices":
        """``halves``: 2 of gate and up, which begin a block of FP8 each."""
        assert weight.data.is_contiguous(), "the kernels would misread it and say nothing"
        (_, num_out, width), scale = weight.data.shape, weight.scale
        plain = cls(data=weight.data, scale=None, bias=weight.bias, num_out=num_out, width=width)
        if weight.format == "plain":
            return plain
        assert scale is not None
        if weight.format == "mxfp4":
            words, scale = as_words(weight.data, scale)
            return replace(plain, data=words, scale=scale, width=2 * width)
        grouped = weight.activations == "group"
        scale = block_scales(scale, halves) if grouped else scale.flatten(1)
        return replace(
            plain,
            scale=scale.contiguous(),
            activations=weight.activations,
            input_scale=weight.input_scale,
        )

    def inputs(self, x: Tensor, tile: ExpertTile) -> tuple[Tensor, Tensor | None, int]:
        """``x`` [n, in] as ``gemm`` takes it with ``tile``, its scales, and how many are each row's."""
        grouped = self.activations == "group"
        if self.activations is None or self.activations == "static" or (grouped and tile.rounds):
            return x, self.input_scale, 0
        rounded = rounded_rows(x, None, GROUP if grouped else None)
        assert rounded.scale is not None
        return rounded.data, rounded.scale, rounded.scale.shape[1]


@triton.jit
def _gate(
    gate: tl.tensor,
    up: tl.tensor,
    alpha: float,
    shift: float,
    limit: float,
    LIMITED: tl.constexpr,  # noqa: N803
    GELU: tl.constexpr,  # noqa: N803
    BETWEEN: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """``Gating`` in float32, what is multiplied rounded to BETWEEN."""
    gate, up = gate.to(BETWEEN).to(tl.float32), up.to(BETWEEN).to(tl.float32)
    if LIMITED:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    return (gate / (1 + tl.exp(-alpha * sharpened(gate, GELU)))).to(BETWEEN).to(tl.float32) * (up + shift)


@triton.jit(do_not_specialize=["num_rows", "x_step", "alpha", "shift", "limit"])
def _gate_up_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    ids: tl.tensor,
    order: tl.tensor,
    listed: tl.tensor,
    num_rows: int,
    x_step: int,
    num_out: int,
    width: int,
    alpha: float,
    shift: float,
    limit: float,
    LIMITED: tl.constexpr,  # noqa: N803
    GELU: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    K: tl.constexpr,  # noqa: N803
    K_BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    GROUPED: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
) -> None:
    gdc_wait()
    expert, pairs, inside = block_of(ids, order, listed, num_rows, KIND, K, K_BLOCK, ROWS)
    if expert < 0:
        return
    # Eight outputs of gate, the same eight of up, and so on: one GEMM, whose halves a thread has both.
    index, first = tl.arange(0, 2 * BLOCK_OUT), tl.program_id(1) * BLOCK_OUT
    half = num_out // 2
    out = tl.minimum(first + index // 16 * 8 + index % 8, half - 1) + index // 8 % 2 * half
    if bias is not None:  # loaded here, not to be waited for at the end
        added = tl.load(bias + expert.to(tl.int64) * num_out + out)
    acc = gemm(
        x, x_scale, x_step, weight, scale, expert, pairs // K, inside, out, first, half, num_out, width,
        GROUPED, BLOCK_IN, STAGES,
    )  # fmt: skip
    # Not earlier: the successor's programs would crowd onto the multiprocessors that are free first.
    gdc_launch_dependents()
    if bias is not None:
        acc += added[:, None].to(tl.float32)
    acc = tl.permute(tl.reshape(acc, (BLOCK_OUT // 8, 2, 8, ROWS)), (0, 2, 3, 1))
    gate, up = tl.split(acc)
    # as Gating rounds: what is rounded to e4m3 next must be the same
    if weight.dtype.element_ty == tl.float8e4nv:
        gated = _gate(gate, up, alpha, shift, limit, LIMITED, GELU, y.dtype.element_ty)
    else:
        gated = _gate(gate, up, alpha, shift, limit, LIMITED, GELU, tl.float32)
    gated = tl.reshape(gated, (BLOCK_OUT, ROWS))
    out = first + tl.arange(0, BLOCK_OUT)
    y += pairs[None, :].to(tl.int64) * half
    tl.store(y + out[:, None], gated.to(y.dtype.element_ty), inside[None, :] & (out[:, None] < half))


@triton.jit(do_not_specialize=["num_rows", "x_step"])
def _down_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    y: tl.tensor,
    ids: tl.tensor,
    order: tl.tensor,
    listed: tl.tensor,
    num_rows: int,
    x_step: int,
    num_out: int,
    width: int,
    KIND: tl.constexpr,  # noqa: N803
    K: tl.constexpr,  # noqa: N803
    K_BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    GROUPED: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
) -> None:
    # What gate and up have waited for can be read before they have finished.
    expert, pairs, inside = block_of(ids, order, listed, num_rows, KIND, K, K_BLOCK, ROWS)
    if expert < 0:
        return
    first = tl.program_id(1) * BLOCK_OUT
    index = first + tl.arange(0, BLOCK_OUT)
    out = tl.minimum(index, num_out - 1)
    factor = tl.load(factors + pairs, inside, 0)  # like the bias, not to be waited for at the end
    if bias is not None:
        added = tl.load(bias + expert.to(tl.int64) * num_out + out)
    if scale is not None:
        prefetch(weight, expert, out, num_out, width)
    gdc_wait()
    acc = gemm(
        x, x_scale, x_step, weight, scale, expert, pairs, inside, out, first, num_out, num_out, width,
        GROUPED, BLOCK_IN, STAGES,
    )  # fmt: skip
    gdc_launch_dependents()
    if bias is not None:
        acc += added[:, None].to(tl.float32)
    dtype = y.dtype.element_ty
    weighted = acc.to(dtype).to(tl.float32) * factor[None, :].to(tl.float32)
    y += (pairs % K * num_rows + pairs // K)[None, :].to(tl.int64) * num_out
    tl.store(y + index[:, None], weighted.to(dtype), inside[None, :] & (index[:, None] < num_out))


def gate_up(
    x: Tensor, matrices: Matrices, gating: Gating, blocks: Blocks, rows: int, tile: ExpertTile
) -> Tensor:
    """``x`` [rows, H] through gate and up of each row's experts: gated [rows * k, I], by pair (see ``Blocks``)."""
    y = x.new_empty(blocks.ids.numel(), matrices.num_out // 2)
    (data, x_scale, x_step), limit = matrices.inputs(x, tile), gating.limit
    _gate_up_kernel[(blocks.count, triton.cdiv(y.shape[1], tile.block_out))](
        *(data, x_scale, matrices.data, matrices.scale, matrices.bias, y),
        *(blocks.ids, blocks.order, blocks.listed, x.shape[0], x_step, matrices.num_out, matrices.width),
        *(gating.alpha, gating.shift, limit or 0.0),
        LIMITED=limit is not None,
        GELU=gating.activation == "gelu tanh",
        **_constants(matrices, blocks, rows, tile),
    )
    return y


def down(
    gated: Tensor, matrices: Matrices, weights: Tensor, blocks: Blocks, rows: int, tile: ExpertTile
) -> Tensor:
    """``gated`` [rows * k, I] through down, times ``weights`` [rows, k]: a part for each slot, [k, rows, H]."""
    num_rows, k = weights.shape
    y = gated.new_empty(k, num_rows, matrices.num_out)
    data, x_scale, x_step = matrices.inputs(gated, tile)
    _down_kernel[(blocks.count, triton.cdiv(matrices.num_out, tile.block_out))](
        *(data, x_scale, matrices.data, matrices.scale, matrices.bias, weights, y),
        *(blocks.ids, blocks.order, blocks.listed, num_rows, x_step, matrices.num_out, matrices.width),
        **_constants(matrices, blocks, rows, tile),
    )
    return y


def _constants(matrices: Matrices, blocks: Blocks, rows: int, tile: ExpertTile) -> dict[str, Any]:
    grouped, k = matrices.activations == "group", blocks.ids.shape[1]
    assert not grouped or (tile.block_in == GROUP and GROUP % tile.block_out == 0), tile
    return {
        "KIND": blocks.kind,
        "K": k,
        "K_BLOCK": triton.next_power_of_2(k),
        "ROWS": rows,
        "BLOCK_OUT": tile.block_out,
        "BLOCK_IN": tile.block_in,
        "GROUPED": grouped,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        **PDL,
    }


@dataclass(frozen=True, kw_only=True)
class LoadedExperts:
    """The experts of a layer as the kernels read them."""

    num_experts: int
    gate_up: Matrices
    down: Matrices
    gating: Gating

    @classmethod
    def of(cls, experts: Experts) -> "LoadedExperts":
        """Memory for a copy of MXFP4 weights, which are put in another order; others are kept."""
        gate_up, down = Matrices.of(experts.gate_up, halves=2), Matrices.of(experts.down)
        return cls(num_experts=len(experts.down.data), gate_up=gate_up, down=down, gating=experts.gating)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, tiles: ExpertTiles) -> Tensor:
        """See ``ExpertsMap``; a part for each of a row's experts, rounded as ``grouped_experts`` rounds them."""
        blocks = find_blocks(ids, self.num_experts, tiles.rows)
        gated = gate_up(x, self.gate_up, self.gating, blocks, tiles.rows, tiles.gate_up)
        return down(gated, self.down, weights, blocks, tiles.rows, tiles.down)


def few_rows_experts(
    experts: Experts, tiles: tuple[ExpertTiles, ...], beyond: ExpertsMap | None = None
) -> ExpertsMap:
    """By ``tiles``, ascending in ``most``; passes of more rows go to ``beyond`` or else to the last."""
    loaded = LoadedExperts.of(experts)

    def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if not len(x):
            return x.new_zeros(1, *x.shape)
        mean = ids.numel() / loaded.num_experts
        tile = next((tile for tile in tiles if mean <= tile.most), None)
        if tile is None and beyond is not None:
            return beyond(x, ids, weights)
        return loaded(x, ids.contiguous(), weights.contiguous(), tile or tiles[-1])

    return forward
