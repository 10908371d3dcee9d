"""The settings in which runs differ, from their manifests."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specgen.json_fields import OF_THE_MOMENT, flat

_CHECKPOINTS = ("model", "drafter")
_DIGEST = 12  # characters that are shown of one


def unlike_settings(manifests: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The value of each run by the dotted name of the field, for fields in which the runs differ.

    A checkpoint is compared by its weights: equal ones may have several paths. A digest is named only where its
    path does not tell the runs apart.
    """
    fields = [dict(_fields(manifest)) for manifest in manifests]
    names = dict.fromkeys(name for each in fields for name in each)
    values = {name: tuple(each.get(name) for each in fields) for name in names}
    unlike = {name: found for name, found in values.items() if any(each != found[0] for each in found[1:])}
    for name in _CHECKPOINTS:
        path, digest = f"engine.{name}", f"fingerprints.{name}"
        if digest in unlike and path in unlike:
            del unlike[digest]
        elif path in unlike and None not in values.get(digest, (None,)):
            del unlike[path]
    return unlike


def _fields(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in flat({key: each for key, each in manifest.items() if key not in OF_THE_MOMENT}):
        digest = name == "data.sha256" or name.startswith("fingerprints.")
        yield name, value[:_DIGEST] if digest and isinstance(value, str) else value
