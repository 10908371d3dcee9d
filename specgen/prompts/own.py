"""Rows in specgen's own format."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from specgen.config import UserError, shown
from specgen.config.errors import nearest
from specgen.prompts.fields import category, chat, checked_text, token_ids
from specgen.prompts.prompt import Prompt
from specgen.prompts.row_sampling import read_sampling

CONTENT_FIELDS = ("prompt", "messages", "prompt_token_ids")


def parse_own(row_id: str, row: Mapping[str, Any], *, endpoint: str | None = None) -> Prompt:
    """Own rows: ``prompt`` (raw text), ``messages`` (a chat, the user last) or ``prompt_token_ids``.

    A row may also set a ``category`` and any field of ``SamplingParams``:
    ``{"id": "a", "prompt": "Once", "temperature": 0.7, "max_tokens": 50}``. Other fields are ignored
    (``notes`` counts those that look misspelt).
    """
    given = [key for key in CONTENT_FIELDS if row.get(key) is not None]
    if len(given) != 1:  # not `require`, which would format its message for every row
        near = "" if given else next(filter(None, map(_misspelt, row)), "")
        raise UserError(
            f"{' and '.join(given) or 'no prompt'}: a row takes one of {', '.join(CONTENT_FIELDS)}{near}, or "
            f"name a field with --prompt-field; this one has {shown(', '.join(row)) if row else 'none'}"
        )
    name, content = given[0], row[given[0]]
    return Prompt(
        id=row_id,
        text=checked_text(content, "prompt") if name == "prompt" else None,
        messages=chat(content) if name == "messages" else (),
        token_ids=token_ids(content, "prompt_token_ids") if name == "prompt_token_ids" else (),
        category=category(row),
        endpoint=endpoint,
        sampling=read_sampling(row),
    )


@lru_cache(maxsize=1024)
def _misspelt(name: str) -> str:
    meant = nearest(name, CONTENT_FIELDS, likeness=0.8) if len(name) <= 64 else None
    return f" ({shown(name)}: did you mean {meant}?)" if meant else ""
