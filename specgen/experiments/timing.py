"""Times one layer of a pass on a device with cold caches."""

import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.config import EngineConfig
from specgen.engine.loading import Models
from specgen.record.provenance import cpu_name, versions
from specgen.report.display import checkpoint_name
from specgen.report.table import Row


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


COLD_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}  # bytes read by all layers: more than a cache holds
MOST_LAYERS = 64
_WARM_UPS = 3

Call = Callable[[int], Tensor]  # runs the layer of that index


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per call: mean and standard deviation over repeats, each of which calls every layer once."""

    mean: float
    std: float
    output: Tensor  # of the last layer in the last repeat


def num_layers(bytes_per_layer: int, device: torch.device) -> int:
    """The number of layers that together read more than a cache holds."""
    return max(1, min(MOST_LAYERS, -(-COLD_BYTES[device.type] // bytes_per_layer)))


def time_layers(call: Call, layers: int, repeats: int, device: torch.device) -> Timing:
    """Call ``call(0)``, ``call(1)``, … in turn, ``repeats`` times.

    On a GPU the calls are captured in one CUDA graph and timed between two events, and a large buffer is overwritten
    before each repeat: the times include no launches and no cached data. ``call`` must be safe to replay.
    """
    call(0)  # loads, compiles and plans
    if device.type == "cpu":
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            for layer in range(layers):
                output = call(layer)
            seconds.append(time.perf_counter() - began)
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(layers):
                output = call(layer)
        seconds = _on_gpu(graph, repeats, device)
        output = output.clone()
    each = [passed / layers for passed in seconds]
    return Timing(mean=statistics.mean(each), std=statistics.stdev(each), output=output)


def _on_gpu(graph: torch.cuda.CUDAGraph, repeats: int, device: torch.device) -> list[float]:
    """Seconds of each replay, without synchronization in between, so that the host stays ahead."""
    other = torch.empty(COLD_BYTES["cuda"], dtype=torch.uint8, device=device)
    marks = []
    for _ in range(_WARM_UPS + repeats):
        other.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks[_WARM_UPS:]]


def relative_error(output: Tensor, expected: Tensor) -> float:
    """The largest error of a row relative to the norm of that row of ``expected``; both ``[rows, width]``."""
    errors = (output.float() - expected.float()).norm(dim=1)
    return float((errors / expected.float().norm(dim=1)).max())
