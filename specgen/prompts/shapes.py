"""Rows that have the fields of an earlier row and other ids and texts: decoded and checked together.

A file of a million rows mostly has one shape. A row of a known one takes 2 us, where parsing it takes 11. What fits
no shape is parsed, so that mistakes are found and worded in one place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, repeat
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Self

import msgspec

from specgen.prompts.fields import LONGEST_ID, SAMPLING_FIELDS
from specgen.prompts.formats import USERS
from specgen.prompts.json_rows import Lines, Row, num_keys, repeats_key
from specgen.prompts.own import CONTENT_FIELDS, IGNORED, is_batch
from specgen.prompts.prompt import Prompt, Rejected
from specgen.text.tokenizer import Message

_MOST_SHAPES = 4  # of a data set: each is tried
_MOST_SETTINGS = 1024  # of a shape
_MOST_LEARNT = 4096  # rows: where nearly all differ, it is not worth its time
_MARK = "\ue000"  # in place of an id, a text or a place
_encode = msgspec.json.Encoder().encode


def content_of(prompt: Prompt | Rejected) -> bytes:
    """All of it, for a digest; three times as fast as ``repr``, which what followed in the data may need."""
    try:
        return _encode(prompt)
    except ValueError:  # a lone surrogate
        return repr(prompt).encode()


class PromptRun(NamedTuple):
    """Valid prompts that follow one another in a data set."""

    turns: Sequence[tuple[str, ...]]  # ``turn_ids`` of each
    content: bytes  # ``content_of`` each
    is_chat: bool
    sampling: Sequence[Mapping[str, Any]]  # their own parameters, each once

    @classmethod
    def of(cls, prompt: Prompt) -> Self:
        """That of one prompt."""
        own = (prompt.sampling,) if prompt.sampling else ()
        return cls((prompt.turn_ids,), content_of(prompt), bool(prompt.messages), own)


class _Setting(NamedTuple):
    """What a prompt is but for its id, its texts and its place."""

    content: bytes  # ``content_of`` it, with conversion specifiers for those
    sampling: Mapping[str, Any]
    num_keys: int  # of the row, with those of objects within it
    num_quotes: int  # that are not escaped


_Match = tuple["Shape", Any, _Setting]  # of a line, with the object that it is decoded to


class Alike(NamedTuple):
    """Rows of one shape that follow one another, whose ids and texts are not checked."""

    lines: Lines
    matches: Sequence[_Match]

    def split(self, at: int) -> tuple[Self, Self]:
        """The first ``at`` rows, and the others."""
        (place, number, lines), matches = self
        rest = Lines(place, number + at, lines[at:]), matches[at:]
        return type(self)(Lines(place, number, lines[:at]), matches[:at]), type(self)(*rest)

    def prompts(self, claim: Callable[[Sequence[str]], bool]) -> PromptRun | None:
        """None unless all ids and texts are valid, no id is there twice, and ``claim`` finds all free."""
        (shape, *_), found, settings = zip(*self.matches, strict=True)
        ids, texts = shape.columns(found)
        if any("" in each or any(map(str.isspace, each)) for each in (ids, *texts)):
            return None
        if not "".join(ids).isprintable() or max(map(len, ids)) > LONGEST_ID:
            return None
        if len(set(ids)) < len(ids) or not claim(ids):
            return None
        place, number = _encode(self.lines.place)[1:-1], self.lines.first
        encoded = zip(*(map(_encode, each) for each in (ids, *texts)), repeat(place), count(number))
        return PromptRun(
            list(zip(ids, strict=True)),
            b"".join([setting.content % each for setting, each in zip(settings, encoded, strict=False)]),
            shape.is_chat,
            [each.sampling for each in {id(each): each for each in settings}.values() if each.sampling],
        )


class Shapes:
    """Those of a data set, learnt from the rows that were the first to have them, up to ``most``."""

    def __init__(self, is_noted: Callable[[Any], bool], most: int = _MOST_SHAPES) -> None:
        self._is_noted = is_noted  # rows that are to be counted one by one
        self._most = most
        self._left = _MOST_LEARNT if most else 0
        self._shapes: list[Shape] = []

    def parts(self, parts: Iterable[Row | Lines]) -> Iterator[Row | Alike]:
        """``parts`` with lines of known shapes and settings in ``Alike``, and others in rows."""
        for part in parts:
            if isinstance(part, Row):
                yield part
            elif self._most == 0:
                yield from part.rows()
            else:
                yield from self._matched(part)

    def _matched(self, lines: Lines) -> Iterator[Row | Alike]:
        begin, matches = 0, list[_Match]()  # of the lines from there
        for index, text in enumerate(lines.texts):
            match = self._match(text)
            if matches and (match is None or match[0] is not matches[0][0]):
                yield Alike(lines.part(begin, index), matches)
                matches = []
            if match is None:
                if (row := lines.row(index)) is not None:
                    yield row
                continue
            if not matches:
                begin = index
            matches.append(match)
        if matches:
            yield Alike(lines.part(begin, len(lines.texts)), matches)

    def _match(self, line: bytes) -> _Match | None:
        for shape in self._shapes:
            if (found := shape.decoded(line)) is not None:
                setting = shape.setting(found, line)
                return None if setting is None else (shape, found, setting)
        return None

    def learn(self, row: Row, prompt: Prompt) -> None:
        """Match lines like ``row``, which was parsed as ``prompt``, from now on."""
        if self._left == 0 or type(row.given) is not bytes:
            return
        self._left -= 1
        value = row.value()
        for shape in self._shapes:
            if (found := shape.decoded(row.given)) is not None:
                shape.learn(found, value, prompt)
                return
        if len(self._shapes) < self._most and not self._is_noted(value):
            with suppress(_UnlikeError):
                shape = Shape(value)
                if (found := shape.decoded(row.given)) is not None and shape.learn(found, value, prompt):
                    self._shapes.append(shape)


class _UnlikeError(Exception):
    """The row has a field that no shape has."""


class Shape:
    """The fields of a row that has an id and texts; ``_UnlikeError`` where it has others than a shape can have.

    Its settings are what else decides what is asked, kept as JSON; other fields may differ, but not in type.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.is_chat = False
        self._settings: dict[bytes, _Setting] = {}
        self._paths: dict[str, list[str]] = {"id": [], "text": [], "setting": []}
        kind = _batch_field if is_batch(row) else _own_field
        self._decode = msgspec.json.Decoder(self._struct(row, kind, "")).decode
        ids, texts, settings = self._paths.values()
        if len(ids) != 1 or not texts:
            raise _UnlikeError
        self._id, self._texts = attrgetter(*ids), [attrgetter(text) for text in texts]
        self._key = _key_of(settings)

    def _struct(self, value: object, kind_of: "_KindOf", path: str) -> Any:  # noqa: ANN401  # a type made here
        """A type for objects with the fields of ``value``, or for lists of its length."""
        if not isinstance(value, dict | list):
            raise _UnlikeError
        given = value if isinstance(value, dict) else dict(enumerate(value))
        names = [f"f{number}" for number in range(len(given))]
        types = [
            self._type(kind_of(key, each), each, path + name)
            for name, (key, each) in zip(names, given.items(), strict=True)
        ]
        try:
            return msgspec.defstruct(
                "Fields",
                list(zip(names, types, strict=True)),
                rename=dict(zip(names, map(str, given), strict=True)),
                array_like=isinstance(value, list),
                forbid_unknown_fields=True,
                gc=False,
            )
        except ValueError as error:  # a name that would be escaped in JSON
            raise _UnlikeError from error

    def _type(self, kind: "_Kind", value: object, path: str) -> Any:  # noqa: ANN401
        if callable(kind):
            return self._struct(value, kind, f"{path}.")
        if kind in self._paths:
            self._paths[kind].append(path)
        if kind == "setting":
            return msgspec.Raw
        if type(value) not in _TYPES[kind]:
            raise _UnlikeError
        return Literal[value] if kind == "same" else type(value)

    def decoded(self, line: bytes) -> Any | None:  # noqa: ANN401
        """The row in ``line``, if it is of this shape, in which a key may be there twice."""
        try:
            return self._decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None

    def setting(self, found: Any, line: bytes) -> _Setting | None:  # noqa: ANN401
        """That of the row in ``line``, if it is known, and no key is there twice."""
        setting = self._settings.get(self._key(found))
        if setting is None or line.count(b'"') == setting.num_quotes:  # no more than there must be
            return setting
        return None if repeats_key(line, setting.num_keys) else setting

    def learn(self, found: Any, row: Mapping[str, Any], prompt: Prompt) -> bool:  # noqa: ANN401
        """Learn the setting of ``row``, parsed as ``prompt``; false where that has another id or other texts."""
        said = [message.content for message in prompt.messages] if prompt.messages else [prompt.text]
        texts = [get(found) for get in self._texts]
        if str(self._id(found)) != prompt.id or texts != said or len(self._settings) == _MOST_SETTINGS:
            return False
        marked = replace(
            prompt,
            id=_MARK,
            text=None if prompt.text is None else _MARK,
            messages=tuple(Message(role=each.role, content=_MARK) for each in prompt.messages),
            where=_MARK,
        )
        *parts, end = content_of(marked).replace(b"%", b"%%").split(_encode(_MARK))
        if len(parts) != len(texts) + 2:  # the mark is in a setting
            return False
        content = b"%b".join(parts) + b'"%b %d"' + end
        self._settings[self._key(found)] = _Setting(content, prompt.sampling, num_keys(row), _num_quotes(row))
        self.is_chat = bool(prompt.messages)
        return True

    def columns(self, found: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
        """The ids of rows of this shape, and a list of theirs for each text."""
        return list(map(str, map(self._id, found))), [list(map(get, found)) for get in self._texts]


def _key_of(settings: Sequence[str]) -> Callable[[Any], bytes]:
    """What is different for a row with other JSON in one of ``settings``."""
    if not settings:
        return lambda found: b""
    get = attrgetter(settings[0], *settings)  # of one name it would not give a tuple
    return lambda found: b",".join(get(found))


# --- the kinds of fields ------------------------------------------------------------------------

_Kind = str | Callable[[Any, object], Any]  # a function has those of the fields within
_KindOf = Callable[[Any, object], _Kind]
_TYPES = {
    "id": (str, int),
    "text": (str,),
    "same": (str,),
    "any": (str, int, float, bool, type(None)),
}


def _own_field(name: str, value: object) -> _Kind:
    if name in USERS.id_keys:
        return "id"
    if name in CONTENT_FIELDS:
        return _content(value)
    return "setting" if name in SAMPLING_FIELDS or name == "category" else _other(name, value)


def _batch_field(name: str, value: object) -> _Kind:
    if name == "custom_id":
        return "id"
    return _body_field if name == "body" else "same"


def _body_field(name: str, value: object) -> _Kind:
    if name in CONTENT_FIELDS:
        return _content(value)
    return _other(name, value) if name in IGNORED else "setting"


def _content(value: object) -> _Kind:
    return "text" if isinstance(value, str) else lambda index, message: _message_field


def _message_field(name: str, value: object) -> _Kind:
    return "text" if name == "content" else "same"


def _other(name: str, value: object) -> _Kind:
    return _other if isinstance(value, dict) else "any"


def _num_quotes(value: object) -> int:
    """The quotes of ``value`` as JSON without those that are escaped."""
    if isinstance(value, dict):
        return 2 * len(value) + sum(map(_num_quotes, value.values()))
    return sum(map(_num_quotes, value)) if isinstance(value, list) else 2 * isinstance(value, str)
