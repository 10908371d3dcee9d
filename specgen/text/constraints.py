"""The constraints of a request as one token automaton: allowed and bad words, choices, regular expressions, schemas."""

import hashlib
import io
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, reduce
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specgen.config import SamplingParams, StructuredOutputs, UserError, require, shown
from specgen.storage import CacheFiles
from specgen.text import automaton, json_schema, regex_program
from specgen.text.automaton import (
    NOT_ALLOWED,
    Automaton,
    ByteAutomaton,
    TokenBytes,
    allowing,
    anything,
    not_first,
    without,
)
from specgen.text.json_schema import PIECE, json_object_regex, json_regex, without_anchors

if TYPE_CHECKING:
    from collections.abc import Hashable

    from specgen.text.tokenizer import Tokenizer

_KEPT = 256  # automata
KEPT = CacheFiles(kind="constraints", what="a compiled constraint")


class Constraints:
    """Compiles the constraints of requests to a target with ``vocab_size`` tokens, whose texts ``ends`` end."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = [token for token in ends if token < vocab_size]
        self._kept: OrderedDict[Hashable, Automaton] = OrderedDict()  # the one that was used last comes last

    def automaton(self, sampling: SamplingParams, prompt: Sequence[int]) -> Automaton | None:
        """What ``sampling`` allows behind ``prompt``; None: everything. ``UserError`` where that cannot be."""
        if not sampling.constrained:
            return None
        before = self._before(sampling, prompt)
        key = (
            *(sampling.allowed_token_ids, sampling.bad_words, sampling.bad_words_ids, before),
            *(sampling.begin_suppress_tokens, sampling.structured_outputs),
        )
        found = self._kept.pop(key, None) or self._from_disk(sampling, before)
        self._kept[key] = found
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return found

    def _from_disk(self, sampling: SamplingParams, before: tuple[int, ...]) -> Automaton:
        """What an earlier process has compiled for this tokenizer, or it is compiled and kept."""
        asked = sampling.structured_outputs
        if asked is None:
            return self._compiled(sampling, before)
        words = (sampling.allowed_token_ids, sampling.bad_words, sampling.bad_words_ids, before)
        tokens, drops_space = self._tokens
        parts = (tokens.ids.tobytes(), tokens.data.tobytes(), tokens.lengths.tobytes())
        rest = (self._vocab_size, self._ends, drops_space, sampling.begin_suppress_tokens)
        key = repr((_sources(), asked, words, rest))
        key_bytes = b"".join((key.encode(), *parts))
        found = KEPT.read(key_bytes, Automaton.of_json)
        if found is None:
            found = self._compiled(sampling, before)
            KEPT.write(key_bytes, found.to_json())
        return found

    def _compiled(self, sampling: SamplingParams, before: tuple[int, ...]) -> Automaton:
        size = self._vocab_size
        parts = list[Automaton]()
        if (allowed := sampling.allowed_token_ids) is not None:
            parts.append(allowing(size, self._known(allowed, "allowed_token_ids")))
        if sampling.begin_suppress_tokens:
            parts.append(
                not_first(size, self._known(sampling.begin_suppress_tokens, "begin_suppress_tokens"))
            )
        if sampling.bad_words:
            words = [each for word in sampling.bad_words for each in self._spellings(word)]
            parts.append(without(size, words))
        # a text may always end, as in ``transformers``
        if listed := [each for each in sampling.bad_words_ids if len(each) > 1 or each[0] not in self._ends]:
            parts.append(without(size, (self._known(each, "bad_words_ids") for each in listed), before))
        ends = list[int]()
        try:
            if (asked := sampling.structured_outputs) is not None:
                require(
                    bool(self._ends), "the target has no end token, which an answer that fits would end with"
                )
                parts.append(byte_automaton(asked, self._tokens[1]).over_tokens(self._tokens[0], self._ends))
                ends = self._ends
            found = reduce(mul, parts).trimmed(ends) if parts else anything(size)
        except UserError as error:
            names = " and ".join(_names(sampling))
            raise UserError(f"{names}: {error}") from error
        return replace(
            found, classes=found.classes.astype(np.int16), successors=found.successors.astype(np.int32)
        )

    @cached_property
    def _tokens(self) -> tuple[TokenBytes, bool]:
        texts, drops_space = self._tokenizer.token_bytes()
        return TokenBytes.of(texts, self._vocab_size), drops_space

    def _before(self, sampling: SamplingParams, prompt: Sequence[int]) -> tuple[int, ...]:
        """The end of ``prompt`` that one of ``bad_words_ids`` begins with."""
        longest = max(map(len, sampling.bad_words_ids), default=0)
        ends = (tuple(prompt[at:]) for at in range(max(len(prompt) - longest + 1, 0), len(prompt)))
        return next(
            (end for end in ends if any(each[: len(end)] == end for each in sampling.bad_words_ids)), ()
        )

    def _known(self, tokens: Iterable[int], name: str) -> tuple[int, ...]:
        """``tokens``, if all are in the vocabulary."""
        for token in (tokens := tuple(tokens)):
            require(
                0 <= token < self._vocab_size,
                f"{name} names {token}, which is not in the vocabulary of {self._vocab_size}",
            )
        return tokens

    def _spellings(self, word: str) -> Iterator[tuple[int, ...]]:
        """The tokens of ``word`` at the start of a text, and behind a space where they begin with another."""
        first = tuple(self._tokenizer.encode_rendered(word.lstrip()))
        behind = tuple(self._tokenizer.encode_rendered(f" {word.lstrip()}"))
        require(bool(first), f"bad_words has {word!r}, of which the tokenizer makes no token: remove it")
        yield self._known(first, "a bad word")
        if behind[0] != first[0] and len(behind) == len(first):
            yield self._known(behind, "a bad word")


@cache
def _sources() -> str:
    """A digest of the code that compiles: what another version has made is not used."""
    digest = hashlib.sha256(version("outlines_core").encode() if find_spec("outlines_core") else b"")
    for module in (__file__, automaton.__file__, json_schema.__file__, regex_program.__file__):
        digest.update(Path(str(module)).read_bytes())
    return digest.hexdigest()


def byte_automaton(asked: StructuredOutputs, drops_space: bool = False) -> ByteAutomaton:
    """The texts that fit ``asked``, also with a space before them that a decoder ``drops``. ``UserError`` for none."""
    if asked.choice:
        found = _of_choices([choice.encode() for choice in asked.choice])
    elif asked.regex is not None:
        found = _of_regex(asked.regex)
    else:
        found = _of_regex(json_object_regex() if asked.json is None else json_regex(str(asked.json)))
    if not drops_space:
        return found
    begin = np.where(found.successors[:1] < 0, NOT_ALLOWED, found.successors[:1] + 1)
    begin[0, ord(" ")] = 1  # where the text really begins
    moved = np.where(found.successors < 0, NOT_ALLOWED, found.successors + 1)
    return ByteAutomaton(
        successors=np.concatenate((begin, moved)), final=np.concatenate((found.final[:1], found.final))
    )


def _of_choices(choices: Sequence[bytes]) -> ByteAutomaton:
    """A tree of their bytes."""
    begun = sorted({choice[:size] for choice in choices for size in range(len(choice) + 1)})
    number_of = {each: number for number, each in enumerate(begun)}
    successors = np.full((len(begun), 256), NOT_ALLOWED)
    for each, number in number_of.items():
        if each:
            successors[number_of[each[:-1]], each[-1]] = number
    return ByteAutomaton(
        successors=successors, final=np.isin(np.arange(len(begun)), [number_of[each] for each in choices])
    )


def _of_regex(regex: str) -> ByteAutomaton:
    require(
        find_spec("outlines_core") is not None,
        "regular expressions and JSON schemas need outlines-core: pip install '.[structured]'",
    )
    whole = without_anchors(regex)
    depth = list(accumulate({"(": 1, ")": -1}.get(piece, 0) for piece in PIECE.findall(whole)))
    require(min(depth, default=0) >= 0, f"{shown(regex)} has a closing parenthesis without an opening one")
    return run_program(whole)


def run_program(regex: str) -> ByteAutomaton:
    """What ``regex_program`` makes of ``regex``, in a process of its own."""
    program = [sys.executable, "-P", regex_program.__file__]
    ended = subprocess.run(program, input=regex.encode(), capture_output=True, check=False)
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        reason = said[-1] if said and ended.returncode > 0 else "it takes too long, or too much memory"
        raise UserError(
            f"{shown(regex)} cannot be compiled ({reason}): look-around, back-references and word boundaries are not "
            "supported"
        )
    found = np.load(io.BytesIO(ended.stdout))
    return ByteAutomaton(successors=found["successors"], final=found["final"])


def _names(sampling: SamplingParams) -> Iterator[str]:
    """Of the fields that constrain."""
    off = SamplingParams()
    names = ("allowed_token_ids", "bad_words", "bad_words_ids", "begin_suppress_tokens", "structured_outputs")
    return (name for name in names if getattr(sampling, name) != getattr(off, name))
