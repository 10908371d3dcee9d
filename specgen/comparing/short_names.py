"""Short names of checkpoints and data sets, each different from the others."""

from collections.abc import Container, Iterable, Iterator
from itertools import count
from pathlib import PurePath

_FILES = (".json", ".jsonl", ".csv", ".txt", ".parquet")  # a head's name may have another dot


# what tables of heads call other things
NO_HEADS = {
    *("plain decoding", "data", "requests", "category", "request", "steps", "difference", "p", "ends"),
    *("head", "heads", "arm", "identical", "range"),
}


def short_names(paths: Iterable[str], taken: Container[str] = ()) -> dict[str, str]:
    """The name of each path: its last part, with as many before it as it takes to differ from earlier names.

    They differ as directories too, and none is in ``taken``.
    """
    names: dict[str, str] = {}
    directories: set[str] = set()
    for path in dict.fromkeys(paths):
        free = (name for name in _names(path) if name not in taken and as_directory(name) not in directories)
        names[path] = next(free)
        directories.add(as_directory(names[path]))
    return names


def _names(path: str) -> Iterator[str]:
    bare = path.removesuffix(".gz")
    parts = (PurePath(bare).with_suffix("") if bare.endswith(_FILES) else PurePath(bare)).parts
    for length in range(1, len(parts) + 1):
        yield "/".join(parts[-length:])
    yield path
    for number in count(2):
        yield f"{path} ({number})"


def as_directory(name: str) -> str:
    """``name`` as the name of one directory."""
    flat = name.replace("/", "--").replace(":", "-")
    return f"_{flat.lstrip('.')}" if flat.startswith(".") else flat
