"""Decode passes of random sequences over random pages, for timing kernels."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random

import torch
from torch import Tensor

from specgen.attention import Heads
from specgen.bench.timing import num_layers
from specgen.device import on_device
from specgen.kv.kv_cache import KVCache
from specgen.kv.kv_spec import KVSpec
from specgen.kv.layout import Layout
from specgen.ops import Rope, bind_ops


@dataclass(frozen=True, kw_only=True)
class Query:
    """The number of rows per sequence in a pass: random from ``shortest`` to ``longest``."""

    name: str
    shortest: int
    longest: int

    def layout(self, cell: "Cell", tables: Tensor) -> Layout:
        """The layout of a pass over the sequences of ``cell``; lengths are on the device only, as in decoding."""
        rng = Random(f"{self.name} {cell.num_seqs}")
        lens = [rng.randint(self.shortest, self.longest) for _ in cell.kv_lens]
        starts = [end - length for end, length in zip(cell.kv_lens, lens, strict=True)]
        first = on_device(starts, tables.device)
        if self.shortest == self.longest:
            return Layout.uniform(tables, first, self.longest, cell.heads.page_size)
        return Layout(
            block_tables=tables,
            starts=first,
            ragged_lens=on_device(lens, tables.device),
            num_rows=sum(lens),
            max_query_len=self.longest,
            page_size=cell.heads.page_size,
            uniform_q=None,
        )


def queries(num_spec_tokens: int) -> Iterator[Query]:
    """Plain decoding, and with drafts K + 1 rows per sequence (padded) and 1 to K + 1 (ragged)."""
    yield Query(name="1", shortest=1, longest=1)
    if longest := num_spec_tokens and num_spec_tokens + 1:
        yield Query(name=f"{longest} padded", shortest=longest, longest=longest)
        yield Query(name=f"1-{longest} ragged", shortest=1, longest=longest)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``num_seqs`` sequences of random lengths up to ``max_seq_len``, which the last one has."""

    num_seqs: int
    max_seq_len: int
    heads: Heads
    device: torch.device

    @cached_property
    def kv_lens(self) -> tuple[int, ...]:
        """Positions of each sequence, the rows of the pass included; deterministic."""
        rng = Random(f"{self.num_seqs} {self.max_seq_len}")
        least = self.heads.max_query_len
        lens = (rng.randint(least, self.max_seq_len) for _ in range(self.num_seqs - 1))
        return (*lens, self.max_seq_len)

    @property
    def bytes_read(self) -> int:
        """Bytes of KV that one call reads."""
        return sum(self.kv_lens) * self._bytes_per_position

    @property
    def num_layers(self) -> int:
        return num_layers(self.bytes_read, self.device)

    @property
    def num_pages(self) -> int:
        return sum(self._page_counts)

    @property
    def bytes_stored(self) -> int:
        """Bytes of KV cache of all layers."""
        return self.num_layers * (self.num_pages + 1) * self.heads.page_size * self._bytes_per_position

    def block_tables(self) -> Tensor:
        """The pages of each sequence in random order, padded with 0: int32 ``[num_seqs, most pages]``."""
        pages = list(range(1, self.num_pages + 1))
        Random(self.num_pages).shuffle(pages)
        width = max(self._page_counts)
        rows = [[pages.pop() for _ in range(count)] + [0] * (width - count) for count in self._page_counts]
        return on_device(rows, self.device, torch.int32)

    def cache(self) -> KVCache:
        """A KV cache of normal random numbers."""
        cache = KVCache(
            spec=self._spec(self.num_layers),
            num_pages=self.num_pages + 1,
            page_size=self.heads.page_size,
            dtype=self.heads.kv_dtype,
            device=self.device,
        )
        for layer in range(self.num_layers):
            for values in cache.pages(layer):
                values.copy_(torch.randn(values.shape, device=self.device))  # no 8-bit float draws its own
        return cache

    def rows(self, layout: Layout) -> Tensor:
        """Heads of q, k and v of normal random numbers, ``[rows, num_heads + 2 * num_kv_heads, head_dim]``.

        Of latents those of absorbed queries alone.
        """
        others = 0 if self.heads.latent is not None else 2 * self.heads.num_kv_heads
        num_heads = self.heads.num_heads + others
        shape = (layout.num_rows, num_heads, self.heads.head_dim)
        return torch.randn(shape, dtype=self.heads.dtype, device=self.device)

    def rope(self) -> Rope:
        """Of usual frequencies."""
        exponents = torch.arange(0, self.heads.head_dim, 2, device=self.device) / self.heads.head_dim
        return bind_ops(self.device, self.heads.dtype).rope(5e5**-exponents)

    @property
    def _bytes_per_position(self) -> int:
        return self._spec(1).bytes_per_token(self.heads.kv_dtype.itemsize)

    def _spec(self, num_layers: int) -> KVSpec:
        heads = self.heads
        return KVSpec(
            num_layers=num_layers,
            num_planes=2 if heads.latent is None else 1,
            num_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
        )

    @property
    def _page_counts(self) -> list[int]:
        return [-(-length // self.heads.page_size) for length in self.kv_lens]
