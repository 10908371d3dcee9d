"""The sources of rows: files, directories, standard input, the Hugging Face hub."""

import gzip
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from specgen.config import UserError, first_line, require
from specgen.prompts.json_rows import Row, parsed, read_rows

_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_BATCH = 1024  # rows of a Parquet file per read
_GZIP = b"\x1f\x8b"  # the start of a gzipped file, whatever its name


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """Arguments of ``datasets.load_dataset`` for a public data set."""

    path: str  # hub id, or the name of a file format
    split: str
    name: str | None = None  # configuration
    data_files: str | None = None  # within the hub's repository, or a URL

    @property
    def address(self) -> str:
        """The hub id, or the URL of a file that is not on the hub."""
        return self.data_files if self.data_files and "://" in self.data_files else self.path


def read_hub(dataset: str, source: HubSource) -> Callable[[], Iterator[Row]]:
    """Reads the rows of the public data set ``dataset``; ``datasets`` caches them."""
    from datasets import load_dataset

    try:
        values = load_dataset(source.path, source.name, data_files=source.data_files, split=source.split)
    except Exception as error:  # the library raises whatever its builders and its network raise
        raise UserError(
            f"dataset is {dataset!r}, but {source.address} could not be loaded ({first_line(error)}): "
            "download it elsewhere and name the file or the directory with --data-path"
        ) from error
    return lambda: (parsed(f"row {number}", value) for number, value in enumerate(values, start=1))


def read_path(path: Path, *, preferred: Sequence[str] = ()) -> Callable[[], Iterator[Row]]:
    """Reads the rows of a file, or of the data files of a directory in the order of their names.

    Files are JSON lines, a JSON array (both also gzipped), Parquet, or a pipe of JSON lines. In a directory the
    first pattern of ``preferred`` that matches selects the files; where none does, all are read. ``UserError``
    for a path without data, and for a file that cannot be read.
    """
    require(path.exists(), f"{path} does not exist: name a file or a directory with prompts")
    if path.is_file():
        return partial(_read_file, path)
    if not path.is_dir():  # a pipe can be read only once
        with path.open("rb") as stream:
            return read_stream(stream)
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name.endswith(_SUFFIXES)]
    require(bool(files), f"{path} has no data file in it: use {', '.join(_SUFFIXES)}")
    choices = ([file for file in files if file.match(pattern)] for pattern in preferred)
    return partial(_read_files, next((choice for choice in choices if choice), files))


def read_stream(stream: BinaryIO) -> Callable[[], Iterator[Row]]:
    """Reads JSON lines of a stream any number of times, from a temporary file that lives as long as the reader."""
    try:
        copy = tempfile.NamedTemporaryFile(prefix="specgen-", suffix=".jsonl")  # noqa: SIM115  # lives with the reader
        shutil.copyfileobj(stream, copy)
        copy.flush()
    except OSError as error:
        raise UserError(
            f"standard input cannot be saved in {tempfile.gettempdir()} ({first_line(error)}): "
            "write it to a file, and name that"
        ) from error
    return lambda: _read_file(Path(copy.name))


def _read_files(files: Sequence[Path]) -> Iterator[Row]:
    for file in files:
        for row in _read_file(file):
            yield row if len(files) == 1 else replace(row, where=f"{file.name} {row.where}")


def _read_file(path: Path) -> Iterator[Row]:
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet(path)
            return
        with path.open("rb") as file:
            is_gzip = file.peek(2)[:2] == _GZIP
            lines = path.name.removesuffix(".gz").endswith(".jsonl")
            yield from read_rows(gzip.GzipFile(fileobj=file) if is_gzip else file, lines=lines)
    except (OSError, EOFError, UserError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}): check that it is whole") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=_BATCH)
            values = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, value in enumerate(values, start=1):
                yield parsed(f"row {number}", value)
    except Exception as error:  # the library raises whatever its decoders raise
        raise UserError(first_line(error)) from error
