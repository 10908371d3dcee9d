"""A hint where other programs use the CPU too: one thread that waits for a core delays the whole pass."""

import time
from pathlib import Path
from statistics import median

from specgen.record.provenance import num_cpus

_LOADAVG = Path("/proc/loadavg")
_SAMPLES, _BETWEEN = 5, 0.01  # seconds


def crowded(device: str) -> str:
    """What to try where other programs keep cores busy that the threads of ``device`` need; empty elsewhere."""
    import torch

    from specgen.device import choose_device

    if choose_device(device).type != "cpu" or not _LOADAVG.exists():
        return ""
    return advice(torch.get_num_threads(), num_cpus(), num_busy())


def advice(num_threads: int, num_cores: int, num_busy: int) -> str:
    """The hint for so many threads on so many cores, of which others use ``num_busy``."""
    if num_threads == 1 or num_threads + num_busy <= num_cores:
        return ""
    return (
        f"{num_threads} threads on {num_cores} cores, of which other programs use {min(num_busy, num_cores)}: "
        "OMP_NUM_THREADS=1 may be faster"
    )


def num_busy() -> int:
    """Threads of other programs that run or wait for a core now, as Linux counts them."""
    running = []
    for _ in range(_SAMPLES):
        running.append(int(_LOADAVG.read_text().split()[3].partition("/")[0]) - 1)  # without this one
        time.sleep(_BETWEEN)
    return int(median(running))
