"""The measured peak speed of a device: a large copy within its memory and a large matrix product."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specgen.device import settle, use

COPIED_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}  # far larger than any cache
_SQUARES = {"cuda": 8192, "cpu": 512}  # sides of the matrices
_REPEATS = 15


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    bytes_per_second: float
    flops_per_second: float  # in the model's dtype


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a large copy within the memory of ``device``."""
    use(torch.device(device))  # the one that ``settle`` waits for
    num_bytes = COPIED_BYTES[torch.device(device).type]
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_seconds(lambda: target.copy_(source))


def matrix_flops(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a product of large square matrices."""
    use(torch.device(device))
    side = _SQUARES[torch.device(device).type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _median_seconds(lambda: left @ right)


def _median_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        settle()
        began = time.perf_counter()
        work()
        settle()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
