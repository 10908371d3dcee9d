"""What an answer has to fit, as vLLM's ``StructuredOutputsParams`` names it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from specgen.config.errors import UserError, first_line, is_text, require, shown
from specgen.config.field_types import flag, strings, text


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The answer is text that fits exactly one of these, and ends there. ``UserError`` for anything else.

    ``json`` is a JSON schema, as an object or as text (kept as text, in the order given, which properties are written
    in); ``regex`` matches the whole answer, ``choice`` has the answers to choose from, and ``json_object`` is any JSON
    object.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    json_object: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "choice", strings(self.choice, "choice"))
        flag(self.json_object, "json_object")
        given = [each.name for each in fields(self) if getattr(self, each.name) not in (None, (), False)]
        names = ", ".join(each.name for each in fields(self))
        if len(given) != 1:
            raise UserError(
                f"structured outputs name {' and '.join(given) or 'nothing'}: give one of {names}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.regex is not None:
            text(self.regex, "regex")
        require(len({*self.choice}) == len(self.choice), "a choice is given twice: remove one")
        require("" not in self.choice, "a choice is empty: give the text of the answer, or leave it out")
        for each in (*self.choice, self.regex or ""):
            require(is_text(each), f"{shown(each)} holds a lone surrogate, which is not a character")

    @classmethod
    def of(cls, value: object, what: str = "structured_outputs") -> "StructuredOutputs | None":
        """From an object with its fields, as rows and manifests have it."""
        if value is None or isinstance(value, cls):
            return value
        names = {each.name for each in fields(cls)}
        if not isinstance(value, Mapping) or not names.issuperset(value):
            raise UserError(f"{what} is {shown(value)}: use an object with one of {', '.join(sorted(names))}")
        return cls(**{name: each for name, each in value.items() if each is not None})

    def __str__(self) -> str:
        """In a few words, for reports."""
        if self.choice:
            return f"one of {len(self.choice)} choices"
        return (
            "a JSON object" if self.json_object else "a regex" if self.regex is not None else "a JSON schema"
        )


def _schema(value: object) -> str:
    """The JSON text of a schema."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        written = json.dumps(found, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"json is {shown(value)} ({first_line(error)}): give a JSON schema") from error
    require(isinstance(found, dict | bool), f"json is {shown(value)}: a JSON schema is an object")
    return written
