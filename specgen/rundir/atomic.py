"""Atomic replacement of files, and errors that name the file that cannot be written."""

import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from specgen.config import UserError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Puts ``path`` into an ``OSError``: the system names a file for open, but not for write."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def writable(output: Path, remedy: str = "fix that and run the same command again") -> Iterator[None]:
    """Makes a ``UserError`` of an ``OSError`` at or in ``output``, and of no other."""
    try:
        yield
    except OSError as error:
        named = Path(error.filename) if isinstance(error.filename, str) else None
        if named is None or not any(named.is_relative_to(path) for path in (output, _partial(output))):
            raise
        raise UserError(
            f"output {str(output)!r} cannot be written ({error.strerror or error}): {remedy}"
        ) from error


class _Named(io.FileIO):
    def write(self, content: "ReadableBuffer", /) -> int:
        with naming(self.name):
            return super().write(content)


def open_output(path: Path, mode: str) -> IO[bytes]:
    """Open ``path`` to write (``w``) or to append (``a``); a flush that fails names it."""
    return io.BufferedWriter(_Named(str(path), mode))


def sync(file: IO[bytes]) -> None:
    """Flush to the disk: survives a power loss."""
    file.flush()
    with naming(file.name):
        os.fsync(file.fileno())


@contextmanager
def swapped(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that atomically replaces ``path`` at the end; a power loss may leave it empty."""
    partial = _partial(path)
    with open_output(partial, "w") as file:
        yield file
    os.replace(partial, path)


@contextmanager
def replacement(path: Path) -> Iterator[IO[bytes]]:
    """As ``swapped``, and survives a power loss: it waits for the disk."""
    with swapped(path) as file:
        yield file
        sync(file)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` atomically."""
    with replacement(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_text(path, as_json(value))


def write_json_lines(path: Path, values: Iterable[object]) -> None:
    """Write ``values`` as JSON lines, atomically."""
    with replacement(path) as file:
        file.writelines(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)


def as_json(value: object) -> str:
    """``value`` as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
