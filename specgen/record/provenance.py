"""The manifest of a run: arguments, versions, machine, checkpoint fingerprints; and in what two of them differ."""

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

from specgen.config import PINNED_DATE, EngineConfig, SamplingParams
from specgen.config.json_fields import flat, load_json

# Fields of a manifest that no run depends on: when and how, a second wording of the rest, what else the machine ran,
# and the files behind the digests, which say in words what a digest cannot
OF_THE_MOMENT = ("created", "argv", "settings", "state", "files")
MACHINE = ("device.host", "device.cpu")  # for whoever reads a report
FREE_IN_A_RUN = (  # no effect on texts; checkpoints are compared by fingerprint, devices by name
    "engine.model",
    "engine.drafter",
    "engine.lora",
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
    "data.own_parameters",  # as the digest has it
    "versions.python",
    "versions.datasets",
    "versions.lm-eval",
)
_PACKAGES = ("specgen", "torch", "flashinfer-python", "transformers", "tokenizers", "datasets", "lm-eval")
_ASKED = {  # of nvidia-smi, by field
    "driver": "driver_version",
    "clock_mhz": "clocks.sm",
    "max_clock_mhz": "clocks.max.sm",
    "power_limit_watts": "power.limit",
    "gpu_use_percent": "utilization.gpu",
}
_TIMEOUT = 10.0  # seconds: a sick driver must not stop a run
_BUSY = 0.5  # share of the CPUs, or of the GPU
_MINUTE = 60.0  # the time constant of the load average


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
    if engine.lookup is not None:  # the drafter, without a checkpoint
        fingerprints = fingerprints | {"drafter": str(engine.drafter)}
    return {
        **now(engine.device),
        "engine": engine.to_json(),
        "sampling": sampling.to_json(),
        "data": data,
        "fingerprints": fingerprints,
        **({} if files is None else {"files": files}),
    }


def timestamp() -> str:
    """The present second, as ``2026-01-31T12:00:00+00:00``."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def now(device_name: str) -> dict[str, Any]:
    """What a manifest says of this moment: date, command, versions, device and the state of the machine."""
    return {
        "created": timestamp(),
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


_OPTIONS = {  # by the field that keeps an option
    "data.dataset": "--dataset",
    "data.data_path": "--data-path",
    "data.num_prompts": "--num-prompts",
    "data.shard": "--shard",
    "steps": "--no-steps",
    "served_model_name": "--served-model-name",
    **{
        f"{part}.{each.name}": "--" + (each.metadata["name"] or each.name).replace("_", "-")
        for part, config in (("engine", EngineConfig), ("sampling", SamplingParams))
        for each in fields(config)
        if each.metadata
    },
}
_DEFAULTS = {"steps": True, "engine.kv_dtype": "model", "engine.tensor_parallel": 1}  # not recorded
_NAMED = 3  # files
_DIGESTS = ("fingerprints.model", "fingerprints.drafter", "data.sha256")
# What only says where prompts were, or how many were asked for. Where both manifests have a digest of the prompts
# themselves, of a run or of a bench, that one decides
NAMES_OF_DATA = ("data.dataset", "data.data_path", "data.num_prompts")
_DIGESTS_OF_DATA = ("data.sha256", "data.requests")


def unlike(manifests: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The values of fields, by dotted name, in which ``manifests`` differ; None of one without the field."""
    each = [dict(flat({k: v for k, v in one.items() if k not in OF_THE_MOMENT})) for one in manifests]
    values = {name: tuple(one.get(name) for one in each) for name in dict.fromkeys(chain(*each))}
    digests = [{*values.get(name, [None])} for name in _DIGESTS_OF_DATA]
    same_prompts = any(len(found) == 1 and None not in found for found in digests)
    decides_nothing = NAMES_OF_DATA if same_prompts else ()
    return {
        name: found
        for name, found in values.items()
        if any(one != found[0] for one in found) and name not in decides_nothing
    }


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any], free: Container[str] = ()) -> list[str]:
    """What differs between two manifests, as ``--dtype float32 -> bfloat16``; the fields in ``free`` may.

    Of digests it says which files changed, where the manifests tell.
    """
    values = unlike([earlier, json.loads(json.dumps(now))])
    names = [name for name in values if name not in free]
    return [
        _of_files(name, earlier, now) if name in _DIGESTS else _of_values(name, *values[name])
        for name in names
        if not _follows(name, names, values)
    ]


def _follows(name: str, names: Sequence[str], values: Mapping[str, Sequence[Any]]) -> bool:
    """Whether ``name`` need not be listed: another difference says why it differs."""
    if name == "data.sha256":
        return not set(NAMES_OF_DATA).isdisjoint(names)
    is_plain = None in values.get("engine.drafter", ()) and "engine.num_spec_tokens" in names
    return name == "fingerprints.drafter" and is_plain


def _of_values(name: str, *values: object) -> str:
    before, after = (_DEFAULTS.get(name) if value is None else value for value in values)
    if name == "steps":  # kept unless --no-steps
        before, after = not before, not after
    return f"{_OPTIONS.get(name, name)} {_shown(before)} -> {_shown(after)}"


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def _of_files(name: str, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The files whose content is another; of a drafter without files its name."""
    role = "prompts" if name == "data.sha256" else name.partition(".")[2]
    left, right = (each.get("files", {}).get(role, {}) for each in (earlier, now))
    if role == "drafter" and not (left and right):
        before, after = (each.get("engine", {}).get("drafter") for each in (earlier, now))
        if before != after:
            return f"--drafter {_shown(before)} -> {_shown(after)}"
    changed = list(_changed(left, right))
    if changed:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        return f"files of the {role}: {', '.join(changed[:_NAMED])}{more}"
    if role == "prompts":
        return "the prompts: other rows, or rows read in another way (--prompt-field, --chat, --raw, --split)"
    return f"the content of the files of the {role}"


def _changed(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[str]:
    """A file per text; without SHA-256 it is identified by its size and date."""
    for name in {**left, **right}:
        if name not in right:
            yield f"{name} is gone"
        elif name not in left:
            yield f"{name} is new"
        elif left[name] != right[name] and _content(left[name]) != _content(right[name]):
            before, after = _state(left[name]), _state(right[name])
            yield f"{name} ({f'{before} -> {after}' if before != after else f'{after}, with other content'})"


def _content(file: Mapping[str, Any]) -> object:
    """What decides whether a file is the same; its date alone does not."""
    return file.get("sha256") or file


def _state(file: Mapping[str, Any]) -> str:
    return f"{file['bytes']:,} bytes of {file['changed'].removesuffix('+00:00')} UTC"


# --- the state of the machine -------------------------------------------------------------------


def machine_state(uuid: str | None = None) -> dict[str, Any]:
    """Load average of the last minute without this process, number of CPUs, and what nvidia-smi says of GPU ``uuid``.

    What cannot be read is left out.
    """
    own = _OWN.now()
    try:
        # a load is that of all CPUs, also where this process may use a few of them
        load = {"load": round(max(0.0, os.getloadavg()[0] - own), 2), "cpus": os.cpu_count() or 1}
    except (OSError, AttributeError):  # not on every system
        load = {}
    return load | ({} if uuid is None else _gpu(uuid))


def state_after(config: EngineConfig) -> dict[str, Any]:
    """``machine_state`` once this process has run; empty with ranks, whose load is not told from that of others."""
    return machine_state() if config.tensor_parallel == 1 else {}


class _OwnLoad:
    """The part of the load average that this process makes, with the programs that it has run and waited for."""

    def __init__(self) -> None:
        self._time, self._cpu_seconds, self._load = time.monotonic(), 0.0, 0.0

    def now(self) -> float:
        """By the CPU time since the last call, as the kernel averages: the past fades with each second."""
        now, cpu_seconds = time.monotonic(), sum(os.times()[:4])
        if (elapsed := now - self._time) > 0:
            kept = math.exp(-elapsed / _MINUTE)
            self._load = kept * self._load + (1 - kept) * (cpu_seconds - self._cpu_seconds) / elapsed
            self._time, self._cpu_seconds = now, cpu_seconds
        return self._load


_OWN = _OwnLoad()


def busy(*states: Mapping[str, Any]) -> str:
    """What makes speeds doubtful where the machine was in one of these states; empty on a quiet one."""
    for state in states:
        if state.get("load", 0) > _BUSY * state.get("cpus", 1):
            load, cpus = f"{state['load']:g}", state.get("cpus", 1)
            return f"load {load} of other programs in the last minute on {cpus} CPUs"
        if state.get("gpu_use_percent", 0) > 100 * _BUSY:
            return f"the GPU was {state['gpu_use_percent']:g} % in use before"
    return ""


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
