"""JSON lines that are on disk whole or not at all."""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specgen.rundir.atomic import replacement


def write_json_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Write one value after the other; a name that ends in ``.gz`` is gzipped, the same in every run."""
    with replacement(path) as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed:
                packed.writelines(map(_line, values))
        else:
            file.writelines(map(_line, values))


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"
