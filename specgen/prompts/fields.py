"""Checks of the fields of a row, its sampling parameters among them; a ``UserError`` names a wrong one briefly.

A million rows pass here: not ``require``, which would format its message for each of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from math import inf
from operator import itemgetter
from typing import Any, get_type_hints

from specgen.config import SamplingParams, StructuredOutputs, UserError, check_own, require, shown
from specgen.text.tokenizer import Message

# OpenAI's and vLLM's other names of ``structured_outputs``
_OF_STRUCTURE = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
SAMPLING_FIELDS = (*(field.name for field in fields(SamplingParams)), *_OF_STRUCTURE)
_NAMES = frozenset(SAMPLING_FIELDS)
_name_of = itemgetter(0)
LONGEST_ID = 512  # characters
_LIMIT = 2**63  # of the magnitude of an integer
_EXACT = 2**53  # up to which floats have all integers
# Of a row: that of the prompt.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_CONTENT_OF = {role: f"the content of a message from {role}" for role in _ROLES}


def character_string(value: object, what: str) -> str:
    """``value`` if it is a string that can be encoded; ``what`` names it in the ``UserError``."""
    if not isinstance(value, str):
        raise UserError(f"{what} is {shown(value)}, not a string")
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        if "\udc80" <= value[error.start] <= "\udcff":  # what an invalid byte of a file is read as
            raise UserError(f"{what} is not UTF-8: save the file as UTF-8") from error
        raise UserError(f"{what} holds a lone surrogate, which is not a character") from error
    return value


def checked_text(value: object, what: str) -> str:
    """``value`` if it is a ``character_string`` that is not blank."""
    text = character_string(value, what)
    if not text or text.isspace():
        raise UserError(f"{what} is empty")
    return text


def checked_list(value: object, what: str) -> list[Any]:
    """``value`` if it is a list that is not empty."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{what} is not a list with at least one element")
    return value


def number(value: object, what: str) -> float:
    """``value`` if it is a finite number of any size, not a string of digits."""
    if type(value) not in (int, float) or not abs(value) < inf:  # type: ignore[arg-type]  # false for NaN
        raise UserError(f"{what} is {shown(value)}: use a number")
    return value  # type: ignore[return-value]


def unfloated(value: object) -> object:
    """3 for 3.0, as tables hold whole numbers in a column with a gap; other values, also rounded ones, as they are."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _EXACT else value


def whole(value: object, what: str) -> int:
    """``value`` if it is an integer of 64 bits, which may be written as 3.0."""
    value = unfloated(value)
    if type(value) is not int:
        raise UserError(f"{what} is {shown(value)}: use a whole number")
    if not -_LIMIT <= value < _LIMIT:
        raise UserError(f"{what} is {shown(value)}: use a whole number of at most 64 bits")
    return value


def flag(value: object, what: str) -> bool:
    """``value`` if it is true or false."""
    if not isinstance(value, bool):
        raise UserError(f"{what} is {shown(value)}: use true or false")
    return value


def token_ids(value: object, what: str) -> tuple[int, ...]:
    """``value`` if it is a list of token ids; the vocabulary is checked later."""
    ids = tuple(checked_list(value, what))
    if not all(type(item) is int and 0 <= item < _LIMIT for item in ids):
        raise UserError(f"{what} must be integers of 0 or more")
    return ids


def category(row: Mapping[str, Any]) -> str | None:
    """The category of ``row``, which may have none; a whole number is as good a name."""
    value = unfloated(row.get("category"))
    if type(value) is int:
        return str(value)
    return None if value is None else checked_text(value, "category")


def label(row: Mapping[str, Any], name: str = "category") -> str | None:
    """As ``category``, of a row of a data set, where such a field may hold anything."""
    value = row.get(name)
    return value if isinstance(value, str) and value.strip() and value.isprintable() else None


def chat(value: object) -> tuple[Message, ...]:
    """The messages of a chat that ends with the user.

    ``content`` is a string or a list of text parts. The role ``developer`` is the newer name of ``system``.
    """
    messages = tuple(_message(item) for item in checked_list(value, "messages"))
    if messages[-1].role != "user":
        raise UserError(f"the last message is from {messages[-1].role}: end with the user")
    return messages


def _message(value: object) -> Message:
    if not isinstance(value, dict):
        raise UserError("a message is not an object with role and content")
    role, content = value.get("role"), value.get("content")
    known = _ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        raise UserError(f"unknown role {shown(role)}: use system, user, assistant")
    for name in ("tool_calls", "function_call"):
        if value.get(name):
            raise UserError(f"a message has {name}, which is not supported: give only its text")
    parts = tuple(map(_part, content)) if isinstance(content, list) else None
    text = checked_text(content if parts is None else "".join(parts), _CONTENT_OF[str(role)])
    return Message(role=known, content=text if parts is None else parts)


def _part(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind != "text":
        raise UserError(f"a part of a message is of type {shown(kind)}: use text")
    return character_string(value.get("text"), "the text of a part")


def read_sampling(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that ``row`` sets; the others are the run's.

    Null is the same as no field. ``stop`` is a string or a list of strings, ``logit_bias`` an object from token id to
    bias, ``suppress_tokens`` and ``stop_token_ids`` are lists of token ids, ``top_k`` -1 is the same as 0, as in vLLM.
    ``structured_outputs`` has other names too: OpenAI's ``response_format`` and vLLM's ``guided_json``,
    ``guided_regex`` and ``guided_choice``. ``UserError`` for an invalid value.
    """
    if _NAMES.isdisjoint(row):
        return {}
    given = tuple(
        [(name, value, type(value)) for name, value in row.items() if name in _NAMES and value is not None]
    )
    if len(given) > 1:  # one object for rows that say the same in another order
        given = tuple(sorted(given, key=_name_of))
    try:
        return _remembered(given)
    except TypeError:  # a list or an object
        return _checked(given)


def _checked(given: tuple[tuple[str, object, type], ...]) -> dict[str, Any]:
    sampling = {name: _READERS[name](value, name) for name, value, _ in given}
    named = [name for name in sampling if name in _OF_STRUCTURE or name == "structured_outputs"]
    if named:
        require(len(named) == 1, f"{' and '.join(named)} say what the answer has to fit: give one of them")
        sampling["structured_outputs"] = sampling.pop(named[0])
    check_own(sampling)
    return sampling


# rows say the same again; with types, as 1 and True are equal
_remembered = lru_cache(maxsize=1024)(_checked)


def _top_k(value: object, what: str) -> int:
    asked = whole(value, what)
    return 0 if asked == -1 else asked


def _each(read: Callable[[object, str], Any], value: object, what: str) -> tuple[Any, ...]:
    """The elements of a list, of which there may be none."""
    return tuple(read(item, what) for item in ([] if value == [] else checked_list(value, what)))


def _logit_bias(value: object, what: str) -> tuple[tuple[int, float], ...]:
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
    ):
        raise UserError(f"{what} is {shown(value)}: use an object from token id to bias")
    return tuple(
        sorted((_token_id(key, what), number(bias, what)) for key, bias in pairs if bias is not None)
    )


def _token_id(key: object, what: str) -> int:
    if type(key) is int and 0 <= key < _LIMIT:  # of Python
        return key
    valid = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19
    require(valid and str(int(str(key))) == key, f"{what} has the key {shown(key)}: use a token id")
    return int(str(key))


def _response_format(value: object, what: str) -> StructuredOutputs | None:
    """OpenAI's: ``{"type": "json_schema", "json_schema": {"schema": ...}}``, ``json_object`` or ``text``."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind == "json_schema":
        described = value.get("json_schema")
        if not isinstance(described, dict) or "schema" not in described:
            raise UserError(f"{what} is {shown(value)}: use an object json_schema with a schema")
        return StructuredOutputs(json=described["schema"])
    if kind not in ("text", "json_object"):
        raise UserError(f"{what} is {shown(value)}: its type is text, json_object or json_schema")
    return StructuredOutputs(json_object=True) if kind == "json_object" else None


def _grammar(value: object, what: str) -> StructuredOutputs:
    raise UserError(f"{what} is not supported: use guided_json, guided_regex or guided_choice")


# By the type of a field of ``SamplingParams``; an empty list means none of those of the run
_OF_TYPE: dict[object, Callable[[object, str], Any]] = {
    int: whole,
    int | None: whole,
    float: number,
    bool: flag,
    tuple[int, ...]: lambda value, what: () if value == [] else token_ids(value, what),
    tuple[int, ...] | None: token_ids,
    tuple[str, ...]: lambda value, what: _each(character_string, value, what),
    tuple[tuple[int, ...], ...]: lambda value, what: _each(token_ids, value, what),
}
_READERS = {
    **{name: _OF_TYPE[kind] for name, kind in get_type_hints(SamplingParams).items() if kind in _OF_TYPE},
    "top_k": _top_k,
    "stop": lambda value, what: _each(character_string, [value] if isinstance(value, str) else value, what),
    "logit_bias": _logit_bias,
    "structured_outputs": StructuredOutputs.of,
    "response_format": _response_format,
    "guided_json": lambda value, what: StructuredOutputs(json=value),
    "guided_regex": lambda value, what: StructuredOutputs(regex=value),
    "guided_choice": lambda value, what: StructuredOutputs(choice=value),
    "guided_grammar": _grammar,
}
