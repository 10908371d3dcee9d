"""Pieces of prompts, packed for one forward pass: their geometry and their tokens on the device.

Short ones can be captured as blocks of a few rows, laid out like the sequences of a decode pass. The host needs longer
to launch the kernels of a prefill than a GPU needs for some hundred rows: 17 ms against 6 for 87 rows of an 8B model on
an H100. Blocks of one prompt have its block table and begin where the one before ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from specgen.core.scheduler import Chunk
from specgen.device import on_device
from specgen.kv.layout import Layout

BLOCK = 16  # rows
_SIZES = (4, 8, 12, 16, 24, 32, 48, 64)  # blocks of a pass; others have padding
MOST_BLOCKS = _SIZES[-1]  # with more rows a GPU is the slower one


def chunk_layout(chunks: Sequence[Chunk], page_size: int, device: torch.device) -> Layout:
    """The ragged layout of ``chunks``, one sequence each."""
    lists = [*zip(*(chunk.sequence.page_lists for chunk in chunks), strict=True)]
    width, some = max(map(len, lists[0])), 1 + any(lists[1])  # windowed ones are as many, or none
    tables = [[pages + [0] * (width - len(pages)) for pages in each] for each in lists[:some]]
    block_tables, *windowed = on_device(tables, device, torch.int32)
    return Layout.ragged(
        block_tables,
        [chunk.start for chunk in chunks],
        [chunk.num_rows for chunk in chunks],
        page_size,
        [chunk.sequence.state_slot for chunk in chunks],
        *windowed,
    )


def chunk_tokens(chunks: Sequence[Chunk], device: torch.device, *, shift: int) -> Tensor:
    """The chunks' tokens ``shift`` positions on, ``[rows]``; 0 stands for one that is not known yet."""
    rows: list[int] = []
    for chunk in chunks:
        start = chunk.start + shift
        known = chunk.sequence.tokens[start : start + chunk.num_rows]
        rows += known + [0] * (chunk.num_rows - len(known))
    return on_device(rows, device)


@dataclass(frozen=True, kw_only=True)
class PromptBlocks:
    """The rows of a ragged layout in blocks; rows behind a prompt's end are padding, as are whole blocks.

    What padding writes lies behind the end, where it is overwritten before anything attends to it, or in page 0.
    """

    starts: Tensor  # [n] int64: position of each block
    # [n, width] int32: block tables, and those of layers with a window where there are
    tables: tuple[Tensor, ...]
    rows: Tensor  # [rows] of the layout in the blocks, [n * BLOCK]

    @classmethod
    def of(cls, layout: Layout) -> "PromptBlocks | None":
        """None where they are too many."""
        assert layout.host is not None
        starts, sequences, rows = list[int](), list[int](), list[int]()
        for sequence, (start, length) in enumerate(
            zip(layout.host.starts, layout.host.query_lens, strict=True)
        ):
            first = len(starts) * BLOCK
            rows += range(first, first + length)
            firsts = range(start, start + length, BLOCK)
            starts += firsts
            sequences += [sequence] * len(firsts)
        number = next((size for size in _SIZES if size >= len(starts)), None)
        if number is None:
            return None
        last = max(starts) + BLOCK  # a kernel may look up the pages of all rows
        width = max(8, 1 << ((max(last, layout.page_size) - 1) // layout.page_size).bit_length())
        device, missing = layout.starts.device, number - len(starts)
        each = on_device(sequences, device)
        return cls(
            starts=on_device([*starts, *[0] * missing], device),
            tables=tuple(
                pad(pad(table[:, :width], (0, width - table[:, :width].shape[1]))[each], (0, 0, 0, missing))
                for table in (layout.block_tables, layout.windowed_tables)
                if table is not None
            ),
            rows=on_device(rows, device),
        )

    @property
    def size(self) -> tuple[int, int]:
        """What a captured pass depends on."""
        return len(self.starts), self.tables[0].shape[1]

    def spread(self, token_ids: Tensor) -> Tensor:
        """``token_ids`` [rows] of the layout as those of the blocks."""
        return token_ids.new_zeros(len(self.starts) * BLOCK).index_copy_(0, self.rows, token_ids)


def block_layout(starts: Tensor, tables: tuple[Tensor, ...], page_size: int) -> Layout:
    """The pass over blocks."""
    block_tables, *windowed = tables
    return replace(Layout.uniform(block_tables, starts, BLOCK, page_size, None, *windowed), chained=True)
