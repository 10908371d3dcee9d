"""One pass of random sequences over pages in any order, and attention over it without pages or masks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from specgen.attention import Backend, LayerAttention
from specgen.kv.layout import Layout

HEAD_DIM = 16
STALE = 100.0  # left by an earlier sequence in the unused slots of a page


@dataclass(frozen=True, kw_only=True)
class PagedPass:
    """Queries, pages and lengths; page 0 belongs to no sequence."""

    q: Tensor  # [rows, Hq, D]
    keys: Tensor  # [num_pages, page_size, Hkv, D]
    values: Tensor
    tables: Tensor  # [B, max_pages]
    kv_lens: tuple[int, ...]  # the pass's own rows included
    query_lens: tuple[int, ...]

    @classmethod
    def random(
        cls, kv_lens: Sequence[int], query_lens: Sequence[int], page_size: int, spare_pages: int = 2
    ) -> "PagedPass":
        """Every row of the table has room for ``spare_pages`` more than the longest sequence takes."""
        generator = torch.Generator().manual_seed(sum(kv_lens) + page_size)
        counts = [-(-length // page_size) for length in kv_lens]
        tables = torch.zeros(len(kv_lens), max(counts) + spare_pages, dtype=torch.int32)
        pages = torch.full((2, sum(counts) + 1, page_size, 2, HEAD_DIM), STALE)
        free = (torch.randperm(sum(counts), generator=generator) + 1).int()
        for row, (count, length) in enumerate(zip(counts, kv_lens, strict=True)):
            tables[row, :count], free = free[:count], free[count:]
            dense = torch.randn(2, count * page_size, 2, HEAD_DIM, generator=generator)
            dense[:, length:] = STALE
            pages[:, tables[row, :count]] = dense.view(2, count, *pages.shape[2:])
        q = torch.randn(sum(query_lens), 4, HEAD_DIM, generator=generator)
        lens = {"kv_lens": tuple(kv_lens), "query_lens": tuple(query_lens)}
        return cls(q=q, keys=pages[0], values=pages[1], tables=tables, **lens)

    def known(self) -> Layout:
        """With lengths that the host knows."""
        starts = [n - q for n, q in zip(self.kv_lens, self.query_lens, strict=True)]
        return Layout.ragged(self.tables, starts, self.query_lens, self.keys.shape[1])

    def uniform(self) -> Layout:
        """With lengths on the device and as many rows for every sequence."""
        (query_len,) = set(self.query_lens)
        return Layout.uniform(self.tables, self.known().starts, query_len, self.keys.shape[1])

    def packed(self, num_padding: int = 0) -> Layout:
        """With lengths on the device and ``num_padding`` padding rows."""
        return replace(self.known(), host=None, num_rows=len(self.q) + num_padding)

    def attend(self, backend: Backend, layout: Layout, layers: Sequence[LayerAttention]) -> list[Tensor]:
        """The output of each layer, all of one plan: ``[layout.num_rows, Hq * D]``; the next layer may reuse it."""
        q = torch.cat((self.q, torch.ones(layout.num_rows - len(self.q), *self.q.shape[1:])))
        kernel = backend.plan(layout)
        return [kernel(layer, q, self.keys, self.values).clone() for layer in layers]

    @cached_property
    def _known(self) -> dict[LayerAttention, Tensor]:
        """What was expected of each layer so far."""
        return {}

    def expected(self, layer: LayerAttention) -> Tensor:
        """``[rows, Hq * D]``: softmax over a slice of the sequence and the sinks, if any, row by row."""
        if layer not in self._known:
            self._known[layer] = self._row_by_row(layer)
        return self._known[layer]

    def _row_by_row(self, layer: LayerAttention) -> Tensor:
        out, rows = [], iter(self.q)
        for table, kv_len, query_len in zip(self.tables.long(), self.kv_lens, self.query_lens, strict=True):
            keys, values = (x[table].flatten(0, 1).repeat_interleave(2, 1) for x in (self.keys, self.values))
            for own in range(kv_len - query_len, kv_len):
                window = layer.window or kv_len
                seen = slice(max(0, own + 1 - window), own + 1 if layer.causal else min(kv_len, own + window))
                scores = torch.einsum("hd,khd->hk", next(rows), keys[seen]) * layer.scale
                if layer.sinks is not None:
                    scores = torch.cat((scores, layer.sinks[:, None]), 1)
                weights = scores.softmax(-1)[:, : len(keys[seen])]
                out.append(torch.einsum("hk,khd->hd", weights, values[seen]))
        return torch.stack(out).flatten(1)
