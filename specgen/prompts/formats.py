"""The known data sets: the parser of a row, and where the public rows are.

A parser takes the id and the JSON object of a row, and raises ``UserError`` for a row that it cannot parse.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from specgen.config import require, shown
from specgen.prompts.fields import category, checked_list, checked_text
from specgen.prompts.openai_batch import is_batch, parse_batch
from specgen.prompts.own import parse_own
from specgen.prompts.prompt import Prompt
from specgen.prompts.recorded import recorded
from specgen.prompts.rows import HubSource
from specgen.text.tokenizer import Message


@dataclass(frozen=True, kw_only=True)
class Format:
    """The parser of a row, whose id is in the first of ``id_keys`` that it has, if any."""

    id_keys: tuple[str, ...]
    parse: Callable[[str, Mapping[str, Any]], Prompt]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set known by name; ``files`` are patterns of its file in a directory, the preferred one first."""

    format: Format
    hub: HubSource
    files: tuple[str, ...] = ()


def parse_users(row_id: str, row: Mapping[str, Any]) -> Prompt:
    """A row of a user's file: in the format of OpenAI's Batch API or in specgen's."""
    return (parse_batch if is_batch(row) else parse_own)(row_id, row)


def parse_turns(row_id: str, row: Mapping[str, Any]) -> Prompt:
    """MT-Bench and Spec-Bench: ``turns`` are the user's, each with the previous answers in context."""
    turns = checked_list(row.get("turns"), "turns")
    first, *later = [checked_text(turn, f"turn {number}") for number, turn in enumerate(turns, start=1)]
    return Prompt(id=row_id, messages=_question(first), follow_ups=tuple(later), category=category(row))


def parse_sharegpt(row_id: str, row: Mapping[str, Any]) -> Prompt:
    """ShareGPT: the first message is the prompt if a human wrote it; the others are kept as ``recorded``."""
    first, *others = checked_list(row.get("conversations"), "conversations")
    require(isinstance(first, dict), "conversations: the first message is not an object")
    sender = first.get("from")
    require(sender in ("human", "user"), f"the first message is from {shown(sender)}, not from a human")
    question = _question(checked_text(first.get("value"), "the first message"))
    return Prompt(id=row_id, messages=question, recorded=tuple(recorded(others)))


def parse_field(name: str, row_id: str, row: Mapping[str, Any]) -> Prompt:
    """One field is the user's message: the question of GSM8K, without examples before it.

    Or HumanEval's function head and docstring without instructions, as in benchmarks of drafters such as SpecForge's,
    which measures speed and acceptance, not pass@1.
    """
    return Prompt(id=row_id, messages=_question(checked_text(row.get(name), name)))


def _question(content: str) -> tuple[Message, ...]:
    return (Message(role="user", content=content),)


USERS = Format(id_keys=("custom_id", "id"), parse=parse_users)
TURNS = Format(id_keys=("question_id",), parse=parse_turns)
DATASETS = {
    "mt-bench": Dataset(
        format=TURNS, hub=HubSource(path="philschmid/mt-bench", split="train"), files=("question.jsonl",)
    ),
    "sharegpt": Dataset(
        format=Format(id_keys=("id",), parse=parse_sharegpt),
        hub=HubSource(
            path="anon8231489123/ShareGPT_Vicuna_unfiltered",
            data_files="ShareGPT_V3_unfiltered_cleaned_split.json",
            split="train",
        ),
        files=("ShareGPT_V3_unfiltered_cleaned_split.json",),
    ),
    "gsm8k": Dataset(
        format=Format(id_keys=("id",), parse=partial(parse_field, "question")),
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
        format=Format(id_keys=("task_id",), parse=partial(parse_field, "prompt")),
        hub=HubSource(path="openai/openai_humaneval", split="test"),
        files=("test*",),
    ),
}
