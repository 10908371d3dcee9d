"""JSON files, and checks of the keys of their objects."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specgen.config import UserError, first_line, require, shown
from specgen.config.errors import did_you_mean, require_no_stand_in


def load_json(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file; ``UserError`` with ``remedy`` for anything else."""
    try:
        # bytes: json finds out whether they are UTF-8 or UTF-16, with or without a BOM
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    except (ValueError, RecursionError) as error:
        require_no_stand_in(path)
        raise UserError(f"{path} is not valid JSON ({first_line(error)}): {remedy}") from error
    require(isinstance(value, dict), f"{path} is not a JSON object: {remedy}")
    return dict(value)


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of nested objects by dotted names."""
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from flat(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def check_keys(value: object, *, needed: set[str], known: set[str]) -> dict[str, Any]:
    """The object ``value``; ``UserError`` names a key that is missing or unknown."""
    require(isinstance(value, Mapping), f"{shown(value)} is not a JSON object")
    assert isinstance(value, Mapping)
    missing, unknown = sorted(needed - set(value)), sorted(set(value) - known)
    require(not missing, f"{', '.join(missing)} is missing: add it")
    meant = "".join(did_you_mean(name, known) for name in unknown[:1])
    require(not unknown, f"{', '.join(unknown)} is not known{meant}: use {', '.join(sorted(known))}")
    return dict(value)
