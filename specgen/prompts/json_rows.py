"""Rows of JSON text: lines are streamed, an array is read whole; an invalid row does not stop the rest."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from gzip import GzipFile
from io import BufferedReader
from typing import Any, NamedTuple

import msgspec

from specgen.config import UserError, first_line, require, shown

_LONGEST = 64 * 2**20  # bytes of a line
_CHUNK = 2**20
_BOM = b"\xef\xbb\xbf"
_KEY_END = re.compile(rb'"[ \t\r\n]*:')
Source = BufferedReader | GzipFile
_decode = msgspec.json.Decoder().decode  # five times as fast as ``json``
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class OtherFormatError(UserError):
    """The file is of another encoding or format; the text has the remedy."""


class Row(NamedTuple):
    """Row ``number`` of ``place``, parsed only when ``value`` is called."""

    place: str  # such as ``line``
    number: int  # from 1
    given: Any  # what ``parse`` takes
    parse: Callable[[Any], Any]  # ``UserError`` for invalid JSON

    @property
    def where(self) -> str:
        """As in ``line 12``."""
        return f"{self.place} {self.number}"

    def value(self) -> Any:  # noqa: ANN401  # JSON
        return self.parse(self.given)


def parsed(place: str, number: int, value: object) -> Row:
    return Row(place, number, value, lambda value: value)


def _broken(place: str, number: int, reason: str) -> Row:
    return Row(place, number, reason, partial(require, False))


def read_rows(file: Source, *, lines: bool) -> Iterator[Row]:
    """The rows of JSON lines, or of an array if the text starts with ``[`` and may be other than ``lines``."""
    return _read_lines(file) if lines or _first_character(file) != b"[" else _read_array(file)


def _read_lines(file: Source) -> Iterator[Row]:
    for number, line in enumerate(iter(partial(file.readline, _LONGEST + 1), b""), start=1):
        if len(line) > _LONGEST and not line.endswith(b"\n"):
            _skip_line(file, line)
            yield _broken("line", number, f"not valid JSON (longer than {_LONGEST:,} bytes)")
        elif text := line.removeprefix(_BOM).strip():
            yield Row("line", number, text, _value)


def _value(text: bytes) -> object:
    try:
        value = _decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _value_or_why(text)  # takes what it refuses, such as NaN, for the error to name the field
    # more marks than keys: an object may have a key twice, or such a mark is in a string
    return _value_or_why(text) if len(_KEY_END.findall(text)) > num_keys(value) else value


def _value_or_why(text: bytes | str) -> object:
    try:
        return json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_unique)
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(
            f"not UTF-8 ({error.reason} at byte {error.start}): save the file as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        torn = (
            isinstance(text, bytes)
            and isinstance(error, json.JSONDecodeError)
            and error.pos >= len(error.doc)
        )
        remedy = "; the line ends within it: write each row on a line of its own" if torn else ""
        raise UserError(f"not valid JSON ({first_line(error)}){remedy}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object; ``UserError`` where a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise UserError(f"the key {shown(repeated)} appears twice in one object: remove one")
    return found


def num_keys(value: object) -> int:
    """Of all objects in ``value``; fewer where a list begins with an integer. Not recursive: a million rows pass."""
    found, parts = 0, [value]
    for each in parts:  # grows meanwhile
        if type(each) is dict:
            found += len(each)
            parts += each.values()
        elif type(each) is list and each and type(each[0]) is not int:  # token ids are many
            parts += each
    return found


def _skip_line(file: Source, part: bytes) -> None:
    while part and not part.endswith(b"\n"):
        part = file.readline(_CHUNK)


def _read_array(file: Source) -> Iterator[Row]:
    """``OtherFormatError`` where the array as a whole is not valid JSON: no row is read of one that is cut short."""
    text = file.read().removeprefix(_BOM)
    try:
        rows = _elements(text)
    except (msgspec.DecodeError, RecursionError):
        try:  # takes what msgspec refuses, such as NaN; an invalid byte invalidates only the row it is in
            values = _value_or_why(text.decode(errors="surrogateescape"))
        except UserError as error:
            remedy = "mend the array, or write each row on a line of its own"
            raise OtherFormatError(f"{error}; no row is read: {remedy}") from error
        assert isinstance(values, list)
        yield from (parsed("row", number, value) for number, value in enumerate(values, start=1))
        return
    yield from (Row("row", number, bytes(row), _value) for number, row in enumerate(rows, start=1))


def _first_character(file: Source) -> bytes:
    """The first byte that is not white space; the file stays at its start."""
    head = file.read(1024).removeprefix(_BOM).lstrip()
    file.seek(0)
    return head[:1]
