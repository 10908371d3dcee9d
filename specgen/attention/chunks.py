"""Attention in chunks of positions, made of a backend's causal attention: layouts whose positions count from a chunk.

Llama-4: a row sees the positions of its own chunk up to its own, so two rows of one pass may see different chunks.
May import ops and kv.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen.device import on_device
from specgen.kv.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """What queries of layers without positions are multiplied by: ``1 + scale * log(1 + n)``.

    ``n`` counts the whole ``floor`` positions up to a row's own, itself included.
    """

    floor: int
    scale: float

    def of(self, positions: Tensor) -> Tensor:
        """Of rows at ``positions`` [rows], float32."""
        return torch.log1p(((positions + 1) // self.floor).float()) * self.scale + 1.0


def most_positions(layout: Layout) -> int:
    """No row stands at this position or behind it, as far as the host knows."""
    if layout.host is not None:
        return max(layout.host.kv_lens)
    return layout.block_tables.shape[1] * layout.page_size


def chunked(
    plan: Callable[[Layout], Callable[..., Tensor]], layout: Layout, size: int
) -> Callable[..., Tensor]:
    """A ``Kernel`` for rows that see no position before their chunk of ``size``, from what plans causal attention.

    A chunk begins with a page, so that attention from there on is that over the rest of a block table. Where the host
    knows the lengths, the rows of a sequence are a sequence for each chunk. Else nothing waits for the device: rows in
    the chunk of their sequence's first row attend with those before them in this pass, and the few behind its end, of
    whose chunks all positions are of this pass, each alone.
    """
    assert size % layout.page_size == 0, (size, layout.page_size)
    if layout.host is not None:
        return plan(_a_sequence_for_each(layout, size))
    together = plan(_from_first_chunk(layout, size))
    if layout.max_query_len == 1:
        return together
    alone = plan(_row_by_row(layout, size))
    beyond = layout.positions // size > (layout.starts // size)[layout.sequences]

    def kernel(layer: object, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        some = alone(layer, q, keys, values)
        return torch.where(beyond[:, None], some, together(layer, q, keys, values))

    return kernel


def _a_sequence_for_each(layout: Layout, size: int) -> Layout:
    """Of a layout whose lengths the host knows: its rows in the same order."""
    assert layout.host is not None
    sequences, starts, lens = list[int](), list[int](), list[int]()
    for sequence, (start, end) in enumerate(zip(layout.host.starts, layout.host.kv_lens, strict=True)):
        borders = range((start // size + 1) * size, end, size)
        for begin, stop in zip((start, *borders), (*borders, end), strict=True):
            sequences.append(sequence)
            starts.append(begin)
            lens.append(stop - begin)
    firsts = [start // size * size for start in starts]
    tables = _rest(
        layout,
        on_device(sequences, layout.starts.device),
        on_device(firsts, layout.starts.device),
        max(start - first + rows for start, first, rows in zip(starts, firsts, lens, strict=True)),
    )
    within = [start - first for start, first in zip(starts, firsts, strict=True)]
    return Layout.ragged(tables, within, lens, layout.page_size)


def _from_first_chunk(layout: Layout, size: int) -> Layout:
    """All rows, from the chunk of their sequence's first row on; what rows behind its end see there is of no use."""
    first = layout.starts // size * size
    every = torch.arange(layout.num_sequences, device=first.device)
    tables = _rest(layout, every, first, size - 1 + layout.max_query_len)
    return replace(layout, block_tables=tables, starts=layout.starts - first)


def _row_by_row(layout: Layout, size: int) -> Layout:
    """Each row as a sequence, from its chunk on but no further back than the page of its sequence's first row.

    So it is right for rows of chunks that begin in this pass, and short for all.
    """
    sequences, page = layout.sequences, layout.page_size
    # padding rows, which stand anywhere, at the last position that there is
    positions = torch.minimum(layout.positions, (layout.kv_lens - 1)[sequences]).clamp_(min=0)
    first = torch.maximum(positions // size * size, (layout.starts // page * page)[sequences])
    tables = _rest(layout, sequences, first, page - 1 + layout.max_query_len)
    return Layout.uniform(tables, (positions - first).clamp_(min=0), 1, page)


def _rest(layout: Layout, sequences: Tensor, first: Tensor, length: int) -> Tensor:
    """Block tables of ``sequences`` [n] for ``length`` positions from ``first`` [n] on, which begin pages."""
    pages, last = -(-length // layout.page_size), layout.block_tables.shape[1] - 1
    columns = (first // layout.page_size)[:, None] + torch.arange(min(pages, last + 1), device=first.device)
    return layout.block_tables[sequences[:, None], columns.clamp_(max=last)]
