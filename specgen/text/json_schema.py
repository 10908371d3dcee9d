"""From a JSON schema to a regular expression of the JSON texts that fit it.

``UserError`` names what has no such expression here: every keyword is either understood as JSON Schema (2020-12) has
it, says nothing about texts, or is refused. Objects have their properties in the schema's order and no others, and
white space is at most one space where JSON has it.

outlines-core has such a translation too. It leaves out what it does not know (bounds of numbers, ``uniqueItems``,
required properties that are not listed), unrolls recursion three times and escapes no name of a property.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from math import perm
from typing import Any

from specgen.config import UserError, require, shown
from specgen.text.number_regex import DIGITS, one_of, within

_SPACE = "[ ]?"
_INNER = r'[^"\\\x00-\x1f]'  # a character of a string that is written as it is
_CHARACTER = rf'(?:{_INNER}|\\["\\/bfnrt])'
_STRING = f'"{_CHARACTER}*"'
_FRACTION = r"(?:\.[0-9]{1,16})?"
_INTEGER = f"-?(?:0|[1-9][0-9]{{0,{DIGITS - 1}}})"
_NUMBER = rf"{_INTEGER}{_FRACTION}(?:[eE][+-]?[0-9]{{1,2}})?"
_SCALARS = {
    "string": _STRING,
    "integer": _INTEGER,
    "number": _NUMBER,
    "boolean": "(?:true|false)",
    "null": "null",
}
_TYPES = (*_SCALARS, "array", "object")
NESTED = 3  # levels of lists and objects in what a schema leaves open
_MOST_ORDERS = 400  # in which the values of a set may come
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_DATE = (  # of the Gregorian calendar, but for 29 February
    r"[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    r"02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}"  # of a host's name
_HOST = rf"(?:{_LABEL}\.){{1,3}}[A-Za-z]{{2,10}}"
# within a day
_SPAN = "(?:[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S)"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "-".join(f"[0-9a-f]{{{size}}}" for size in (8, 4, 4, 4, 12)),
    # of one version, as pydantic names them
    **{
        f"uuid{version}": f"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}"
        for version in (1, 3, 4, 5, 6, 7, 8)
    },
    "duration": f"P(?:[0-9]{{1,4}}D(?:T{_SPAN})?|T{_SPAN})",
    "ipv4": r"\.".join([_OCTET] * 4),
    "email": rf"[A-Za-z0-9_](?:[.+-]?[A-Za-z0-9_]){{0,31}}@{_HOST}",
    "uri": rf"https?://{_HOST}(?:/[A-Za-z0-9_.~-]{{1,40}}){{0,8}}/?",
}
_HINTS = ("password", "path")  # formats of any string
_LONGEST_FORMAT = 533  # characters, of a uri
_NOTES = {  # say nothing about texts, or are looked up where they are referred to
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions"),
}
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set[str](),
    "null": set[str](),
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "object": {
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
        *("propertyNames", "patternProperties"),
    },
}
# escapes that may stand for a character that a string may not hold
_SETS = (r"\p", r"\P", r"\x", r"\u", r"\U")
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " "}  # as ECMA-262 has them, of what a string may hold


# an escape, a class, or a character of a regular expression
_PIECE = re.compile(
    r"\\(?:[pPxuU]\{[^}]*\}|[pP].|x\w\w|u\w{4}|U\w{8}|.)?"
    r"|\[\^?\]?(?:\\.|\[(?:\\.|[^\]\\])*\]|[^\]\\])*\]|.",
    re.DOTALL,
)


_ANCHORS = ("^", r"\A", "$", r"\z")


def json_regex(schema: str) -> str:
    """The expression for the texts of ``schema``, which is JSON itself.

    A string with a length beside its pattern or format stands between marks, ``\\x01LEAST,MOST\\x02`` and ``\\x03``: an
    expression cannot have both, but who compiles it can count characters between them, and leave them out.
    """
    root = json.loads(schema)
    return _Translation(root).of(root, "the schema")


def json_object_regex() -> str:
    """That of any object with at most ``NESTED`` levels of lists and objects, itself included."""
    return _object_of(_any(NESTED - 1))


class _Translation:
    """Of one schema; ``where`` names the part in hand."""

    def __init__(self, root: Any) -> None:  # noqa: ANN401  # JSON
        self._root = root
        self._inside: list[str] = []  # references that are being followed

    def of(self, schema: Any, where: str) -> str:  # noqa: ANN401
        """The expression for ``schema``, which may stand beside others."""
        if schema is True or schema == {}:
            return _any(NESTED)
        require(
            isinstance(schema, Mapping), f"{where} is {shown(schema)}: nothing fits it, or it is no schema"
        )
        given = {name: value for name, value in schema.items() if name not in _NOTES}
        if not given:
            return _any(NESTED)
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            if name in given:
                _require_alone(name, given, where)
                return self._combined(name, given[name], where)
        for name in ("const", "enum"):
            if name in given:
                return self._values(given, [given[name]] if name == "const" else given[name], where)
        return self._typed(given, where)

    def _combined(self, name: str, value: Any, where: str) -> str:  # noqa: ANN401
        if name == "$ref":
            return self._referred(value, where)
        require(
            isinstance(value, list) and bool(value),
            f"{name} of {where} is {shown(value)}: use a list of schemas",
        )
        require(
            name != "allOf" or len(value) == 1,
            f"allOf of {where} has {len(value)} schemas: write them as one",
        )
        tag = self._tag(value, where) if name == "oneOf" else None
        return one_of([self._tagged(each, tag, f"{name} of {where}") for each in value])

    def _tagged(self, schema: Any, tag: str | None, where: str) -> str:  # noqa: ANN401
        """The expression for ``schema``, which has the property ``tag`` in any case."""
        if tag is None:
            return self.of(schema, where)
        if "$ref" in schema:
            _require_alone("$ref", schema, where)
            return self._referred(schema["$ref"], where, tag)
        required = schema.get("required", [])
        added = isinstance(required, list) and tag not in required
        return self.of({**schema, "required": [*required, tag]} if added else schema, where)

    def _referred(self, name: Any, where: str, tag: str | None = None) -> str:  # noqa: ANN401
        found = self._target(name, where)
        require(
            name not in self._inside,
            f"$ref {name} refers to itself, and a regular expression has no recursion: write out as many levels as "
            "you need, each under a name of its own",
        )
        self._inside.append(name)
        expression = self._tagged(found, tag, name)
        self._inside.pop()
        return expression

    def _target(self, name: Any, where: str) -> Any:  # noqa: ANN401
        require(
            isinstance(name, str) and (name == "#" or name.startswith("#/")),
            f"$ref of {where} is {shown(name)}: use one within the schema, such as #/$defs/NAME",
        )
        found = self._root
        for key in name.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            require(isinstance(found, Mapping) and key in found, f"$ref {name} leads nowhere")
            found = found[key]
        return found

    def _tag(self, schemas: list[Any], where: str) -> str | None:
        """The property whose values tell the ``schemas`` of ``oneOf`` apart: it is ``anyOf`` then. None: types do."""
        objects = [each if isinstance(each, Mapping) else {} for each in schemas]
        known = [self._target(each["$ref"], where) if "$ref" in each else each for each in objects]
        types = [{"integer": "number"}.get(kind, kind) for kind in (str(each.get("type")) for each in known)]
        if set(types) <= set(_TYPES) and len({*types}) == len(types):
            return None
        for name in known[0].get("properties", {}):
            values = [_constants(each, name) for each in known]
            if all(values) and len({*chain(*values)}) == len([*chain(*values)]):
                return str(name)
        raise UserError(f"oneOf of {where}: a value might fit two of its schemas: write anyOf")

    def _values(self, given: Mapping[str, Any], values: Any, where: str) -> str:  # noqa: ANN401
        """Of ``const`` and ``enum``; beside them a type may select."""
        others = given.keys() - {"const", "enum", "type"}
        require(not others, f"{where} has {', '.join(sorted(others))} beside const or enum: leave it out")
        require(
            isinstance(values, list) and bool(values),
            f"enum of {where} is {shown(values)}: use a list of values",
        )
        types = _types(given, where) if "type" in given else _TYPES
        fitting = [value for value in values if any(_is_of(value, each) for each in types)]
        require(bool(fitting), f"no value of {where} is of its type")
        return one_of([_written(value) for value in fitting])

    def _typed(self, given: Mapping[str, Any], where: str) -> str:
        if "type" not in given:  # what says something of one type alone is meant for it
            owners = {each for each, names in _OF_TYPE.items() if names & given.keys()} - {"integer"}
            known = set[str]().union(*(_OF_TYPE[each] for each in owners))
            _require_known(given, known, where)
            require(len(owners) == 1 and owners <= {"object", "array"}, f"{where} has no type: name one")
            types: Sequence[str] = tuple(owners)
        else:
            types = _types(given, where)
        known = {"type"}.union(*(_OF_TYPE[each] for each in types))
        _require_known(given, known, where)
        return one_of([self._of_type(each, given, where) for each in types])

    def _of_type(self, kind: str, given: Mapping[str, Any], where: str) -> str:
        match kind:
            case "string":
                return f'"{_string(given, where)}"'
            case "integer" | "number":
                bounds = {name: given[name] for name in sorted(_OF_TYPE[kind]) if name in given}
                return within(kind, bounds, where) if bounds else _SCALARS[kind]
            case "array":
                return self._array(given, where)
            case "object":
                return self._object(given, where)
        return _SCALARS[kind]

    def _array(self, given: Mapping[str, Any], where: str) -> str:
        least, most = _bounds(given, "minItems", "maxItems", where)
        items = given.get("items", True)
        require(
            not isinstance(items, list),
            f"items of {where} is a list, as before 2020-12: write prefixItems, and leave additionalItems out",
        )
        unique = given.get("uniqueItems", False) is not False and most not in (0, 1)
        if "prefixItems" in given:
            require(not unique, f"{where} has uniqueItems beside prefixItems: leave it out")
            first = [self.of(each, f"an item of {where}") for each in given["prefixItems"]]
            require(
                least <= len(first) and (most is None or len(first) <= most),
                f"{where} has {len(first)} prefixItems, and minItems or maxItems say otherwise",
            )
            return rf"\[{_SPACE}" + f"{_SPACE},{_SPACE}".join(first) + rf"{_SPACE}\]"
        if unique:
            return rf"\[{_SPACE}{self._set(items, least, most, where)}{_SPACE}\]"
        open_ended = items is True or items == {}
        item = _any(NESTED - 1) if open_ended else self.of(items, f"items of {where}")
        return rf"\[{_SPACE}{_several(item, least, most)}{_SPACE}\]"

    def _set(self, items: Any, least: int, most: int | None, where: str) -> str:  # noqa: ANN401
        """Some of the listed values of ``items``, each once, in any order."""
        listed = self._listed_values(items, where)
        # others may be equal and look different
        plain = all(isinstance(each, str | int | None) for each in listed)
        values = list(dict.fromkeys(json.dumps(each) for each in listed)) if plain else []
        most = len(values) if most is None else min(most, len(values))
        orders = sum(perm(len(values), size) for size in range(most + 1))
        require(
            bool(values) and orders <= _MOST_ORDERS,
            f"{where} has uniqueItems, which is kept for an enum of few values (5, or more below a smaller maxItems): "
            "leave it out and drop repeated items afterwards, or set maxItems to 1",
        )
        require(
            least <= most, f"minItems of {where} is {least}, and there are {most} values at most: lower it"
        )
        return _in_any_order([_written(json.loads(each)) for each in values], least, most)

    def _listed_values(self, schema: Any, where: str) -> list[Any]:  # noqa: ANN401
        """Those of an enum or a const alone, also where ``schema`` refers to it, which its type leaves; or none."""
        followed = list[str]()
        while isinstance(schema, Mapping) and schema.keys() - _NOTES == {"$ref"}:
            if schema["$ref"] in followed:
                return []
            followed.append(schema["$ref"])
            schema = self._target(schema["$ref"], where)
        if not isinstance(schema, Mapping) or schema.keys() - _NOTES - {"type"} not in ({"const"}, {"enum"}):
            return []
        self.of(schema, where)  # refuses what is none
        values = [schema["const"]] if "const" in schema else schema["enum"]
        types = _types(schema, where) if "type" in schema else _TYPES
        return [each for each in values if any(_is_of(each, kind) for kind in types)]

    def _named(self, given: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """An object in terms of ``propertyNames`` where it has ``patternProperties``; of ``properties`` for an enum."""
        if "patternProperties" in given:
            patterns = given["patternProperties"]
            require(
                isinstance(patterns, Mapping)
                and len(patterns) == 1
                and not given.keys() & {"properties", "propertyNames"},
                f"{where} has patternProperties of several patterns, or beside properties: leave one alone",
            )
            ((pattern, value),) = patterns.items()
            given = {**given, "propertyNames": {"pattern": pattern}, "additionalProperties": value}
        if "propertyNames" not in given:
            return given
        require(
            not given.get("properties"),
            f"{where} has propertyNames beside properties: leave propertyNames out",
        )
        names = [each for each in self._listed_values(given["propertyNames"], where) if isinstance(each, str)]
        value = given.get("additionalProperties", True)
        return {**given, "properties": dict.fromkeys(names, value)} if value is not False else given

    def _object(self, given: Mapping[str, Any], where: str) -> str:
        given = self._named(given, where)
        properties, required = given.get("properties", {}), given.get("required", [])
        least, most = _bounds(given, "minProperties", "maxProperties", where)
        require(
            isinstance(properties, Mapping) and isinstance(required, list),
            f"{where}: properties is an object, and required a list",
        )
        missing = [name for name in required if name not in properties]
        require(
            not missing,
            f"{where} requires {', '.join(map(shown, missing))}, which its properties do not have: describe it "
            "there, or leave it out of required",
        )
        if not properties:
            value = given.get("additionalProperties", True)
            if value is False:
                return rf"\{{{_SPACE}\}}"
            # a name may be there twice, which is one property
            require(least <= 1, f"minProperties of {where} is {least}: name the properties")
            open_ended = value is True or value == {}
            each = _any(NESTED - 1) if open_ended else self.of(value, f"additionalProperties of {where}")
            names = given.get("propertyNames", True)
            if names in (True, {}):
                return _object_of(each, least, most)
            require(isinstance(names, Mapping), f"propertyNames of {where} is {shown(names)}: use a schema")
            # a name is a string in any case
            names = names if "$ref" in names else {"type": "string", **names}
            name = self.of(names, f"propertyNames of {where}")
            require(name[0] == '"', f"propertyNames of {where} is {shown(names)}: use one of type string")
            return _object_of(each, least, most, name)
        require(
            least <= len({*required}) and (most is None or most >= len(properties)),
            f"{where} has properties beside minProperties or maxProperties: say which are required",
        )
        pairs = [
            (f"{_written(name)}{_SPACE}:{_SPACE}{self.of(value, shown(name))}", name in required)
            for name, value in properties.items()
        ]
        return rf"\{{{_SPACE}{_listed(pairs)}{_SPACE}\}}"


def _require_alone(name: str, given: Mapping[str, Any], where: str) -> None:
    others = given.keys() - {name} - _NOTES
    require(not others, f"{where} has {name} beside {', '.join(sorted(others))}: give {name} by itself")


def _require_known(given: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(given.keys() - known)
    require(
        not unknown, f"{where} has {', '.join(map(shown, unknown))}, which is not supported: leave it out"
    )


def _types(given: Mapping[str, Any], where: str) -> list[str]:
    kinds = given["type"] if isinstance(given["type"], list) else [given["type"]]
    for kind in kinds:
        require(kind in _TYPES, f"type of {where} is {shown(kind)}: use one of {', '.join(_TYPES)}")
    require(bool(kinds), f"type of {where} is an empty list: name one")
    return kinds


def _constants(schema: Mapping[str, Any], name: str) -> list[str]:
    """The values that a property may have, if they are listed."""
    each = schema.get("properties", {}).get(name)
    if not isinstance(each, Mapping):
        return []
    values = [each["const"]] if "const" in each else each.get("enum", [])
    return [json.dumps(value) for value in values if isinstance(value, str)]


def _is_of(value: Any, kind: str) -> bool:  # noqa: ANN401
    kinds: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "boolean": (bool,),
        "null": (type(None),),
        "array": (list,),
        "object": (dict,),
    }
    if kind in kinds:
        return isinstance(value, kinds[kind])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (kind == "number" or value == int(value))


def _written(value: Any) -> str:  # noqa: ANN401
    """A JSON value as it may be spelled."""
    if isinstance(value, dict):
        pairs = [f"{_written(name)}{_SPACE}:{_SPACE}{_written(each)}" for name, each in value.items()]
        return rf"\{{{_SPACE}" + f"{_SPACE},{_SPACE}".join(pairs) + rf"{_SPACE}\}}"
    if isinstance(value, list):
        return rf"\[{_SPACE}" + f"{_SPACE},{_SPACE}".join(map(_written, value)) + rf"{_SPACE}\]"
    return re.escape(json.dumps(value, ensure_ascii=False))


def _several(item: str, least: int, most: int | None) -> str:
    """``least`` to ``most`` items with commas between them."""
    if most == 0:
        return ""
    more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    some = f"{item}(?:{_SPACE},{_SPACE}{item}){more}"
    return some if least else f"(?:{some})?"


def _listed(pairs: Sequence[tuple[str, bool]]) -> str:
    """Those of ``pairs`` that are required and any of the others, in order, with commas between them."""
    comma = f"{_SPACE},{_SPACE}"
    first = next((index for index, (_, required) in enumerate(pairs) if required), None)
    if first is not None:
        before = "".join(f"(?:{pair}{comma})?" for pair, _ in pairs[:first])
        behind = (
            f"{comma}{pair}" if required else f"(?:{comma}{pair})?" for pair, required in pairs[first + 1 :]
        )
        return f"{before}{pairs[first][0]}{''.join(behind)}"
    ways = [
        f"{pair}{''.join(f'(?:{comma}{other})?' for other, _ in pairs[index + 1 :])}"
        for index, (pair, _) in enumerate(pairs)
    ]
    return f"{one_of(ways)}?" if len(ways) > 1 else f"(?:{ways[0]})?"


def _in_any_order(items: Sequence[str], least: int, most: int) -> str:
    """``least`` to ``most`` of ``items``, each once, with commas between them."""
    if most == 0:
        return ""
    ways = []
    for item in items:
        others = [each for each in items if each != item]
        rest = _in_any_order(others, max(least - 1, 1), most - 1)
        more = f"{_SPACE},{_SPACE}{rest}" if rest else ""
        ways.append(item + (more if least > 1 or not rest else f"(?:{more})?"))
    return f"(?:{'|'.join(ways)}){'' if least else '?'}"


def _object_of(value: str, least: int = 0, most: int | None = None, name: str = _STRING) -> str:
    pair = f"{name}{_SPACE}:{_SPACE}{value}"
    return rf"\{{{_SPACE}{_several(pair, least, most)}{_SPACE}\}}"


def _any(levels: int) -> str:
    """Any value with so many levels of lists and objects."""
    scalars = [_STRING, _NUMBER, "true", "false", "null"]
    if levels == 0:
        return one_of(scalars)
    inner = _any(levels - 1)
    return one_of([*scalars, rf"\[{_SPACE}{_several(inner, 0, None)}{_SPACE}\]", _object_of(inner)])


def _bounds(given: Mapping[str, Any], least: str, most: str, where: str) -> tuple[int, int | None]:
    low, high = given.get(least, 0), given.get(most)
    for name, value in ((least, low), (most, high)):
        whole = value is None or (_is_of(value, "integer") and value >= 0)
        require(whole, f"{name} of {where} is {shown(value)}: use a whole number of 0 or more")
    require(high is None or low <= high, f"{least} of {where} is {low} and {most} {high}: nothing fits")
    return int(low), None if high is None else int(high)


def _string(given: Mapping[str, Any], where: str) -> str:
    told = [name for name in ("pattern", "format") if name in given and given[name] not in _HINTS]
    least, most = _bounds(given, "minLength", "maxLength", where)
    if not told:
        return f"{_CHARACTER}{{{least},{'' if most is None else most}}}"
    require(len(told) == 1, f"{where} has pattern and format: leave one of them out")
    value = given[told[0]]
    require(isinstance(value, str), f"{told[0]} of {where} is {shown(value)}: use a string")
    if told == ["format"]:
        known = ", ".join(_FORMATS)
        require(value in _FORMATS, f"format of {where} is {shown(value)}: use {known}, or a pattern")
        found = _FORMATS[value]
        least, most = 0 if least == 1 else least, None if most and most >= _LONGEST_FORMAT else most
    else:
        found = f"(?:{_pattern(value, where)})"
    if least == 0 and most is None:
        return found
    # marks that the compiler counts between, and leaves out: no text of JSON has them
    return rf"\x01{least},{'' if most is None else most}\x02{found}\x03"


def _pattern(pattern: str, where: str) -> str:
    """A pattern for the whole string, of characters that JSON writes as they are."""
    found = ""
    for text in _PIECE.findall(without_anchors(pattern)):
        if text == '"' or text < " " or (text[0] == "\\" and text[1:] in {*'\\"nrtfva', ""}):
            raise UserError(
                f"pattern of {where} has {shown(text)}, which JSON writes as two characters: leave it out"
            )
        if text[0] == "[" or text == "." or text[:2] in _SETS:
            inside = "[^\\n]" if text == "." else text
            found += f"[{re.sub(_SHORT, _spelled, inside)}&&{_INNER}]"
        elif text[0] == "\\" and text[1] in "dws":
            found += f"[{_CLASSES[text[1]]}]"
        elif text[0] == "\\" and text[1] in "DWS":
            found += f"[[^{_CLASSES[text[1].lower()]}]&&{_INNER}]"
        else:
            found += text
    return found


def without_anchors(pattern: str) -> str:
    """``pattern`` without those at the ends of its alternatives, which say nothing where it is to match a whole text.

    It will stand within parentheses: ``UserError`` for one that it closes and did not open, and for other anchors,
    which would match nowhere there.
    """
    pieces, depth, found = _PIECE.findall(pattern), 0, ""
    for before, piece, after in zip(("|", *pieces), pieces, (*pieces[1:], "|"), strict=False):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        require(depth >= 0, f"{shown(pattern)} has a closing parenthesis without an opening one: remove it")
        if piece not in _ANCHORS:
            found += piece
            continue
        beside = before if piece in _ANCHORS[:2] else after
        require(
            depth == 0 and beside == "|",
            f"{shown(pattern)} has the anchor {piece} within, not at an end: remove it",
        )
    return found


_SHORT = re.compile(r"\\(.)", re.DOTALL)


def _spelled(match: re.Match[str]) -> str:
    """An escape within brackets."""
    kind = match[1]
    if kind in _CLASSES:
        return _CLASSES[kind]
    return f"[^{_CLASSES[kind.lower()]}]" if kind in "DWS" else match[0]
