"""FlashInfer's paged kernel with one block per sequence and KV head: lengths change no plan, so it is captured."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgen.attention import Kernel
from specgen.attention.pass_lens import window_left
from specgen.kv.layout import Layout
from specgen.models.layers import LayerAttention

# FlashInfer takes 8 MiB for a work list, of which one entry per sequence needs 16 bytes
_WORK_LIST = 1 << 18


@dataclass(kw_only=True)
class _Planned:
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
        self._planned: dict[tuple[object, ...], _Planned] = {}

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

    def _plan_for(self, layout: Layout, layer: LayerAttention, q: Tensor, keys: Tensor) -> _Planned:
        """The plan for passes of that shape, made once and kept: graphs read its buffers."""
        shapes = (*layout.block_tables.shape, *q.shape, *keys.shape[1:])
        key = (*shapes, q.dtype, keys.dtype, layer.scale, layer.window)
        if key not in self._planned:
            assert not torch.cuda.is_current_stream_capturing(), (
                "run a pass of this shape before it is captured"
            )
            self._planned[key] = self._make_plan(layout, layer, q, keys)
        return self._planned[key]

    def _make_plan(self, layout: Layout, layer: LayerAttention, q: Tensor, keys: Tensor) -> _Planned:
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
            window_left=window_left(layer),
            disable_split_kv=True,
        )
        torch.cuda.current_stream().synchronize()  # the plan's copy, before its pinned buffer can be used again
        return _Planned(wrapper=wrapper, pages=pages, last_page_lens=last_page_lens)
