"""How fast the memory of a device is, as a large copy measures it: the bound of everything that mostly reads."""

import statistics
import time

import torch

from specgen.bench.environment import settle

COPIED_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}  # far more than any cache holds
COPIES = 15


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a large copy within the memory of ``device``; median of several."""
    kind = torch.device(device).type
    source = torch.randint(0, 255, (COPIED_BYTES[kind],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(COPIES):
        settle()
        began = time.perf_counter()
        target.copy_(source)
        settle()
        seconds.append(time.perf_counter() - began)
    return 2 * source.numel() / statistics.median(seconds)
