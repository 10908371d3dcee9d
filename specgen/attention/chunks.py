"""Attention in chunks of positions, made of a backend's causal attention over layouts that begin with a chunk.

Llama-4: a row sees the positions of its own chunk up to its own, so two rows of one pass may see different chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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
        return plan(layout.split_in_chunks(size))
    together = plan(layout.from_first_chunk(size))
    if layout.max_query_len == 1:
        return together
    alone = plan(layout.row_by_row(size))
    beyond = layout.positions // size > (layout.starts // size)[layout.sequences]

    def kernel(layer: object, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        some = alone(layer, q, keys, values)
        return torch.where(beyond[:, None], some, together(layer, q, keys, values))

    return kernel
