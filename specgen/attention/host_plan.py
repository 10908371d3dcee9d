"""When FlashInfer's wrappers are planned anew."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

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
