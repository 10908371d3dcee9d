"""The storage of the paged KV cache."""

import math
import mmap

import torch
from torch import Tensor


class KVCache:
    """Keys and values of ``num_layers`` layers, in pages shared by all of them.

    Storage is ``[num_layers, 2, num_pages, page_size, num_kv_heads, head_dim]``. Target and drafter have one each
    and use the same page numbers, so a sequence has one block table.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim)
        self.page_size = page_size
        self._storage = _zeros(shape, dtype, device)
        self._layers = [(layer[0], layer[1]) for layer in self._storage]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each ``[num_pages, page_size, num_kv_heads, head_dim]``."""
        return self._layers[layer]

    def clear(self, pages: Tensor) -> None:
        """Make ``pages`` ``[n]`` int64 zero in all layers."""
        self._storage.view(torch.uint8).index_fill_(2, pages, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: rows past a sequence's end are masked, but what was NaN there would leak through the mask.

    On a CPU they are the system's own zero pages, which cost neither time nor memory until they are written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
