"""Reasoning and answer of a generated text, separated by the tokens that a model writes around them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal, Protocol

from specgen.config import SamplingParams
from specgen.text.automaton import Thoughts
from specgen.text.tokenizer import StopStrings, Tokenizer, pieces

Part = Literal["reasoning", "answer"]
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_THINK = ("<think>", "</think>")
# of Gemma 4, which writes the name of what it opens on the rest of the line
_CHANNEL = ("<|channel>", "<channel|>")
_THOUGHT = ("", "thought")  # of such a name, what may follow at the end of a prompt
_OF_ANSWER = ("answer", True)  # what ``Reader.read`` says of its text
# The header of a message that is the answer: of the assistant, and in the channel "final" or in none.
_ANSWER = re.compile(r"\s*(assistant)?\s*(<\|channel\|>\s*final\b.*)?", re.DOTALL)


class Reader(Protocol):
    """Follows one generated text token by token."""

    @property
    def thoughts(self) -> Thoughts | None:
        """How the text may think before its answer; None where the prompt has begun that. Asked before ``read``."""
        ...

    def read(self, token_id: int) -> tuple[Part, bool]:
        """The part that the next token belongs to, and whether it is text of it: markers are not."""
        ...


def thoughts(tokenizer: Tokenizer, prompt: Sequence[int]) -> Thoughts | None:
    """How the text after ``prompt`` may think before its answer; None where there is no place for it."""
    reader = new_reader(tokenizer, prompt)
    return None if reader is None else reader.thoughts


def new_reader(tokenizer: Tokenizer, prompt: Sequence[int]) -> Reader | None:
    """A reader of the text after ``prompt``; None where the tokenizer has no tokens that mark reasoning.

    Decided by the tokens, not by the name of the model: harmony's channels (GPT-OSS), ``<think>`` (Qwen3), or
    ``<|channel>thought`` (Gemma 4).
    """
    reader = _reader_of(tokenizer)
    return None if reader is None else reader(tokenizer, prompt)


@lru_cache(maxsize=8)  # a short text takes little more than to ask for nine tokens
def _reader_of(tokenizer: Tokenizer) -> "Callable[[Tokenizer, Sequence[int]], Reader] | None":
    marked = ((_HARMONY, _HarmonyReader), (_THINK, _ThinkReader), (_CHANNEL, _ChannelReader))
    for marks, reader in marked:
        if all(tokenizer.added_token_id(text) is not None for text in marks):
            return reader
    return None


class _ThinkReader:
    """``<think>reasoning</think>answer``; the template may have written ``<think>`` at the end of the prompt.

    There is one block, at the beginning: in any other place the markers are text. Blank tokens before the answer
    are no text of it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._open, self._close = _marks(tokenizer, _THINK)
        # a question may contain the marker too: only blanks may follow that of the template
        last = _last(tokenizer, prompt)
        self._state = "reasoning" if last == self._open else "begin"
        opener = None if last == self._open else self._open
        self.thoughts = None if last == self._close else Thoughts(opener=opener, close=(self._close,))

    def read(self, token_id: int) -> tuple[Part, bool]:
        match self._state:
            case "begin" if token_id == self._open:
                self._state = "reasoning"
                return "reasoning", False
            case "reasoning":
                if token_id == self._close:
                    self._state = "blank"
                return "reasoning", token_id != self._close
            case "blank" if self._tokenizer.piece(token_id).isspace():
                return "answer", False
        self._state = "answer"
        return "answer", True


class _ChannelReader:
    """``<|channel>thought``, a line break, ``reasoning<channel|>answer``; the prompt may have written the first line.

    A block may be opened in any place: its tokens are special, and no text. Blank tokens behind it are no text either.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._open, self._close = _marks(tokenizer, _CHANNEL)
        # a question may contain the marker too, and goes on behind it
        written = tokenizer.decode_with_special(_behind_last(prompt, self._open))
        opened = self._open in prompt and written.strip() in _THOUGHT
        self._state = ("reasoning" if "\n" in written else "name") if opened else "answer"
        opener, is_over = None if opened else self._open, _last(tokenizer, prompt) == self._close
        self.thoughts = None if is_over else Thoughts(opener=opener, close=(self._close,))

    def read(self, token_id: int) -> tuple[Part, bool]:
        if token_id == self._open:
            self._state = "name"
            return "reasoning", False
        piece = self._tokenizer.piece(token_id)
        match self._state:
            case "name" | "reasoning" if token_id == self._close:
                self._state = "blank"
                return "reasoning", False
            case "name":
                self._state = "reasoning" if "\n" in piece else "name"
                return "reasoning", False
            case "reasoning":
                return "reasoning", True
            case "blank" if piece.isspace():
                return "answer", False
        self._state = "answer"
        return "answer", True


class _HarmonyReader:
    """Messages ``<|start|>assistant<|channel|>NAME<|message|>text<|end|>``, the first one begun by the prompt.

    The message in the channel ``final``, to its end token, is the answer; analysis, commentary and the headers of
    messages are reasoning. A text that begins without any header is the answer.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._start, self._channel, self._message, _ = _marks(tokenizer, _HARMONY)
        self._ends = {*_marks(tokenizer, _HARMONY_ENDS)}
        self._header: list[int] = []
        self._part: Part = "reasoning"
        self._in_message = False
        for token in _behind_last(prompt, self._start):
            self._fed(token)
        self._is_first = True
        self.thoughts: Thoughts | None = None
        if self._start in prompt and not self._in_answer:
            final = (self._channel, *tokenizer.encode_rendered("final"), self._message)
            self.thoughts = Thoughts(opener=None, close=final)

    def read(self, token_id: int) -> tuple[Part, bool]:
        if self._is_first and not self._in_message and not self._is_marker(token_id):
            self._in_message, self._part = True, "answer"
        self._is_first = False
        part, is_text = self._part, self._fed(token_id)
        # an end token belongs to its message, and a header to what is before it
        return (part, False) if token_id in self._ends else (self._part, is_text)

    @property
    def _in_answer(self) -> bool:
        return self._in_message and self._part == "answer"

    def _is_marker(self, token_id: int) -> bool:
        return token_id in (self._start, self._channel, self._message) or token_id in self._ends

    def _fed(self, token_id: int) -> bool:
        """Take a token; returns whether it is text of a message."""
        if token_id == self._message:
            header = self._tokenizer.decode_with_special(self._header)
            self._part = "answer" if _ANSWER.fullmatch(header) else "reasoning"
            self._in_message = True
        elif token_id in self._ends or token_id in (self._start, self._channel):
            if self._in_message or token_id != self._channel:
                self._header.clear()
            if token_id == self._channel:
                self._header.append(token_id)
            self._in_message, self._part = False, "reasoning"
        elif not self._in_message:
            self._header.append(token_id)
        else:
            return True
        return False


def _marks(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """The ids of ``texts``, those that are tokens."""
    found = map(tokenizer.added_token_id, texts)
    return [token for token in found if token is not None]


def _last(tokenizer: Tokenizer, prompt: Sequence[int]) -> int | None:
    """The last token that is not blank."""
    return next((token for token in reversed(prompt) if not tokenizer.piece(token).isspace()), None)


def _behind_last(token_ids: Sequence[int], marker: int | None) -> Sequence[int]:
    """The tokens behind the last ``marker``; none where there is none."""
    for at in range(len(token_ids) - 1, -1, -1):
        if token_ids[at] == marker:
            return token_ids[at + 1 :]
    return ()


class PartFinder:
    """Finds where the part of a text changes, as it is generated; without a change all of it is the answer."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._part: Part = "answer"

    def feed(self, new_token_ids: Sequence[int]) -> list[tuple[int, Part]]:
        """Index among the new tokens, and part, of those that belong to another part than the token before."""
        found: list[tuple[int, Part]] = []
        for index, token_id in enumerate(new_token_ids):
            part, _ = self._reader.read(token_id)
            if part != self._part:
                self._part = part
                found.append((index, part))
        return found


def stop_finder(
    tokenizer: Tokenizer, stops: Sequence[str], prompt: Sequence[int], min_tokens: int = 0
) -> StopStrings | None:
    """A detector of ``stops`` in the answer to ``prompt`` alone, as reasoning may contain them; None without any.

    The first ``min_tokens`` tokens, reasoning too, complete none.
    """
    if not stops:
        return None
    reader = new_reader(tokenizer, prompt)
    if reader is None:
        return StopStrings(tokenizer, stops, min_tokens=min_tokens)
    return StopStrings(
        tokenizer,
        stops,
        lambda token_id: _is_of_answer(tokenizer, token_id, reader.read(token_id)),
        min_tokens,
    )


def _is_of_answer(tokenizer: Tokenizer, token_id: int, read: tuple[Part, bool]) -> bool:
    """Whether a token is text of the answer, or a special token in it, such as its end, that a stop may name."""
    return read == _OF_ANSWER or (read[0] == "answer" and tokenizer.is_special(token_id))


def part_finder(tokenizer: Tokenizer, prompt: Sequence[int]) -> PartFinder | None:
    """A detector of the parts of what follows ``prompt``; None where no tokens mark reasoning."""
    reader = new_reader(tokenizer, prompt)
    return None if reader is None else PartFinder(reader)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A text in its parts: ``reasoning`` is None where there is none; the answer as the ids of its tokens."""

    reasoning: str | None
    num_reasoning_tokens: int  # the markers around them included
    answer: tuple[int, ...]  # special tokens in it included


def split(tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Sequence[int]) -> Parts:
    """The parts of the text ``token_ids`` after ``prompt``; blocks of reasoning are joined by a line break."""
    reader = new_reader(tokenizer, prompt)
    if reader is None:
        return Parts(reasoning=None, num_reasoning_tokens=0, answer=tuple(token_ids))
    read = [reader.read(token_id) for token_id in token_ids]
    texts = [tokenizer.decode([token_ids[index] for index in block]).strip("\n") for block in _blocks(read)]
    return Parts(
        reasoning="\n".join(filter(None, texts)) if texts else None,
        num_reasoning_tokens=sum(part == "reasoning" for part, _ in read),
        answer=tuple(
            token_id
            for token_id, each in zip(token_ids, read, strict=True)
            if _is_of_answer(tokenizer, token_id, each)
        ),
    )


def answer_of(
    tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams
) -> tuple[Parts, str]:
    """The parts of the text ``token_ids`` after ``prompt``, and the text of its answer before what ended it."""
    every = split(tokenizer, prompt, token_ids)
    parts, stops = every, sampling.stop_strings
    if token_ids and token_ids[-1] in sampling.stop_token_ids:
        parts = replace(
            split(tokenizer, prompt, token_ids[:-1]), num_reasoning_tokens=every.num_reasoning_tokens
        )
    if not stops:
        return parts, tokenizer.decode(parts.answer)
    num_first = len(split(tokenizer, prompt, token_ids[: sampling.min_tokens]).answer)
    return parts, StopStrings(tokenizer, stops).text(parts.answer, num_first)


def _blocks(read: Sequence[tuple[Part, bool]]) -> list[list[int]]:
    """The indices of tokens that are text of the reasoning, in runs that nothing interrupts."""
    runs = groupby(enumerate(read), lambda each: each[1] == ("reasoning", True))
    return [[index for index, _ in run] for is_reasoning, run in runs if is_reasoning]


def pieces_by_part(
    tokenizer: Tokenizer, prompt: str, token_ids: Sequence[int]
) -> dict[Part, list[tuple[int, str]]]:
    """Index and piece of every token after the rendered ``prompt``, in the reasoning and in the answer.

    Blocks of reasoning are joined by a line break, as in ``split``.
    """
    reader = new_reader(tokenizer, ())
    if reader is not None:  # only then is the prompt worth encoding
        reader = new_reader(tokenizer, tokenizer.encode_rendered(prompt))
    if reader is None:
        return {"answer": list(enumerate(pieces(tokenizer, token_ids)))}
    read = [reader.read(token_id) for token_id in token_ids]
    answer = [index for index, each in enumerate(read) if each == _OF_ANSWER]
    blocks: dict[Part, list[list[int]]] = {"reasoning": _blocks(read), "answer": [answer]}
    found: dict[Part, list[tuple[int, str]]] = {}
    for part in blocks:
        texts: dict[int, str] = {}
        for block in blocks[part]:
            block_pieces = pieces(tokenizer, [token_ids[index] for index in block])
            if texts and block_pieces:
                block_pieces[0] = "\n" + block_pieces[0]
            texts |= zip(block, block_pieces, strict=True)
        found[part] = [(index, texts.get(index, "")) for index, (of, _) in enumerate(read) if of == part]
    return {part: listed for part, listed in found.items() if listed}
