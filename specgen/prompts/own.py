"""Rows in specgen's own format, and in that of OpenAI's Batch API and vLLM's ``run-batch``."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from specgen.config import UserError, shown
from specgen.config.errors import did_you_mean, nearest
from specgen.prompts.fields import (
    SAMPLING_FIELDS,
    category,
    chat,
    checked_text,
    flag,
    read_sampling,
    token_ids,
)
from specgen.prompts.prompt import Prompt

CONTENT_FIELDS = ("prompt", "messages", "prompt_token_ids")
# Fields that change no answer. ``model`` is always the loaded one.
IGNORED = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_retention"),
}
_KNOWN = {content: {content, *SAMPLING_FIELDS} for content in ("messages", "prompt")}
_NEUTRAL: dict[str, Any] = {  # unsupported fields, with the value that has no effect
    "best_of": 1,
    "echo": False,
    "stream": False,
    "modalities": ["text"],
    "tools": [],
    "tool_choice": "none",
}


def parse_own(row_id: str, row: Mapping[str, Any], *, endpoint: str | None = None) -> Prompt:
    """Own rows: ``prompt`` (raw text), ``messages`` (a chat, the user last) or ``prompt_token_ids``.

    A row may also set a ``category`` and any field of ``SamplingParams``:
    ``{"id": "a", "prompt": "Once", "temperature": 0.7, "max_tokens": 50}``. Other fields are ignored
    (``notes`` counts those that look misspelt).
    """
    given = [key for key in CONTENT_FIELDS if row.get(key) is not None]
    if len(given) != 1:  # not `require`, which would format its message for every row
        near = "" if given else next(filter(None, map(_misspelt, row)), "")
        fields = ", ".join(name if value is not None else f"{name} (null)" for name, value in row.items())
        raise UserError(
            f"{' and '.join(given) or 'no prompt'}: a row takes one of {', '.join(CONTENT_FIELDS)}{near}, or "
            f"name a field with --prompt-field; this one has {shown(fields) if row else 'none'}"
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
    looks = name not in CONTENT_FIELDS and len(name) <= 64
    meant = nearest(name, CONTENT_FIELDS, likeness=0.8) if looks else None
    return f" ({shown(name)}: did you mean {meant}?)" if meant else ""


def is_batch(row: Mapping[str, Any]) -> bool:
    """Whether ``row`` is a request of the Batch API, complete or not."""
    return "body" in row and ("custom_id" in row or "url" in row)


def parse_batch(row_id: str, row: Mapping[str, Any]) -> Prompt:
    """``{"custom_id", "method": "POST", "url", "body"}``, the url ``/v1/chat/completions`` or ``/v1/completions``.

    The body has the parameters of that endpoint (OpenAI's API reference, "The request input object"): ``messages``
    or ``prompt`` (a string or a list of token ids), ``max_completion_tokens`` or ``max_tokens``, ``temperature``,
    ``top_p``, ``presence_penalty``, ``frequency_penalty``, ``n``, ``seed``, ``stop``, ``logit_bias``, ``logprobs``,
    ``top_logprobs`` and ``response_format``, and of vLLM's those that an own row may have. What a body does not set is
    the run's, ``temperature`` and ``max_tokens`` too. Unsupported fields that would change the answer (``best_of`` 2,
    tools, ...) are a ``UserError``; those that would not (``user``, ``metadata``, ...) are ignored.
    """
    if row.get("custom_id") is None:
        raise UserError("no custom_id: give each request its own")
    method, url, body = row.get("method"), row.get("url"), row["body"]
    if method not in (None, "POST"):
        raise UserError(f"method is {shown(method)}: use POST")
    read = _ENDPOINTS.get(url) if isinstance(url, str) else None
    if read is None:
        raise UserError(f"url is {shown(url)}: use {' or '.join(_ENDPOINTS)}")
    if not isinstance(body, dict):
        raise UserError(f"body is {shown(body)}: use an object")
    given = {name: value for name, value in body.items() if value is not None}
    return parse_own(row_id, read(given), endpoint=url)


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat request as an own row; ``logprobs`` is a switch, ``top_logprobs`` the number."""
    asked, number = flag(body.pop("logprobs", False), "logprobs"), body.pop("top_logprobs", None)
    if not asked and number is not None:
        raise UserError(f"top_logprobs is {shown(number)} but logprobs is not true: set both")
    if asked:
        body["logprobs"] = 0 if number is None else number
    return _own_row(body, "messages")


def _completion(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a completion request as an own row; its ``prompt`` may be text or token ids."""
    row = _own_row(body, "prompt")
    if isinstance(row.get("prompt"), list):
        row["prompt_token_ids"] = [*token_ids(row.pop("prompt"), "the items of prompt")]
    return row


def _own_row(body: dict[str, Any], content: str) -> dict[str, Any]:
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    if content not in body:
        raise UserError(f"no {content}: the body of this endpoint has them")
    kept, others = _sorted_out(tuple(body), content)
    for name in others:
        _require_neutral(name, body[name])
    return {name: body[name] for name in kept}


@lru_cache(maxsize=1024)
def _sorted_out(names: tuple[str, ...], content: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the fields of a body those of an own row, and those that may only say what has no effect."""
    known = _KNOWN[content]
    return tuple(name for name in names if name in known), tuple(sorted({*names} - known - IGNORED))


def _require_neutral(name: str, value: object) -> None:
    if name not in _NEUTRAL:
        meant = did_you_mean(name, (*SAMPLING_FIELDS, *_NEUTRAL, "max_completion_tokens"))
        raise UserError(f"{shown(name)} is not known and might change the answer{meant}: remove it")
    if value != (neutral := _NEUTRAL[name]):
        raise UserError(f"{name} is {shown(value)}, which is not supported: use {neutral!r}, or remove it")


_ENDPOINTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
}
