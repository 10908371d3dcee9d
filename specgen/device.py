"""Small things between host and device, without either waiting for the other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """``values``, nested or not, as a tensor on ``device``.

    Pinned memory lets a GPU fetch them when it gets there; from ordinary memory the host would wait for the GPU.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def use(device: torch.device) -> None:
    """Make ``device`` the current one, by which streams, events, graphs and Triton's launches go."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def settle() -> None:
    """Wait until a GPU, where there is one, has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class HostCopy:
    """The numbers of a device tensor on their way to the host; the tensor may be overwritten at once."""

    def __init__(self, source: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if source.device.type == "cpu":
            self._numbers = source
        else:
            self._numbers = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._numbers.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[Any]:
        """Wait until they are there; nested lists in the shape of the tensor."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[Any] = self._numbers.tolist()
        return numbers
