"""What a bench runs on: the device, the versions and the pair, for the head of its table, and its memory given back."""

import gc
import platform
from pathlib import Path

import torch

from specgen.config import EngineConfig
from specgen.engine.loading import Models
from specgen.report.table import Row
from specgen.rundir.provenance import versions


def environment(device: str) -> dict[str, str]:
    """The device, the GPU's name or the CPU's kind, and the versions of what runs on it."""
    on_cpu = device == "cpu"
    found = {
        "device": platform.machine() if on_cpu else torch.cuda.get_device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if on_cpu:
        return found
    return found | {"cuda": str(torch.version.cuda), "flashinfer": versions()["flashinfer-python"]}


def conditions(config: EngineConfig, models: Models) -> Row:
    """The environment, target and head, the number format, and whether the weights were trained."""
    weights = "synthetic" if models.synthetic else "as trained"
    return {
        **environment(config.device),
        "model": f"{_short(config.model)}, {config.dtype}, weights {weights}",
        "drafter": _short(str(config.drafter)),
    }


def _short(checkpoint: str) -> str:
    """``demo/target`` of a path; a hub id as it is."""
    return "/".join(Path(checkpoint).parts[-2:])


def free_memory() -> None:
    """Give the memory of what nothing refers to any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
