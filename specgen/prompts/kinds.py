"""The kinds of rows that a user's file may hold, each recognised by its fields; and how a field is made a prompt."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specgen.config import UserError, require, shown
from specgen.prompts.fields import category, chat, checked_list, checked_text, label, read_sampling
from specgen.prompts.own import CONTENT_FIELDS, is_batch, parse_batch, parse_own
from specgen.prompts.prompt import Prompt, question
from specgen.text.tokenizer import Message

Row = Mapping[str, Any]
_SENDERS = {  # of ShareGPT
    "user": ("human", "user"),
    "assistant": ("gpt", "chatgpt", "assistant", "bing", "bard"),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How rows are parsed; ``note`` says how rows are read, where the file does not say it itself."""

    parse: Callable[[str, Row], Prompt]
    note: str = ""


def parse_turns(row_id: str, row: Row) -> Prompt:
    """MT-Bench and Spec-Bench: ``turns`` are the user's, each with the previous answers in context."""
    turns = checked_list(row.get("turns"), "turns")
    first, *later = [checked_text(turn, f"turn {number}") for number, turn in enumerate(turns, start=1)]
    return Prompt(id=row_id, messages=question(first), follow_ups=tuple(later), category=category(row))


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


def parse_question(name: str, row_id: str, row: Row) -> Prompt:
    """One field is the user's message: the question of GSM8K, without examples before it.

    Or HumanEval's function head and docstring without instructions, as in benchmarks of drafters such as SpecForge's,
    which measures speed and acceptance, not pass@1.
    """
    return Prompt(id=row_id, messages=question(checked_text(row.get(name), name)), category=label(row))


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


def _of(name: str) -> Callable[[str, Row], Prompt]:
    return lambda row_id, row: parse_question(name, row_id, row)


_OWN = Kind(parse=parse_own)
_BATCH = Kind(parse=parse_batch)
_HUMANEVAL = Kind(parse=_of("prompt"), note="read as humaneval: the field prompt as a user's message")
_TREE = Kind(parse=_parse_tree, note="read as trees of messages: the first one as a user's message")
_OTHERS = {  # by the field that tells, in the order in which they are looked for
    "turns": Kind(parse=parse_turns, note="read as mt-bench: the field turns"),
    "conversations": Kind(parse=parse_sharegpt, note="read as sharegpt: the first message of conversations"),
    "history": Kind(parse=_parse_history, note="read as mt-bench-101: what the user says in history"),
    "question": Kind(parse=_of("question"), note="read as gsm8k: the field question as a user's message"),
    "instruction": Kind(
        parse=_parse_instruction, note="read as instructions: instruction and input as a user's message"
    ),
    "text": Kind(parse=_of("text"), note="read by the field text, as a user's message"),
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
    return next((kind for field, kind in _OTHERS.items() if row.get(field) is not None), _OWN)


def num_turns(row: object, name: str | None) -> int:
    """The user's turns in a row, also in one that cannot be parsed; ``name`` is that of their field, if it is known."""
    if not isinstance(row, Mapping):
        return 1
    if name is None:
        parse = kind_of(row).parse
        name = "turns" if parse is parse_turns else "history" if parse is _parse_history else None
    said = row.get(name) if name is not None else None
    are_turns = isinstance(said, list) and (
        name in ("turns", "history") or all(isinstance(e, str) for e in said)
    )
    return max(len(said), 1) if isinstance(said, list) and are_turns else 1


def parse_users(row_id: str, row: Row) -> Prompt:
    """A row of a user's file, by its kind; sampling parameters may be in any."""
    kind = kind_of(row)
    prompt = kind.parse(row_id, row)
    if kind.note and (sampling := read_sampling(row)):
        return replace(prompt, sampling=sampling)
    return prompt
