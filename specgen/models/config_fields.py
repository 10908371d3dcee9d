"""The fields of a ``config.json``, each validated by name; no torch."""

from collections.abc import Mapping
from typing import Any

from specgen.config import require, shown

LARGEST_COUNT = 1 << 24  # of layers, tokens, positions, ...: far beyond any model
_LARGEST_NUMBER = 1e18

Raw = Mapping[str, Any]


def section(config: Raw, name: str) -> Raw:
    """An object inside ``config``; empty if absent."""
    value: Raw = config.get(name) or {}
    require(isinstance(value, Mapping), f"{name} is {shown(value)}: config.json is wrong")
    return value


_OF_THE_WHOLE = (
    *("architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id"),
    *("quantization_config", "compression_config"),
)


def text_part(config: Raw) -> Raw:
    """Of a vision-language model, what its ``config.json`` says of text, in one dictionary; of others all of it.

    Where ``text_config`` and the top level say something, the former counts, as in ``transformers``, but for what is
    of the whole model.
    """
    if not config.get("text_config"):
        return config
    whole = {name: config[name] for name in _OF_THE_WHOLE if config.get(name) is not None}
    top = {name: value for name, value in config.items() if name != "text_config" and value is not None}
    return {**top, **section(config, "text_config"), **whole}


def items(config: Raw, name: str) -> list[Any]:
    """A list; empty if absent."""
    value: list[Any] = config.get(name) or []
    require(isinstance(value, list), f"{name} is {shown(value)}: it must be a list")
    return value


def architectures(config: Raw) -> tuple[str, ...]:
    """The classes that the config names for the model; none if it has no such list."""
    return tuple(map(str, items(config, "architectures")))


def flag(config: Raw, name: str, default: bool = False) -> bool:
    value = _given(config, name, default)
    require(isinstance(value, bool), f"{name} is {shown(value)}: it must be true or false")
    return bool(value)


def count(config: Raw, name: str, default: int | None = None) -> int:
    """A whole number above 0."""
    value: Any = _given(config, name, default)
    fits = type(value) is int and 0 < value <= LARGEST_COUNT
    require(fits, f"{name} is {shown(value)}: it must be a whole number above 0, at most {LARGEST_COUNT}")
    return int(value)


def number(config: Raw, name: str, default: float | None = None) -> float:
    """A finite number above 0."""
    value: Any = _given(config, name, default)
    fits = isinstance(value, int | float) and value is not True and 0 < value < _LARGEST_NUMBER  # not NaN
    require(fits, f"{name} is {shown(value)}: it must be a number above 0, below {_LARGEST_NUMBER:g}")
    return float(value)


def by_layer(config: Raw, name: str, meanings: Mapping[str, bool]) -> tuple[bool, ...]:
    """What the words of a list say of each layer; empty if absent."""
    words, num_layers = items(config, name), count(config, "num_hidden_layers")
    for word in words:
        require(
            isinstance(word, str) and word in meanings,
            f"{name} has {shown(word)}: only {' and '.join(meanings)} are supported",
        )
    require(
        len(words) in (0, num_layers),
        f"{name} names {len(words)} layers, num_hidden_layers {num_layers}: config.json is wrong",
    )
    return tuple(meanings[word] for word in words)


def _given(config: Raw, name: str, default: object) -> object:
    value = default if config.get(name) is None else config[name]
    reason = f"config.json has no {name}: it is incomplete, or of a family that is not supported"
    require(value is not None, reason)
    return value
