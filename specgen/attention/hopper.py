"""On compute capability 9.0 the kernel measured fastest for each kind of pass, one of specgen's own first."""

import ctypes
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specgen.attention import Backend, Gpu, Kernel, LayerAttention, RotatingKernel, Rows, Use
from specgen.attention.fa3 import attend_expanded
from specgen.attention.flashinfer_paged import prefill_modules
from specgen.attention.latent_decode import LatentDecode, latent_kernel, latent_modules, refuse_latents
from specgen.attention.trtllm import HEAD_DIMS, TrtllmBackend, xqa_module, xqa_partial_modules
from specgen.kv.layout import HostLens, Layout
from specgen.ops import Rope
from specgen.ops.jit_modules import Module, compiled, current_stream, num_sms, pointers, runs_on, source_spec
from specgen.ops.measured_choices import UNSPLIT_ROWS

if TYPE_CHECKING:
    from specgen.ops.rope import TritonRope


OWN, UNSPLIT, WIDE = "specgen hopper_decode", "FlashInfer FA2 without splits", "specgen wide_heads"
_WIDE_DIM = 512


class HopperBackend(Backend):
    """Decode passes on ``hopper_decode`` where it serves, else on XQA or FA2; all else as ``TrtllmBackend``.

    Passes of several rows that ``hopper_decode`` does not serve and that fill the GPU with a block per sequence and KV
    head go to FlashInfer's FA2 kernel: it takes 83 us against XQA's 92 for 128 sequences of 5 rows and 300 positions,
    and 24.5 against 28.3 for 32 (32 heads, 8 KV heads of 128, bfloat16, H100).

    Latents are attended to by FlashInfer's FA3 kernel, with a work list that the device makes; heads of 512 by
    ``wide_heads``, prefills too, and so are decode passes of layers that store nothing.
    """

    name = "hopper"
    summary = "the kernel measured fastest for each pass, none of which needs a plan on the host"
    capabilities = replace(
        TrtllmBackend.capabilities,
        compute_majors=(9,),
        fp8_majors=(9,),
        head_dims=(*HEAD_DIMS, _WIDE_DIM),
        latents=refuse_latents,
    )

    def __init__(self, device: torch.device) -> None:
        self._trtllm = TrtllmBackend(device)
        self._num_sms = num_sms(device)
        self._unsplit = UnsplitDecode(device)
        self._latents = LatentDecode(device)
        self._arrivals = new_arrivals(device)

    @staticmethod
    def modules(gpu: Gpu, use: Use) -> list[Module]:
        heads = use.heads
        if heads.latent is not None:
            return latent_modules(use)
        if heads.head_dim == _WIDE_DIM:
            return []  # Triton's
        found, decoding = prefill_modules("fa3", use) if use.prefills else [], list[Module]()
        chosen = {rows: HopperBackend.kernel(gpu, use, rows, use.num_sequences) for rows in use.query_lens}
        for rows, kernel in chosen.items():
            if kernel == OWN:
                found.append(hopper_decode_module(rows, heads.group, heads.head_dim))
            elif kernel != WIDE:  # XQA where fewer sequences are left
                decoding += [xqa_module(heads, rows, windowed) for windowed in use.windowed]
        decoding += [xqa_module(heads, rows, windowed=False) for rows in use.chunk_rows]
        if use.partial and HopperBackend.kernel(gpu, use, "partial", use.num_sequences) not in (OWN, WIDE):
            decoding += xqa_partial_modules(use)
        return [*found, *decoding, *(prefill_modules("fa2", use) if UNSPLIT in chosen.values() else [])]

    @staticmethod
    def kernel(gpu: Gpu, use: Use, rows: Rows, num_sequences: int) -> str:
        heads = use.heads
        if heads.latent is not None:
            return latent_kernel(rows)
        if heads.head_dim == _WIDE_DIM or not (use.stores or rows == "prefill"):
            return WIDE
        if rows == "partial" and serves(
            heads.max_query_len, heads.group, heads.head_dim, heads.dtype, heads.kv_dtype
        ):
            return OWN
        if isinstance(rows, int):
            if not use.chained and serves(rows, heads.group, heads.head_dim, heads.dtype, heads.kv_dtype):
                return OWN
            fills = _unsplits(gpu.num_sms, num_sequences * heads.num_kv_heads, rows, heads.group)
            if fills and not heads.sinks and heads.kv_dtype == heads.dtype:
                return UNSPLIT
        return TrtllmBackend.kernel(gpu, use, rows, num_sequences)

    def plan(self, layout: Layout) -> Kernel:
        narrow = self._plan(layout)

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # layers that store nothing: 8 us where XQA takes 27 (a row of 354 positions, 16 heads of 256, H200)
            if q.shape[2] != _WIDE_DIM and (layer.stores or layout.host is not None):
                return narrow(layer, q, keys, values)
            from specgen.attention.wide_heads import attend_wide

            return attend_wide(layout, layer, q, keys, values)

        return kernel

    def _plan(self, layout: Layout) -> Kernel:
        """For narrower heads."""
        xqa, query_len = self._trtllm.plan(layout), layout.uniform_q
        if layout.host is not None or query_len is None:
            return xqa
        unsplit = self._unsplit.plan(layout)

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            num_kv_heads = keys.shape[2]
            blocks, group = layout.num_sequences * num_kv_heads, q.shape[1] // num_kv_heads
            # FA2 takes no sinks, and leaves out the scales of FP8 pages
            plain = layer.sinks is None and keys.dtype == q.dtype
            fa2 = plain and _unsplits(self._num_sms, blocks, query_len, group)
            return (unsplit if fa2 else xqa)(layer, q, keys, values)

        return kernel

    def absorbed(self, layout: Layout) -> Kernel:
        return self._latents.plan(layout)

    def expanded(self, host: HostLens) -> Kernel:
        return attend_expanded(host)

    def rotating(self, layout: Layout, rope: Rope) -> RotatingKernel | None:
        if layout.host is not None or layout.chained or not (layout.uniform_q or layout.full):
            return None
        from specgen.ops.rope import TritonRope

        if not isinstance(rope, TritonRope):
            return None
        return HopperDecode(layout=layout, rope=rope, arrivals=self._arrivals)


def _unsplits(num_sms: int, num_blocks: int, query_len: int, group: int) -> bool:
    """Whether a block for each sequence and KV head keeps every SM busy, and holds its rows of ``group`` heads."""
    return query_len > 1 and num_blocks > num_sms and query_len * group <= UNSPLIT_ROWS


# FlashInfer takes 8 MiB for a work list, of which one entry per sequence needs 16 bytes
_WORK_LIST = 1 << 18


@dataclass(kw_only=True)
class _FixedPlan:
    """A planned wrapper and the device buffers from which it reads pages and lengths."""

    wrapper: Any
    pages: Tensor  # [B * max_pages] int32
    last_page_lens: Tensor  # [B] int32
    filled_by: object = None  # the pass whose tables and lengths are in the buffers


class UnsplitDecode:
    """FA2 for uniform passes that fill the GPU without splitting a sequence.

    The work list then is one entry per sequence, whatever the lengths. Every sequence is given its whole row of the
    block table as pages, and a length of the last page that brings the sum down to its length: it may be negative.
    FlashInfer does not promise to take that, so pyproject.toml keeps to versions that do.
    """

    def __init__(self, device: torch.device) -> None:
        self._workspace = torch.empty(_WORK_LIST, dtype=torch.uint8, device=device)
        self._plans: dict[tuple[object, ...], _FixedPlan] = {}

    def plan(self, layout: Layout) -> Kernel:
        """``layout`` is uniform, with no more than 64 rows for the heads of a KV head."""
        this = object()
        spare = (layout.block_tables.shape[1] - 1) * layout.page_size

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            assert layer.sinks is None, "this kernel would leave them out and say nothing"
            assert keys.dtype == q.dtype, "and so it would the scales of FP8 pages"
            planned = self._plan_for(layout, layer, q, keys)
            if planned.filled_by is not this:
                planned.pages.view(layout.block_tables.shape).copy_(layout.block_tables)
                torch.sub(layout.kv_lens, spare, out=planned.last_page_lens)
                planned.filled_by = this
            return planned.wrapper.run(q, (keys, values)).view(len(q), -1)  # type: ignore[no-any-return]

        return kernel

    def _plan_for(self, layout: Layout, layer: LayerAttention, q: Tensor, keys: Tensor) -> _FixedPlan:
        """The plan for passes of that shape, made once and kept: graphs read its buffers."""
        shapes = (*layout.block_tables.shape, *q.shape, *keys.shape[1:])
        key = (*shapes, q.dtype, keys.dtype, layer.scale, layer.window)
        if key not in self._plans:
            assert not torch.cuda.is_current_stream_capturing(), (
                "run a pass of this shape before it is captured"
            )
            self._plans[key] = self._make_plan(layout, layer, q, keys)
        return self._plans[key]

    def _make_plan(self, layout: Layout, layer: LayerAttention, q: Tensor, keys: Tensor) -> _FixedPlan:
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        num_sequences, max_pages = layout.block_tables.shape
        wrapper = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
        wrapper.reset_workspace_buffer(self._workspace, torch.empty_like(self._workspace))
        pages = torch.zeros(num_sequences * max_pages, dtype=torch.int32, device=q.device)
        last_page_lens = torch.full((num_sequences,), layout.page_size, dtype=torch.int32, device=q.device)
        each = torch.arange(num_sequences + 1, dtype=torch.int32)
        wrapper.plan(
            each * (len(q) // num_sequences),
            each * max_pages,
            pages,  # on the device already, so the wrapper reads these two buffers and no copies
            last_page_lens,
            q.shape[1],
            keys.shape[2],
            q.shape[2],
            layout.page_size,
            causal=True,
            q_data_type=q.dtype,
            kv_data_type=keys.dtype,
            sm_scale=layer.scale,
            window_left=layer.window_left,
            disable_split_kv=True,
        )
        torch.cuda.current_stream().synchronize()  # the plan's copy, before its pinned buffer can be used again
        return _FixedPlan(wrapper=wrapper, pages=pages, last_page_lens=last_page_lens)


_SOURCE = Path(__file__).with_name("hopper_decode.cu")
# Rows of a sequence times heads, in a block, by the size of a head: as many as shared memory has room for
_MOST_ROWS = {64: 64, 128: 64, 256: 48}
_MOST_QUERY = 16  # rows of a sequence
_LEAST_SHARE = 128  # positions of a block: those of fewer would wait for one another longer than they read
_LEAST_OF_CLUSTERS = 512  # positions of a cluster of several blocks
_CLUSTER_SIZES = ((16, 64, 8), (32, 16, 4), (96, 64, 2))  # by most clusters and most rows of a block
_MOST_BLOCKS = 1 << 16  # sequences times the blocks that share their heads
_PARTLY_ROTATED = 256  # the size of heads of which only a part may be: any number of 8 pairs


def block_heads(query_len: int, heads_per_kv: int, head_dim: int) -> int | None:
    """Of the heads of a KV head, how many one block attends with; None: the rows are too many."""
    if query_len > _MOST_QUERY:
        return None
    divisors = (heads for heads in range(heads_per_kv, 0, -1) if heads_per_kv % heads == 0)
    return next((heads for heads in divisors if heads * query_len <= _MOST_ROWS[head_dim]), None)


def cluster_size(num_clusters: int, rows: int, head_dim: int, num_multiprocessors: int) -> int:
    """Blocks of a cluster, where each sequence and group of heads has at least one, which should start at once.

    They add up their sums sooner than those that meet in global memory, but can only start together. Measured on an
    H100: one sequence of 330 positions and 5 rows takes 6.2 us with 8 and 11.3 with 1, 8 of them 10.0 with 2 and 13.1
    with 1; 4 of them 8.1 with 4 and 8.9 with 2, of 8,128 positions 64 and 57, of 32,000 240 and 195.
    """
    for most, most_rows, size in _CLUSTER_SIZES:
        at_once = clusters_at_once(size, rows, head_dim, num_multiprocessors)
        if num_clusters <= min(most, at_once) and rows <= most_rows:
            return size
    return 1


def clusters_at_once(size: int, rows: int, head_dim: int, num_multiprocessors: int) -> int:
    """Clusters that a GPU is to hold at a time.

    Of larger ones fewer than it could: the kernel behind starts to load its weights when all have begun, also those
    that short sequences leave without a share, and not everywhere is there room for a whole one.
    """
    resident = _resident(rows, head_dim) * num_multiprocessors
    if size == 1:
        return resident
    return min((1 if size > 4 else 2) * num_multiprocessors, resident * 7 // 8) // size


@dataclass(frozen=True, kw_only=True)
class Shares:
    """In how many shares all sequences' positions are cut, none of which goes beyond a sequence.

    Each of the groups of heads has a cluster for every share, and clusters should fill a GPU together. Where it has
    room for more of them than there are sequences, ``wanted`` makes shares of one length if all sequences have the
    same; where it makes more than ``most`` of others, there are ``certain``, and up to one more for each sequence.
    Where sequences alone fill it, only long ones are cut, so that none is left when all else is done.
    """

    most: int
    wanted: int
    certain: int

    @classmethod
    def of(cls, num_sequences: int, num_groups: int, num_resident: int) -> "Shares":
        """Of a GPU that holds ``num_resident`` clusters at a time."""
        each = max(num_resident // num_groups, 1)
        if each > num_sequences:
            return cls(most=each, wanted=each, certain=each - num_sequences)
        return cls(most=num_sequences + each, wanted=each, certain=each)

    @property
    def most_cut(self) -> int:
        """Shares of sequences that have several: each has, on average, more than half of what a share has at most."""
        return min(self.most, 2 * self.wanted)


def new_arrivals(device: torch.device) -> Tensor:
    """Where the blocks that share a sequence count those that are done, each time from 0: for one stream."""
    return torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)


def serves(
    query_len: int, heads_per_kv: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> bool:
    """Whether it was built for these; then it is the fastest."""
    if dtype != torch.bfloat16 or kv_dtype != dtype or head_dim not in _MOST_ROWS:
        return False
    return block_heads(query_len, heads_per_kv, head_dim) is not None


def hopper_decode_module(query_len: int, heads_per_kv: int, head_dim: int) -> Module:
    """What passes of ``query_len`` rows a sequence need compiled."""
    rows = _row_tile(query_len, heads_per_kv, head_dim)
    return Module(what=f"attention, {rows} rows, heads of {head_dim}", spec=partial(_spec, head_dim, rows))


@dataclass(frozen=True, kw_only=True)
class HopperDecode:
    """See ``RotatingKernel``; of a decode pass."""

    layout: Layout  # uniform, or full
    rope: "TritonRope"
    arrivals: Tensor  # see ``new_arrivals``

    def fits(self, layer: LayerAttention, qkv: Tensor, keys: Tensor) -> bool:
        num_kv_heads, head_dim = keys.shape[2:]
        group, num_pairs = qkv.shape[1] // num_kv_heads - 2, len(self.rope.frequencies)
        return (
            layer.value_dim is None
            and (num_pairs % 8 == 0 if head_dim == _PARTLY_ROTATED else num_pairs * 2 == head_dim)
            and serves(self.layout.max_query_len, group, head_dim, qkv.dtype, keys.dtype)
            and runs_on(qkv.device)
        )

    def __call__(self, layer: LayerAttention, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        layout, query_len = self.layout, self.layout.max_query_len
        num_kv_heads, head_dim = keys.shape[2:]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        group = block_heads(query_len, num_heads // num_kv_heads, head_dim)
        assert group is not None
        assert qkv.is_contiguous(), qkv.stride()
        assert keys.stride() == values.stride(), "keys and values must have the same strides"
        assert keys.stride(3) == 1, keys.stride()
        starts, tables = layout.starts, layout.block_tables
        ends = None if layout.uniform_q else layout.ends
        assert ends is None or ends.dtype == torch.int64, ends.dtype
        assert starts.dtype == torch.int64, starts.dtype
        assert tables.dtype == torch.int32, tables.dtype
        assert tables.stride(1) == 1, tables.stride()
        page_size = keys.shape[1]
        assert page_size >= 16, page_size
        assert page_size.bit_count() == 1, page_size
        out = qkv.new_empty(len(qkv), num_heads * head_dim)
        if not len(qkv):
            return out
        rows, groups = _row_tile(query_len, num_heads // num_kv_heads, head_dim), num_heads // group
        assert layout.num_sequences * groups <= len(self.arrivals), (layout.num_sequences, groups)
        multiprocessors = num_sms(qkv.device)
        cluster = cluster_size(layout.num_sequences * groups, rows, head_dim, multiprocessors)
        least = _LEAST_SHARE if cluster == 1 else max(_LEAST_OF_CLUSTERS, cluster * _LEAST_SHARE)
        resident = clusters_at_once(cluster, rows, head_dim, multiprocessors)
        shares = Shares.of(layout.num_sequences, groups, resident)
        # The sums of each begin at a multiple of 16 bytes
        size = -(-query_len * group * (head_dim + 2 * cluster) // 4) * 4
        sums = qkv.new_empty(shares.most_cut, groups, size, dtype=torch.float32)
        strides = (*keys.stride()[:3], tables.stride(0))
        numbers = (
            *(tables.shape[1], page_size.bit_length() - 1, layout.num_sequences, query_len),
            *(num_heads, num_kv_heads, group, layer.window or 0, int(layer.causal)),
            *(cluster, shares.most, shares.wanted, shares.certain, least),
            *(size, len(self.rope.frequencies)),
        )
        error = compiled(_spec, "hopper_decode_run", head_dim, rows)(
            *pointers((qkv, self.rope.frequencies, keys, values, starts, ends, tables, layer.sinks, out)),
            *pointers((sums, self.arrivals)),
            *(ctypes.c_int64(each) for each in strides),
            *numbers,
            ctypes.c_float(layer.scale),
            ctypes.c_float(self.rope.scale),
            current_stream(qkv.device),
        )
        assert error == 0, f"hopper_decode: error {error} at {list(qkv.shape)} heads, {numbers}"
        return out


def _row_tile(query_len: int, heads_per_kv: int, head_dim: int) -> int:
    heads = block_heads(query_len, heads_per_kv, head_dim)
    assert heads is not None, (query_len, heads_per_kv, head_dim)
    return -(-query_len * heads // 16) * 16


def _spec(head_dim: int, rows: int) -> Any:  # noqa: ANN401
    defines = {"DIM": head_dim, "MROWS": rows, "RESIDENT": _resident(rows, head_dim)}
    return source_spec("attention", _SOURCE, defines, {})


def _resident(rows: int, head_dim: int) -> int:
    """Blocks that a multiprocessor has shared memory and registers for."""
    if rows > 32:
        return 1
    return 2 if rows > 16 or head_dim > 128 else 3
