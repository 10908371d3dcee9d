"""The fields of a configuration: as options of commands, and held to their types where a program sets them."""

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from functools import cache, wraps
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from specgen.config.errors import UserError, require, shown

# The groups of --help, in their order
Group = Literal["Study", "Table", "Models", "Prompts", "Speculation", "Sampling", "Running", "Results"]
Reader = Callable[[object, str], object]
_Config = TypeVar("_Config")
# What vLLM calls settings of ours: taken as options, in files of options and by ``EngineConfig``
VLLM_NAMES = {
    "num_speculative_tokens": "num_spec_tokens",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_prefill_tokens",
    "tensor_parallel_size": "tensor_parallel",
}


def option(
    default: object,
    group: Group | None,
    text: str,
    *,
    name: str | None = None,
    shown: str | None = None,
    metavar: str | None = None,
    least: int | None = None,
    off: str | None = None,
    parse: Callable[[str], object] | None = None,
) -> Any:  # noqa: ANN401
    """A field or parameter that is an option of commands; ``text`` is its help, in the section ``group``.

    ``name`` is the option's where it differs from the field's, ``shown`` the default in ``--help``, and ``parse``
    converts the text of the command line. ``off`` is the switch beside that of a truth value.
    """
    help = {"group": group, "text": text, "name": name, "shown": shown, "metavar": metavar, "least": least}
    return field(default=default, metadata=help | {"off": off, "parse": parse})


def with_vllm_names(config: type[_Config]) -> type[_Config]:
    """``config``, a dataclass, also made with the names of ``VLLM_NAMES``, which are read-only properties of it."""
    init: Any = config.__init__

    @wraps(init)
    def renamed(self: object, **given: object) -> None:
        for theirs in VLLM_NAMES.keys() & given.keys():
            ours = VLLM_NAMES[theirs]
            require(ours not in given, f"{theirs} and {ours} are the same setting: give one of them")
            given[ours] = given.pop(theirs)
        init(self, **given)

    config.__init__ = renamed  # type: ignore[method-assign]
    for theirs, ours in VLLM_NAMES.items():
        setattr(config, theirs, property(operator.attrgetter(ours)))
    return config


def check_types(config: Any) -> None:  # noqa: ANN401
    """Hold the fields of ``config``, a frozen dataclass, to their types; ``UserError`` names a wrong value.

    numpy's numbers become Python's, and one string becomes a tuple of it where there may be several. A truth value is
    no number, and neither are NaN and infinity. Fields of other types than those of ``_READERS`` are left alone.
    """
    kind: Any = type(config)
    for name, default, read in _readers(kind):
        value = getattr(config, name)
        if value is not default and (checked := read(value, name)) is not value:
            object.__setattr__(config, name, checked)


def whole(value: object, what: str) -> int:
    """``value`` if it is an integer, also one of numpy's; the field checks its range."""
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise UserError(f"{what} is {shown(value)}: use a whole number") from None
    return value


def whole_numbers(value: object, what: str) -> tuple[int, ...]:
    """The integers of a list, a tuple or an array."""
    if type(value) is tuple and set(map(type, value)) <= {int}:
        return value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise UserError(f"{what} is {shown(value)}: use a list of whole numbers")
    return tuple(whole(each, what) for each in value)


def counts(name: str, text: str, least: int = 1) -> tuple[int, ...]:
    """The numbers of option ``name``, such as ``1,8,32``; ``UserError`` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    require(
        all(part.isdecimal() and int(part) >= least for part in parts),
        f"{name} is {text!r}: write comma-separated numbers of at least {least}, such as 1,8,32",
    )
    return tuple(int(part) for part in parts)


def number(value: object, what: str) -> float:
    """``value`` if it is a finite number, also one of numpy's; an integer stays one."""
    if type(value) is not int and type(value) is not float:
        if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
            raise UserError(f"{what} is {shown(value)}: use a number")
        try:
            value = float(value)
        except (TypeError, ValueError):  # of an array or a tensor with several
            raise UserError(f"{what} is {shown(value)}: use a number") from None
    if not abs(value) <= sys.float_info.max:  # false for NaN
        raise UserError(f"{what} is {shown(value)}: use a finite number")
    return value


def flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{what} is {shown(value)}: use True or False")
    return value


def text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{what} is {shown(value)}: use a string")
    return value


def strings(value: object, what: str) -> tuple[str, ...]:
    """The strings of a list or a tuple; one string is a tuple of it."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise UserError(f"{what} is {shown(value)}: use a string or a list of strings")
    if type(value) is tuple and all(type(each) is str for each in value):
        return value
    return tuple(text(each, what) for each in value)


_READERS: dict[object, Reader] = {
    bool: flag,
    int: whole,
    float: number,
    str: text,
    tuple[str, ...]: strings,
    str | Sequence[str]: strings,
    tuple[int, ...]: whole_numbers,
}


@cache
def _readers(config: Any) -> tuple[tuple[str, object, Reader], ...]:  # noqa: ANN401
    """Name, default and reader of each field that has a reader."""
    hints = get_type_hints(config)
    found = ((field.name, field.default, _reader(hints[field.name])) for field in fields(config))
    return tuple((name, default, read) for name, default, read in found if read is not None)


def _reader(kind: object) -> Reader | None:
    required = tuple(each for each in get_args(kind) if each is not NoneType)
    if len(required) == len(get_args(kind)):
        return _READERS.get(kind)
    read = _READERS.get(required[0]) if len(required) == 1 else None
    return None if read is None else lambda value, what: None if value is None else read(value, what)
