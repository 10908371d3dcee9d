# mypy: allow-untyped-decorators
"""Triton kernels that process whole rows: RMSNorm with its fused variants, SwiGLU's activation, and the maximum.

The maximum of few long rows takes two kernels, as torch runs each row on one multiprocessor.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops import Sandwich, SandwichNorm, joined
from specgen.ops.experts import Activation
from specgen.ops.launch import PDL


@triton.jit
def rms_normed(x: tl.tensor, weight: tl.tensor, size: int, eps: float, CASTS_LAST: tl.constexpr) -> tl.tensor:  # noqa: N803
    """Rows ``x``, zero beyond ``size``, in their dtype; rounded in front of the weight or, CASTS_LAST, behind it."""
    wide = x.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, len(x.shape) - 1, keep_dims=True) / size + eps)
    # one return, as Triton compares the types of several: with a float32 weight they differ
    return (scaled * weight.to(tl.float32)).to(x.dtype) if CASTS_LAST else scaled.to(x.dtype) * weight


@triton.jit
def to_e4m3(values: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Times ``inverse``; saturates at 448, as the conversion does, and NaN stays NaN."""
    return (values.to(tl.float32) * inverse).to(tl.float8e4nv)


@triton.jit
def e4m3_scale(values: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:  # noqa: N803
    """Along AXIS, so that the largest magnitude becomes that of e4m3; of zeros so small that they stay zero."""
    return tl.maximum(tl.max(tl.abs(values.to(tl.float32)), AXIS) / 448.0, 1e-12)


@triton.jit
def _norm_heads_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_heads: int,
    num_normed: int,
    size: int,
    eps: float,
    stride: int,
    CASTS_LAST: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside, is_normed = (head < num_heads) & (column < size), head < num_normed
    w = tl.load(weight + head * size + column, inside & is_normed, 0)
    gdc_wait()
    values = tl.load(x + row * stride + head * size + column, inside, 0)
    normed = rms_normed(values, w, size, eps, CASTS_LAST).to(values.dtype)
    tl.store(out + (row * num_heads + head) * size + column, tl.where(is_normed, normed, values), inside)


@triton.jit
def _plus(
    total: tl.tensor,
    parts: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    size: int,
    PARTS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """``total`` in float32, and on it a row's parts, one after the other."""
    for part in tl.static_range(PARTS):
        start = (part * tl.num_programs(0) + row) * size
        total += tl.load(parts + start + columns, inside, 0).to(tl.float32)
    return total


@triton.jit
def _norm_kernel(
    stream: tl.tensor,
    parts: tl.tensor,
    more: tl.tensor,
    weight: tl.tensor,
    out_scale: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    size: int,
    eps: float,
    stride: int,
    PARTS: tl.constexpr,  # noqa: N803
    MORE: tl.constexpr,  # noqa: N803
    CASTS_LAST: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Of a stream as it is, or with PARTS and MORE added, which is ``total`` then."""
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    w = tl.load(weight + columns, inside, 0)
    gdc_wait()
    values = tl.load(stream + row * stride + columns, inside, 0)
    if PARTS > 0:
        delta = _plus(tl.zeros((BLOCK,), tl.float32), parts, row, columns, inside, size, PARTS)
        delta = _plus(delta, more, row, columns, inside, size, MORE)
        values += delta.to(values.dtype)
        tl.store(total + row * size + columns, values, inside)
    normed = rms_normed(values, w, size, eps, CASTS_LAST)
    if out_scale is not None:
        normed = to_e4m3(normed, 1.0 / tl.load(out_scale))
    tl.store(out + row * size + columns, normed, inside)


@triton.jit
def _sandwich_kernel(
    stream: tl.tensor,
    parts: tl.tensor,
    more: tl.tensor,
    within: tl.tensor,
    within_more: tl.tensor,
    behind: tl.tensor,
    scale: tl.tensor,
    before: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    size: int,
    eps: float,
    stride: int,
    PARTS: tl.constexpr,  # noqa: N803
    MORE: tl.constexpr,  # noqa: N803
    BEFORE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """``Sandwich``; a program a row."""
    gdc_launch_dependents()
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < size
    dtype: tl.constexpr = stream.dtype.element_ty
    weight = tl.load(behind + columns, inside, 0)
    gdc_wait()
    nothing = tl.zeros((BLOCK,), tl.float32)
    added = _plus(nothing, parts, row, columns, inside, size, PARTS).to(dtype)
    if MORE > 0:
        added = rms_normed(added, tl.load(within + columns, inside, 0), size, eps, True)
        other = _plus(nothing, more, row, columns, inside, size, MORE).to(dtype)
        added += rms_normed(other, tl.load(within_more + columns, inside, 0), size, eps, True)
    added = tl.load(stream + row * stride + columns, inside, 0) + rms_normed(added, weight, size, eps, True)
    if scale is not None:
        added = (added.to(tl.float32) * tl.load(scale).to(tl.float32)).to(dtype)
    tl.store(total + row * size + columns, added, inside)
    for each in tl.static_range(BEFORE):
        weight = tl.load(before + each * size + columns, inside, 0)
        start = (each * tl.num_programs(0) + row) * size
        tl.store(out + start + columns, rms_normed(added, weight, size, eps, True), inside)


@triton.jit
def _sum_kernel(
    parts: tl.tensor,
    out: tl.tensor,
    size: int,
    PARTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + columns, inside, 0).to(tl.float32)
    tl.store(out + columns, total, inside)


@triton.jit
def _embed_norm_concat_kernel(
    token_ids: tl.tensor,
    table: tl.tensor,
    embed_weight: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    size: int,
    eps: float,
    stride: int,
    CASTS_LAST: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    out += row * 2 * size + tl.program_id(1) * size
    if tl.program_id(1) == 0:
        w = tl.load(embed_weight + columns, inside, 0)
        gdc_wait()
        values = tl.load(table + tl.load(token_ids + row) * size + columns, inside, 0)
    else:
        w = tl.load(weight + columns, inside, 0)
        gdc_wait()
        values = tl.load(x + row * stride + columns, inside, 0)
    tl.store(out + columns, rms_normed(values, w, size, eps, CASTS_LAST), inside)


@triton.jit
def _gated_norm_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_heads: int,
    size: int,
    eps: float,
    gate_stride: int,
    HEADS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads) & (column < size)
    w = tl.load(weight + column, column < size, 0)
    gdc_wait()
    values = tl.load(x + (row * num_heads + head) * size + column, inside, 0)
    wide = values.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 1)[:, None] / size + eps)
    normed = (scaled.to(values.dtype) * w).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + head * size + column, inside, 0).to(tl.float32)
    gated = normed * (opened / (1 + tl.exp(-opened)))
    tl.store(out + (row * num_heads + head) * size + column, gated.to(values.dtype), inside)


@triton.jit
def _sigmoid_gated_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    size: int,
    gate_stride: int,
    STEP: tl.constexpr,  # noqa: N803  from a column's gate to the next one's: 0 where a row has one
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    at = gate + row % num_rows * gate_stride + columns * STEP
    gdc_wait()
    wide = tl.load(at, inside, 0).to(tl.float32)
    opened = (1 / (1 + tl.exp(-wide))).to(gate.dtype.element_ty).to(tl.float32)
    values = tl.load(x + row * size + columns, inside, 0)
    tl.store(out + row * size + columns, (values.to(tl.float32) * opened).to(values.dtype), inside)


@triton.jit
def sharpened(gate: tl.tensor, GELU: tl.constexpr) -> tl.tensor:  # noqa: N803
    """What of a gate goes through the sigmoid that opens it: of GELU, by its approximation with tanh, more than it."""
    return gate * (1.5957691216057308 + 0.07135481282052193 * gate * gate) if GELU else gate


@triton.jit
def gate_mul(gate: tl.tensor, up: tl.tensor, GELU: tl.constexpr) -> tl.tensor:  # noqa: N803
    """SiLU or GELU of gate times up, in float32, the activated gate rounded to its own dtype as in ``torch``."""
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-sharpened(wide, GELU)))).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _gate_mul_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out_scale: tl.tensor,
    out: tl.tensor,
    size: int,
    gate_stride: int,
    up_stride: int,
    PARTS: tl.constexpr,  # noqa: N803
    GELU: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gdc_wait()
    total = _plus(tl.zeros((BLOCK,), tl.float32), gate, row, columns, inside, gate_stride, PARTS)
    gated = gate_mul(total.to(up.dtype.element_ty), tl.load(up + row * up_stride + columns, inside, 0), GELU)
    if out_scale is not None:
        gated = to_e4m3(gated, 1.0 / tl.load(out_scale))
    tl.store(out + row * size + columns, gated, inside)


_NORMED_HEADS = 8  # per program of a gated norm


@dataclass(frozen=True)
class TritonNorm:
    """Rows may be strided; the elements of a row must be contiguous.

    With an ``out_scale`` float32 [1] the normed rows are e4m3; see ``MakeNorm``.
    """

    weight: Tensor  # [N] or [n, N]
    eps: float
    casts_last: bool = False
    out_scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dim() > 1:
            return self._heads(x)
        assert x.numel() == len(x) * len(self.weight), (x.shape, self.weight.shape)
        out = torch.empty(x.shape, dtype=self.out_dtype(x), device=x.device)
        self._rows(x, None, None, None, out)
        return out

    def _rows(
        self, x: Tensor, parts: Tensor | None, more: Tensor | None, total: Tensor | None, out: Tensor
    ) -> None:
        if not len(x):
            return
        size = len(self.weight)
        _norm_kernel[(len(x),)](
            *(x, parts, more, self.weight, self.out_scale, total, out, size, self.eps, x.stride(0)),
            PARTS=0 if parts is None else len(parts),
            MORE=0 if more is None else len(more),
            CASTS_LAST=self.casts_last,
            **row_block(size),
            **PDL,
        )

    def _heads(self, x: Tensor) -> Tensor:
        rows, num_heads, size = x.shape
        assert self.out_scale is None
        assert x.stride()[1:] == (size, 1), "the heads of a row must be contiguous"
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if rows:
            block = row_block(size)
            heads = max(1024 // block["BLOCK"], 1)
            _norm_heads_kernel[(rows, triton.cdiv(num_heads, heads))](
                *(x, self.weight, out, num_heads, len(self.weight), size, self.eps, x.stride(0)),
                CASTS_LAST=self.casts_last,
                HEADS=heads,
                **(block | {"num_warps": max(block["num_warps"], 4)}),
                **PDL,
            )
        return out

    def add(self, stream: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        first, more = parts if len(parts) == 2 else (joined(parts), None)
        # not one allocation of both: one may outlive the other
        total = stream.new_empty(stream.shape)
        out = torch.empty(stream.shape, dtype=self.out_dtype(stream), device=stream.device)
        self._rows(stream, first, more, total, out)
        return total, out

    def out_dtype(self, x: Tensor) -> torch.dtype:
        """Of the normed rows of ``x``."""
        return x.dtype if self.out_scale is None else torch.float8_e4m3fn


def sandwich(norms: Sandwich) -> SandwichNorm:
    """See ``Ops.sandwich``."""
    within = norms.within or (None, None)

    def forward(stream: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        first, more = parts if len(parts) == 2 else (parts[0], None)
        assert (more is None) == (norms.within is None), len(parts)
        (rows, size), count = stream.shape, len(norms.before)
        total, out = stream.new_empty(rows, size), stream.new_empty(count, rows, size)
        if rows:
            _sandwich_kernel[(rows,)](
                *(stream, first, more, *within, norms.behind, norms.scale, norms.before, total, out),
                *(size, norms.eps, stream.stride(0)),
                PARTS=len(first),
                MORE=0 if more is None else len(more),
                BEFORE=count,
                **row_block(size),
                **PDL,
            )
        return total, out

    return forward


@dataclass(frozen=True)
class TritonEmbedNormConcat:
    table: Tensor
    embed_weight: Tensor
    weight: Tensor
    eps: float
    casts_last: bool

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        rows, size = x.shape
        out = x.new_empty(rows, 2 * size)
        if rows:
            args = (token_ids, self.table, self.embed_weight, x, self.weight, out, size, self.eps)
            _embed_norm_concat_kernel[(rows, 2)](
                *args, x.stride(0), CASTS_LAST=self.casts_last, **row_block(size), **PDL
            )
        return out


@dataclass(frozen=True)
class TritonGatedNorm:
    weight: Tensor  # [N]
    eps: float

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        rows, num_heads, size = x.shape
        assert x.is_contiguous()
        assert gate.shape == x.shape
        assert gate.stride()[1:] == (size, 1), "the heads of a row must be contiguous"
        out = torch.empty_like(x)
        if rows:
            _gated_norm_kernel[(rows, triton.cdiv(num_heads, _NORMED_HEADS))](
                *(x, gate, self.weight, out, num_heads, size, self.eps, gate.stride(0)),
                HEADS=_NORMED_HEADS,
                BLOCK=triton.next_power_of_2(size),
                num_warps=4,
                **PDL,
            )
        return out


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """See ``Ops.sigmoid_gated``; the sigmoid is rounded to the gate's dtype as in ``torch``."""
    num_rows, size = x.shape[-2:]
    assert x.is_contiguous()
    assert len(gate) == num_rows, (x.shape, gate.shape)
    assert gate.shape[1] in (1, size), (x.shape, gate.shape)
    out = torch.empty_like(x)
    if x.numel():
        _sigmoid_gated_kernel[(x.numel() // size, triton.cdiv(size, 1024))](
            *(x, gate, out, num_rows, size, gate.stride(0)),
            STEP=int(gate.shape[1] == size),
            BLOCK=1024,
            num_warps=4,
            **PDL,
        )
    return out


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, rows, N] -> [rows, N], summed in float32 and rounded to ``dtype``."""
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if out.numel():
        grid = (triton.cdiv(out.numel(), 1024),)
        _sum_kernel[grid](
            parts.contiguous(), out, out.numel(), PARTS=len(parts), BLOCK=1024, num_warps=4, **PDL
        )
    return out


def activate_and_mul(
    activation: Activation, gate: Tensor, up: Tensor, out_scale: Tensor | None = None
) -> Tensor:
    """Two [rows, I], of which rows may be strided -> [rows, I]; with an ``out_scale`` [1] in e4m3.

    ``gate`` may be partial sums [n, rows, I].
    """
    rows, size = up.shape
    assert gate.shape[-2:] == up.shape, (gate.shape, up.shape)
    assert gate.dim() == 2 or gate.is_contiguous(), gate.stride()
    dtype = up.dtype if out_scale is None else torch.float8_e4m3fn
    out = torch.empty(rows, size, dtype=dtype, device=up.device)
    if rows:
        _gate_mul_kernel[(rows, triton.cdiv(size, 1024))](
            *(gate, up, out_scale, out, size, gate.stride(-2), up.stride(0)),
            PARTS=1 if gate.dim() == 2 else len(gate),
            GELU=activation == "gelu tanh",
            BLOCK=1024,
            num_warps=4,
            **PDL,
        )
    return out


def row_block(size: int) -> dict[str, int]:
    """For a program that holds a row of ``size``."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


_CHUNK = 4096  # elements per program


@triton.jit
def _chunk_kernel(
    x: tl.tensor,
    best: tl.tensor,
    where: tl.tensor,
    total: tl.tensor,
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
    if total is not None:
        tl.store(total + slot, tl.sum(tl.exp(values - largest), 0))


@triton.jit
def _row_kernel(
    best: tl.tensor,
    where: tl.tensor,
    total: tl.tensor,
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
    if total is not None:
        totals = tl.load(total + row * num_chunks + chunks, chunks < num_chunks, 0)
        tl.store(value + row, 1 / tl.sum(totals * tl.exp(values - largest), 0))
    else:
        tl.store(value + row, largest)


def largest(x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``Largest``; the maximum in float32, of a row with NaN infinite."""
    return _largest(x, ids, probability=False)


def most_likely(x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``MostLikely``: the sum of the softmax is taken on the way, in the kernels of ``largest``."""
    return _largest(x, ids, probability=True)


def _largest(x: Tensor, ids: Tensor | None, *, probability: bool) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    index = torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)
    value = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, num_chunks = index.numel(), triton.cdiv(size, _CHUNK)
    if rows:
        assert x.is_contiguous(), "rows must be contiguous"
        best = torch.empty(rows, num_chunks, dtype=torch.float32, device=x.device)
        where = torch.empty(rows, num_chunks, dtype=torch.int32, device=x.device)
        total = torch.empty_like(best) if probability else None
        _chunk_kernel[(rows, num_chunks)](x, best, where, total, size, CHUNK=_CHUNK, num_warps=4, **PDL)
        block = triton.next_power_of_2(num_chunks)
        args = (best, where, total, ids, index, value, num_chunks)
        _row_kernel[(rows,)](*args, BLOCK=block, num_warps=1, **PDL)
    return index, value
