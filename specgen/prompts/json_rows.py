"""Rows of JSON text, streamed in bounded memory; an invalid or oversized row does not stop the rest."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from gzip import GzipFile
from io import BufferedReader, TextIOWrapper
from typing import Any, NamedTuple

import msgspec

from specgen.config import UserError, first_line, require, shown

_LONGEST = 64 * 2**20  # bytes of a line, characters of an array element
_CHUNK = 2**20
_BOM = b"\xef\xbb\xbf"
_BETWEEN_ROWS = re.compile(r"[ \t\r\n,]*")
_KEY_END = re.compile(rb'"[ \t\r\n]*:')
Source = BufferedReader | GzipFile
_DECODER = json.JSONDecoder()
_decode = msgspec.json.Decoder().decode  # five times as fast as ``json``


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
    return _value_or_why(text) if repeats_key(text, num_keys(value)) else value


def repeats_key(text: bytes, keys: int) -> bool:
    """Whether an object in ``text`` may have a key twice, which leaves more of these marks than ``keys``.

    So does such a mark in a string: only then is it worth a look.
    """
    return len(_KEY_END.findall(text)) > keys


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
    number = 0
    try:
        for number, (value, text) in enumerate(_elements(file), start=1):
            yield Row("row", number, (value, text), _checked)
    except UserError as error:
        yield _broken("row", number + 1, f"not valid JSON ({error}); no row after it is read")


def _checked(element: tuple[object, str]) -> object:
    """The value of an element of the array and its text, in which no key may be there twice."""
    value, text = element
    return _value_or_why(text) if repeats_key(text.encode(errors="replace"), num_keys(value)) else value


def _elements(file: Source) -> Iterator[tuple[object, str]]:
    """The elements of a JSON array and their texts, from a window of the file that grows to hold the next one.

    ``UserError`` where invalid JSON begins.
    """
    # An invalid byte becomes a lone surrogate, which invalidates only the row it is in.
    text = TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")
    window, start = text.read(_CHUNK).lstrip().removeprefix("["), 0
    while True:
        start = _BETWEEN_ROWS.match(window, start).end()  # type: ignore[union-attr]
        if window.startswith("]", start):
            require(not (window[start + 1 :] + text.read(_CHUNK)).strip(), "text behind the array")
            return
        value, end, problem = _decoded(window, start)
        if end >= len(window):  # an element that ends with the window might continue after it
            require(len(window) - start <= _LONGEST, f"longer than {_LONGEST:,} characters")
            if more := text.read(max(_CHUNK, len(window) - start)):
                window, start = window[start:] + more, 0
                continue
        if problem is not None:
            raise UserError(problem)
        yield value, window[start:end]
        start = end


def _decoded(window: str, start: int) -> tuple[Any, int, str | None]:
    """The element at ``start``, its end (that of the window if it is cut off), and the error, if any."""
    try:
        value, end = _DECODER.raw_decode(window, start)
        return value, end, None
    except json.JSONDecodeError as error:
        cut_off = error.msg.startswith("Unterminated string") or error.pos > len(window) - 16
        return None, len(window) if cut_off else error.pos, error.msg
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        return None, start, first_line(error)


def _first_character(file: Source) -> bytes:
    """The first byte that is not white space; the file stays at its start."""
    head = file.read(1024).removeprefix(_BOM).lstrip()
    file.seek(0)
    return head[:1]
