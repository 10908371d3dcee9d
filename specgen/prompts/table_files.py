"""Rows of files that are not JSON: Parquet, CSV with a header, and plain text."""

import csv
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from specgen.config import UserError, first_line, require, shown
from specgen.prompts.json_rows import OtherFormatError, Row, parsed
from specgen.prompts.row_sampling import SAMPLING_FIELDS

_BATCH = 1024  # rows of a Parquet file per read
_LONGEST = 64 * 2**20  # characters of a cell
_NUMBERS = frozenset(SAMPLING_FIELDS) - {"stop"}  # columns whose cells are JSON values, in a CSV file
_MARKS = {",": "comma", ";": "semicolon", "\t": "tab"}
SEPARATORS = {".csv": ",", ".tsv": "\t"}


def read_parquet(path: Path) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=_BATCH)
            values = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, value in enumerate(values, start=1):
                yield parsed(f"row {number}", value)
    except Exception as error:  # the library raises whatever its decoders raise
        raise UserError(first_line(error)) from error


def read_csv(lines: IO[str], separator: str) -> Iterator[Row]:
    """The rows below the header; an empty cell is no value."""
    csv.field_size_limit(_LONGEST)
    table = csv.reader(lines, delimiter=separator)
    try:
        names = next(table, [])
        require(len(set(names)) == len(names), "two columns have the same name: rename one")
        _require_separator(names, separator)
        for number, cells in enumerate(filter(None, table), start=1):
            yield Row(f"row {number}", lambda cells=cells: _of_cells(names, cells))  # type: ignore[misc]
    except csv.Error as error:
        raise UserError(f"line {table.line_num}: {error}") from error


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
    return {name: _value(cell) if name in _NUMBERS else cell for name, cell in pairs if cell}


def _value(cell: str) -> object:
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell  # for the error to name the column


def read_text(lines: IO[str]) -> Iterator[Row]:
    """Every line that is not blank is a prompt."""
    for number, line in enumerate(lines, start=1):
        if text := line.strip():
            yield parsed(f"line {number}", text)
