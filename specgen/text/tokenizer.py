"""The tokenizer of a checkpoint, its chat template, stop strings, and the text of every single token."""

import codecs
import copy
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.config import PINNED_DATE, TemplateKwargs, UserError, first_line, is_text, require, shown
from specgen.config.errors import require_no_stand_in
from specgen.storage import cached_files
from specgen.text.chat_template import pin_date, require_compiled, require_inside, require_known

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILES = ("tokenizer.json", "*_config.json", "config.json", "*_tokens*.json", "chat_template*")
_GIVE = "give a directory with a tokenizer.json, or a hub id that can be reached"
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for an incomplete character
_UTF8 = codecs.getincrementaldecoder("utf-8")
_ROLES = ("system", "user", "assistant")
_LONGEST_CHARACTER = 4  # bytes, in UTF-8


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a chat; ``role`` is ``system``, ``user`` or ``assistant``. ``UserError`` for another.

    ``content`` is a text, or the texts of several parts, as in OpenAI's API.
    """

    role: str
    content: str | tuple[str, ...]

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise UserError(f"the role of a message is {shown(self.role)}: use system, user or assistant")
        if isinstance(self.content, str):
            return
        if not isinstance(self.content, tuple | list) or not all(isinstance(e, str) for e in self.content):
            raise UserError(
                f"the content of a message from {self.role} is {shown(self.content)}: use a string, or the parts' texts"
            )
        object.__setattr__(self, "content", tuple(self.content))

    @property
    def text(self) -> str:
        """All of it; parts with a space between them, as ``transformers serve`` joins them for language models."""
        return self.content if isinstance(self.content, str) else " ".join(self.content)


def load_tokenizer(path_or_hub_id: str) -> "Tokenizer":
    """The tokenizer of a checkpoint: a directory with a ``tokenizer.json``, its URL, or a Hugging Face hub id.

    ``UserError`` where there is none. ``tokenizer.json`` is read as it is: ``AutoTokenizer`` would rebuild
    some families from their vocabulary, might be asked to run code, and takes two seconds longer to import.
    """
    from transformers import PreTrainedTokenizerFast

    failure = f"no tokenizer could be loaded from {path_or_hub_id!r}"
    with _in_library(failure, _GIVE):
        directory = Path(path_or_hub_id)
        if not directory.is_dir():
            directory = cached_files(path_or_hub_id, _FILES)
    require_inside(directory)
    for pattern in _FILES:
        for found in directory.glob(pattern):
            require_no_stand_in(found)  # any text is a template
    own = directory / "tokenizer.json"
    with _in_library(failure, _GIVE):
        if not own.is_file() and not any(directory.glob("*.model")):
            # the library's own words are ten lines
            raise FileNotFoundError("there is no file tokenizer.json")
        # Set explicitly, because tokenizer_config.json could name a file elsewhere.
        file = {"tokenizer_file": str(own)} if own.is_file() else {}
        tokenizer = Tokenizer(PreTrainedTokenizerFast.from_pretrained(directory, **file))
        # refuse a broken tokenizer here, not at every prompt
        tokenizer.decode(tokenizer.encode_text("a"))
        return tokenizer


@contextmanager
def _in_library(failure: str, remedy: str) -> Iterator[None]:
    """Makes a ``UserError`` of whatever the library raises, because checkpoints are untrusted data.

    A panic of its Rust code is a ``BaseException``, which it also prints.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{failure} ({first_line(error)}): {remedy}") from error


def _as_parts(content: str | tuple[str, ...]) -> object:
    """The content of a message as templates that read lists take it."""
    return content if isinstance(content, str) else [{"type": "text", "text": text} for text in content]


class Tokenizer:
    """Text to token ids and back, for one checkpoint."""

    def __init__(self, pretrained: "PreTrainedTokenizerFast") -> None:
        self._pretrained = pretrained
        self._backend = pretrained.backend_tokenizer
        # Some files contain the truncation and padding of the training run.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._pieces: dict[int, str] = {}
        self._with_text: dict[int, bool] = {}
        self.byte_values = self._bytes()  # of the tokens that stand for single bytes, by id
        # added tokens included; a model's embedding may be padded beyond it
        self.vocab_size = len(pretrained)
        # None where the checkpoint names none
        self.eos_token_id: int | None = pretrained.eos_token_id
        self.bos_token_id: int | None = pretrained.bos_token_id
        # of Gemma 4, whose files may not add it, though a text without it makes no sense to the model
        self._first = (
            [self.bos_token_id] if "<|turn>" in self._added and self.bos_token_id is not None else []
        )
        own = pretrained.chat_template
        self._own_template: str | None = own.get("default") if isinstance(own, dict) else own
        self.chat_template = self._own_template
        self.template_kwargs = TemplateKwargs()  # that chats are rendered with
        self._names: dict[str, Any] = {}  # of them, those that are handed to the template
        self._parts_read: dict[tuple[tuple[str, bool], ...], list[bool]] = {}  # see ``_reads_parts``

    def with_template_kwargs(self, kwargs: TemplateKwargs) -> "Tokenizer":
        """The same tokenizer, whose chats are rendered with ``kwargs`` alone, among which is the date if it is pinned.

        ``UserError`` for names that the template does not use.
        """
        other, given = copy.copy(self), kwargs.values
        day = given.pop(PINNED_DATE, None)
        other.chat_template, other.template_kwargs, other._names = self._own_template, kwargs, given
        other._parts_read = {}
        if given:
            other.require_chat_template()
        if other.chat_template:
            require_known(other.chat_template, given)
            other.chat_template = pin_date(other.chat_template, day)
        return other

    def added_token_id(self, text: str) -> int | None:
        """The id of the token ``text`` that is never part of other text, special or not; or None."""
        return self._added.get(text)

    def difference(self, other: "Tokenizer", whose: str = "draft model") -> str | None:
        """How the vocabulary of ``other``, ``whose`` it is, differs, by its first such token; None: it does not."""
        ours, theirs = (
            {number: piece for piece, number in each._pretrained.get_vocab().items()}
            for each in (self, other)
        )
        for number in sorted(ours.keys() | theirs.keys()):
            if ours.get(number) != theirs.get(number):
                said = [repr(each[number]) if number in each else "missing" for each in (theirs, ours)]
                return (
                    f"token {number} is {said[0]} in the {whose}'s tokenizer and {said[1]} in the target's: use a "
                    "model of the target's own vocabulary"
                )
        return None

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` leaves this token of the vocabulary out."""
        return token_id in self._special

    def names_special(self, text: str) -> bool:
        """Whether the name of a special token is part of ``text``."""
        return not self._special.isdisjoint(self.encode_rendered(text))

    def encode_text(self, text: str) -> list[int]:
        """The ids of raw text, with the special tokens (such as BOS) that the tokenizer adds, or the model needs."""
        ids = self._encode(text, add_special_tokens=True)
        return ids if ids[: len(self._first)] == self._first else self._first + ids

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of the text of ``render_chat``, which has its special tokens already."""
        return self._encode(text, add_special_tokens=False)

    def require_chat_template(self) -> None:
        """``UserError`` if there is no chat template, or one that cannot be compiled."""
        require(
            bool(self._own_template),
            "the tokenizer has no chat template: use rows with a raw `prompt`, or add chat_template.jinja to the model",
        )
        require_compiled(str(self._own_template))

    def render_chat(self, messages: Sequence[Message]) -> str:
        """``messages`` rendered by the chat template, up to the generation prompt.

        ``UserError`` where the tokenizer has no template, or the template fails on the messages. A template is a
        program: the sandbox blocks access to files and Python, but does not limit time and memory.
        """
        return self._render(messages, add_generation_prompt=True)

    def render_open_chat(self, messages: Sequence[Message]) -> str:
        """As ``render_chat``, but the last message is the start of the answer, to be continued."""
        return self._render(messages, add_generation_prompt=False)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        self.require_chat_template()
        shape = tuple((each.role, not isinstance(each.content, str)) for each in messages)
        chat = [
            (message.role, _as_parts(message.content) if is_read else message.text)
            for message, is_read in zip(messages, self._reads_parts(shape), strict=True)
        ]
        with _in_library(
            "the chat template refuses these messages",
            "change their roles or their order, or fix the template",
        ):
            return self._applied(chat, add_generation_prompt=add_generation_prompt)

    def _applied(self, chat: Sequence[tuple[str, object]], *, add_generation_prompt: bool) -> str:
        text: str = self._pretrained.apply_chat_template(
            [{"role": role, "content": content} for role, content in chat],
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._names,
        )
        return text

    def _reads_parts(self, shape: tuple[tuple[str, bool], ...]) -> list[bool]:
        """Which messages of several parts are handed to the template as these; ``shape``: roles, and whether in parts.

        A template that does not read lists writes them as Python or JSON spells them: with names and quotes around a
        text, and any character for private use escaped. Or it fails, or reads the first part alone.
        """
        if not any(in_parts for _, in_parts in shape):
            return [False] * len(shape)
        if shape not in self._parts_read:
            codes = (0xE000 + 2 * number % 6400 for number in range(len(shape)))
            marks = [(chr(code), chr(code + 1)) for code in codes]
            tried = [
                (role, _as_parts(pair if in_parts else "".join(pair)))
                for pair, (role, in_parts) in zip(marks, shape, strict=True)
            ]
            try:
                text = self._applied(tried, add_generation_prompt=True)
            except Exception:  # of any kind: the template is a program
                text = ""
            self._parts_read[shape] = [
                in_parts and all(mark in text and f'"{mark}"' not in text for mark in pair)
                for pair, (_, in_parts) in zip(marks, shape, strict=True)
            ]
        return self._parts_read[shape]

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        require(
            is_text(text), "the tokenizer cannot encode this text, which holds a lone surrogate: remove it"
        )
        with _in_library("the tokenizer cannot encode this text", "its tokenizer.json is broken"):
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        with _in_library("the tokenizer cannot decode these tokens", "its tokenizer.json is broken"):
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without special tokens; ids outside the vocabulary give no text."""
        return self._decode(token_ids, skip_special_tokens=True)

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` with special tokens written out."""
        return self._decode(token_ids, skip_special_tokens=False)

    def _bytes(self) -> Mapping[int, int]:
        """Those of a byte-fallback decoder; a vocabulary with such names under another decoder has none."""
        named = {f"<0x{value:02X}>": value for value in range(256)}
        ids = {name: self._backend.token_to_id(name) for name in named}
        return {
            token_id: named[name]
            for name, token_id in ids.items()
            if token_id is not None and token_id not in self._special and self.decode([token_id]) != name
        }

    def token_bytes(self) -> tuple[dict[int, bytes], bool]:
        """The bytes that every token but added ones writes, by id, and whether a text loses a space at its beginning.

        ``UserError`` for a decoder whose tokens write other bytes beside others.
        """
        state = json.loads(self._backend.decoder.__getstate__()) if self._backend.decoder is not None else {}
        steps = state.get("decoders", [state])
        kinds = [step.get("type") for step in steps]
        added = set(self._added.values())
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        pieces = {token_id: piece for piece, token_id in vocabulary.items() if token_id not in added}
        if kinds == ["ByteLevel"]:
            return {token_id: _of_characters(piece) for token_id, piece in pieces.items()}, False
        known = kinds[: kinds.index("Strip")] if "Strip" in kinds else kinds
        require(
            known == ["Replace", "ByteFallback", "Fuse"] and steps[0]["content"] == " ",
            f"structured outputs need a tokenizer whose tokens are bytes, and this one's decoder is {kinds}",
        )
        space = steps[0]["pattern"]["String"]
        texts = {token_id: piece.replace(space, " ").encode() for token_id, piece in pieces.items()}
        return texts | {each: bytes([value]) for each, value in self.byte_values.items()}, known != kinds

    def has_text(self, token_id: int) -> bool:
        """Whether ``decode`` returns text for this id: it is in the vocabulary and not special."""
        if token_id not in self._with_text:  # asked of every token where a text has stops
            known = self._backend.id_to_token(token_id) is not None
            self._with_text[token_id] = known and token_id not in self._special
        return self._with_text[token_id]

    def piece(self, token_id: int) -> str:
        """The decoded text of this id, repeated; U+FFFD stands for an incomplete character."""
        if token_id not in self._pieces:
            # twice, because a SentencePiece decoder drops the leading space of a text
            self._pieces[token_id] = self.decode([token_id, token_id])
        return self._pieces[token_id]


def _of_characters(piece: str) -> bytes:
    """Bytes of the characters that a byte-level vocabulary writes them as; printable ones are themselves."""
    try:
        return bytes(_byte_of()[character] for character in piece)
    except KeyError:  # no such vocabulary wrote it
        return piece.encode()


@cache
def _byte_of() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    own = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = [value for value in range(256) if chr(value) not in own]
    return own | dict(zip(alphabet[len(own) :], others, strict=True))


class ByteRuns:
    """Tokens, one by one, put behind ``shown`` such that any part of it decodes as it does in the whole text.

    A byte-fallback decoder writes byte tokens that follow each other as characters only if all of them are; else it
    writes each as U+FFFD. So one byte may spoil any number before it, and a part of a run would look different.
    Those of a spoilt run are replaced by one that is no character however often it is repeated. Only the end of
    ``shown`` is needed.
    """

    def __init__(self, tokenizer: "Tokenizer", shown: MutableSequence[int]) -> None:
        self._values = tokenizer.byte_values
        self._no_character = max(self._values, key=self._values.__getitem__, default=0)
        self._shown = shown
        self._length = 0  # of the run at the end
        self._spoilt = False
        self._decoder = _UTF8()

    def append(self, token_id: int) -> None:
        """The next token, which has text."""
        value = self._values.get(token_id)
        if value is None:
            if self._length:
                self.end()
        else:
            if not self._spoilt:
                try:
                    self._decoder.decode(bytes([value]))
                except UnicodeDecodeError:
                    self._spoil()
            self._length += 1
        self._shown.append(self._no_character if self._spoilt else token_id)

    def end(self) -> None:
        """The text, or the run, ends here."""
        if self._length and not self._spoilt and self._decoder.getstate()[0]:
            self._spoil()
        self._length, self._spoilt = 0, False
        self._decoder.reset()

    def _spoil(self) -> None:
        self._spoilt = True
        for back in range(1, min(self._length, len(self._shown)) + 1):
            self._shown[-back] = self._no_character


def _all_tokens(token_id: int) -> bool:
    return True


class _Search:
    """Finds the first of ``stops`` in what ``decode`` makes of tokens that come one by one.

    A token has at least one byte of the text, so a match lies in the last ``bytes(stop)`` tokens: only these, as
    ``ByteRuns`` has them, are decoded, however long the text is. And only a token with a stop's last character, an
    incomplete character, or no text in ``Tokenizer.decode`` can complete a stop: after any other nothing is decoded.
    Stops that contain U+FFFD are an exception, as a later token or the start of a window may turn text into it: for
    them all is decoded.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._tokenizer, self._decode = tokenizer, decode
        self.stops = tuple(stops)
        longest = max((len(stop.encode()) for stop in stops), default=0)
        # More tokens than the match: the first may be within a character, and a SentencePiece decoder drops the leading
        # space of a text.
        self._whole = any(_UNFINISHED in stop for stop in stops)
        self._tail: deque[int] = deque(maxlen=None if self._whole else longest + _LONGEST_CHARACTER)
        # without tokens of single bytes there are no runs to spoil
        self._take = ByteRuns(tokenizer, self._tail).append if tokenizer.byte_values else self._tail.append
        self._ends = {_UNFINISHED, *(stop[-1] for stop in stops)}
        self._num_counting = 0  # tokens so far

    def ends_at(self, token_id: int, counts: bool) -> bool:
        """Whether the next token, if it ``counts``, completes a stop."""
        if not self.stops:
            return False
        self._take(token_id)
        self._num_counting += counts
        return counts and self._may_complete(token_id) and self._is_complete()

    def first(self, text: str, done: int = 0) -> int | None:
        """Where in ``text`` the first stop begins that ends behind its ``done`` first characters."""
        begins = ((stop, max(done + 1 - len(stop), 0)) for stop in self.stops)
        return min((at for stop, begin in begins if (at := text.find(stop, begin)) >= 0), default=None)

    def done(self, token_ids: Sequence[int]) -> int:
        """The characters of ``token_ids`` that no later token changes."""
        return len(self._decode(token_ids).rstrip(_UNFINISHED)) if token_ids else 0

    def _may_complete(self, token_id: int) -> bool:
        piece = self._tokenizer.piece(token_id)
        return self._whole or not piece or not self._ends.isdisjoint(piece)

    def _is_complete(self) -> bool:
        window = list(self._tail)
        num_first = max(len(window) - self._num_counting, 0)  # before those that count
        # Where a window starts inside a character, a byte-fallback decoder hides the whole run of bytes: start later
        # until it decodes.
        for start in range(1 if self._whole else _LONGEST_CHARACTER):
            text = self._decode(window[start:])
            if self.first(text, self.done(window[start:num_first])) is not None:
                return True
            if not text.startswith(_UNFINISHED):
                return False
        return False


class StopStrings:
    """Finds the first stop string in the text of one sequence, token by token as it is generated.

    Only tokens that ``searched`` holds for are looked at: ``reasoning`` skips what is not the answer. A stop that the
    first ``min_tokens`` tokens complete ends nothing.

    The search is in the text of ``Tokenizer.decode``, which has no special tokens. A stop that contains the name of one
    is also looked for in the text with special tokens written out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        searched: Callable[[int], bool] = _all_tokens,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._searched = searched
        self._num_left = min_tokens  # that complete no stop
        self._shown = _Search(tokenizer, stops, tokenizer.decode)
        named = [stop for stop in stops if tokenizer.names_special(stop)]
        self._written = _Search(tokenizer, named, tokenizer.decode_with_special)

    def feed(self, new_token_ids: Sequence[int]) -> int | None:
        """How many of the new tokens to keep: up to and including the one that completes a stop string, else None."""
        if not self._shown.stops:
            return None
        for count, token_id in enumerate(new_token_ids, start=1):
            counts, self._num_left = self._num_left <= 0, self._num_left - 1
            if self._searched(token_id):
                has_text = self._tokenizer.has_text(token_id)
                is_written = has_text or self._tokenizer.is_special(token_id)
                # both take the token, whatever the other finds
                in_shown = has_text and self._shown.ends_at(token_id, counts)
                in_written = is_written and self._written.ends_at(token_id, counts)
                if in_shown or in_written:
                    return count
        return None

    def text(self, token_ids: Sequence[int], num_first: int = 0) -> str:
        """The text of ``token_ids``, all that are searched, cut before the first stop string.

        The first ``num_first`` of them complete no stop.
        """
        text = self._before_written(token_ids, num_first)
        return text[: self._shown.first(text, self._shown.done(token_ids[:num_first]))]

    def _before_written(self, token_ids: Sequence[int], num_first: int) -> str:
        """The text without special tokens before the first stop that names one."""
        decode, written = self._tokenizer.decode, self._tokenizer.decode_with_special
        whole = written(token_ids) if self._written.stops else ""
        at = self._written.first(whole, self._written.done(token_ids[:num_first]) if whole else 0)
        if at is None:
            return decode(token_ids)
        count = len(token_ids)  # from the end, where a text was ended by its stop
        while len(written(token_ids[:count])) > at:
            count -= 1
        if not self._tokenizer.has_text(token_ids[count]):
            return decode(token_ids[:count])
        # it begins within this token, or right before it; with those that end its character
        while not whole.startswith(written(token_ids[: count + 1])):
            count += 1
        text, behind = decode(token_ids[: count + 1]), len(written(token_ids[: count + 1])) - at
        return text[: max(0, len(text) - behind)]


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to ``tokenizer.decode(token_ids)``; special tokens add nothing.

    A character of several tokens is a piece of the last of them. Each token is decoded behind the few before it,
    because a decoder may drop the leading space of a text.
    """
    token_ids = _decodable(tokenizer, token_ids)
    found: list[str] = []
    begin, known = 0, 0  # tokens: where decoding begins, and those before which all characters are complete
    for end in range(1, len(token_ids) + 1):
        before = tokenizer.decode(token_ids[begin:known])
        text = tokenizer.decode(token_ids[begin:end])
        complete = len(text) > len(before) and not text.endswith(_UNFINISHED)
        found.append(text[len(before) :] if complete else "")
        if complete:
            begin, known = known, end
    whole, so_far = tokenizer.decode(token_ids), "".join(found)
    if found and whole.startswith(so_far):  # a text may end within a character
        found[-1] += whole[len(so_far) :]
    return found


def _decodable(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """As ``ByteRuns`` has them; tokens without text stay."""
    shown: list[int] = []
    runs = ByteRuns(tokenizer, shown)
    texts = [tokenizer.has_text(token_id) for token_id in token_ids]
    for token_id, has_text in zip(token_ids, texts, strict=True):
        if has_text:
            runs.append(token_id)
    runs.end()
    found = iter(shown)
    return [
        next(found) if has_text else token_id for token_id, has_text in zip(token_ids, texts, strict=True)
    ]


def fitted(parts: Sequence[str], text: str) -> list[str] | None:
    """``parts`` cut so that together they are exactly ``text``, a part of theirs; None where it is not."""
    begin = "".join(parts).find(text)
    if begin < 0:
        return None
    found, at = [], 0
    for part in parts:
        found.append(part[max(0, begin - at) : max(0, begin + len(text) - at)])
        at += len(part)
    return found
