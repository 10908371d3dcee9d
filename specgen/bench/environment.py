"""The conditions of a bench (device, versions, pair), and freeing its memory."""

import gc
import platform

import torch

from specgen.config import EngineConfig
from specgen.engine.loading import Models
from specgen.report.display import checkpoint_name
from specgen.report.table import Row
from specgen.rundir.provenance import cpu_name, versions


def environment(device: str) -> dict[str, str]:
    """The name of the GPU or CPU, and the versions of the software."""
    on_cpu = device == "cpu"
    found = {
        "device": cpu_name() if on_cpu else torch.cuda.get_device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if on_cpu:
        return found
    return found | {"cuda": str(torch.version.cuda), "flashinfer": versions()["flashinfer-python"]}


def conditions(config: EngineConfig, models: Models) -> Row:
    """The environment, target, drafter and dtype, and whether the weights are synthetic."""
    weights = "synthetic" if models.synthetic else "as trained"
    return {
        **environment(config.device),
        **({} if config.tensor_parallel == 1 else {"tensor parallel": config.tensor_parallel}),
        "model": f"{checkpoint_name(config.model)}, {config.formats}, weights {weights}",
        "drafter": checkpoint_name(str(config.drafter)),
    }


def free_memory() -> None:
    """Return unreferenced memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
