"""The sources of rows: files and stored objects (JSON, CSV, text, Parquet, Arrow), directories, stdin, the hub."""

import csv
import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, TextIOWrapper
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO

from specgen.config import UserError, first_line, require, shown
from specgen.config.errors import stand_in
from specgen.config.urls import Url
from specgen.prompts.fields import SAMPLING_FIELDS
from specgen.prompts.json_rows import OtherFormatError, Row, parsed, read_rows
from specgen.prompts.json_rows import Source as JsonSource
from specgen.storage import Store, StoredObject, file_digest

_BATCH = 1024  # rows of a table per read
_LONGEST_CELL = 64 * 2**20  # characters
# Of a CSV file: their cells are JSON values, but for a single stop string
_JSON_COLUMNS = frozenset(SAMPLING_FIELDS)
_SAME_NAME = "two columns have the same name: rename one"
_MARKS = {",": "comma", ";": "semicolon", "\t": "tab"}
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_OF_TEXT = (".jsonl", ".json", *_SEPARATORS, ".txt")
_OF_ARROW = (".arrow", ".feather")
_SUFFIXES = (*_OF_TEXT, *(f"{kind}.gz" for kind in _OF_TEXT), ".parquet", *_OF_ARROW)
_DOWNLOAD = "download it elsewhere and name the file or the directory with --data-path"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_OF_A_RUN = {".lock", "status.json"}  # from its start
_OF_A_STORED_RUN = "parts.json"  # in a store, and in a copy from there
# Starts of files, whatever their names
_GZIP = b"\x1f\x8b"
_PARQUET = b"PAR1"
_ARROW_FILE, _ARROW_STREAM = b"ARROW1", b"\xff\xff\xff\xff"
_PACKED = {
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"(\xb5/\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7z",
}
_LONGEST_START = 64  # bytes
# What ``save_to_disk`` of ``datasets`` writes beside its tables
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
File = Path | StoredObject


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """Arguments of ``datasets.load_dataset`` for a public data set."""

    path: str  # hub id, or the name of a file format
    split: str | None = None  # None: the only one
    name: str | None = None  # configuration
    data_files: str | None = None  # within the hub's repository, or a URL

    @property
    def address(self) -> str:
        """The hub id, or the URL of a file that is not on the hub."""
        return self.data_files if self.data_files and "://" in self.data_files else self.path


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows that ``read`` gives any number of times, of ``files``; those of the hub are unknown."""

    read: Callable[[], Iterator[Row]]
    files: tuple[File, ...] = ()
    keeps: object = None  # what ``files`` live as long as

    def digest(self) -> str | None:
        """SHA-256 of the content of all files (of objects, their versions) and the kinds of their names.

        None without files.
        """
        if not self.files:
            return None
        digest = hashlib.sha256()
        for file in self.files:
            # what its store says is enough: to read it would take as long as a run
            if isinstance(file, StoredObject):
                digest.update(f"{file.path.suffixes[-2:]} {file.size} {file.version} ".encode())
                continue
            digest.update(f"{file.suffixes[-2:]} {file_digest(file)} ".encode())
        return digest.hexdigest()


def read_hub(dataset: str, source: HubSource, remedy: str = _DOWNLOAD) -> Source:
    """The rows of the public data set ``dataset``; ``datasets`` caches them."""
    from datasets import load_dataset

    try:
        values = load_dataset(source.path, source.name, data_files=source.data_files, split=source.split)
    except Exception as error:  # the library raises whatever its builders and its network raise
        raise UserError(
            f"dataset is {dataset!r}, but {source.address} could not be loaded ({first_line(error)}): "
            f"{remedy}"
        ) from error
    if isinstance(values, Mapping):  # without a split
        require(
            len(values) == 1,
            f"dataset {dataset!r} has the splits {', '.join(map(str, values))}: name one with --split",
        )
        (values,) = values.values()
    return Source(read=lambda: (parsed("row", number, value) for number, value in enumerate(values, start=1)))


def read_path(path: Path | Url, *, preferred: Sequence[str] = ()) -> Source:
    """The rows of a file, or of the data files of a directory in the order of their names; at a URL too.

    Files are JSON lines, a JSON array, CSV or lines of text (all also gzipped), Parquet, Arrow (Feather), or a pipe of
    JSON lines. A directory may be what ``save_to_disk`` of ``datasets`` has written. Hidden files and runs of specgen
    are left out, and of the others the first pattern of ``preferred`` that matches selects; where none does, all are
    read.
    ``UserError`` for a path without data, and for a file that cannot be read.
    """
    if isinstance(path, Url):
        return _of_files(path, _objects(path), preferred)
    require(path.exists(), f"{path} does not exist: name a file or a directory with prompts")
    if path.is_file():
        return _of_files(path, [path], preferred)
    if not path.is_dir():  # a pipe can be read only once
        with path.open("rb") as stream:
            return read_stream(stream)
    return _of_files(path, sorted(_below(path)), preferred)


def _below(path: Path) -> Iterator[Path]:
    """The files below ``path``, but for hidden ones and those of runs, whose output may be in a folder of prompts."""
    for place, folders, names in os.walk(path):
        if _OF_A_RUN.issubset(names) or _OF_A_STORED_RUN in names:
            folders.clear()
            continue
        folders[:] = (name for name in folders if not name.startswith("."))
        files = (Path(place, name) for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file())


def _objects(url: Url) -> list[StoredObject]:
    """As ``_below``, at a URL."""
    try:
        found = {each.path.relative_to(url.path): each for each in Store.at(url).objects()}
    except FileNotFoundError as error:
        raise UserError(f"{url} does not exist: name an object or a directory with prompts") from error
    runs = {name.parent for name in found if name.name == _OF_A_STORED_RUN}
    return [
        each
        for name, each in found.items()
        if runs.isdisjoint(name.parents) and not any(part.startswith(".") for part in name.parts)
    ]


def _of_files(path: Path | Url, files: Sequence[File], preferred: Sequence[str]) -> Source:
    """The rows of ``files``, which are ``path`` itself or all below it."""
    if [str(file) for file in files] == [str(path)]:
        return Source(read=partial(_read_file, files[0]), files=tuple(files))
    data = [file for file in _without_records(files) if _pure(file).name.lower().endswith(_SUFFIXES)]
    require(bool(data), f"{path} has no data file in it: use {', '.join(_SUFFIXES)}")
    choices = ([file for file in data if _pure(file).match(pattern)] for pattern in preferred)
    chosen = next((choice for choice in choices if choice), data)
    return Source(read=partial(_read_files, chosen), files=tuple(chosen))


def _without_records(files: Sequence[File]) -> list[File]:
    """``files`` without what is beside the tables of data sets that were saved by ``datasets``: records and caches."""
    by_path = {_pure(file): file for file in files}
    for path, file in by_path.items():
        if path.name == _SPLITS:
            splits = _names_in(file, "splits")
            require(
                len(splits) == 1,
                f"{path.parent} has the splits {', '.join(splits)}: name one with --split, or its directory",
            )
    saved = {
        path.parent: {path.with_name(name) for name in _names_in(file, "_data_files")}
        for path, file in by_path.items()
        if path.name == _STATE and path.with_name(_INFO) in by_path
    }
    for path in set().union(*saved.values()) - by_path.keys():
        raise UserError(f"{path} is missing: {path.with_name(_STATE)} names it; save the data set again")
    return [
        file
        for path, file in by_path.items()
        if path.name != _SPLITS and (path.parent not in saved or path in saved[path.parent])
    ]


def _names_in(file: File, key: str) -> list[str]:
    """Those that a record of ``datasets`` has under ``key``: of splits, or of the files beside it."""
    try:
        with _open(file) as content:
            listed = json.load(content).get(key, ())
        names = [each["filename"] if isinstance(each, dict) else each for each in listed]
        require(all(PurePath(name).name == name for name in names), f"{key} is {shown(listed)}")
        return names
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({first_line(error)}): save the data set again") from error


def _pure(file: File) -> PurePath:
    return file.path if isinstance(file, StoredObject) else file


def _open(file: File) -> BufferedReader:
    return file.open() if isinstance(file, StoredObject) else file.open("rb")


def read_stream(stream: BinaryIO) -> Source:
    """JSON lines of a stream, from a temporary file that lives as long as the source."""
    try:
        copy = tempfile.NamedTemporaryFile(prefix="specgen-", suffix=".jsonl")  # noqa: SIM115  # lives with the reader
        shutil.copyfileobj(stream, copy)
        copy.flush()
    except OSError as error:
        raise UserError(
            f"standard input cannot be saved in {tempfile.gettempdir()} ({first_line(error)}): "
            "write it to a file, and name that"
        ) from error
    path = Path(copy.name)
    return Source(read=partial(_read_file, path), files=(path,), keeps=copy)


def _read_files(files: Sequence[File]) -> Iterator[Row]:
    """Places are in a file, which is named by its path from where all are."""
    root = Path(os.path.commonpath([_pure(file).parent for file in files]))
    for file in files:
        for part in _read_file(file):
            name = _pure(file).relative_to(root)
            yield part if len(files) == 1 else part._replace(place=f"{name} {part.place}")


def _read_file(path: File) -> Iterator[Row]:
    remedy = "check that it is whole"
    if isinstance(path, StoredObject):
        remedy += " and can be reached, then run the same command again"
    try:
        with _open(path) as file:
            start = file.peek(_LONGEST_START)[:_LONGEST_START]
            _require_rows(start)
            suffix = _pure(path).suffix.lower()
            if start.startswith(_PARQUET) or suffix == ".parquet":
                yield from _read_table(file, _parquet)
                return
            if start.startswith((_ARROW_FILE, _ARROW_STREAM)) or suffix in _OF_ARROW:
                yield from _read_table(file, _arrow)
                return
            is_gzip = start.startswith(_GZIP)
            yield from _read_open(gzip.GzipFile(fileobj=file) if is_gzip else file, _pure(path).name)
    except OtherFormatError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, EOFError, UserError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}): {remedy}") from error


def _require_rows(start: bytes) -> None:
    """``OtherFormatError`` for the first bytes of a file that cannot be one of rows."""
    if (other := stand_in(start)) is not None:
        raise OtherFormatError(other)
    if start.startswith(_UTF_16):
        raise OtherFormatError("not UTF-8 but UTF-16: save the file as UTF-8")
    for mark, name in _PACKED.items():
        if start.startswith(mark):
            raise OtherFormatError(
                f"compressed as {name}, which is not read: unpack it, or compress it with gzip"
            )


def _read_open(file: JsonSource, name: str) -> Iterator[Row]:
    kind = PurePath(name.lower().removesuffix(".gz")).suffix
    if kind == ".txt" or kind in _SEPARATORS:
        # an invalid byte becomes a lone surrogate, which invalidates only the row it is in
        text = TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        yield from _read_text(text) if kind == ".txt" else _read_csv(text, _SEPARATORS[kind])
    else:
        yield from read_rows(file, lines=kind == ".jsonl")


_Batches = tuple[Any, Iterator[Any]]  # Arrow schema, and record batches


def _parquet(file: BufferedReader) -> _Batches:
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(file)
    return table.schema_arrow, table.iter_batches(batch_size=_BATCH)


def _arrow(file: BufferedReader) -> _Batches:
    """Of both formats of Arrow: files, which Feather is another name of, and streams, which ``datasets`` saves."""
    from pyarrow import ipc

    if file.peek(len(_ARROW_FILE)).startswith(_ARROW_FILE):
        table = ipc.open_file(file)
        batches = map(table.get_batch, range(table.num_record_batches))
    else:
        table = ipc.open_stream(file)
        batches = iter(table)
    parts = (batch.slice(at, _BATCH) for batch in batches for at in range(0, batch.num_rows, _BATCH))
    return table.schema, parts


def _read_table(file: BufferedReader, opened: Callable[[BufferedReader], _Batches]) -> Iterator[Row]:
    try:
        schema, batches = opened(file)
        require(len({*schema.names}) == len(schema.names), _SAME_NAME)
        gappy = [each.name for each in schema if str(each.type) == "double" and each.name in _JSON_COLUMNS]
        values = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, value in enumerate(values, start=1):
            for name in gappy:
                if value[name] != value[name]:  # NaN, with which numpy leaves a number out
                    value[name] = None
            yield parsed("row", number, value)
    except Exception as error:  # the library raises whatever its decoders raise
        raise UserError(first_line(error)) from error


def _read_csv(lines: IO[str], separator: str) -> Iterator[Row]:
    """The rows below the header; an empty cell is no value."""
    csv.field_size_limit(_LONGEST_CELL)
    # strict: a quote that is not closed would take the rows behind it into its cell
    table = csv.reader(lines, delimiter=separator, strict=True)
    try:
        names = next(table, [])
        require(len({*names}) == len(names), _SAME_NAME)
        _require_separator(names, separator)
        for number, cells in enumerate(filter(None, table), start=1):
            yield Row("row", number, cells, partial(_of_cells, names))
    except csv.Error as error:
        raise OtherFormatError(
            f"line {table.line_num}: {error}: close every quote, and double those within a quoted cell"
        ) from error


def _require_separator(names: list[str], separator: str) -> None:
    """Refuse a header of one column that another separator would split."""
    others = [mark for mark in _MARKS if mark != separator and len(names) == 1 and mark in names[0]]
    if others:
        raise OtherFormatError(
            f"the header {shown(names[0])} is one column with a {_MARKS[others[0]]} in it: separate columns by "
            f"{_MARKS[separator]}s"
        )


def _of_cells(names: list[str], cells: list[str]) -> dict[str, Any]:
    if len(cells) != len(names):
        raise UserError(f"{len(cells)} cells and {len(names)} columns: quote cells that hold a separator")
    pairs = zip(names, cells, strict=True)
    return {name: _cell(name, cell) if name in _JSON_COLUMNS else cell for name, cell in pairs if cell}


def _cell(name: str, cell: str) -> object:
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        return cell  # for the error to name the column
    return cell if name == "stop" and not isinstance(value, list) else value


def _read_text(lines: IO[str]) -> Iterator[Row]:
    """Every line that is not blank is a prompt."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield parsed("line", number, line.rstrip("\r\n"))
