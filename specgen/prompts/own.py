"""Rows in specgen's own format."""

from collections.abc import Mapping
from typing import Any

from specgen.config import UserError
from specgen.prompts.fields import category, chat, checked_text, token_ids
from specgen.prompts.prompt import Prompt
from specgen.prompts.row_sampling import read_sampling

# Known data sets by a field that their rows have.
_FIELDS_OF = {"turns": "mt-bench", "conversations": "sharegpt", "question": "gsm8k"}
CONTENT_FIELDS = ("prompt", "messages", "prompt_token_ids")


def parse_own(row_id: str, row: Mapping[str, Any]) -> Prompt:
    """Own rows: ``prompt`` (raw text), ``messages`` (a chat, the user last) or ``prompt_token_ids``.

    A row may also set a ``category`` and any field of ``SamplingParams``:
    ``{"id": "a", "prompt": "Once", "temperature": 0.7, "max_tokens": 50}``. Other fields are ignored
    (``unknown_fields`` counts those that look misspelt).
    """
    given = [key for key in CONTENT_FIELDS if row.get(key) is not None]
    if len(given) != 1:  # not `require`, which would format its message for every row
        looks_like = next((name for field, name in _FIELDS_OF.items() if field in row), "NAME")
        raise UserError(
            f"{' and '.join(given) or 'no prompt'}: a row takes one of {', '.join(CONTENT_FIELDS)} "
            f"(for the format of a known data set: --dataset {looks_like} --data-path FILE)"
        )
    content = row[given[0]]
    return Prompt(
        id=row_id,
        text=checked_text(content, "prompt") if "prompt" in given else None,
        messages=chat(content) if "messages" in given else (),
        token_ids=token_ids(content, "prompt_token_ids") if "prompt_token_ids" in given else (),
        category=category(row),
        sampling=read_sampling(row),
    )
