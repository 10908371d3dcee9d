"""A prompt of a data set, and the token ids of its turns."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Self

import msgspec

from specgen.config import SamplingParams, UserError, check_own, require, shown
from specgen.config.field_types import check_types
from specgen.config.json_fields import check_keys
from specgen.record.files import sample_id
from specgen.record.record_rows import turn_id
from specgen.text.tokenizer import Message, Tokenizer

_SAMPLING = {each.name for each in fields(SamplingParams)}
_encode = msgspec.json.Encoder().encode


@lru_cache(maxsize=1024)
def _check_sampling(fields: tuple[tuple[str, object, Any], ...]) -> None:
    """``UserError`` unless names and values of ``fields`` are those of ``SamplingParams``; 1 is not True.

    A million rows often ask for the same.
    """
    given = {name: value for name, _, value in fields}
    check_keys(given, needed=set(), known=_SAMPLING)
    check_own(given)


@lru_cache(maxsize=1024)
def _changed(sampling: SamplingParams, fields: tuple[tuple[str, object, Any], ...]) -> SamplingParams:
    return replace(sampling, **{name: value for name, _, value in fields})


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A chat, a text or token ids to answer: exactly one of ``messages``, ``text`` and ``token_ids`` is set.

    ``messages`` are the opening of a chat, of which the last is the user's, and ``follow_ups`` later turns of the user,
    each asked with the answers before it in context. ``text`` is tokenized as it is, without a chat template.
    ``sampling`` has the fields of ``SamplingParams`` that differ for this prompt, such as ``{"max_tokens": 8}``;
    ``category`` is a label for reports. Ids are unique among prompts. ``UserError`` for anything else, and for values
    of other types.
    """

    id: str
    messages: tuple[Message, ...] = ()  # opening messages; the last is the user's
    text: str | None = None  # raw text, tokenized as it is
    token_ids: tuple[int, ...] = ()  # already tokenized
    follow_ups: tuple[str, ...] = ()  # later user turns, each with the previous answers in context
    # what followed ``messages`` in the data: an answer, a question, an answer ...
    recorded: tuple[Message, ...] = ()
    category: str | None = None
    endpoint: str | None = None  # ``url`` of an OpenAI batch row
    sampling: Mapping[str, Any] = field(default_factory=dict)  # its own fields of SamplingParams
    where: str = field(default="", compare=False, repr=False)  # location of the row, only for messages

    def __post_init__(self) -> None:
        check_types(self)
        if bool(self.messages) + (self.text is not None) + bool(self.token_ids) != 1:
            raise UserError(f"prompt {shown(self.id)}: set exactly one of messages, text and token_ids")
        if self.messages:
            self._check_messages()
        elif self.follow_ups:
            raise UserError(
                f"prompt {shown(self.id)} has follow_ups: they need messages, not a text or token_ids"
            )
        elif self.token_ids and min(self.token_ids) < 0:
            raise UserError(f"prompt {shown(self.id)} has the token id {min(self.token_ids)}: use 0 or more")
        if self.sampling:
            self._check_sampling()
            if self.follow_ups and self.sampling.get("n", 1) > 1:
                raise UserError(f"prompt {shown(self.id)}: {several_turns(self.sampling['n'])}")

    def _check_messages(self) -> None:
        if not isinstance(self.messages, tuple | list):
            raise UserError(f"messages is {shown(self.messages)}: use a tuple of Message")
        for message in self.messages:
            if not isinstance(message, Message):
                raise UserError(f"messages has {shown(message)}: use Message(role=..., content=...)")
        object.__setattr__(self, "messages", tuple(self.messages))
        if self.messages[-1].role != "user":
            raise UserError(
                f"prompt {shown(self.id)}: the last message is from {self.messages[-1].role}: end with the user"
            )

    def _check_sampling(self) -> None:
        if not isinstance(self.sampling, Mapping):
            raise UserError(
                f"sampling is {shown(self.sampling)}: use a dict of the fields of SamplingParams that differ"
            )
        try:
            _check_sampling(self._own)
        except TypeError:  # a list, say, has no hash
            _check_sampling.__wrapped__(self._own)

    @property
    def _own(self) -> tuple[tuple[str, object, Any], ...]:
        """Names, types and values of ``sampling``."""
        return tuple((name, type(value), value) for name, value in self.sampling.items())

    def sampling_over(self, others: SamplingParams) -> SamplingParams:
        """``others`` with its own fields: one object for prompts that ask for the same, as passes look at each once."""
        try:
            return _changed(others, self._own)
        except TypeError:
            return _changed.__wrapped__(others, self._own)

    def at(self, where: str) -> Self:
        """This prompt, just made, with its location; a copy takes five times as long."""
        object.__setattr__(self, "where", where)
        return self

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The request ids of its turns: ``ID``, ``ID/turn-2``, ..."""
        if not self.follow_ups:
            return (self.id,)
        return tuple(turn_id(self.id, turn) for turn in range(1, len(self.follow_ups) + 2))

    @property
    def last_message(self) -> str:
        """The last message without the chat template, for printing."""
        if self.messages:
            return self.messages[-1].text
        return self.text if self.text is not None else f"{len(self.token_ids)} token ids"


def several_turns(n: int) -> str:
    """Why so many samples of a prompt with follow-up turns are refused."""
    return (
        f"n is {n} and there are follow-up turns, which follow one answer: leave n out, or give single turns"
    )


def sample_ids(prompt: "Prompt | Rejected", sampling: SamplingParams) -> tuple[str, ...]:
    """The names of its requests: of its turns, or where it or ``sampling`` asks for several, of its samples.

    What is refused, samples of several turns or without a temperature, is one request a turn.
    """
    if isinstance(prompt, Rejected) or prompt.follow_ups:
        return prompt.turn_ids
    own = prompt.sampling
    n = own.get("n", sampling.n) if own else sampling.n
    if n == 1 or own.get("temperature", sampling.temperature) == 0:
        return prompt.turn_ids
    return tuple(sample_id(prompt.id, sample) for sample in range(n))


def asked_digest(prompt: Prompt, turn: int) -> str:
    """16 digits for what ``turn``, counted from 1, asks and how: all of its row but its place and later turns.

    How many samples there are changes none of them.
    """
    content = (
        *(prompt.id, prompt.text, prompt.token_ids, prompt.category, prompt.endpoint),
        *([(each.role, each.content) for each in prompt.messages], prompt.follow_ups[: turn - 1]),
        sorted(item for item in prompt.sampling.items() if item[0] != "n"),
    )
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A row that cannot be run, of which no turn is.

    ``id`` is its own, its location (``line 7``) where it has none, or both where an earlier row has the same.
    """

    id: str
    reason: str  # one short line that starts with the row's location

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The id of its error record."""
        return (self.id,)


def content_of(prompt: Prompt | Rejected) -> bytes:
    """All of it but ``n``, for a digest; three times as fast as ``repr``, which what followed in the data may need."""
    if isinstance(prompt, Prompt) and "n" in prompt.sampling:  # with more samples a run goes on
        own = {name: value for name, value in prompt.sampling.items() if name != "n"}
        prompt = replace(prompt, sampling=own)
    try:
        return _encode(prompt)
    except ValueError:  # a lone surrogate
        return repr(prompt).encode()


def question(content: str) -> tuple[Message, ...]:
    """A chat of one message, the user's."""
    return (Message(role="user", content=content),)


def failure(request_id: str, reason: str) -> str:
    """``id: reason``; where the id is the row's place, or ends with it, the place is not said twice."""
    place = reason.partition(": ")[0]
    return reason if request_id == place else f"{request_id.removesuffix(f' ({place})')}: {reason}"


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
        size = tokenizer.vocab_size
        for token_id in prompt.token_ids:
            if not 0 <= token_id < size:
                raise UserError(
                    f"token id {shown(token_id)} is outside the vocabulary of {size}: tokenize for this model"
                )
        text, ids = tokenizer.decode_with_special(prompt.token_ids), list(prompt.token_ids)
    require(bool(ids), "the tokenizer makes no token of the prompt: remove the row")
    return text, ids


def single_turns(prompt: Prompt, answers: Iterable[str]) -> Iterator[Prompt]:
    """The turns of ``prompt`` that have ``answers``, each a prompt of its own behind the answers before it."""
    history = prompt.messages
    for name, answer, question in zip(prompt.turn_ids, answers, (*prompt.follow_ups, ""), strict=False):
        yield replace(prompt, id=name, messages=history, follow_ups=())
        history += (Message(role="assistant", content=answer), Message(role="user", content=question))


def _conversation(prompt: Prompt, answers: Sequence[str]) -> list[Message]:
    messages = list(prompt.messages)
    for answer, question in zip(answers, prompt.follow_ups, strict=False):
        messages += [Message(role="assistant", content=answer), Message(role="user", content=question)]
    return messages
