"""A prompt of a data set, and the token ids of its turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from specgen.config import require
from specgen.text.tokenizer import Message, Tokenizer


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A row of a data set; exactly one of ``messages``, ``text`` and ``token_ids`` is set."""

    id: str
    messages: tuple[Message, ...] = ()  # opening messages; the last is the user's
    text: str | None = None  # raw text, tokenized as it is
    token_ids: tuple[int, ...] = ()  # already tokenized
    follow_ups: tuple[str, ...] = ()  # later user turns, each with the previous answers in context
    recorded: tuple[
        Message, ...
    ] = ()  # what followed ``messages`` in the data: an answer, a question, an answer ...
    category: str | None = None
    endpoint: str | None = None  # ``url`` of an OpenAI batch row
    sampling: Mapping[str, Any] = field(default_factory=dict)  # its own fields of SamplingParams
    where: str = field(default="", compare=False, repr=False)  # location of the row, only for messages

    def at(self, where: str) -> Self:
        """This prompt, just made, with its location; a copy takes five times as long."""
        object.__setattr__(self, "where", where)
        return self

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The request ids of its turns: ``ID``, ``ID/turn-2``, ..."""
        if not self.follow_ups:
            return (self.id,)
        return self.id, *[f"{self.id}/turn-{turn}" for turn in range(2, len(self.follow_ups) + 2)]

    @property
    def last_message(self) -> str:
        """The last message without the chat template, for printing."""
        if self.messages:
            return self.messages[-1].content
        return self.text if self.text is not None else f"{len(self.token_ids)} token ids"


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A row that cannot be run. ``id`` is its own, or its location (``line 7``) if that is missing or a duplicate."""

    id: str
    reason: str  # one short line that starts with the row's location

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The id of its error record."""
        return (self.id,)


def question(content: str) -> tuple[Message, ...]:
    """A chat of one message, the user's."""
    return (Message(role="user", content=content),)


def failure(request_id: str, reason: str) -> str:
    """``id: reason``; the id of a row without one is its place, with which the reason starts already."""
    return reason if reason.startswith(f"{request_id}: ") else f"{request_id}: {reason}"


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, answers: Sequence[str]) -> tuple[str, list[int]]:
    """Text and token ids of turn ``len(answers) + 1``, with the answers in context.

    ``UserError`` where the tokenizer cannot encode this prompt.
    """
    assert len(answers) <= len(prompt.follow_ups), "there is no user turn after the last answer"
    if prompt.messages:
        text = tokenizer.render_chat(_conversation(prompt, answers))
        ids = tokenizer.encode_rendered(text)
    elif prompt.text is not None:
        text, ids = prompt.text, tokenizer.encode_text(prompt.text)
    else:
        largest, size = max(prompt.token_ids, default=0), tokenizer.vocab_size
        require(
            largest < size, f"token id {largest} is outside the vocabulary of {size}: tokenize for this model"
        )
        text, ids = tokenizer.decode_with_special(prompt.token_ids), list(prompt.token_ids)
    require(bool(ids), "the tokenizer makes no token of the prompt: remove the row")
    return text, ids


def _conversation(prompt: Prompt, answers: Sequence[str]) -> list[Message]:
    messages = list(prompt.messages)
    for answer, question in zip(answers, prompt.follow_ups, strict=False):
        messages += [Message(role="assistant", content=answer), Message(role="user", content=question)]
    return messages
