"""Decode attention on Hopper, with rotation and storing: ``hopper_decode.cu``."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specgen.attention.workspaces import num_sms
from specgen.kv.layout import Layout
from specgen.models.attend import LayerAttention
from specgen.ops.cuda_source import compiled, current_stream, pointers, runs_on, source_spec
from specgen.ops.jit_modules import Module

if TYPE_CHECKING:
    from specgen.ops.rope import TritonRope

_SOURCE = Path(__file__).with_suffix(".cu")
_MOST_ROWS = 64  # of a sequence times heads, in a cluster
_MOST_QUERY = 16  # rows of a sequence
_MOST_SPLITS = 8  # blocks of a cluster
_HEAD_DIMS = (64, 128)


def cluster_heads(query_len: int, heads_per_kv: int) -> int | None:
    """Of the heads of a KV head, how many one cluster attends with; None: the rows are too many."""
    if query_len > _MOST_QUERY:
        return None
    divisors = (heads for heads in range(heads_per_kv, 0, -1) if heads_per_kv % heads == 0)
    return next((heads for heads in divisors if heads * query_len <= _MOST_ROWS), None)


def cluster_size(num_clusters: int, num_multiprocessors: int) -> int:
    """Blocks of a cluster, a power of two: what the longest of uneven sequences may be worth.

    Those that a sequence does not need end at once, which costs little while clusters are few. Of 16 blocks, for which
    not all parts of a GPU have room, a step of one sequence took 5.54 ms and of 4 5.40.
    """
    if 2 * num_clusters > num_multiprocessors:
        return 1
    size = _MOST_SPLITS
    while size * num_clusters > 2 * num_multiprocessors:
        size //= 2
    return size


def serves(
    query_len: int, heads_per_kv: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> bool:
    """Whether it was built for these; then it is the fastest."""
    half = dtype == kv_dtype == torch.bfloat16
    return half and head_dim in _HEAD_DIMS and cluster_heads(query_len, heads_per_kv) is not None


def module(query_len: int, heads_per_kv: int, head_dim: int) -> Module:
    """What passes of ``query_len`` rows a sequence need compiled."""
    rows = _row_tile(query_len, heads_per_kv)
    return Module(what=f"attention, {rows} rows, heads of {head_dim}", spec=partial(_spec, head_dim, rows))


@dataclass(frozen=True, kw_only=True)
class HopperDecode:
    """See ``RotatingKernel``; of a decode pass."""

    layout: Layout  # uniform
    rope: "TritonRope"

    def fits(self, layer: LayerAttention, qkv: Tensor, keys: Tensor) -> bool:
        num_kv_heads, head_dim = keys.shape[2:]
        group = qkv.shape[1] // num_kv_heads - 2
        assert self.layout.uniform_q is not None
        return (
            layer.value_dim is None
            and len(self.rope.frequencies) * 2 == head_dim
            and serves(self.layout.uniform_q, group, head_dim, qkv.dtype, keys.dtype)
            and runs_on(qkv.device)
        )

    def __call__(self, layer: LayerAttention, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        layout, query_len = self.layout, self.layout.uniform_q
        assert query_len is not None
        num_kv_heads, head_dim = keys.shape[2:]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        group = cluster_heads(query_len, num_heads // num_kv_heads)
        assert group is not None
        assert qkv.is_contiguous(), qkv.stride()
        assert keys.stride() == values.stride(), "keys and values must have the same strides"
        assert keys.stride(3) == 1, keys.stride()
        starts, tables = layout.starts, layout.block_tables
        assert starts.dtype == torch.int64, starts.dtype
        assert tables.dtype == torch.int32, tables.dtype
        assert tables.stride(1) == 1, tables.stride()
        page_size = keys.shape[1]
        assert page_size >= 16, page_size
        assert page_size.bit_count() == 1, page_size
        out = qkv.new_empty(len(qkv), num_heads * head_dim)
        if not len(qkv):
            return out
        clusters, sms = layout.num_sequences * num_heads // group, num_sms(qkv.device)
        strides = (*keys.stride()[:3], tables.stride(0))
        numbers = (
            *(tables.shape[1], page_size.bit_length() - 1, layout.num_sequences, query_len),
            *(num_heads, num_kv_heads, group, layer.window or 0),
            *(cluster_size(clusters, sms), sms),
        )
        error = _function(head_dim, _row_tile(query_len, num_heads // num_kv_heads))(
            *pointers((qkv, self.rope.frequencies, keys, values, starts, tables, layer.sinks, out)),
            *(ctypes.c_int64(each) for each in strides),
            *numbers,
            ctypes.c_float(layer.scale),
            ctypes.c_float(self.rope.scale),
            current_stream(qkv.device),
        )
        assert error == 0, f"hopper_decode: error {error} at {list(qkv.shape)} heads, {numbers}"
        return out


def _row_tile(query_len: int, heads_per_kv: int) -> int:
    heads = cluster_heads(query_len, heads_per_kv)
    assert heads is not None, (query_len, heads_per_kv)
    return -(-query_len * heads // 16) * 16


@cache
def _function(head_dim: int, rows: int) -> Callable[..., int]:
    return compiled(_spec(head_dim, rows), "hopper_decode_run")


def _spec(head_dim: int, rows: int) -> Any:  # noqa: ANN401
    return source_spec("attention", _SOURCE, {"DIM": head_dim, "MROWS": rows}, {})
