"""Files that survive a kill: replaced atomically, or append-only rows indexed by id; errors name the file."""

import io
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from specgen.config import UserError, first_line, shown

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_decode = msgspec.json.Decoder().decode  # three times as fast as ``json``
_BOM = b"\xef\xbb\xbf"  # before the first row, as other programs write it
# the start of a row as ``add`` writes it
_ID = re.compile(rb'\{"id": ("(?:[^"\\]|\\.)*")(?:, "sample": (\d+))?')


def sample_id(request: str, sample: int | None) -> str:
    """The name of the request for a sample, from 0 on, of the prompt with this id; the first has the id itself."""
    return f"{request}/sample-{sample}" if sample else request


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
    """A file to write that atomically replaces ``path`` at the end; a power loss may leave it empty.

    Where it cannot be written as a whole, what there is of it goes: the disk may be full.
    """
    partial = _partial(path)
    try:
        with open_output(partial, "w") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@contextmanager
def replacement(path: Path) -> Iterator[IO[bytes]]:
    """As ``swapped``, and survives a power loss: it waits for the disk."""
    with swapped(path) as file:
        yield file
        sync(file)


@contextmanager
def new_file(path: Path | None) -> Iterator[None]:
    """``path``, if any, is there until it is written; an error removes it. ``UserError`` where it was there before."""
    if path is None:
        yield
        return
    with writable(path), naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.open("x").close()
        except FileExistsError as error:
            is_empty = path.is_file() and not path.stat().st_size
            held = " and is empty (another command is at work on it, or was killed)" * is_empty
            raise UserError(
                f"output {str(path)!r} exists{held}: name a new file, or remove it first"
            ) from error
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


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


# --- rows ---------------------------------------------------------------------------------------


class Rows(Mapping[str, dict[str, Any]]):
    """The rows of ``path`` by id, each read from the file on access; of rows with the same id the last counts.

    That of a row with a ``sample`` is the ``sample_id``.

    Opening takes one pass that parses only ids, and keeps only ids in memory. A torn last line is no row, and a file
    that is not there has none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader: IO[bytes] = path.open("rb") if path.exists() else io.BytesIO()
        self._offsets = dict(_offsets(self._reader))

    def __getitem__(self, row_id: str) -> dict[str, Any]:
        """``UserError`` where the file is damaged within the row."""
        line = self._line(row_id)
        with suppress(msgspec.DecodeError, ValueError):
            found: dict[str, Any] = _decode(line)
            return found
        try:
            row: dict[str, Any] = json.loads(line)  # takes NaN too
        except ValueError as error:
            raise UserError(
                f"{self.path}: the row of {shown(row_id)} is damaged ({first_line(error)}): remove that line, and run "
                "the same command again"
            ) from error
        return row

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """Every row by id, as it stands in the file."""
        for row_id in self:
            yield row_id, self._line(row_id)

    def __contains__(self, row_id: object) -> bool:
        return row_id in self._offsets

    def __iter__(self) -> Iterator[str]:
        return iter(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    def _line(self, row_id: str) -> bytes:
        self._reader.seek(self._offsets[row_id])
        return self._reader.readline().removeprefix(_BOM)


class RowFile(Rows):
    """``Rows`` that grow. Opening cuts a torn last line. ``OSError`` where the file cannot be written."""

    def __init__(self, path: Path) -> None:
        path.touch()
        cut_torn_line(path)
        self._file = open_output(path, "a")
        super().__init__(path)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append ``row``, flushed to the OS: survives a kill, not a power loss.

        Its first key is ``id``, and the next ``sample`` if it has one.
        """
        offset = self._file.tell()
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._offsets[sample_id(row["id"], row.get("sample"))] = offset

    def last(self) -> dict[str, Any] | None:
        """The newest row, if there is one."""
        newest = next(reversed(self._offsets), None)
        return None if newest is None else self[newest]

    def sync(self) -> None:
        """Flush to the disk: survives a power loss."""
        sync(self._file)

    def close(self) -> None:
        """Close for writing; rows can still be read."""
        self._file.close()

    def arrange(self, ids: Iterable[str]) -> None:
        """Atomically sort the closed file's rows in the order of ``ids``; others are removed."""
        offsets, offset = dict[str, int](), 0
        with replacement(self.path) as file:
            for row_id in ids:
                if row_id in self._offsets:
                    offsets[row_id] = offset
                    offset += file.write(self._line(row_id))
        self._reader.close()
        self._reader, self._offsets = self.path.open("rb"), offsets


def cut_torn_line(path: Path) -> None:
    """Remove everything after the last line break of ``path``, unless only that break is missing."""
    with naming(path), path.open("r+b") as file:
        if size := os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
                is_whole = end < size and _is_object(content[end:])
            if is_whole:
                file.seek(size)
                file.write(b"\n")
            else:
                file.truncate(end)


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of ``path``, numbered from 1, that are not blank.

    Without a last one that a kill, or a write at this moment, has cut.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(_BOM).strip()
            if content and (line.endswith(b"\n") or _is_object(content)):
                yield number, content


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def id_of(line: bytes) -> str | None:
    """The id of the row in ``line``; None for an incomplete row, as a power loss may leave it."""
    if b"\0" in line:
        return None
    if line.endswith((b"}\n", b"}\r\n")) and (found := _ID.match(line)) is not None:
        text, sample = found.groups()  # without escapes this is ten times as fast as ``json``
        row_id = str(json.loads(text)) if b"\\" in text else text[1:-1].decode()
        return sample_id(row_id, int(sample or 0))
    try:  # as another program has written it
        row = json.loads(line)
        row_id, number = row["id"], row.get("sample")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return sample_id(row_id, number if type(number) is int else None) if isinstance(row_id, str) else None


def _offsets(lines: IO[bytes]) -> Iterator[tuple[str, int]]:
    """The id and the offset of every row."""
    offset = 0
    for line in lines:
        row_id = id_of(line)
        if row_id is not None:
            yield row_id, offset
        offset += len(line)
