"""Costs of steps, for K auto, that are kept between runs: a file for everything that they depend on.

A file is used only where all of that is the same, down to the source of this package; anything else is measured anew.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from specgen.checkpoints.cache_files import cache_directory, read_cached, write_cached
from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.config import EngineConfig
from specgen.core.spec_length import StepCosts
from specgen.core.step_costs import timed_sizes
from specgen.engine.number_formats import Checkpoints
from specgen.ops.jit_modules import runs_on
from specgen.record.provenance import device, machine_state, uuid, versions

_KIND, _WHAT = "step-costs", "costs of steps"
_SET = (
    "CUDA_",
    "NCCL_",
    "TORCH",
    "PYTORCH",
    "TRITON_",
    "FLASHINFER_",
    "TRTLLM_",
    "TLLM_",
)  # may change kernels
_STATE = ("driver", "max_clock_mhz", "power_limit_watts")  # of a GPU, that last


def forget() -> None:
    """Remove all that is kept, of every model."""
    for file in cache_directory(_KIND).glob("*"):
        file.unlink(missing_ok=True)


def costs_for(config: EngineConfig, checkpoints: Checkpoints, measure: Callable[[], StepCosts]) -> StepCosts:
    """Those kept for a resolved ``config``, or measured now and kept.

    Nothing is kept of a CPU, whose other programs come and go, nor where the driver of a GPU cannot be read, nor where
    the cache had no room for all sizes. A file that cannot be read, or written, costs a line in the log.
    """
    key = key_of(config, checkpoints)
    if key is None:
        return measure()
    points = {
        (size, k) for size in timed_sizes(config.max_batch_size) for k in range(config.draft_length.most + 1)
    }
    file = cache_directory(_KIND) / f"{hashlib.sha256(_text(key).encode()).hexdigest()}.json"
    kept = read_cached(file, _WHAT, partial(_checked, key=key, points=points))
    if kept is not None:
        return kept
    costs = measure()
    if costs.seconds.keys() == points:
        seconds = [[*point, each] for point, each in sorted(costs.seconds.items())]
        write_cached(file, _WHAT, {"key": key, "seconds": seconds})
    return costs


def key_of(config: EngineConfig, checkpoints: Checkpoints) -> dict[str, Any] | None:
    """All that the costs depend on; None where they are not to be kept."""
    if config.device == "cpu":
        return None
    state = machine_state(uuid(config.device))
    if "driver" not in state:
        return None
    engine = config.to_json()
    del engine["chat_template_kwargs"]  # with the date in it
    return {
        "device": device(config.device),
        "state": {name: state.get(name) for name in _STATE},
        "versions": versions(),
        "source": _source(),
        "own_kernels": runs_on(torch.device(config.device)),  # which the machine may not be able to compile
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SET)},
        "engine": engine,
        "checkpoints": {role: _identity(checkpoint) for role, checkpoint in checkpoints.items()},
    }


def _identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Its configuration, and its files as far as their names, sizes and times tell."""
    found = [(file, file.stat()) for file in checkpoint.files]
    return {
        "config": checkpoint.config,
        "files": [[file.name, state.st_size, state.st_mtime_ns] for file, state in found],
    }


def _source() -> str:
    """Of this package: a change of the code may change what a step takes, and no version with it."""
    total = hashlib.sha256()
    root = Path(str(files("specgen")))
    for file in sorted(file for file in root.rglob("*") if file.suffix in (".py", ".cu", ".toml")):
        total.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
        total.update(file.read_bytes())
    return total.hexdigest()


def _checked(found: Any, key: Mapping[str, Any], points: set[tuple[int, int]]) -> StepCosts | None:  # noqa: ANN401
    """None for what is not of ``key`` and ``points``."""
    seconds = {(int(size), int(k)): float(each) for size, k, each in found["seconds"]}
    sound = all(math.isfinite(each) and each > 0 for each in seconds.values())
    same = _text(found["key"]) == _text(key) and seconds.keys() == points
    return StepCosts(seconds=seconds) if same and sound else None


def _text(key: Any) -> str:  # noqa: ANN401
    return json.dumps(key, sort_keys=True)
