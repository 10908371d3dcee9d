"""The known data sets: the parser of a row, and where the public rows are.

A parser takes the id and the JSON object of a row, and raises ``UserError`` for a row that it cannot parse.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from specgen.prompts.kinds import parse_question, parse_sharegpt, parse_turns, parse_users
from specgen.prompts.prompt import Prompt
from specgen.prompts.rows import HubSource


@dataclass(frozen=True, kw_only=True)
class Format:
    """The parser of a row, whose id is in the first of ``id_keys`` that it has, if any.

    ``turns`` is the field with the user's turns, where every row has them.
    """

    id_keys: tuple[str, ...]
    parse: Callable[[str, Mapping[str, Any]], Prompt]
    turns: str | None = None


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set known by name; ``files`` are patterns of its file in a directory, the preferred one first."""

    format: Format
    hub: HubSource
    files: tuple[str, ...] = ()


USERS = Format(id_keys=("custom_id", "id", "question_id", "task_id", "message_tree_id"), parse=parse_users)
TURNS = Format(id_keys=("question_id",), parse=parse_turns, turns="turns")
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
        format=Format(id_keys=("id",), parse=partial(parse_question, "question")),
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
        format=Format(id_keys=("task_id",), parse=partial(parse_question, "prompt")),
        hub=HubSource(path="openai/openai_humaneval", split="test"),
        files=("test*",),
    ),
}
