"""FlashInfer's wrapper of its latent attention, for any mix of query lengths; the host plans every pass."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specgen.attention import Kernel
from specgen.attention.host_plan import HostPlan
from specgen.attention.latent_decode import BLOCK_ROWS, RANK, ROPE_DIM, Shape
from specgen.attention.pass_lens import PassLens
from specgen.attention.workspaces import MIB, num_sms
from specgen.kv.layout import Layout
from specgen.models.attend import LayerAttention


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """What a plan depends on beside the lengths."""

    num_heads: int
    dtype: torch.dtype
    scale: float


class PlannedLatents:
    """The absorbed form, with a plan a pass; what ``LatentDecode`` is measured against.

    Rows of a sequence that fill more than a tile are planned as several sequences: how far a tile's rows see, the
    kernel rounds down where heads do not divide the tile. Its tiles are smaller where rows are few on average.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inner: Any = None
        self._planned: HostPlan[tuple[PassLens, _Planned]] = HostPlan()

    def plan(self, layout: Layout) -> Kernel:
        """Without ``layout.host`` this waits for the device."""
        lengths = PassLens(layout)

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            assert keys is values, "values are the first numbers of the keys"
            assert (layer.value_dim, layer.window, layer.sinks) == (RANK, None, None), layer
            heads = _Planned(num_heads=q.shape[1], dtype=q.dtype, scale=layer.scale)
            self._planned.renew((lengths, heads), lambda: self._plan(lengths, heads))
            rows, latents = slice(lengths.num_rows), keys[:, :, 0]
            out = q.new_zeros(len(q), heads.num_heads, RANK)
            self._inner.run(
                q[rows, :, :RANK], q[rows, :, RANK:], latents[..., :RANK], latents[..., RANK:], out=out[rows]
            )
            return out.view(len(q), -1)

        return kernel

    def _plan(self, lengths: PassLens, heads: _Planned) -> None:
        if self._inner is None:
            from flashinfer.mla import BatchMLAPagedAttentionWrapper

            scratch = torch.empty(128 * MIB, dtype=torch.uint8, device=self._device)  # as it recommends
            self._inner = BatchMLAPagedAttentionWrapper(scratch)
        query_lens, kv_lens = lengths.query_lens.tolist(), lengths.kv_lens.tolist()
        longest, share = max(query_lens), max(BLOCK_ROWS // heads.num_heads, 1)
        if min(query_lens) == longest:
            share = Shape.of(longest, heads.num_heads, num_sms(self._device)).group_rows
        groups = [
            (min(share, rows - skipped), kv_len - rows + min(skipped + share, rows), page)
            for rows, kv_len, page in zip(query_lens, kv_lens, lengths.first_pages.tolist(), strict=False)
            for skipped in range(0, rows, share)
        ]
        rows, ends, pages = zip(*groups, strict=True)
        self._inner.plan(
            torch.tensor([*accumulate(rows, initial=0)], dtype=torch.int32),
            torch.tensor([*pages, 0], dtype=torch.int32),
            lengths.pages,
            torch.tensor(ends, dtype=torch.int32),
            heads.num_heads,
            RANK,
            ROPE_DIM,
            lengths.page_size,
            True,  # causal
            heads.scale,
            heads.dtype,
            heads.dtype,
        )
