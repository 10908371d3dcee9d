"""The storage of the paged KV cache."""

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """Per position and layer ``num_planes`` tensors ``[num_heads, head_dim]``; GQA has two, keys and values."""

    num_layers: int
    num_planes: int
    num_heads: int
    head_dim: int

    def bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes that one position takes in the cache."""
        return self.num_layers * self.num_planes * self.num_heads * self.head_dim * bytes_per_value


class KVCache:
    """What ``spec`` describes, in ``num_pages`` pages shared by all layers.

    Storage is ``[num_layers, num_planes, num_pages, page_size, num_heads, head_dim]``. Target and drafter have one
    each and use the same page numbers, so a sequence has one block table.
    """

    def __init__(
        self,
        *,
        spec: KVSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (spec.num_layers, spec.num_planes, num_pages, page_size, spec.num_heads, spec.head_dim)
        self.page_size = page_size
        self._storage = _zeros(shape, dtype, device)
        self._layers = [tuple(layer) for layer in self._storage]

    def pages(self, layer: int) -> tuple[Tensor, ...]:
        """The planes of one layer, each ``[num_pages, page_size, num_heads, head_dim]``."""
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
