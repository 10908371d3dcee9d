"""Files that are there whole or not at all, whenever the writer is killed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacement(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of ``path`` at the end, in one step and for good."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """Write ``text``, whole or not at all."""
    with replacement(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
