"""TensorRT-LLM's decode kernels through FlashInfer: every length is read on the device, so a call can be captured."""

from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from specgen.attention import Backend, Capabilities, Gpu, Heads, Kernel, LayerAttention, Rows, Use
from specgen.attention.flashinfer_paged import (
    FlashAttention,
    FlashInferBackend,
    prefill_kernel,
    prefill_modules,
)
from specgen.attention.planning import decode_workspace, offsets
from specgen.config import require
from specgen.kv.layout import Layout
from specgen.ops.jit_modules import Module, compiles

_MAX_GROUP = 16  # heads per KV head
_MAX_QUERY = 32  # rows per sequence: their mask is one word
HEAD_DIMS = (64, 128, 256)


_claimed: set[int] = set()  # the GPU of this process; what FlashInfer keeps of it cannot be asked for


def _claim(device: torch.device) -> None:
    """``UserError`` for a second GPU of one process: XQA prepares its kernels on the first one that calls it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    require(
        _claimed <= {index},
        f"XQA (attention 'trtllm' and 'hopper') runs on one GPU of a process and {device} is the second: "
        "use a process for each, or --attention flashinfer",
    )
    _claimed.add(index)


class TrtllmBackend(Backend):
    """Decoding on XQA (compute capability 9.0, 12.x) or trtllm-gen (10.x), prefill on FlashInfer's paged kernel.

    A layout whose lengths the host knows is a prefill; any other is a decode pass of up to 32 rows per sequence, whose
    call stays right when it is replayed after lengths, block tables and ragged offsets have changed on the device.
    What is built at first use (kernels, masks) cannot be built while a graph is captured: run a pass of the same
    batch and query length before. A graph keeps neither this object nor the layout's tensors alive, and reads both:
    replayed after they are gone it reads whatever took their place. Calls must not run at once on two streams.

    FP8 pages are read by XQA's kernel for ragged queries, also where all sequences have as many rows: the one for
    Hopper that FlashInfer else picks by shape rounds the queries to FP8 too, so that a step with drafts and one without
    would compute different texts.

    XQA is tested on an H100; the calls for trtllm-gen follow its documentation and have not been run.
    """

    name = "trtllm"
    summary = "decode kernels that need no plan on the host, so a step is one CUDA graph"
    capabilities = Capabilities(
        devices=("cuda",),
        package="flashinfer",
        uniform_q_max=_MAX_QUERY,
        needs_host_lens=False,
        page_size=64,  # XQA at 1 x 300 positions, 5 rows: 15.4 us per layer, and 19.2 us with pages of 16
        compute_majors=(9, 10, 12),
        dtypes=(torch.bfloat16, torch.float16),
        kv_dtypes=(torch.bfloat16, torch.float16, torch.float8_e4m3fn),
        fp8_majors=(9, 10, 12),
        page_sizes=(16, 32, 64),
        head_dims=HEAD_DIMS,
        max_group=_MAX_GROUP,
        sinks=True,
        latents=None,
    )

    def __init__(self, device: torch.device) -> None:
        _claim(device)
        major = torch.cuda.get_device_capability(device)[0]
        self._xqa = major != 10
        self._workspace = decode_workspace(
            device, max_group=_MAX_GROUP, max_rows=_MAX_QUERY, max_head_dim=max(HEAD_DIMS)
        )
        self._prefill = FlashInferBackend(device, _prefill_kernels(major))
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._first_rows: dict[tuple[int, int], Tensor] = {}

    @staticmethod
    def modules(gpu: Gpu, use: Use) -> list[Module]:
        found = prefill_modules(_prefill_kernels(gpu.major), use) if use.prefills else []
        if gpu.major == 10:
            return found  # trtllm-gen comes compiled
        shapes = product(dict.fromkeys((*use.query_lens, *use.chunk_rows)), use.windowed)
        found += [xqa_module(use.heads, rows, windowed) for rows, windowed in shapes]
        return found + (xqa_partial_modules(use) if use.partial else [])

    @staticmethod
    def kernel(gpu: Gpu, use: Use, rows: Rows, num_sequences: int) -> str:
        if rows == "prefill":
            return prefill_kernel(_prefill_kernels(gpu.major), use.heads)
        return "trtllm-gen" if gpu.major == 10 else "XQA"

    def plan(self, layout: Layout) -> Kernel:
        if layout.host is not None:
            return self._prefill.plan(layout)
        assert layout.max_query_len <= _MAX_QUERY, layout.max_query_len
        if layout.uniform_q is not None:
            return self._uniform(layout, layout.uniform_q)
        if not self._xqa:
            return self._packed_trtllm_gen(layout)
        mask = causal_mask(layout.positions - layout.starts[layout.sequences])
        return self._packed_xqa(layout, _lengths(layout), offsets(layout.query_lens), mask)

    def _uniform(self, layout: Layout, query_len: int) -> Kernel:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache as decode

        shape, lengths = (layout.num_sequences, query_len), _lengths(layout)
        mask = self._uniform_mask(*shape).view(*shape, 2) if self._xqa and query_len > 1 else None

        @cache
        def packed() -> Kernel:
            return self._packed_xqa(
                layout, lengths, self._uniform_offsets(*shape), self._uniform_mask(*shape)
            )

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if self._xqa and keys.dtype.itemsize == 1:
                return packed()(layer, q, keys, values)
            common = self._arguments(lengths, layer, q, keys, values)
            out = decode(**common, kv_layout="NHD", q_len_per_req=query_len, mask=mask)
            return out.view(q.shape[0], -1)  # type: ignore[no-any-return]

        return kernel

    def _packed_xqa(
        self, layout: Layout, lengths: tuple[Tensor, Tensor, int], first_rows: Tensor, mask: Tensor
    ) -> Kernel:
        """For rows ``first_rows`` of each sequence, int32 ``[B + 1]``, whose ``mask`` is uint16 ``[rows, 2]``."""
        from flashinfer.decode import xqa_batch_decode_with_kv_cache as decode

        outs: list[Tensor] = []

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if not outs:  # padding rows are not written: zeros, once per pass, keep them from becoming NaN
                outs.append(torch.zeros_like(q))
            decode(
                **self._arguments(lengths, layer, q, keys, values),
                out=outs[0],
                q_len_per_req=max(layout.max_query_len, 2),  # it takes no rows of one each as such
                mask=mask,
                q_cu_seq_lens=first_rows,
            )
            return outs[0].view(q.shape[0], -1)

        return kernel

    def _packed_trtllm_gen(self, layout: Layout) -> Kernel:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache as decode

        lengths, first_rows = _lengths(layout), offsets(layout.query_lens)

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            out = decode(
                **self._arguments(lengths, layer, q, keys, values),
                kv_layout="NHD",
                out=torch.zeros_like(q),
                q_len_per_req=None,
                max_q_len=layout.max_query_len,
                cum_seq_lens_q=first_rows,
            )
            return out.view(q.shape[0], -1)  # type: ignore[no-any-return]

        return kernel

    def _arguments(
        self,
        lengths: tuple[Tensor, Tensor, int],
        layer: LayerAttention,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> dict[str, Any]:
        """What every decode call takes, by FlashInfer's names."""
        assert q.is_contiguous(), "XQA would misread it and say nothing"
        tables, kv_lens, longest = lengths
        k_scale, v_scale = layer.kv_scales(keys)
        return {
            "query": q,
            "kv_cache": (keys, values),
            "workspace_buffer": self._workspace,
            "block_tables": tables,
            "seq_lens": kv_lens,
            "max_seq_len": longest,
            "bmm1_scale": layer.scale * k_scale,
            "bmm2_scale": v_scale,
            "window_left": layer.window_left,
            "sinks": layer.sinks,
        }

    def _uniform_mask(self, num_sequences: int, query_len: int) -> Tensor:
        """The mask of a uniform pass, built once: ``[B * query_len, 2]``."""
        key = (num_sequences, query_len)
        if key not in self._masks:
            self._require_eager()
            offsets = torch.arange(query_len, device=self._workspace.device).repeat(num_sequences)
            self._masks[key] = causal_mask(offsets)
        return self._masks[key]

    def _uniform_offsets(self, num_sequences: int, query_len: int) -> Tensor:
        """``offsets`` of a uniform pass, built once."""
        key = (num_sequences, query_len)
        if key not in self._first_rows:
            self._require_eager()
            ends = torch.arange(num_sequences + 1, dtype=torch.int32, device=self._workspace.device)
            self._first_rows[key] = ends * query_len
        return self._first_rows[key]

    def _require_eager(self) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        assert not capturing, "run a pass of this shape before it is captured"


def _prefill_kernels(major: int) -> FlashAttention:
    return "fa3" if major == 9 and compiles() else "fa2"


def xqa_partial_modules(use: Use) -> list[Module]:
    """What passes over a part of the drafts need compiled, each K an own one."""
    longest = [rows for rows in use.query_lens if rows > 1]
    return [
        xqa_module(use.heads, rows, windowed, ragged=True)
        for rows, windowed in product(longest, use.windowed)
    ]


def xqa_module(heads: Heads, rows: int, windowed: bool, *, ragged: bool = False) -> Module:
    """What passes of ``rows`` rows a sequence need compiled, for layers with a window or without.

    With ``ragged`` no sequence has more.
    """
    kinds = (
        (", ragged" if ragged else "")
        + (", FP8 KV" if heads.fp8_pages else "")
        + (", windows" if windowed else "")
    )
    what = f"XQA, {rows} {'row' if rows == 1 else 'rows'}, heads of {heads.head_dim}{kinds}"
    return Module(what=what, spec=partial(_xqa_spec, heads, rows, windowed, ragged or heads.fp8_pages))


def _xqa_spec(heads: Heads, rows: int, windowed: bool, ragged: bool) -> Any:  # noqa: ANN401
    """The module that a pass gets; FP8 pages are read by the one for ragged queries."""
    from flashinfer.jit.xqa import gen_xqa_module

    shape = (heads.page_size, heads.head_dim, heads.group, windowed)
    rows = max(rows, 2) if ragged else rows
    return gen_xqa_module(heads.dtype, heads.kv_dtype, *shape, heads.dtype, rows, ragged)


def causal_mask(offsets: Tensor) -> Tensor:
    """XQA's mask for rows that are the ``offsets[r]``-th of their sequence: uint16 ``[rows, 2]``.

    Bit j of a row's 32 says whether it sees the j-th of the pass's rows of its sequence; what came before the pass
    is always seen.
    """
    words = (2 << offsets.long()) - 1
    return words.to(torch.int32).view(torch.uint16).view(-1, 2)


def _lengths(layout: Layout) -> tuple[Tensor, Tensor, int]:
    """Block tables, KV lengths as int32, and the positions that a table's row has room for."""
    tables = layout.block_tables.contiguous()
    kv_lens = torch.empty(layout.num_sequences, dtype=torch.int32, device=tables.device)
    torch.add(layout.starts, layout.uniform_q or layout.query_lens, out=kv_lens)  # one kernel, cast included
    return tables, kv_lens, tables.shape[1] * layout.page_size
