"""The known data sets: the parser of a row, where the public rows are, and how a user says that rows are to be read.

A parser takes the id and the JSON object of a row, and raises ``UserError`` for a row that it cannot parse.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specgen.config import UserError, option, require
from specgen.prompts.kinds import parse_field, parse_question, parse_sharegpt, parse_turns, parse_users
from specgen.prompts.prompt import Prompt, question
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


@dataclass(frozen=True, kw_only=True)
class Reading:
    """``chat`` puts a text into the chat template as the user's message, or not; None: as its kind of row has it."""

    split: str | None = option(
        None,
        "Prompts",
        "Read this split of a data set on the hub, such as test, or of a directory laid out like one.",
        shown="that of a known data set, else the only one",
    )
    prompt_field: str | None = option(
        None,
        "Prompts",
        "The field of a row that is the prompt: a text, a list of the user's turns or of messages. a.b is field b of "
        "field a.",
        shown="recognised by the fields",
        metavar="NAME",
    )
    chat: bool | None = option(
        None,
        "Prompts",
        "A text is the user's message in the chat template, or is taken as it is.",
        off="raw",
        shown="as its kind of row has it",
    )

    def __post_init__(self) -> None:
        require(self.prompt_field != "", "prompt-field is empty: name a field of the rows")

    @property
    def is_open(self) -> bool:
        """Whether it is left to the rows."""
        return self.prompt_field is None and self.chat is None

    def format(self, known: Format) -> Format:
        """``known``, or the format of rows with the field that is asked for."""
        if self.prompt_field is None:
            return known
        return replace(known, parse=partial(parse_field, self.prompt_field), turns=self.prompt_field)

    def applied(self, prompt: Prompt) -> Prompt:
        """``prompt`` with its text in the chat template or without; ``UserError`` where that cannot be."""
        if self.chat is None:
            return prompt
        if prompt.endpoint is not None:
            raise UserError("the url of a batch row says whether it is a chat: leave out --chat and --raw")
        if self.chat:
            if prompt.token_ids:
                raise UserError("token ids cannot be put into a chat template: leave out --chat")
            return (
                prompt if prompt.text is None else replace(prompt, text=None, messages=question(prompt.text))
            )
        if len(prompt.messages) > 1 or prompt.follow_ups:
            raise UserError("several messages or turns need the chat template: leave out --raw")
        if prompt.messages:
            return replace(prompt, text=prompt.messages[0].content, messages=())
        return prompt


AS_IT_IS = Reading()
