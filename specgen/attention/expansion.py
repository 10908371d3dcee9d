"""The positions of a pass over latents as pages of keys and values, for the expanded form of latent attention."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen.kv.layout import Layout
from specgen.models.attend import LatentLayer


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """Which pages are expanded; beside one another they have new numbers."""

    pages: Tensor  # [n] of the cache
    layout: Layout  # the same pass with the new numbers in its block tables

    @classmethod
    def of(cls, layout: Layout) -> "Expansion | None":
        """None where absorbed queries are better: in decode passes, and where most positions are not of this pass.

        So no more positions are expanded than twice the rows of a prefill, and twice a page for each sequence.
        """
        if layout.host is None or 2 * layout.num_rows < sum(layout.host.starts) + layout.num_rows:
            return None
        lens = zip(layout.host.starts, layout.host.query_lens, strict=True)
        counts = [-(-(start + rows) // layout.page_size) for start, rows in lens]
        tables = torch.zeros_like(layout.block_tables)
        first = 0
        for row, num_pages in zip(tables, counts, strict=True):
            row[:num_pages] = torch.arange(first, first + num_pages, device=tables.device)
            first += num_pages
        pages = [table[:num_pages] for table, num_pages in zip(layout.block_tables, counts, strict=True)]
        return cls(pages=torch.cat(pages), layout=replace(layout, block_tables=tables))

    def keys_and_values(self, layer: LatentLayer, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Pages of a layer's latents as pages [n, page_size, num_heads, key_dim] and [n, page_size, num_heads, Dv]."""
        chosen = pages.index_select(0, self.pages)
        keys, values = layer.expand(chosen.flatten(0, 2))
        return keys.view(*chosen.shape[:2], *keys.shape[1:]), values.view(
            *chosen.shape[:2], *values.shape[1:]
        )
