"""The sampling parameters of a row."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from operator import itemgetter
from typing import Any

from specgen.config import SamplingParams, UserError, require, shown
from specgen.prompts.fields import character_string, checked_list, flag, number, token_ids, whole

SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
_NAMES = frozenset(SAMPLING_FIELDS)
_name_of = itemgetter(0)


def read_sampling(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that ``row`` sets; the others are the run's.

    Null is the same as no field. ``stop`` is a string or a list of strings, ``logit_bias`` an object from token id to
    bias, ``suppress_tokens`` a list of token ids, ``top_k`` -1 the same as 0, as in vLLM. ``UserError`` for an invalid
    value.
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
    SamplingParams(**sampling)  # checks itself
    return sampling


_remembered = lru_cache(maxsize=1024)(
    _checked
)  # rows say the same again; with types, as 1 and True are equal


def _top_k(value: object, what: str) -> int:
    asked = whole(value, what)
    return 0 if asked == -1 else asked


def _stop(value: object, what: str) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else checked_list(value, what)
    return tuple(character_string(item, what) for item in strings)


def _logit_bias(value: object, what: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise UserError(f"{what} is {shown(value)}: use an object from token id to bias")
    given = {key: bias for key, bias in value.items() if bias is not None}
    return tuple(sorted((_token_id(key, what), number(bias, what)) for key, bias in given.items()))


def _token_id(key: object, what: str) -> int:
    valid = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19
    require(valid and str(int(str(key))) == key, f"{what} has the key {shown(key)}: use a token id")
    return int(str(key))


def _suppress_tokens(value: object, what: str) -> tuple[int, ...]:
    return () if value == [] else token_ids(value, what)  # none of those that the run suppresses


_READERS: dict[str, Callable[[object, str], Any]] = {
    "max_tokens": whole,
    "temperature": number,
    "top_p": number,
    "top_k": _top_k,
    "min_p": number,
    "repetition_penalty": number,
    "presence_penalty": number,
    "frequency_penalty": number,
    "seed": whole,
    "stop": _stop,
    "ignore_eos": flag,
    "logit_bias": _logit_bias,
    "suppress_tokens": _suppress_tokens,
    "logprobs": whole,
}
