"""Times one layer of a pass on a device with cold caches."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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
