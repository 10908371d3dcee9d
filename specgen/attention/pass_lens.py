"""The lengths and the window of a pass as FlashInfer's wrappers want them, and when these are planned anew."""

from collections.abc import Callable
from functools import cached_property
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specgen.kv.layout import Layout
from specgen.models.layers import LayerAttention


def window_left(layer: LayerAttention) -> int:
    """How many positions before its own a row sees; -1: all."""
    return -1 if layer.window is None else layer.window - 1


class PassLens:
    """Lengths on the host, pages on the device; a layout without ``host`` lengths is asked for them, and waits."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.query_lens = torch.tensor(layout.host.query_lens if layout.host else layout.query_lens.tolist())
        self.kv_lens = self.query_lens + torch.tensor(
            layout.host.starts if layout.host else layout.starts.tolist()
        )
        self.page_size = layout.page_size
        self.num_rows = int(self.query_lens.sum())  # that belong to a sequence

    @cached_property
    def first_rows(self) -> Tensor:
        """Where each sequence's rows begin, and where the last one's end: int32 ``[B + 1]``."""
        return _offsets(self.query_lens)

    @cached_property
    def first_pages(self) -> Tensor:
        """Where each sequence's pages begin in ``pages``, and where the last one's end: int32 ``[B + 1]``."""
        return _offsets(-(-self.kv_lens // self.page_size))

    @cached_property
    def last_page_lens(self) -> Tensor:
        """Positions in each sequence's last page: int32 ``[B]``."""
        return ((self.kv_lens - 1) % self.page_size + 1).to(torch.int32)

    @cached_property
    def pages(self) -> Tensor:
        """The pages of all sequences, one sequence after the other: int32 on the device, which is not waited for."""
        tables, total = self._layout.block_tables, int(self.first_pages[-1])
        counts = -(-self._layout.kv_lens // self.page_size)
        return tables[spread(counts, total)]


def spread(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Of ``counts`` ``[B]`` one behind the other, ``total`` in all: the sequence of each, and its place there."""
    sequences = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=total)
    return sequences, torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[sequences]


def _offsets(lens: Tensor) -> Tensor:
    """0 and the running sum of ``lens`` ``[B]``: int32 ``[B + 1]``."""
    return F.pad(lens.cumsum(0), (1, 0)).to(torch.int32)


T = TypeVar("T")


class HostPlan(Generic[T]):
    """A plan that layers of one pass take in turn; ``of`` is what it was made for."""

    def __init__(self) -> None:
        self.of: T | None = None
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the copy of the last plan has left the pinned buffer that plans are written to."""
        self._copied.synchronize()

    def renew(self, of: T, plan: Callable[[], object]) -> None:
        """``plan`` anew, unless it is planned for just that."""
        if self.of == of:
            return
        self.wait()
        plan()
        self._copied.record()
        self.of = of
