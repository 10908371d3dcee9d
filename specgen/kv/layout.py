"""The geometry of one forward pass: which rows belong to which sequence, where they stand and where their KV goes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from specgen.device import on_device


@dataclass(frozen=True, kw_only=True)
class HostLens:
    """The lengths of a layout where the host knows them without asking the device."""

    starts: tuple[int, ...]  # [B]
    query_lens: tuple[int, ...]  # [B]

    @property
    def kv_lens(self) -> list[int]:
        return [start + rows for start, rows in zip(self.starts, self.query_lens, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Rows of B sequences laid one after the other; a row is one token at one position of one sequence.

    Everything is on the device, so that a pass can be laid out, and captured, without asking the host. ``uniform_q``
    is the number of rows per sequence where all have the same, else None (ragged). Behind the rows of a ragged layout
    there may be padding rows; what they compute means nothing.
    """

    block_tables: Tensor  # [B, max_pages] int32: page of each page_size positions; page 0 where there is none
    starts: Tensor  # [B] int64: position of the sequence's first row
    num_rows: int  # of the whole pass
    max_query_len: int  # no sequence has more rows
    page_size: int
    uniform_q: int | None
    ragged_lens: Tensor | None = None  # [B] int64: rows of the sequence where uniform_q is None
    host: HostLens | None = None
    full: bool = False  # of a ragged layout: there are no padding rows
    # sequences may continue one another: rows attend to KV that others of the pass write
    chained: bool = False
    state_slots: Tensor | None = None  # [B] int64: of each sequence's recurrent state; 0 of padding rows
    # as ``block_tables``, for the layers with a window where a cache has pages for them apart: page 0 behind a window
    windowed_tables: Tensor | None = None

    @staticmethod
    def uniform(
        block_tables: Tensor,
        starts: Tensor,
        query_len: int,
        page_size: int,
        state_slots: Tensor | None = None,
        windowed_tables: Tensor | None = None,
    ) -> "Layout":
        """``query_len`` rows for every sequence, from position ``starts[b]`` on."""
        return Layout(
            block_tables=block_tables,
            starts=starts,
            num_rows=len(starts) * query_len,
            max_query_len=query_len,
            page_size=page_size,
            uniform_q=query_len,
            state_slots=state_slots,
            windowed_tables=windowed_tables,
        )

    @staticmethod
    def ragged(
        block_tables: Tensor,
        starts: Sequence[int],
        query_lens: Sequence[int],
        page_size: int,
        state_slots: Sequence[int] = (),
        windowed_tables: Tensor | None = None,
    ) -> "Layout":
        """``query_lens[b]`` rows for sequence b, from position ``starts[b]`` on; both known to the host.

        ``state_slots`` are needed where the model has recurrent states.
        """
        slots = state_slots or [0] * len(starts)
        columns = on_device([starts, query_lens, slots], block_tables.device)
        return Layout(
            block_tables=block_tables,
            starts=columns[0],
            ragged_lens=columns[1],
            num_rows=sum(query_lens),
            max_query_len=max(query_lens),
            page_size=page_size,
            uniform_q=None,
            host=HostLens(starts=tuple(starts), query_lens=tuple(query_lens)),
            state_slots=columns[2],
            windowed_tables=windowed_tables,
        )

    @property
    def windowed(self) -> "Layout":
        """The same for the layers whose pages go back behind a window."""
        assert self.windowed_tables is not None, "the layout of a pass over such a cache has their tables too"
        return replace(self, block_tables=self.windowed_tables)

    @property
    def num_sequences(self) -> int:
        return self.starts.shape[0]

    @cached_property
    def query_lens(self) -> Tensor:
        """Rows of each sequence, ``[B]`` int64."""
        if self.ragged_lens is not None:
            return self.ragged_lens
        assert self.uniform_q is not None
        return torch.full_like(self.starts, self.uniform_q)

    @cached_property
    def ends(self) -> Tensor:
        """Index behind each sequence's last row, ``[B]``."""
        if self.uniform_q is not None:
            return self.first_rows + self.uniform_q
        return self.query_lens.cumsum(0)

    @cached_property
    def first_rows(self) -> Tensor:
        """Index of each sequence's first row, ``[B]``."""
        if self.uniform_q is not None:
            return torch.arange(0, self.num_rows, self.uniform_q, device=self.starts.device)
        return self.ends - self.query_lens

    @cached_property
    def kv_lens(self) -> Tensor:
        """Positions that each sequence's last row attends to, itself included, ``[B]``."""
        return self.starts + (self.uniform_q or self.query_lens)

    @property
    def most_positions(self) -> int:
        """No row stands at this position or behind it, as far as the host knows."""
        if self.host is not None:
            return max(self.host.kv_lens)
        return self.block_tables.shape[1] * self.page_size

    @cached_property
    def sequences(self) -> Tensor:
        """The sequence of each row, ``[rows]``; B - 1 for padding rows."""
        rows = torch.arange(self.num_rows, device=self.starts.device)
        if self.uniform_q is not None:
            return rows // self.uniform_q
        return torch.searchsorted(self.ends, rows, right=True).clamp_(max=len(self.starts) - 1)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each row in its sequence, ``[rows]`` int64."""
        if self.uniform_q is not None:  # in every decode step, so in few kernels
            return (self.starts[:, None] + torch.arange(self.uniform_q, device=self.starts.device)).flatten()
        rows = torch.arange(self.num_rows, device=self.starts.device)
        return rows + (self.starts - self.first_rows)[self.sequences]

    @cached_property
    def slots(self) -> Tensor:
        """Where each row's KV is written, ``[rows]`` int64: page * page_size + offset; page 0 for padding rows."""
        page, offset = self.positions // self.page_size, self.positions % self.page_size
        last = self.block_tables.shape[1] - 1
        pages = self.block_tables[self.sequences, page.clamp(max=last)]
        owned = page <= last
        if self.uniform_q is None:
            owned &= self.positions < self.kv_lens[self.sequences]
        return torch.where(owned, pages * self.page_size, 0) + offset

    @cached_property
    def padded(self) -> Tensor:
        """Where each row is in a uniform layout of ``max_query_len`` rows a sequence, ``[rows]``."""
        return self.sequences * self.max_query_len + self.positions - self.starts[self.sequences]

    def rows_of(self, query_len: int) -> Tensor:
        """The first ``query_len`` rows of each sequence, ``[B, query_len]``; its last one where it has fewer."""
        offsets = torch.arange(query_len, device=self.starts.device)
        return self.first_rows[:, None] + torch.minimum(offsets, self.query_lens[:, None] - 1)

    def leading(self, keep: Tensor, num_rows: int) -> tuple[Tensor, "Layout"]:
        """The first ``keep[b]`` rows of every sequence: their indices, and the ragged layout of them alone.

        ``num_rows`` is at least the sum of ``keep``; the rows beyond it are padding rows.
        """
        kept = Layout(
            block_tables=self.block_tables,
            starts=self.starts,
            ragged_lens=keep,
            num_rows=num_rows,
            max_query_len=self.max_query_len,
            page_size=self.page_size,
            uniform_q=None,
        )
        rows = kept.positions - self.starts[kept.sequences] + self.first_rows[kept.sequences]
        return rows.clamp(max=self.num_rows - 1), kept

    def shifted(self) -> "Layout":
        """The same rows, each a position later."""
        host = self.host and replace(self.host, starts=tuple(start + 1 for start in self.host.starts))
        return replace(self, starts=self.starts + 1, host=host)

    def split_in_chunks(self, size: int) -> "Layout":
        """The same rows in their order, a sequence for each chunk of ``size`` positions that has some of one's rows.

        Positions count from the chunk's first. The host knows the lengths.
        """
        assert self.host is not None
        sequences, starts, lens = list[int](), list[int](), list[int]()
        for sequence, (start, end) in enumerate(zip(self.host.starts, self.host.kv_lens, strict=True)):
            borders = range((start // size + 1) * size, end, size)
            for begin, stop in zip((start, *borders), (*borders, end), strict=True):
                sequences.append(sequence)
                starts.append(begin)
                lens.append(stop - begin)
        firsts = [start // size * size for start in starts]
        within = [start - first for start, first in zip(starts, firsts, strict=True)]
        length = max(start + rows for start, rows in zip(within, lens, strict=True))
        columns = on_device([sequences, firsts], self.starts.device)
        tables = self._tables_from(columns[0], columns[1], length)
        return Layout.ragged(tables, within, lens, self.page_size)

    def from_first_chunk(self, size: int) -> "Layout":
        """All rows, from the chunk of their sequence's first row on; behind its end rows see nothing of use."""
        first = self.starts // size * size
        every = torch.arange(self.num_sequences, device=first.device)
        tables = self._tables_from(every, first, size - 1 + self.max_query_len)
        return replace(self, block_tables=tables, starts=self.starts - first)

    def row_by_row(self, size: int) -> "Layout":
        """Each row as a sequence, from its chunk on but no further back than the page of its sequence's first row.

        So it is right for rows of chunks that begin in this pass, and short for all.
        """
        sequences, page = self.sequences, self.page_size
        # padding rows, which stand anywhere, at the last position that there is
        positions = torch.minimum(self.positions, (self.kv_lens - 1)[sequences]).clamp_(min=0)
        first = torch.maximum(positions // size * size, (self.starts // page * page)[sequences])
        tables = self._tables_from(sequences, first, page - 1 + self.max_query_len)
        return Layout.uniform(tables, (positions - first).clamp_(min=0), 1, page)

    def _tables_from(self, sequences: Tensor, first: Tensor, length: int) -> Tensor:
        """Block tables of ``sequences`` [n] for ``length`` positions from ``first`` [n] on, which begin pages."""
        pages, last = -(-length // self.page_size), self.block_tables.shape[1] - 1
        columns = (first // self.page_size)[:, None] + torch.arange(min(pages, last + 1), device=first.device)
        return self.block_tables[sequences[:, None], columns.clamp_(max=last)]
