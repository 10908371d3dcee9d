"""What manifests say: where the numbers of a page come from, and in which settings runs differ."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from specgen.config import lookup_of
from specgen.record.provenance import busy, unlike
from specgen.record.record_rows import WHOLE
from specgen.report.display import checkpoint_name, count

_PACKAGES = ("specgen", "torch", "flashinfer-python", "lm-eval")
_MISSING = "not installed"
_CHECKPOINTS = ("model", "drafter")
_DIGEST = 12  # characters that are shown of one


def run_title(record: Mapping[str, Any]) -> str:
    """``org/target with org/head (K 4, padded) on gsm8k``, of a run's manifest: pages open beside each other differ."""
    engine = record["engine"]
    model = record.get("served_model_name", checkpoint_name(engine["model"]))
    data, shard = record["data"], record["data"].get("shard", WHOLE)
    source = PurePath(data["dataset"]).name if "dataset" in data else ", ".join(data["tasks"])
    arm = record.get("settings", {}).get("arm")
    whole = "" if shard == WHOLE else f" (shard {shard})"
    return f"{arm + ': ' if arm else ''}{model} {_drafting(engine)} on {source}{whole}"


def _drafting(engine: Mapping[str, Any]) -> str:
    drafter, length = engine.get("drafter"), engine["num_spec_tokens"]
    if drafter is None or length == 0:
        return "alone"
    kind = engine.get("spec_length", "fixed")
    k = length if kind == "fixed" else kind
    batch = "" if lookup_of(drafter) is not None else f", {engine['drafter_batch']}"
    return f"with {checkpoint_name(drafter)} (K {k}{batch})"


def origin(record: Mapping[str, Any]) -> dict[str, str]:
    """The fields ``created``, ``argv``, ``versions``, ``device`` and ``state`` of a manifest as a page shows them.

    What a record of an earlier version lacks is left out.
    """
    found = {
        "date": record.get("created", "").replace("T", " ").replace("+00:00", " UTC"),
        "machine": _machine(record.get("device", {})),
        "state": _state(record.get("state", {})),
        "versions": _versions(record.get("versions", {})),
        "command": _command(record.get("argv", [])),
    }
    return {label: text for label, text in found.items() if text}


def _machine(device: Mapping[str, Any]) -> str:
    number = device.get("threads")
    threads = None if number is None else f"{count(number)} thread{'' if number == 1 else 's'}"
    cuda = f"CUDA {device['cuda']}" if device.get("cuda") else None
    name = device.get("name") if cuda or "cpu" not in device else None  # of a CPU it is the architecture
    parts = (device.get("host"), name, cuda, device.get("cpu"), threads)
    return ", ".join(str(part) for part in parts if part is not None)


def _state(state: Mapping[str, Any]) -> str:
    """The machine's state when the run began: sharing it makes every speed doubtful, and so do low clocks."""
    shown = {
        "driver": "driver {driver}",
        "clock_mhz": "clock {clock_mhz:g} MHz",
        "max_clock_mhz": "of at most {max_clock_mhz:g} MHz",
        "power_limit_watts": "power limit {power_limit_watts:g} W",
        "gpu_use_percent": "GPU {gpu_use_percent:g} % in use",
        "load": "load {load:g} on {cpus} CPUs",
    }
    parts = [text.format(**state) for name, text in shown.items() if name in state]
    if not parts:
        return ""
    return f"{', '.join(parts)} at the start{': BUSY, so speeds are doubtful' if busy(state) else ''}"


def _versions(versions: Mapping[str, str]) -> str:
    shown = [f"{name} {versions[name]}" for name in _PACKAGES if versions.get(name, _MISSING) != _MISSING]
    return ", ".join([*shown, *([f"Python {versions['python']}"] if "python" in versions else [])])


def _command(argv: list[str]) -> str:
    """The command as a shell reads it, its program without the directory."""
    if not argv:
        return ""
    program = PurePath(argv[0]).name
    return shlex.join(["specgen" if program == "__main__.py" else program, *argv[1:]])  # of python -m specgen


def unlike_settings(manifests: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The value of each run by the dotted name of the field, for fields in which the runs differ.

    A checkpoint is compared by its weights and prompts by their texts: equal ones may have several paths. The digest
    of a checkpoint is named only where its path does not tell the runs apart.
    """
    found = unlike(manifests)
    for name in _CHECKPOINTS:
        path, digest = f"engine.{name}", f"fingerprints.{name}"
        digests = [manifest.get("fingerprints", {}).get(name) for manifest in manifests]
        if digest in found and path in found:
            del found[digest]
        elif path in found and None not in digests:
            del found[path]
    for name in found:
        if name == "data.sha256" or name.startswith("fingerprints."):
            found[name] = tuple(each and each[:_DIGEST] for each in found[name])
    return found
