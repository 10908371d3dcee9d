"""Latents of a prefill as keys and values of each head, for the expanded form of latent attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specgen.attention.pass_lens import spread
from specgen.kv.layout import HostLens, Layout
from specgen.models.attend import LatentLayer, LayerAttention


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """All positions of the sequences of a pass, one sequence behind the other."""

    slots: Tensor  # [n] int64 of the cache: page * page_size + offset
    host: HostLens

    @classmethod
    def of(cls, layout: Layout) -> "Expansion | None":
        """None where absorbed queries are better: in decode passes, and where most positions are not of this pass.

        So no more positions are expanded than twice the rows of a prefill.
        """
        if layout.host is None or 2 * layout.num_rows < sum(layout.host.starts) + layout.num_rows:
            return None
        tables, counts = layout.block_tables, layout.kv_lens
        total = sum(layout.host.kv_lens)
        sequences, positions = spread(counts, total)
        pages = tables[sequences, positions // layout.page_size].long()
        return cls(slots=pages * layout.page_size + positions % layout.page_size, host=layout.host)

    def keys_and_values(self, layer: LatentLayer, pages: Tensor) -> tuple[Tensor, Tensor]:
        """From pages of a layer's latents: [n, num_heads, key_dim] and [n, num_heads, value_dim]."""
        return layer.expand(pages.flatten(0, 2).index_select(0, self.slots))


class SdpaExpanded:
    """``ExpandedKernel`` with PyTorch's attention, one sequence after another."""

    def __init__(self, host: HostLens) -> None:
        self._host = host

    def __call__(self, layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        lens = self._host.kv_lens
        split = torch.split_with_sizes
        each = zip(split(q, self._host.query_lens), split(keys, lens), split(values, lens), strict=True)
        return torch.cat([_attend(layer.scale, *some) for some in each])


def _attend(scale: float, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Of one sequence, whose last positions are the rows."""
    rows, positions = len(q), len(keys)
    q, keys, values = (each.transpose(0, 1)[None] for each in (q, keys, values))
    seen = None
    if rows < positions:
        seen = torch.ones(rows, positions, dtype=torch.bool, device=q.device).tril(positions - rows)
    out = F.scaled_dot_product_attention(q, keys, values, seen, is_causal=seen is None, scale=scale)
    return out[0].transpose(0, 1).flatten(1)
