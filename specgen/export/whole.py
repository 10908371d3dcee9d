"""Files that appear under their name when they are complete, and not before."""

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write what will be ``path`` afterwards; nothing is left of it if the writer fails."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines, one value after the other; a name that ends in ``.gz`` is gzipped, the same in every run."""
    with whole(path) as partial, partial.open("wb") as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed:
                packed.writelines(map(_line, values))
        else:
            file.writelines(map(_line, values))


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"
