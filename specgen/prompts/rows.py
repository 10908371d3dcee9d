"""Rows of a data set, from files or from the Hugging Face hub; a broken row does not stop the rest."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedIOBase
from itertools import count
from pathlib import Path
from typing import Any

from specgen.config import require

_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_BETWEEN_ROWS = re.compile(r"[ \t\r\n,]*")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: its JSON value, or the ``error`` that kept it from being read; ``where`` as in ``line 12``."""

    where: str
    value: Any = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """What ``datasets.load_dataset`` needs to find a public data set."""

    path: str  # hub id, or the name of a file format
    split: str
    name: str | None = None  # configuration
    data_files: str | None = None  # within the hub's repository, or a URL

    @property
    def address(self) -> str:
        """What a person looks for: the hub id, or the URL of a file that is not on the hub."""
        return self.data_files if self.data_files and "://" in self.data_files else self.path


def read_hub(dataset: str, source: HubSource) -> Callable[[], Iterator[Row]]:
    """Reads the rows of the public data set that is known as ``dataset``; ``datasets`` keeps them in its cache."""
    from datasets import load_dataset

    try:
        values = load_dataset(source.path, source.name, data_files=source.data_files, split=source.split)
    except Exception as error:  # the library raises whatever its builders and its network raise
        raise ValueError(
            f"dataset is {dataset!r}, but {source.address} could not be loaded ({_first_line(error)}): "
            "download it elsewhere and name the file or the directory with --data-path"
        ) from error
    return lambda: (Row(where=f"row {number}", value=value) for number, value in enumerate(values, start=1))


def read_path(path: Path, *, preferred: Sequence[str] = ()) -> Callable[[], Iterator[Row]]:
    """Reads the rows of a file, or of the data files of a directory in the order of their names.

    Files are JSON lines, a JSON array (both also gzipped) or Parquet. In a directory the first pattern of
    ``preferred`` that matches chooses the files; where none does, all are read. ``ValueError`` for a path
    without data, and for a file that cannot be read at all.
    """
    require(path.exists(), f"{path} does not exist: name a file or a directory with prompts")
    if not path.is_dir():
        return partial(_read_file, path)
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name.endswith(_SUFFIXES)]
    require(bool(files), f"{path} has no data file in it: use {', '.join(_SUFFIXES)}")
    choices = ([file for file in files if file.match(pattern)] for pattern in preferred)
    return partial(_read_files, next((choice for choice in choices if choice), files))


def _read_files(files: Sequence[Path]) -> Iterator[Row]:
    for file in files:
        for row in _read_file(file):
            yield row if len(files) == 1 else replace(row, where=f"{file.name} {row.where}")


def _read_file(path: Path) -> Iterator[Row]:
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet(path)
            return
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            is_lines = path.name.removesuffix(".gz").endswith(".jsonl") or _first_character(file) != b"["
            yield from _read_lines(file) if is_lines else _read_array(file.read())
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({_first_line(error)}): check that it is whole") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    from datasets import load_dataset

    values = load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    for number, value in enumerate(values, start=1):
        yield Row(where=f"row {number}", value=value)


def _read_lines(lines: Iterable[bytes]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig").strip()
            if text:
                yield Row(where=f"line {number}", value=json.loads(text))
        except (ValueError, RecursionError) as error:
            yield Row(where=f"line {number}", error=f"not valid JSON ({_first_line(error)})")


def _read_array(content: bytes) -> Iterator[Row]:
    """The elements one by one, so that the first prompts of a large file do not wait for the last."""
    decoder = json.JSONDecoder()
    text = content.decode("utf-8-sig")
    end = text.index("[") + 1
    for number in count(1):
        start = _BETWEEN_ROWS.match(text, end).end()  # type: ignore[union-attr]  # matches the empty string too
        if text[start : start + 1] == "]":
            return
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            yield Row(
                where=f"row {number}", error=f"not valid JSON ({_first_line(error)}); no row after it is read"
            )
            return
        yield Row(where=f"row {number}", value=value)


def _first_character(file: BufferedIOBase) -> bytes:
    """The first byte that is no white space; the file stays at its start."""
    head = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    file.seek(0)
    return head[:1]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
