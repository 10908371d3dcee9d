"""The geometry of one forward pass: which rows belong to which sequence, where they stand and where their KV goes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Rows of B sequences laid one after the other; a row is one token at one position of one sequence.

    Everything is on the device, so that a pass can be laid out without asking the host. ``uniform_q`` is the
    number of rows a sequence where all have the same, else None (ragged).
    """

    block_tables: Tensor  # [B, max_pages] int64: page of each page_size positions
    starts: Tensor  # [B] int64: position of the sequence's first row
    query_lens: Tensor  # [B] int64: rows of the sequence
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64: page * page_size + offset, where the row's KV is written
    page_size: int
    uniform_q: int | None

    @staticmethod
    def uniform(block_tables: Tensor, starts: Tensor, query_len: int, page_size: int) -> "Layout":
        """``query_len`` rows for every sequence, from position ``starts[b]`` on."""
        positions = starts[:, None] + torch.arange(query_len, device=starts.device)
        pages = block_tables.gather(1, positions // page_size)
        return Layout(
            block_tables=block_tables,
            starts=starts,
            query_lens=torch.full_like(starts, query_len),
            positions=positions.flatten(),
            slots=(pages * page_size + positions % page_size).flatten(),
            page_size=page_size,
            uniform_q=query_len,
        )

    @staticmethod
    def ragged(
        block_tables: Tensor, starts: Tensor, query_lens: Tensor, num_rows: int, page_size: int
    ) -> "Layout":
        """``query_lens[b]`` rows for sequence b, ``num_rows`` in all (given, so that the device is not asked)."""
        sequences = torch.arange(len(starts), device=starts.device)
        sequences = sequences.repeat_interleave(query_lens, output_size=num_rows)
        first_rows = query_lens.cumsum(0) - query_lens
        rows = torch.arange(num_rows, device=starts.device)
        positions = rows + (starts - first_rows)[sequences]
        pages = block_tables[sequences, positions // page_size]
        return Layout(
            block_tables=block_tables,
            starts=starts,
            query_lens=query_lens,
            positions=positions,
            slots=pages * page_size + positions % page_size,
            page_size=page_size,
            uniform_q=None,
        )

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.starts.shape[0]

    @property
    def num_rows(self) -> int:
        """Rows of the whole pass."""
        return self.positions.shape[0]

    @property
    def first_rows(self) -> Tensor:
        """Index of each sequence's first row, ``[B]``."""
        return self.query_lens.cumsum(0) - self.query_lens

    @property
    def kv_lens(self) -> Tensor:
        """Positions that each sequence's last row attends to, itself included, ``[B]``."""
        return self.starts + self.query_lens

    def leading(self, keep: Tensor) -> tuple[Tensor, "Layout"]:
        """The first ``keep[b]`` rows of every sequence: their indices, and the ragged layout of them alone.

        The number of rows depends on the data, so on a GPU this waits for the device.
        """
        sequences = torch.arange(self.num_sequences, device=keep.device)
        sequences = sequences.repeat_interleave(self.query_lens, output_size=self.num_rows)
        rows = (self.positions < (self.starts + keep)[sequences]).nonzero().flatten()
        kept = replace(
            self, query_lens=keep, positions=self.positions[rows], slots=self.slots[rows], uniform_q=None
        )
        return rows, kept
