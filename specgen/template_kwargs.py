"""What the user hands to a chat template beside the messages."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from specgen.errors import UserError, first_line, require, shown

PINNED_DATE = "strftime_now"  # the argument of a chat template that is the date it sees
_RENDERERS = {  # arguments of a chat template that are not the user's
    *("messages", "conversation", "conversations", "chat_template", "add_generation_prompt"),
    *(
        "continue_final_message",
        "tools",
        "documents",
        "tokenize",
        "tokenizer_kwargs",
        "padding",
        "truncation",
    ),
    *(
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
    ),
}


@dataclass(frozen=True)
class TemplateKwargs:
    """Names and values for a chat template, as one JSON object with sorted keys."""

    text: str = "{}"

    @classmethod
    def of(cls, asked: "TemplateKwargs | Mapping[str, Any] | str | None") -> "TemplateKwargs":
        """From an object or its JSON; ``UserError`` for anything else and for names that have another meaning."""
        if isinstance(asked, TemplateKwargs):
            return asked
        remedy = 'write one JSON object, such as {"reasoning_effort": "low"}'
        try:
            value = json.loads(asked) if isinstance(asked, str) else dict(asked or {})
            text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"chat-template-kwargs is {shown(asked)} ({first_line(error)}): {remedy}"
            ) from error
        require(isinstance(value, dict), f"chat-template-kwargs is {shown(asked)}: {remedy}")
        taken = sorted(_RENDERERS & value.keys())
        require(
            not taken, f"chat-template-kwargs has {', '.join(taken)}, which specgen sets itself: remove it"
        )
        day = value.get(PINNED_DATE, "2026-01-31")
        require(
            isinstance(day, str) and _is_date(day),
            f"chat-template-kwargs has {PINNED_DATE} {shown(day)}: give the date as 2026-01-31",
        )
        return cls(text)

    @property
    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.text)
        return values

    def with_date(self, day: str) -> "TemplateKwargs":
        """The same, and ``day`` as the date that templates see unless they were given one."""
        return TemplateKwargs.of({PINNED_DATE: day} | self.values)

    def __str__(self) -> str:
        return self.text


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
