# mypy: allow-untyped-decorators
"""Triton kernels that process whole rows: RMSNorm with its fused variants, and SwiGLU's activation."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops.launch import PDL


@triton.jit
def _normed(x: tl.tensor, weight: tl.tensor, size: int, eps: float, CASTS_LAST: tl.constexpr) -> tl.tensor:  # noqa: N803
    """``x`` in its own dtype, zero beyond ``size``; rounded before the weight is applied or, CASTS_LAST, behind it."""
    wide = x.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide) / size + eps)
    if CASTS_LAST:
        return (scaled * weight.to(tl.float32)).to(x.dtype)
    return scaled.to(x.dtype) * weight


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    size: int,
    eps: float,
    num_weights: int,
    stride: int,
    CASTS_LAST: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = row % num_weights
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    w = tl.load(weight + part * size + columns, inside, 0)
    gdc_wait()
    values = tl.load(x + row // num_weights * stride + part * size + columns, inside, 0)
    tl.store(out + row * size + columns, _normed(values, w, size, eps, CASTS_LAST), inside)


@triton.jit
def _add_norm_kernel(
    stream: tl.tensor,
    parts: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    size: int,
    eps: float,
    stride: int,
    PARTS: tl.constexpr,  # noqa: N803
    CASTS_LAST: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    w = tl.load(weight + columns, inside, 0)
    gdc_wait()
    before = tl.load(stream + row * stride + columns, inside, 0)
    delta = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        start = (part * tl.num_programs(0) + row) * size
        delta += tl.load(parts + start + columns, inside, 0).to(tl.float32)
    added = before + delta.to(before.dtype)
    tl.store(total + row * size + columns, added, inside)
    tl.store(out + row * size + columns, _normed(added, w, size, eps, CASTS_LAST), inside)


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
    tl.store(out + columns, _normed(values, w, size, eps, False), inside)


@triton.jit
def silu_mul(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up, computed in float32, the activated gate rounded to its own dtype as in ``torch``."""
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul_kernel(gate_up: tl.tensor, out: tl.tensor, size: int, BLOCK: tl.constexpr) -> None:  # noqa: N803
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gdc_wait()
    gate = tl.load(gate_up + row * 2 * size + columns, inside, 0)
    up = tl.load(gate_up + row * 2 * size + size + columns, inside, 0)
    tl.store(out + row * size + columns, silu_mul(gate, up), inside)


@dataclass(frozen=True)
class TritonNorm:
    """Rows may be strided; the elements of a row must be contiguous."""

    weight: Tensor  # [..., N]
    eps: float
    casts_last: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        size = self.weight.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            num_weights = self.weight.numel() // size
            args = (x, self.weight, out, size, self.eps, num_weights, x.stride(0))
            _norm_kernel[(x.numel() // size,)](*args, CASTS_LAST=self.casts_last, **_block(size), **PDL)
        return out

    def add(self, stream: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        rows, size = stream.shape
        # not one allocation of both: one may outlive the other
        total, out = stream.new_empty(rows, size), stream.new_empty(rows, size)
        if rows:
            args = (stream, parts, self.weight, total, out, size, self.eps, stream.stride(0))
            flags = {"PARTS": len(parts), "CASTS_LAST": self.casts_last}
            _add_norm_kernel[(rows,)](*args, **flags, **_block(size), **PDL)
        return total, out


@dataclass(frozen=True)
class TritonEmbedNormConcat:
    table: Tensor
    embed_weight: Tensor
    weight: Tensor
    eps: float

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        rows, size = x.shape
        out = x.new_empty(rows, 2 * size)
        if rows:
            args = (token_ids, self.table, self.embed_weight, x, self.weight, out, size, self.eps)
            _embed_norm_concat_kernel[(rows, 2)](*args, x.stride(0), **_block(size), **PDL)
        return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * I] -> [rows, I]; the gate is the first half."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if rows:
        _silu_mul_kernel[(rows, triton.cdiv(size, 1024))](gate_up, out, size, BLOCK=1024, num_warps=4, **PDL)
    return out


def _block(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
