"""The row formats of the known data sets: how a row becomes a prompt, and where the public rows are.

A parser takes the id and the JSON object of a row, and raises ``ValueError`` with what is wrong with the row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specgen.config import require
from specgen.prompts.prompt import Prompt
from specgen.prompts.rows import HubSource
from specgen.tokenizer import Message

_ROLES = ("system", "user", "assistant")
_CONTENT_KEYS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a row becomes a prompt; ``id_key`` names the field with its id, which public rows may lack."""

    id_key: str
    id_required: bool = False
    parse: Callable[[str, Mapping[str, Any]], Prompt]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set known by name; ``files`` are patterns that find its file in a directory, the best first."""

    format: Format
    hub: HubSource
    files: tuple[str, ...] = ()


def parse_own(row_id: str, row: Mapping[str, Any]) -> Prompt:
    """Own rows: ``prompt`` (raw text), ``messages`` (a chat, the user last) or ``prompt_token_ids``."""
    given = [key for key in _CONTENT_KEYS if row.get(key) is not None]
    require(
        len(given) == 1,
        f"{' and '.join(given) or 'no prompt'}: a row takes one of {', '.join(_CONTENT_KEYS)} "
        "(for the format of a known data set: --dataset NAME --data-path FILE)",
    )
    return Prompt(
        id=row_id,
        text=checked_text(row["prompt"], "prompt") if "prompt" in given else None,
        messages=_chat(row["messages"]) if "messages" in given else (),
        token_ids=_token_ids(row["prompt_token_ids"]) if "prompt_token_ids" in given else (),
        category=_category(row),
    )


def parse_turns(row_id: str, row: Mapping[str, Any]) -> Prompt:
    """MT-Bench and Spec-Bench: ``turns`` are the user's, each asked with the answers before it in context."""
    turns = _list(row.get("turns"), "turns")
    first, *later = [checked_text(turn, f"turn {number}") for number, turn in enumerate(turns, start=1)]
    return Prompt(id=row_id, messages=_question(first), follow_ups=tuple(later), category=_category(row))


def parse_sharegpt(row_id: str, row: Mapping[str, Any]) -> Prompt:
    """ShareGPT: the first message is the prompt if a human wrote it; the answers in the file are not used."""
    first = _list(row.get("conversations"), "conversations")[0]
    require(isinstance(first, dict), "conversations: the first message is not an object")
    sender = first.get("from")
    require(sender in ("human", "user"), f"the first message is from {sender!r}, not from a human")
    return Prompt(id=row_id, messages=_question(checked_text(first.get("value"), "the first message")))


def parse_gsm8k(row_id: str, row: Mapping[str, Any]) -> Prompt:
    """GSM8K: the question alone, without examples before it."""
    return Prompt(id=row_id, messages=_question(checked_text(row.get("question"), "question")))


def parse_humaneval(row_id: str, row: Mapping[str, Any]) -> Prompt:
    """HumanEval: the function's head and docstring as the user's message, with no words around it.

    So do the benchmarks of drafters (SpecForge's among them). It measures speed and acceptance, not pass@1.
    """
    return Prompt(id=row_id, messages=_question(checked_text(row.get("prompt"), "prompt")))


def _question(content: str) -> tuple[Message, ...]:
    return (Message(role="user", content=content),)


def checked_text(value: object, what: str) -> str:
    """``value`` if it is text, not blank, that can be encoded; ``what`` names it in the ``ValueError``."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is not a string")
    require(bool(value.strip()), f"{what} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} holds half of a surrogate pair, which is no character") from error
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} is not a list with at least one element")
    return value


def _chat(value: object) -> tuple[Message, ...]:
    messages = tuple(_message(item) for item in _list(value, "messages"))
    require(messages[-1].role == "user", f"the last message is from {messages[-1].role}: end with the user")
    return messages


def _message(value: object) -> Message:
    if not isinstance(value, dict):
        raise ValueError("a message is not an object with role and content")
    role: Any = value.get("role")
    require(role in _ROLES, f"unknown role {role!r}: use {', '.join(_ROLES)}")
    return Message(role=role, content=checked_text(value.get("content"), f"the content of a {role} message"))


def _token_ids(value: object) -> tuple[int, ...]:
    ids = tuple(_list(value, "prompt_token_ids"))
    require(
        all(type(item) is int and item >= 0 for item in ids), "prompt_token_ids are not all integers from 0"
    )
    return ids


def _category(row: Mapping[str, Any]) -> str | None:
    category = row.get("category")
    return None if category is None else checked_text(category, "category")


OWN = Format(id_key="id", id_required=True, parse=parse_own)
TURNS = Format(id_key="question_id", parse=parse_turns)
DATASETS = {
    "mt-bench": Dataset(
        format=TURNS, hub=HubSource(path="philschmid/mt-bench", split="train"), files=("question.jsonl",)
    ),
    "sharegpt": Dataset(
        format=Format(id_key="id", parse=parse_sharegpt),
        hub=HubSource(
            path="anon8231489123/ShareGPT_Vicuna_unfiltered",
            data_files="ShareGPT_V3_unfiltered_cleaned_split.json",
            split="train",
        ),
        files=("ShareGPT_V3_unfiltered_cleaned_split.json",),
    ),
    "gsm8k": Dataset(
        format=Format(id_key="id", parse=parse_gsm8k),
        hub=HubSource(path="openai/gsm8k", name="main", split="test"),
        files=("main/test*", "test*"),
    ),
    "spec-bench": Dataset(  # not on the hub: the file of its authors
        format=TURNS,
        hub=HubSource(
            path="json",
            data_files="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
            split="train",
        ),
        files=("question.jsonl",),
    ),
    "humaneval": Dataset(
        format=Format(id_key="task_id", parse=parse_humaneval),
        hub=HubSource(path="openai/openai_humaneval", split="test"),
        files=("test*",),
    ),
}
