"""JSON objects that stand for a dataclass: neither a field too few nor a key too many."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from specgen.config import require, shown


def check_fields(value: object, cls: type[Any]) -> dict[str, Any]:
    """``value`` as the arguments of the dataclass ``cls``; ``ValueError`` names a key that is missing or unknown."""
    require(isinstance(value, Mapping), f"{shown(value)} is not a JSON object")
    assert isinstance(value, Mapping)
    needed = {field.name for field in fields(cls) if field.default is MISSING}
    missing = sorted(needed - set(value))
    unknown = sorted(set(value) - {field.name for field in fields(cls)})
    require(not missing, f"{', '.join(missing)} is missing: add it")
    require(not unknown, f"{', '.join(unknown)} is not known: remove it")
    return dict(value)
