"""The constraints of a request as one token automaton: allowed and bad words, choices, regular expressions, schemas."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache, cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Semaphore, Thread
from typing import TYPE_CHECKING

from specgen.config import SamplingParams, UserError, require
from specgen.storage import CacheFiles
from specgen.text import answer_automaton, automaton, json_schema, number_regex
from specgen.text.answer_automaton import Answer, compiled, compiled_apart
from specgen.text.automaton import Automaton, Thoughts, TokenBytes, allowing, not_first, without
from specgen.text.reasoning import thoughts

if TYPE_CHECKING:
    from collections.abc import Hashable

    from specgen.text.tokenizer import Tokenizer

_KEPT = 256  # automata
_AT_ONCE = 4  # processes that compile
KEPT = CacheFiles(kind="constraints", what="a compiled constraint")


class Constraints:
    """Compiles the constraints of requests to a target with ``vocab_size`` tokens, whose texts ``ends`` end.

    Those of answers that fit something are compiled beside the caller, several at once, and kept on disk.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = [token for token in ends if token < vocab_size]
        # the one that was used last comes last
        self._kept: OrderedDict[Hashable, Future[Automaton]] = OrderedDict()
        self._turns = Semaphore(_AT_ONCE)

    def automaton(self, sampling: SamplingParams, prompt: Sequence[int]) -> Automaton | None:
        """What ``sampling`` allows behind ``prompt``; None: everything. Waits until it is compiled.

        ``UserError`` where that cannot be.
        """
        found = self.compiling(sampling, prompt)
        if found is None:
            return None
        error = found.exception()
        if isinstance(error, UserError):
            raise UserError(str(error)) from error  # a new one: it may be raised for every row of a run
        return found.result()

    def compiling(self, sampling: SamplingParams, prompt: Sequence[int]) -> "Future[Automaton] | None":
        """``automaton``, which may not be there yet: the same object for the same constraint. Raises nothing."""
        if not sampling.constrained:
            return None
        before = self._before(sampling, prompt)
        first = None if sampling.structured_outputs is None else thoughts(self._tokenizer, prompt)
        key = (
            *(sampling.allowed_token_ids, sampling.bad_words, sampling.bad_words_ids, before),
            *(sampling.begin_suppress_tokens, sampling.structured_outputs, first),
        )
        found = self._kept.pop(key, None) or self._begun(sampling, before, first)
        self._kept[key] = found
        if len(self._kept) > _KEPT:
            oldest = next((each for each, future in self._kept.items() if future.done()), key)
            del self._kept[oldest]
        return found

    def _begun(
        self, sampling: SamplingParams, before: tuple[int, ...], first: Thoughts | None
    ) -> "Future[Automaton]":
        """What an earlier process has compiled for this tokenizer, or a thread begins to compile it, and keeps it."""
        future = Future[Automaton]()
        try:
            words = tuple(self._words(sampling, before))
            answer = self._answer(sampling, first)
            if answer is None:
                future.set_result(compiled(self._vocab_size, words, None))
                return future
        except UserError as error:
            future.set_exception(_naming(sampling, error))
            return future
        key = self._key(sampling, before, answer)
        if (found := KEPT.read(key, Automaton.of_json)) is not None:
            future.set_result(found)
            return future

        def compile_it() -> None:
            try:
                with self._turns:
                    made = compiled_apart(self._vocab_size, words, answer)
                KEPT.write(key, made.to_json())
                future.set_result(made)
            except UserError as error:
                future.set_exception(_naming(sampling, error))
            except BaseException as error:  # a bug, of whoever asks for it
                future.set_exception(error)

        Thread(target=compile_it, daemon=True).start()  # so that nobody waits for it who leaves
        return future

    def _words(self, sampling: SamplingParams, before: tuple[int, ...]) -> Iterator[Automaton]:
        """What ``sampling`` says of single tokens and words."""
        size = self._vocab_size
        if (allowed := sampling.allowed_token_ids) is not None:
            yield allowing(size, self._known(allowed, "allowed_token_ids"))
        if sampling.begin_suppress_tokens:
            yield not_first(size, self._known(sampling.begin_suppress_tokens, "begin_suppress_tokens"))
        if sampling.bad_words:
            yield without(size, [each for word in sampling.bad_words for each in self._spellings(word)])
        # a text may always end, as in ``transformers``
        if listed := [each for each in sampling.bad_words_ids if len(each) > 1 or each[0] not in self._ends]:
            yield without(size, (self._known(each, "bad_words_ids") for each in listed), before)

    def _answer(self, sampling: SamplingParams, first: Thoughts | None) -> Answer | None:
        if sampling.structured_outputs is None:
            return None
        require(bool(self._ends), "the target has no end token, which an answer that fits would end with")
        tokens, drops_space = self._tokens
        return Answer(
            asked=sampling.structured_outputs,
            tokens=tokens,
            ends=self._ends,
            drops_space=drops_space,
            thoughts=first,
        )

    def _key(self, sampling: SamplingParams, before: tuple[int, ...], answer: Answer) -> bytes:
        """All that a compiled constraint depends on."""
        words = (sampling.allowed_token_ids, sampling.bad_words, sampling.bad_words_ids, before)
        rest = (self._vocab_size, self._ends, answer.drops_space, sampling.begin_suppress_tokens)
        asked = repr((_sources(), answer.asked, answer.thoughts, words, rest))
        tokens = answer.tokens
        return b"".join(
            (asked.encode(), tokens.ids.tobytes(), tokens.data.tobytes(), tokens.lengths.tobytes())
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
    modules = (answer_automaton, automaton, json_schema, number_regex)
    for path in (__file__, *(each.__file__ for each in modules)):
        digest.update(Path(str(path)).read_bytes())
    return digest.hexdigest()


def _naming(sampling: SamplingParams, error: UserError) -> UserError:
    """``error`` behind the names of the fields of ``sampling`` that constrain."""
    off = SamplingParams()
    names = ("allowed_token_ids", "bad_words", "bad_words_ids", "begin_suppress_tokens", "structured_outputs")
    given = (name for name in names if getattr(sampling, name) != getattr(off, name))
    return UserError(f"{' and '.join(given)}: {error}")
