"""Random JSON schemas and regular expressions, for answers that must fit them."""

import json
import random
import re
from collections.abc import Iterable
from datetime import datetime, time
from typing import Any

import numpy as np

from specgen.config import StructuredOutputs
from specgen.text.automaton import ByteAutomaton

FORMATS = ("date", "time", "date-time", "uuid", "uuid4", "duration", "ipv4", "email", "uri")
_NAMES = ("a", "name", 'the "x"', "größe", "b.c", "n-1", "id", "ok?", "日本", "a\\b")
_TEXTS = ("x", "yes", "no", 'a"b', "línea\n2", "", "0", "true", "C:\\d", "é(", "[]")


def schema(rng: random.Random, depth: int = 2) -> Any:
    """Of everything that is understood; deeper ones have lists and objects."""
    kinds = [
        *("string", "integer", "number", "boolean", "null"),
        *("enum", "const", "anyOf", "types", "pattern", "format"),
    ]
    if depth:
        kinds += ["object", "object", "object", "array", "array", "map", "prefix", "oneOf", "set"]
    match rng.choice(kinds):
        case "string":
            return _bounded(rng, {"type": "string"}, "minLength", "maxLength", 12)
        case "integer":
            return {"type": "integer"} | _range(
                rng, ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
            )
        case "number":
            found = _range(rng, ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
            scale = rng.choice((1, 8))
            return {"type": "number"} | {name: value / scale for name, value in found.items()}
        case "enum":
            return {"enum": [_value(rng, depth) for _ in range(rng.randint(1, 4))]}
        case "const":
            return {"const": _value(rng, depth)}
        case "anyOf":
            return {"anyOf": [schema(rng, max(depth - 1, 0)) for _ in range(rng.randint(1, 3))]}
        case "types":
            return {
                "type": rng.sample(["string", "null", "boolean", "integer"], rng.randint(1, 3)),
                "title": "of several",
            }
        case "pattern":
            lengths = {
                "minLength": rng.randint(0, 3),
                "maxLength": rng.randint(3, 6),
            }  # all of them have one of 3
            return {name: each for name, each in lengths.items() if rng.random() < 0.4} | {
                "type": "string",
                "pattern": rng.choice(
                    (
                        *(r"^[A-Z]{2}\d{1,3}$", r"^\w+( \w+)?$", "^(red|green)$"),
                        *("^.{1,4}$", r"^[^,]{2,5}$", r"^\S+\s\S$"),
                    )
                ),
            }
        case "format":
            return {"type": "string", "format": rng.choice(FORMATS)}
        case "object":
            names = rng.sample(_NAMES, rng.randint(1, 4))
            required = [name for name in names if rng.random() < 0.5]
            found: dict[str, Any] = {
                "properties": {name: schema(rng, depth - 1) for name in names},
                "required": required,
            }
            return (
                {"type": "object"} | found | ({"additionalProperties": False} if rng.random() < 0.5 else {})
            )
        case "array":
            return _bounded(
                rng, {"type": "array", "items": schema(rng, depth - 1)}, "minItems", "maxItems", 3
            )
        case "set":
            values = {"enum": rng.sample(_TEXTS, rng.randint(1, 4))}
            return {"type": "array", "uniqueItems": True, "items": values} | (
                {"maxItems": 2} if rng.random() < 0.5 else {"minItems": 1}
            )
        case "prefix":
            return {
                "type": "array",
                "prefixItems": [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))],
            }
        case "map":
            names: Any = rng.choice(({"maxLength": 3}, {"pattern": "^[a-z]+$"}, {"enum": ["a", "b", "c"]}))
            found = {"type": "object", "additionalProperties": schema(rng, depth - 1)}
            if rng.random() < 0.5:
                return found | {"propertyNames": names}
            return (
                found
                | ({"minProperties": 1} if rng.random() < 0.3 else {})
                | ({"maxProperties": 2} if rng.random() < 0.3 else {})
            )
        case "oneOf":
            tags = rng.sample(_TEXTS, 2)
            each = [
                {
                    "type": "object",
                    "properties": {"tag": {"const": tag}, "of": schema(rng, 0)},
                    "required": ["tag"] if rng.random() < 0.5 else [],
                }
                for tag in tags
            ]
            return {"oneOf": rng.choice((each, [{"type": "string"}, {"type": "integer"}]))}
        case kind:
            return {"type": kind}


def _bounded(
    rng: random.Random, given: dict[str, Any], least: str, most: str, largest: int
) -> dict[str, Any]:
    low = rng.randint(0, largest)
    return (
        given
        | ({least: low} if rng.random() < 0.4 else {})
        | ({most: low + rng.randint(0, largest)} if rng.random() < 0.6 else {})
    )


def _range(rng: random.Random, least: tuple[str, ...], most: tuple[str, ...]) -> dict[str, int]:
    low = rng.choice((0, 1, -1, rng.randint(-10000, 10000)))
    high = low + rng.choice((0, 1, 9, rng.randint(0, 100000))) + 2
    return ({rng.choice(least): low} if rng.random() < 0.6 else {}) | (
        {rng.choice(most): high} if rng.random() < 0.6 else {}
    )


def _value(rng: random.Random, depth: int) -> Any:
    simple = [rng.choice(_TEXTS), rng.randint(-99, 99), rng.choice((0.5, -1.25, 1e6)), True, False, None]
    if depth and rng.random() < 0.3:
        return rng.choice(([_value(rng, 0), _value(rng, 0)], {rng.choice(_NAMES): _value(rng, 0)}, [], {}))
    return rng.choice(simple)


# what pydantic's ``model_json_schema`` makes of a field's annotation
PYDANTIC: dict[str, Any] = {
    "Annotated[float, Field(gt=0)]": {"exclusiveMinimum": 0, "type": "number"},
    "Annotated[float, Field(gt=-2.5, lt=0.1)]": {
        "exclusiveMaximum": 0.1,
        "exclusiveMinimum": -2.5,
        "type": "number",
    },
    "Annotated[float, Field(ge=0.5, le=1.5)]": {"maximum": 1.5, "minimum": 0.5, "type": "number"},
    "Annotated[int, Field(gt=0, lt=10)]": {"exclusiveMaximum": 10, "exclusiveMinimum": 0, "type": "integer"},
    "Optional[Decimal] = None": {
        "anyOf": [{"exclusiveMinimum": 0.0, "type": "number"}, {"type": "string"}, {"type": "null"}],
        "default": None,
    },
    "constr(pattern=..., max_length=5)": {"maxLength": 5, "pattern": "^[a-zé]+( [a-z]+)*$", "type": "string"},
    "set[Enum]": {"items": {"$ref": "#/$defs/Color"}, "type": "array", "uniqueItems": True},
    "dict[Enum, int]": {
        "additionalProperties": {"type": "integer"},
        "propertyNames": {"$ref": "#/$defs/Color"},
        "type": "object",
    },
    "dict[constr(max_length=5), bool]": {
        "additionalProperties": {"type": "boolean"},
        "propertyNames": {"maxLength": 5},
        "type": "object",
    },
    "dict[constr(pattern=...), bool]": {
        "patternProperties": {"^[a-z]+$": {"type": "boolean"}},
        "type": "object",
    },
    "Cat | Dog, Field(discriminator='kind')": {
        "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    },
    "tuple[int, EmailStr]": {
        "maxItems": 2,
        "minItems": 2,
        "prefixItems": [{"type": "integer"}, {"format": "email", "type": "string"}],
        "type": "array",
    },
    "UUID4": {"format": "uuid4", "type": "string"},
    "HttpUrl": {"format": "uri", "maxLength": 2083, "minLength": 1, "type": "string"},
    "SecretStr": {"format": "password", "type": "string", "writeOnly": True},
}
_DEFS = {
    "Color": {"enum": ["red", "blue", "green"], "title": "Color", "type": "string"},
    "Cat": {
        "properties": {"kind": {"const": "cat", "default": "cat"}, "of": {"type": "null"}},
        "type": "object",
    },
    "Dog": {
        "properties": {"kind": {"const": "dog", "default": "dog"}, "of": {"type": "null"}},
        "type": "object",
    },
}


def pydantic_schema(annotation: str) -> dict[str, Any]:
    """Of a model with one field."""
    return {
        "$defs": _DEFS,
        "properties": {"x": {"title": "X", "description": "a field", **PYDANTIC[annotation]}},
        "required": ["x"],
        "title": "M",
        "type": "object",
    }


def walks(rng: random.Random, automaton: ByteAutomaton, lengths: Iterable[int]) -> list[str]:
    """Texts that ``automaton`` takes: random for about ``lengths`` bytes, then the shortest end."""
    successors, far = automaton.successors, len(automaton.successors)
    steps = np.where(automaton.final, 0, far)  # [S] to the next end
    while True:
        shorter = np.minimum(steps, np.where(successors >= 0, steps[successors], far).min(1) + 1)
        if (shorter == steps).all():
            return [_walk(rng, automaton, steps, length) for length in lengths]
        steps = shorter


def _walk(rng: random.Random, automaton: ByteAutomaton, steps: Any, length: int) -> str:
    state, text = 0, bytearray()
    while len(text) < length or not automaton.final[state]:
        row = automaton.successors[state]
        targets = [each for each in np.unique(row[row >= 0]).tolist() if steps[each] < len(steps)]
        if not targets:
            break
        nearest = min(steps[targets])
        # states behind few bytes as often as others
        state = rng.choice([each for each in targets if len(text) < length or steps[each] == nearest])
        text.append(rng.choice(np.nonzero(row == state)[0].tolist()))
    return text.decode()


def regex(rng: random.Random, depth: int = 3) -> str:
    """One that Python and outlines-core read alike."""
    if depth == 0:
        return rng.choice(("a", "b", "[a-c]", "[^a-z0-9]", ".", "é", r"\.", "x{2}", "[0-9]", "yes", "-"))
    inner = [regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    match rng.randint(0, 4):
        case 0:
            return f"(?:{'|'.join(inner)})"
        case 1:
            return f"(?:{inner[0]})" + rng.choice(("*", "+", "?", "{0,3}", "{2}", "{1,}", "??", "*?"))
        case _:
            return "".join(inner)


def asked(rng: random.Random) -> StructuredOutputs:
    kind = rng.random()
    if kind < 0.7:
        return StructuredOutputs(json=schema(rng))
    if kind < 0.9:
        return StructuredOutputs(regex=regex(rng))
    return StructuredOutputs(choice=rng.sample([each for each in _TEXTS if each], rng.randint(1, 4)))


def fits(asked: StructuredOutputs, text: str) -> bool:
    """By jsonschema and ``re``."""
    import jsonschema

    if asked.choice:
        return text in asked.choice
    if asked.regex is not None:
        return re.fullmatch(asked.regex, text) is not None
    checker = jsonschema.FormatChecker(formats=["date", "uuid", "ipv4", "email"])
    checker.checks("time", raises=ValueError)(
        lambda text: bool(time.fromisoformat(text) if isinstance(text, str) else 1)
    )
    checker.checks("date-time", raises=ValueError)(
        lambda text: bool(datetime.fromisoformat(text) if isinstance(text, str) else 1)
    )
    value = json.loads(text)
    return not [
        *jsonschema.Draft202012Validator(json.loads(str(asked.json)), format_checker=checker).iter_errors(
            value
        )
    ]
