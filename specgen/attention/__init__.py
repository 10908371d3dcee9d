"""The attention seam: what a backend is, what it can do, and the one callable that a model sees of it."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specgen.kv_cache import KVCache
from specgen.layout import Layout
from specgen.ops import Rope


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do; ``build.py`` checks it once, at start."""

    devices: tuple[str, ...]  # torch device types
    ragged_q: bool  # sequences of different query lengths in one pass
    uniform_q_max: int | None  # longest uniform query; None: no bound
    needs_host_lens: bool  # reads lengths on the host, so every pass waits for the device
    graphs: bool  # a captured call stays right when lengths change on the device


class Kernel(Protocol):
    """Attention of one layer, planned for one layout."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q ``[rows, num_heads, head_dim]`` over pages ``[num_pages, page_size, num_kv_heads, head_dim]``.

        Row r sees the positions of its own sequence up to its own. Returns ``[rows, num_heads * head_dim]``.
        """
        ...


class Backend(Protocol):
    """A way to compute attention over the paged cache."""

    name: str
    capabilities: Capabilities

    def plan(self, layout: Layout) -> Kernel:
        """Whatever depends on the layout alone, once a pass instead of once a layer."""
        ...


class Attend:
    """Backend, cache and layout of one pass: rotates, writes the rows' KV, then attends."""

    def __init__(self, backend: Backend, cache: KVCache, layout: Layout, rope: Rope) -> None:
        self._kernel = backend.plan(layout)
        self._cache = cache
        self._store = rope(layout)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Heads of q, k and v ``[rows, num_heads + 2 * num_kv_heads, head_dim]``; see ``Kernel``."""
        keys, values = self._cache.pages(layer)
        return self._kernel(self._store(qkv, keys, values), keys, values)
