"""The device that a bench runs on: its name, the versions on it, waiting for it and giving memory back to it."""

import gc
import platform

import torch

from specgen.rundir.provenance import versions


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's kind."""
    return platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)


def environment(device: str) -> dict[str, str]:
    """The device and the versions of what runs on it."""
    found = {
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cpu":
        return found
    return found | {"cuda": str(torch.version.cuda), "flashinfer": versions()["flashinfer-python"]}


def settle() -> None:
    """Wait until a GPU, where there is one, has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    """Give the memory of what nothing refers to any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
