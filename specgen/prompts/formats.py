"""How a row becomes a prompt: the known data sets, the kinds of rows of a user's file, and what a user says of them.

A parser takes the id and the JSON object of a row, and raises ``UserError`` for a row that it cannot parse.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specgen.config import UserError, option, require, shown
from specgen.prompts.fields import category, chat, checked_list, checked_text, label, read_sampling
from specgen.prompts.own import CONTENT_FIELDS, is_batch, parse_batch, parse_own
from specgen.prompts.prompt import Prompt, question
from specgen.prompts.rows import HubSource
from specgen.text.tokenizer import Message

Row = Mapping[str, Any]
_SENDERS = {  # of ShareGPT
    "user": ("human", "user"),
    "assistant": ("gpt", "chatgpt", "assistant", "bing", "bard"),
}


# In place of SPEED-Bench's texts on the hub, in front of what is put around them
_TO_FETCH = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


class UnpreparedError(Exception):
    """A row is no more than the place of a text; the text is one line for the user. No figure of such rows is right."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How rows are parsed; ``note`` says how rows are read, where the file does not say it itself."""

    parse: Callable[[str, Row], Prompt]
    note: str = ""


def parse_turns(row_id: str, row: Row) -> Prompt:
    """MT-Bench and Spec-Bench: ``turns`` are the user's, each with the previous answers in context.

    ``UnpreparedError`` for SPEED-Bench as it is on the hub.
    """
    turns = checked_list(row.get("turns"), "turns")
    first, *later = [checked_text(turn, f"turn {number}") for number, turn in enumerate(turns, start=1)]
    if any(turn.startswith(_TO_FETCH) for turn in (first, *later)):
        raise UnpreparedError(
            "the texts of SPEED-Bench are not in these rows: fetch them with prepare_data.py of NVIDIA's "
            "Model-Optimizer (examples/specdec_bench), and name what it writes"
        )
    return Prompt(id=row_id, messages=question(first), follow_ups=tuple(later), category=category(row))


def _parse_first_turn(row_id: str, row: Row) -> Prompt:
    """MT-Bench's first turn alone."""
    first = checked_text(checked_list(row.get("turns"), "turns")[0], "turn 1")
    return Prompt(id=row_id, messages=question(first), category=category(row))


def _parse_speed(row_id: str, row: Row) -> Prompt:
    """SPEED-Bench as Model-Optimizer prepares it, with ``turns``, or NeMo-Skills: a user's message for each of them."""
    if row.get("turns") is not None:
        return parse_turns(row_id, row)
    said = [
        message.get("content") if isinstance(message, dict) and message.get("role") == "user" else None
        for message in checked_list(row.get("messages"), "messages")
    ]
    return parse_turns(row_id, {"turns": said, "category": row.get("category")})


def parse_sharegpt(row_id: str, row: Row) -> Prompt:
    """ShareGPT: the first message is the prompt if a human wrote it; the others are kept as ``recorded``."""
    first, *others = checked_list(row.get("conversations"), "conversations")
    require(isinstance(first, dict), "conversations: the first message is not an object")
    sender = first.get("from")
    if sender not in ("human", "user"):
        raise UserError(f"the first message is from {shown(sender)}, not from a human")
    messages = question(checked_text(first.get("value"), "the first message"))
    return Prompt(id=row_id, messages=messages, recorded=tuple(_recorded(others)))


def _recorded(others: Sequence[object]) -> Iterator[Message]:
    """The messages behind ShareGPT's first: answers and questions in turn, up to the first that is out of turn."""
    for number, message in enumerate(others):
        role = "user" if number % 2 else "assistant"
        if not isinstance(message, dict) or message.get("from") not in _SENDERS[role]:
            return
        text = message.get("value")
        if not isinstance(text, str) or not text.strip():
            return
        yield Message(role=role, content=text)


def parse_question(name: str, row_id: str, row: Row, *, form: str = "{}") -> Prompt:
    """One field is the user's message, put into ``form``: the question of GSM8K, without examples before it.

    Or HumanEval's function head and docstring without instructions, as in benchmarks of drafters such as SpecForge's,
    which measures speed and acceptance, not pass@1.
    """
    text = form.format(checked_text(row.get(name), name))
    return Prompt(id=row_id, messages=question(text), category=label(row))


def parse_field(name: str, row_id: str, row: Row) -> Prompt:
    """The field ``name`` (``a.b`` is field ``b`` of ``a``), a text, is the user's message.

    A list of texts is the user's turns, a list of messages a chat. As in an own row there may be sampling parameters.
    """
    value: Any = row
    for part in (name,) if name in row else name.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            raise UserError(f"no field {shown(name)}: the row has {shown(', '.join(row))}")
        value = value[part]
    if isinstance(value, list) and value and isinstance(value[0], str):
        prompt = parse_turns(row_id, {"turns": value})
    else:
        prompt = Prompt(
            id=row_id,
            messages=chat(value) if isinstance(value, list) else question(checked_text(value, name)),
        )
    return replace(prompt, category=label(row), sampling=read_sampling(row))


def _parse_history(row_id: str, row: Row) -> Prompt:
    """MT-Bench-101: what the user says in each turn; the answers in the file are not used."""
    said = [
        each.get("user") if isinstance(each, dict) else None
        for each in checked_list(row["history"], "history")
    ]
    return parse_turns(row_id, {"turns": said, "category": label(row) or label(row, "task")})


def _parse_instruction(row_id: str, row: Row) -> Prompt:
    """Alpaca and Self-Instruct: the instruction, and after a blank line its input, of the first instance, if any."""
    holder = row
    if isinstance(row.get("instances"), list) and row["instances"] and isinstance(row["instances"][0], dict):
        holder = row["instances"][0]
    text, given = checked_text(row["instruction"], "instruction"), holder.get("input") or ""
    if given:
        text = f"{text}\n\n{checked_text(given, 'input')}"
    return Prompt(id=row_id, messages=question(text), category=label(row))


def _parse_tree(row_id: str, row: Row) -> Prompt:
    """OpenAssistant's message trees: the first message."""
    first = row["prompt"]
    return Prompt(id=row_id, messages=question(checked_text(first.get("text"), "the text of the prompt")))


_OWN = Kind(parse=parse_own)
_BATCH = Kind(parse=parse_batch)
_HUMANEVAL = Kind(
    parse=partial(parse_question, "prompt"), note="read as humaneval: the field prompt as a user's message"
)
_TREE = Kind(parse=_parse_tree, note="read as trees of messages: the first one as a user's message")
_OTHERS = {  # by the field that tells, in the order in which they are looked for
    "turns": Kind(parse=parse_turns, note="read as mt-bench: the field turns"),
    "conversations": Kind(parse=parse_sharegpt, note="read as sharegpt: the first message of conversations"),
    "history": Kind(parse=_parse_history, note="read as mt-bench-101: what the user says in history"),
    "question": Kind(
        parse=partial(parse_question, "question"),
        note="read as gsm8k: the field question as a user's message",
    ),
    "instruction": Kind(
        parse=_parse_instruction, note="read as instructions: instruction and input as a user's message"
    ),
    "text": Kind(parse=partial(parse_question, "text"), note="read by the field text, as a user's message"),
}


def kind_of(row: Row) -> Kind:
    """What a row of a user's file is; an own row where nothing else fits, which says what is missing."""
    if is_batch(row):
        return _BATCH
    prompt = row.get("prompt")
    if isinstance(prompt, dict) and "text" in prompt:
        return _TREE
    if isinstance(prompt, str) and "entry_point" in row and "task_id" in row:
        return _HUMANEVAL
    if any(row.get(name) is not None for name in CONTENT_FIELDS):
        return _OWN
    # an empty list tells nothing: LLaMA-Factory's instructions have a history too
    return next((kind for field, kind in _OTHERS.items() if row.get(field) not in (None, [])), _OWN)


def parse_users(row_id: str, row: Row) -> Prompt:
    """A row of a user's file, by its kind; sampling parameters may be in any."""
    kind = kind_of(row)
    prompt = kind.parse(row_id, row)
    if kind.note and (sampling := read_sampling(row)):
        return replace(prompt, sampling=sampling)
    return prompt


# --- known data sets ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Format:
    """The parser of a row, whose id is in the first of ``id_keys`` that it has, if any."""

    id_keys: tuple[str, ...]
    parse: Callable[[str, Row], Prompt]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set known by name; ``files`` are patterns of its file in a directory, the preferred one first.

    Without ``hub`` it is only read from a user's file.
    """

    format: Format
    hub: HubSource | None = None
    files: tuple[str, ...] = ()


USERS = Format(id_keys=("custom_id", "id", "question_id", "task_id", "message_tree_id"), parse=parse_users)
TURNS = Format(id_keys=("question_id",), parse=parse_turns)
_PLAIN = {
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
    "speed-bench": Dataset(
        format=Format(id_keys=("question_id",), parse=_parse_speed),
        files=("qualitative/test*", "qualitative*"),
    ),
    "humaneval": Dataset(
        format=Format(id_keys=("task_id",), parse=partial(parse_question, "prompt")),
        hub=HubSource(path="openai/openai_humaneval", split="test"),
        files=("test*",),
    ),
}
# How published tables ask them: of DeepSpec's `eval_datasets`, and of vLLM's `acceptance_rates/utils.py`.
_ASKED: dict[str, Callable[[str, Row], Prompt]] = {
    "mt-bench": _parse_first_turn,
    "gsm8k": partial(
        parse_question,
        "question",
        form="{}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    ),
    "humaneval": partial(
        parse_question,
        "prompt",
        form="Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\n{}\n```",
    ),
}
DATASETS = _PLAIN | {
    f"{name}:{table}": replace(_PLAIN[name], format=Format(id_keys=_PLAIN[name].format.id_keys, parse=parse))
    for table in ("dspark", "vllm")
    for name, parse in _ASKED.items()
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
        shown="depends on the row's fields",
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
        return replace(known, parse=partial(parse_field, self.prompt_field))

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
            return replace(prompt, text=prompt.messages[0].text, messages=())
        return prompt


AS_IT_IS = Reading()
