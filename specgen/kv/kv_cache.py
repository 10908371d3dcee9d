"""The storage of the paged KV cache, and of the recurrent states beside it."""

import math
import mmap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """Per position and layer ``num_planes`` tensors ``[num_heads, head_dim]``; GQA has two, keys and values."""

    num_planes: int
    layers: tuple[tuple[int, int], ...]  # (num_heads, head_dim) of each
    windows: tuple[int | None, ...] = ()  # of each: positions that a row sees, its own included; None: all

    @property
    def window(self) -> int | None:
        """The longest; None: no layer has one."""
        return max(filter(None, self.windows), default=None)

    def windowed(self, layer: int) -> bool:
        """Whether ``layer`` has a window."""
        return bool(self.windows) and self.windows[layer] is not None

    def bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes that one position takes in the cache."""
        return self._bytes(bytes_per_value, range(len(self.layers)))

    def windowed_bytes(self, bytes_per_value: int) -> int:
        """Of them those in layers with a window."""
        return self._bytes(bytes_per_value, filter(self.windowed, range(len(self.layers))))

    def _bytes(self, bytes_per_value: int, layers: Iterable[int]) -> int:
        return self.num_planes * bytes_per_value * sum(math.prod(self.layers[layer]) for layer in layers)


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """The recurrent states of a sequence: per layer ``[num_heads, key_dim, value_dim]``, and a convolution's inputs."""

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    num_channels: int  # of the convolution
    num_taps: int

    @property
    def num_bytes(self) -> int:
        """Of a sequence's states, which are float32."""
        return self.num_layers * self.num_heads * self.value_dim * self.key_dim * 4

    @property
    def row_width(self) -> int:
        """Numbers of a row's inputs: of the convolution, and two for each head."""
        return self.num_channels + 2 * self.num_heads

    def kept_rows(self, step_rows: int) -> int:
        """Rows whose inputs are kept: what the convolution looks back at, and those of a decode pass."""
        return self.num_taps - 1 + step_rows

    def bytes_per_sequence(self, step_rows: int, bytes_per_value: int) -> int:
        """Bytes that a sequence takes whose decode passes have ``step_rows`` rows."""
        rows = self.kept_rows(step_rows) * self.row_width * bytes_per_value
        errors = step_rows * self.num_heads * self.value_dim * 4
        return self.num_bytes + self.num_layers * (rows + errors + 8)


class StateCache:
    """What ``spec`` describes, in ``num_slots`` slots of a sequence each; slot 0 is where padding rows write.

    Like KV, a state is never rewound. It is that behind the positions before ``positions``; the inputs of the rows of
    the last decode pass are kept behind it, and the next pass first takes in as many of them as its start says were
    accepted. So it holds no row that was rejected. On a GPU what each of them wrote at its key is kept too, so that
    taking it in is no second computation of it.
    """

    def __init__(
        self, *, spec: StateSpec, num_slots: int, step_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        slots = spec.num_layers, num_slots
        sizes = spec.num_heads, spec.key_dim, spec.value_dim
        self.states = torch.zeros(*slots, *sizes, device=device)  # float32
        # the convolution's look-back, and behind it the last decode pass
        self.rows = torch.zeros(*slots, spec.kept_rows(step_rows), spec.row_width, dtype=dtype, device=device)
        # float32: beta (v - S' k) of the rows of the last decode pass
        self.errors = torch.zeros(*slots, step_rows, spec.num_heads, spec.value_dim, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)  # that the state has taken in

    def copy(self, source: Tensor, to: Tensor) -> None:
        """Copy the states in slots ``source`` [n] int64, all read first, ``to`` [n]; those behind a prefill."""
        for each in (self.states, self.rows, self.positions):
            each[:, to] = each[:, source]


class KVCache:
    """What ``spec`` describes, in ``num_pages`` pages shared by all layers.

    With ``num_windowed_pages`` the layers with a window have so many, numbered apart: a sequence has those of its last
    positions alone. ``states`` are those of the layers that have a state in place of keys and values.

    Storage is ``[num_layers, num_planes, num_pages, page_size, num_heads, head_dim]``, one for the layers of each
    shape. Target and drafter have one cache each and use the same page numbers, so a sequence has one block table; the
    target's layers with a window, where they are apart, have another.
    """

    def __init__(
        self,
        *,
        spec: KVSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateCache | None = None,
        num_windowed_pages: int | None = None,
    ) -> None:
        self.states = states
        self.page_size = page_size
        self._kinds = [
            (num_windowed_pages is not None and spec.windowed(layer), heads)
            for layer, heads in enumerate(spec.layers)
        ]
        number = {False: num_pages, True: num_windowed_pages or 0}
        self._storage = {
            (apart, heads): _zeros((count, spec.num_planes, number[apart], page_size, *heads), dtype, device)
            for (apart, heads), count in Counter(self._kinds).items()
        }
        alike = {kind: iter(layers) for kind, layers in self._storage.items()}
        self._layers = [tuple(next(alike[kind])) for kind in self._kinds]

    def pages(self, layer: int) -> tuple[Tensor, ...]:
        """The planes of one layer, each ``[num_pages, page_size, num_heads, head_dim]``."""
        return self._layers[layer]

    def windowed(self, layer: int) -> bool:
        """Whether the pages of ``layer`` are numbered apart, and go back behind its window."""
        return self._kinds[layer][0]

    def clear(self, pages: Tensor, windowed: Tensor | None = None) -> None:
        """Make ``pages`` ``[n]`` int64 zero, and ``windowed`` in the layers that have pages apart."""
        for (apart, _), layers in self._storage.items():
            some = windowed if apart else pages
            if some is not None:
                layers.view(torch.uint8).index_fill_(2, some, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: rows past a sequence's end are masked, but what was NaN there would leak through the mask.

    On a CPU they are the system's own zero pages, which cost neither time nor memory until they are written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
