"""Where the numbers of a page come from: date, machine, versions and command."""

import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from specgen.display import count

_PACKAGES = ("specgen", "torch", "flashinfer-python", "lm-eval")
_MISSING = "not installed"


def origin(record: Mapping[str, Any]) -> dict[str, str]:
    """The fields ``created``, ``argv``, ``versions`` and ``device`` of a manifest as a page shows them, by label.

    What a record of an earlier version lacks is left out.
    """
    found = {
        "date": record.get("created", "").replace("T", " ").replace("+00:00", " UTC"),
        "machine": _machine(record.get("device", {})),
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


def _versions(versions: Mapping[str, str]) -> str:
    shown = [f"{name} {versions[name]}" for name in _PACKAGES if versions.get(name, _MISSING) != _MISSING]
    return ", ".join([*shown, *([f"Python {versions['python']}"] if "python" in versions else [])])


def _command(argv: list[str]) -> str:
    """The command as a shell reads it, its program without the directory."""
    return shlex.join([PurePath(argv[0]).name, *argv[1:]]) if argv else ""
