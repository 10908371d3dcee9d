"""The state of the machine when a run began: its load, and the GPU's driver, clocks, power limit and use."""

import os
import subprocess
from typing import Any

_ASKED = {  # of nvidia-smi, by field
    "driver": "driver_version",
    "clock_mhz": "clocks.sm",
    "max_clock_mhz": "clocks.max.sm",
    "power_limit_watts": "power.limit",
    "gpu_use_percent": "utilization.gpu",
}
_TIMEOUT = 10.0  # seconds: a sick driver must not stop a run


def machine_state(uuid: str | None = None) -> dict[str, Any]:
    """Load average of the last minute, number of CPUs, and what nvidia-smi says of the GPU ``uuid``.

    What cannot be read is left out.
    """
    try:
        load = {"load": round(os.getloadavg()[0], 2), "cpus": num_cpus()}
    except (OSError, AttributeError):  # not on every system
        load = {}
    return load | ({} if uuid is None else _gpu(uuid))


def num_cpus() -> int:
    """The CPUs that this process may use, where the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpu(uuid: str) -> dict[str, Any]:
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(_ASKED.values())}"]
    try:
        found = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in found.stdout.strip().split(",")]
    if len(values) != len(_ASKED):
        return {}
    numbers = {name: _number(value) for name, value in zip(_ASKED, values, strict=True)}
    return {name: number for name, number in numbers.items() if number is not None} | {"driver": values[0]}


def _number(text: str) -> float | None:
    """None for [N/A] and the like, and for a version."""
    try:
        return float(text)
    except ValueError:
        return None
