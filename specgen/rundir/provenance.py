"""The manifest of a run: arguments, versions, device, checkpoint fingerprints."""

import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specgen.config import EngineConfig, SamplingParams
from specgen.json_fields import load_json
from specgen.rundir.machine_state import machine_state
from specgen.template_kwargs import PINNED_DATE

MACHINE = ("device.host", "device.cpu")  # for whoever reads a report
FREE_IN_A_RUN = (  # no effect on texts; checkpoints are compared by fingerprint, devices by name
    "engine.model",
    "engine.drafter",
    "engine.device",
    "engine.tensor_parallel",
    "engine.max_batch_size",
    "engine.max_prefill_tokens",
    "engine.kv_memory",
    "engine.gpu_memory_utilization",
    "engine.prefix_cache",
    "engine.cuda_graphs",
    *MACHINE,
    "device.threads",
    "device.memory_bytes",
    "data.data_path",
    "versions.python",
    "versions.datasets",
    "versions.lm-eval",
)
_PACKAGES = ("specgen", "torch", "flashinfer-python", "transformers", "tokenizers", "datasets", "lm-eval")


def manifest(
    *,
    engine: EngineConfig,
    sampling: SamplingParams,
    data: dict[str, Any],
    fingerprints: dict[str, str],
    files: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of ``manifest.json``; ``engine`` is the resolved configuration.

    ``files`` are those behind the digests, by role and name, for ``differences`` to name.
    """
    if engine.ngram is not None:  # the drafter, without a checkpoint
        fingerprints = fingerprints | {"drafter": str(engine.drafter)}
    return {
        **now(engine.device),
        "engine": engine.to_json(),
        "sampling": sampling.to_json(),
        "data": data,
        "fingerprints": fingerprints,
        **({} if files is None else {"files": files}),
    }


def now(device_name: str) -> dict[str, Any]:
    """What a manifest says of this moment: date, command, versions, device and the state of the machine."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "versions": versions(),
        "device": device(device_name),
        "state": machine_state(uuid(device_name)),
    }


def uuid(device_name: str) -> str | None:
    """Of a GPU, as nvidia-smi knows it, whatever CUDA_VISIBLE_DEVICES makes of its number."""
    if device_name == "cpu":
        return None
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device_name).uuid}"


def with_recorded_date(config: EngineConfig, asked: EngineConfig, path: Path) -> EngineConfig:
    """``config``, resolved from ``asked``, with the date that the run of the manifest in ``path`` began with.

    A date that ``asked`` names is kept; so is today's where there is no such run.
    """
    if PINNED_DATE in asked.template_kwargs.values or not path.is_file():
        return config
    engine = load_json(path, "remove the directory, or name another").get("engine")
    recorded = engine.get("chat_template_kwargs") if isinstance(engine, Mapping) else None
    if not isinstance(recorded, Mapping) or PINNED_DATE not in recorded:
        return config
    kwargs = asked.template_kwargs.values | {PINNED_DATE: recorded[PINNED_DATE]}
    return replace(config, chat_template_kwargs=kwargs)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results can depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def device(name: str) -> dict[str, Any]:
    """Name and properties of the device ``name``, and the machine that it is in."""
    import torch

    machine = {"host": platform.node(), "cpu": cpu_name()}
    if name == "cpu":
        architecture = platform.processor() or platform.machine()
        return {"name": architecture, "threads": torch.get_num_threads(), **machine}
    properties = torch.cuda.get_device_properties(name)
    return {
        **machine,
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the CPU as Linux has it, elsewhere its architecture."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), platform.processor() or platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
