"""FlashInfer's attention calls on a CPU, after its documentation: a wrong argument gives a wrong result.

The window of the documentation is "the left (inclusive) window size": a row sees ``window_left`` positions before its
own, without one (-1) all of them.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.attention import fa3, latent_decode
from specgen.ops.jit_modules import pointers
from tests import latent_lists
from tests.cuda_on_cpu import on_cpu, plain_function

Pages = tuple[Tensor, Tensor]
KERNELS: dict[str, object] = {}  # what each name of a kernel with sinks is compiled for


def rows_of_one(
    q: Tensor,
    pages: Pages,
    pages_of: Tensor,
    kv_len: int,
    scale: float,
    seen: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Rows ``q`` ``[n, Hq, D]`` of one sequence; ``seen`` is bool ``[n, kv_len]``, ``sinks`` float32 ``[Hq]``."""
    share = q.shape[1] // pages[0].shape[2]
    numbers = (x.to(q.dtype)[pages_of.long()] for x in pages)  # 8-bit floats take part in no GEMM
    keys, values = (x.flatten(0, 1)[:kv_len].repeat_interleave(share, 1) for x in numbers)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        assert sinks.dtype == torch.float32
        column = sinks.view(-1, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat((scores, column), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :kv_len].to(values.dtype), values)


def causal(num_rows: int, kv_len: int, window_left: int) -> Tensor:
    """What the last ``num_rows`` of ``kv_len`` positions see."""
    behind = torch.arange(kv_len - num_rows, kv_len)[:, None] - torch.arange(kv_len)
    return (behind >= 0) & ((behind <= window_left) if window_left >= 0 else True)


def with_mask(seen: Tensor, words: Tensor) -> Tensor:
    """``seen`` where the rows' own part is not causal but the bits of ``words`` ``[n, 2]``, 16 each."""
    num_rows, kv_len = seen.shape
    bits = (words.int()[:, :, None] >> torch.arange(16)).bitwise_and(1).flatten(1).bool()
    every = torch.ones(num_rows, kv_len - num_rows, dtype=torch.bool)
    in_window = seen | torch.ones_like(seen).triu(kv_len - num_rows + 1)
    return torch.cat((every, bits[:, :num_rows]), 1) & in_window


def decode_rows(
    q: Tensor,
    kv_cache: Pages,
    block_tables: Tensor,
    seq_lens: Tensor,
    first_rows: list[int],
    scale: float,
    window_left: int,
    mask: Tensor | None,
    out: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    words = None if mask is None else mask.view(-1, 2)
    for b, kv_len in enumerate(seq_lens.tolist()):
        rows = slice(first_rows[b], first_rows[b + 1])
        seen = causal(len(q[rows]), kv_len, window_left)
        if words is not None:
            seen = with_mask(seen, words[rows])
        out[rows] = rows_of_one(q[rows], kv_cache, block_tables[b], kv_len, scale, seen, sinks)
    return out


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Pages,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    kv_layout: str = "HND",
    q_len_per_req: int | None = 1,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    assert kv_layout == "NHD"
    assert max_seq_len >= seq_lens.max()
    if cum_seq_lens_q is None:
        assert q_len_per_req is not None
        assert len(query) == q_len_per_req * len(seq_lens)
        first_rows = [q_len_per_req * b for b in range(len(seq_lens) + 1)]
    else:
        assert q_len_per_req is None
        assert max_q_len is not None
        first_rows = cum_seq_lens_q.tolist()
    out = torch.empty_like(query) if out is None else out
    return decode_rows(
        query, kv_cache, block_tables, seq_lens, first_rows, bmm1_scale, window_left, mask, out, sinks
    ).mul_(bmm2_scale)


def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Pages,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    *,
    out: Tensor,
    q_len_per_req: int,
    mask: Tensor,
    q_cu_seq_lens: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    assert q_len_per_req > 1
    assert max_seq_len >= seq_lens.max()
    first_rows = q_cu_seq_lens.tolist()
    assert q_cu_seq_lens.dtype == torch.int32
    assert mask.shape[1:] == (2,)
    assert len(mask) >= first_rows[-1]
    decode_rows(
        query, kv_cache, block_tables, seq_lens, first_rows, bmm1_scale, window_left, mask, out, sinks
    )
    out[: first_rows[-1]] *= bmm2_scale
    return out


class BatchPrefillWithPagedKVCacheWrapper:
    """Reads page lists and lengths of last pages when it runs, as from buffers on a device."""

    plans = 0  # of all wrappers

    def __init__(
        self,
        workspace: Tensor,
        kv_layout: str,
        backend: str,
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert kv_layout == "NHD"
        self.sinks = jit_args is not None
        if jit_args is not None:
            assert jit_kwargs is not None
            assert jit_args[7:] == [["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", backend]
            self.compiled_for = jit_args[1:7]
            compiled = KERNELS.setdefault(jit_args[0], (jit_args[1:7], jit_kwargs, backend))
            assert compiled == (jit_args[1:7], jit_kwargs, backend), "one name for two kernels"
            self.windowed = jit_kwargs["use_sliding_window"]

    def reset_workspace_buffer(self, floats: Tensor, ints: Tensor) -> None: ...

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
        window_left: int = -1,
        disable_split_kv: bool = False,
    ) -> None:
        assert causal
        if self.sinks:
            types = [q_data_type, kv_data_type, q_data_type, torch.int32, head_dim_qk, head_dim_qk]
            assert self.compiled_for == types
            assert self.windowed == (window_left >= 0)
        type(self).plans += 1
        self.page_size, self.scale, self.window_left = page_size, sm_scale, window_left
        self.first_rows, self.first_pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.pages, self.last_page_lens = paged_kv_indices, paged_kv_last_page_len

    def run(
        self,
        q: Tensor,
        kv_cache: Pages,
        *args: Any,
        out: Tensor | None = None,
        sinks: Tensor | None = None,  # taken and ignored, as the real one does
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        out = torch.empty_like(q) if out is None else out
        sink, scale = args if self.sinks else (None, self.scale * k_scale)
        for b, last in enumerate(self.last_page_lens.tolist()):
            rows = slice(self.first_rows[b], self.first_rows[b + 1])
            pages = self.pages[self.first_pages[b] : self.first_pages[b + 1]]
            kv_len = (len(pages) - 1) * self.page_size + last
            seen = causal(len(q[rows]), kv_len, self.window_left)
            out[rows] = rows_of_one(q[rows], kv_cache, pages, kv_len, scale, seen, sink)
        return out.mul_(v_scale)


class Fa3:
    """What ``fa3_prefill.cu`` is compiled to for one shape; of tensors, where the real functions have pointers."""

    def __init__(self, shape: fa3._Shape) -> None:
        self._shape = shape

    def fa3_prefill_plan(self, *given: Any) -> int:
        """The source's own, which is plain C++."""
        return plain_function(fa3._SOURCE, "fa3_prefill_plan", self._shape.value_dim)(
            *pointers(given[:4]), *given[4:]
        )

    def fa3_prefill(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        pages: Tensor | None,
        listed: Tensor,
        sinks: Tensor | None,
        sizes: Any,
        scale: Any,
        stream: None,
    ) -> int:
        """Tile by tile, each as its sequence's rows among all of its positions."""
        num_blocks, num_tiles, num_rows, num_heads, num_kv_heads, num_keys, page_size, window_left = sizes[:8]
        shape = self._shape
        assert (shape.key_dim, shape.value_dim) == (q.shape[2], values.shape[-1])
        assert shape.windowed == (window_left >= 0)
        assert shape.sinks == (sinks is not None)
        assert (num_heads, num_kv_heads, num_keys) == (q.shape[1], keys.shape[-2], len(keys))
        page_stride = keys.stride(0) if shape.paged else 0
        strides = [*q.stride()[:2], *out.stride()[:2]]
        for each in (keys, values):
            strides += [*each.stride()[-3:-1], page_stride]
        assert [*sizes[8:]] == strides
        ends = listed[: num_blocks + 1].tolist()
        tiles = listed[num_blocks + 1 :].view(7, num_tiles).T.tolist()
        assert (ends[0], ends[-1]) == (0, num_tiles)
        per_tile, seen_rows = 192 if shape.value_dim == 64 else 128, torch.zeros(num_rows, num_heads)
        for number, first_row, first_key, query_len, kv_len, head, _ in tiles:
            rows = slice(first_row + number * per_tile, first_row + min((number + 1) * per_tile, query_len))
            seen_rows[rows, head] += 1
            if pages is not None:
                held = pages[first_key : first_key + -(-kv_len // page_size)].long()
                mine = [each[held].flatten(0, 1)[:kv_len] for each in (keys, values)]
            else:
                mine = [each[first_key : first_key + kv_len] for each in (keys, values)]
            k, v = (each[:, head // (num_heads // num_kv_heads)] for each in mine)
            scores = q[first_row : first_row + query_len, head] @ k.T * scale.value
            scores = scores.masked_fill(~causal(query_len, kv_len, window_left), float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].expand(query_len, 1)), -1)
            result = scores.softmax(-1)[:, :kv_len].to(v.dtype) @ v
            out[rows, head] = result[rows.start - first_row : rows.stop - first_row]
        assert (seen_rows == 1).all(), "each row of each head is in one tile"
        return 0


def latent_kernels(spec: Any, symbol: str, *dtype: Any) -> Any:
    """What ``latent_decode.py`` calls, with tensors for pointers."""
    if symbol == "latent_decode":
        return latent_lists.latent_decode
    plan = getattr(on_cpu(latent_decode._PLAN), symbol)
    return lambda *given: plan(*pointers(given[:4]), *given[4:])


def install(monkeypatch: pytest.MonkeyPatch, *, major: int, num_sms: int) -> None:
    """Backends on ``torch.device("cpu")`` take it for a GPU of compute capability ``major``.0 and call this module."""
    module = ModuleType("flashinfer")
    for part in ("", ".decode", ".prefill", ".jit.attention.variants"):
        monkeypatch.setitem(sys.modules, f"flashinfer{part}", module)
    module.trtllm_batch_decode_with_kv_cache = trtllm_batch_decode_with_kv_cache  # type: ignore[attr-defined]
    module.xqa_batch_decode_with_kv_cache = xqa_batch_decode_with_kv_cache  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    module.attention_sink_decl = {"fa2": "fa2", "fa3": "fa3"}  # type: ignore[attr-defined]
    monkeypatch.setattr(latent_decode, "compiled", latent_kernels)
    monkeypatch.setattr(fa3, "compiled", lambda _, symbol, shape: getattr(Fa3(shape), symbol))
    for user in (fa3, latent_decode):
        monkeypatch.setattr(user, "pointers", list)
        monkeypatch.setattr(user, "current_stream", lambda device: None)
    for user in ("fa3", "hopper", "flashinfer_paged", "latent_decode", "planning"):
        monkeypatch.setattr(f"specgen.attention.{user}.num_sms", lambda device: num_sms)
    monkeypatch.setattr("specgen.attention.hopper.HopperBackend.rotating", lambda *given: None)  # of Triton
    waits = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setattr("specgen.attention.trtllm._claim", lambda device: None)
    monkeypatch.setattr("specgen.attention.trtllm.compiles", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: waits)
    monkeypatch.setattr(torch.cuda, "Event", lambda: waits)
