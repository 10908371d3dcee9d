"""Short names of checkpoints and data sets, each different from the others."""

from collections.abc import Iterable
from pathlib import PurePath

_FILES = (".json", ".jsonl", ".csv", ".txt", ".parquet")  # a head's name may have another dot


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """The name of each path: its last part, with as many before it as it takes to differ from earlier names."""
    names: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        bare = path.removesuffix(".gz")
        parts = (PurePath(bare).with_suffix("") if bare.endswith(_FILES) else PurePath(bare)).parts
        shorter = ("/".join(parts[-length:]) for length in range(1, len(parts) + 1))
        names[path] = next((name for name in shorter if name not in names.values()), path)
    return names


def as_directory(name: str) -> str:
    """``name`` as the name of one directory."""
    return name.replace("/", "--").replace(":", "-")
