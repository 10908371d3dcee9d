"""Token automata: which tokens a constraint allows behind a text, as tables of states and classes of tokens.

Tokens that behave alike in every state share a class, so a table has a row per state and a column per class: in JSON
nearly all of a vocabulary are a few classes of text within strings. Automata multiply, so any number of constraints on
one text are one automaton.
"""

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.config import LARGEST_AUTOMATON, UserError, require

Numbers = NDArray[np.int64]
_MOST_CLASSES = 2**15 - 1  # int16 has as many
_FEW = 32  # tokens, of which one may be all that the others begin
NOT_ALLOWED = -1


@dataclass(frozen=True, kw_only=True)
class Thoughts:
    """The tokens around what a model may think before its answer."""

    opener: int | None  # the first token of a text that thinks; None: the prompt has it
    close: tuple[int, ...]  # that the answer comes behind


@dataclass(frozen=True, kw_only=True, eq=False)
class Automaton:
    """A deterministic automaton over token ids. An end token is a token: where one is allowed a text may end."""

    classes: NDArray[np.integer[Any]]  # [V] of every token
    successors: NDArray[np.integer[Any]]  # [S, C] the state behind a token of a class, or NOT_ALLOWED
    start: int = 0
    ends: tuple[int, ...] = ()  # tokens that end a text that fits; none where any text does
    forced: NDArray[np.integer[Any]] | None = None  # [S] of every state, see ``with_forced``

    @property
    def table(self) -> NDArray[np.integer[Any]]:
        """[S, 1 + C]: forced tokens, or NOT_ALLOWED, in front of the successors."""
        forced = np.full(len(self.successors), NOT_ALLOWED) if self.forced is None else self.forced
        return np.column_stack((forced, self.successors))

    @property
    def num_entries(self) -> int:
        """Of ``table``."""
        return len(self.successors) + self.successors.size

    def fits(self, state: int) -> bool:
        """Whether a text may end in ``state``."""
        return not self.ends or any(self.after(state, token) != NOT_ALLOWED for token in self.ends)

    def to_json(self) -> dict[str, Any]:
        """For a file of the cache."""
        parts = {"classes": self.classes, "table": self.table}
        packed = {
            name: b64encode(zlib.compress(each.astype(np.int32).tobytes(), 1)).decode()
            for name, each in parts.items()
        }
        return packed | {"start": self.start, "num_states": len(self.successors), "ends": self.ends}

    @classmethod
    def of_json(cls, value: Any) -> "Automaton":  # noqa: ANN401
        """What ``to_json`` has written; any exception for anything else."""
        try:
            packed = [zlib.decompress(b64decode(value[name])) for name in ("classes", "table")]
        except zlib.error as error:
            raise ValueError(str(error)) from error
        classes, entries = (np.frombuffer(each, np.int32) for each in packed)
        forced, table = np.split(entries.reshape(value["num_states"], -1), [1], axis=1)
        if not (
            classes.min() >= 0
            and classes.max() < table.shape[1]
            and table.max() < len(table) > value["start"]
            and forced.max() < len(classes)
        ):
            raise ValueError("its numbers do not fit together")
        return cls(
            classes=classes.astype(np.int16),
            successors=table,
            start=value["start"],
            ends=tuple(value["ends"]),
            forced=forced[:, 0],
        )

    def after(self, state: int, token: int) -> int:
        """The state behind ``token``, or NOT_ALLOWED."""
        return int(self.successors[state, self.classes[token]])

    def walk(self, tokens: Iterable[int], state: int | None = None) -> int:
        """The state behind ``tokens`` from ``state``, or the start, on; or NOT_ALLOWED."""
        state = self.start if state is None else state
        for token in tokens:
            state = self.after(state, token)
            if state == NOT_ALLOWED:
                break
        return state

    def __mul__(self, other: "Automaton") -> "Automaton":
        """What allows a token where both do; states that the start cannot reach are left out."""
        both, classes = np.unique(
            self.classes * other.successors.shape[1] + other.classes, return_inverse=True
        )
        mine = self.successors[:, both // other.successors.shape[1]]
        theirs = other.successors[:, both % other.successors.shape[1]]
        width = len(other.successors)
        known = np.array([self.start * width + other.start])
        number_of = {int(known[0]): 0}
        rows: list[Numbers] = []
        while len(known):
            first, second = mine[known // width], theirs[known % width]
            pairs = np.where((first < 0) | (second < 0), NOT_ALLOWED, first * width + second)
            rows.append(pairs)
            found = np.unique(pairs)
            known = np.array([pair for pair in found if pair >= 0 and int(pair) not in number_of], np.int64)
            number_of |= {int(pair): len(number_of) + index for index, pair in enumerate(known)}
            require_size(len(number_of), len(both))
        table = np.concatenate(rows)
        pairs, at = np.unique(table, return_inverse=True)
        numbers = np.array([number_of.get(int(pair), NOT_ALLOWED) for pair in pairs], np.int64)
        return Automaton(classes=classes.astype(np.int64), successors=numbers[at].reshape(table.shape))

    def behind(self, thoughts: Thoughts, ends: Sequence[int]) -> "Automaton":
        """What this one takes, behind anything that ``thoughts`` close, where they are opened; they hold no ``ends``.

        All but the first two tokens that close have to follow each other: what they begin is no thought.
        """
        close, opener = thoughts.close, thoughts.opener
        tokens = [*dict.fromkeys((*close, *ends, *(() if opener is None else (opener,))))]
        kinds = np.zeros(len(self.classes), np.int64)
        kinds[tokens] = np.arange(1, 1 + len(tokens))
        both, classes = np.unique(self.classes * (1 + len(tokens)) + kinds, return_inverse=True)
        table = self.successors[:, both // (1 + len(tokens))]
        first = len(table)  # what has been closed so far is of no token, one, two ...

        def row(others: NDArray[np.integer[Any]], given: dict[int, int]) -> NDArray[np.integer[Any]]:
            found = others.copy()
            for token, state in given.items():
                found[both % (1 + len(tokens)) == 1 + tokens.index(token)] = state
            return found

        never = dict.fromkeys(ends, NOT_ALLOWED)
        rows = list[NDArray[np.integer[Any]]]()
        for at, token in enumerate(close):
            following = first + at + 1 if at + 1 < len(close) else self.start
            others = np.full(len(both), first if at < 2 else NOT_ALLOWED)
            again = {close[0]: first + 1} if at == 1 else {}
            rows.append(row(others, never | again | {token: following}))
        if opener is not None:
            rows.append(row(table[self.start], {opener: first}))
        start = first if opener is None else first + len(close)
        return Automaton(classes=classes, successors=np.vstack((table, *rows)), start=start)

    def with_forced(self, tokens: "TokenBytes") -> "Automaton":
        """With the longest token that is allowed, where all others are beginnings of it, or NOT_ALLOWED.

        An end is none behind which text might go on.
        """
        text_of = {int(token): tokens.text(index) for index, token in enumerate(tokens.ids)}
        allowed = self.successors >= 0
        num_allowed = allowed @ np.bincount(self.classes, minlength=allowed.shape[1])
        members = [np.nonzero(self.classes == kind)[0] for kind in range(allowed.shape[1])]
        forced = np.full(len(allowed), NOT_ALLOWED)
        for state in np.nonzero((num_allowed > 0) & (num_allowed <= _FEW))[0]:
            listed = np.concatenate([members[kind] for kind in np.nonzero(allowed[state])[0]])
            texts = {int(token): text_of.get(int(token), b"") for token in listed}
            longest = max(texts, key=lambda token: len(texts[token]))
            if len(texts) == 1 or all(text and texts[longest].startswith(text) for text in texts.values()):
                forced[state] = longest
        return replace(self, forced=forced)

    def trimmed(self, ends: Sequence[int] = ()) -> "Automaton":
        """Without states from which no text can end by one of ``ends``; with none, from which no text can go on.

        ``UserError`` where nothing is left.
        """
        table = self.successors
        source, target = np.nonzero(table >= 0)[0], table[table >= 0]
        source, target = np.divmod(np.unique(source * len(table) + target), len(table))
        alive: NDArray[np.bool_] = np.ones(len(table), np.bool_)
        if ends:
            alive = np.isin(np.arange(len(table)), np.nonzero(table[:, self.classes[list(ends)]] >= 0)[0])
        while True:
            led = np.zeros_like(alive)
            led[source[alive[target]]] = True
            changed = led | alive if ends else led
            if (changed == alive).all():
                break
            alive = changed
        require(bool(alive[self.start]), "no text fits all of it")
        numbers = np.append(np.where(alive, np.cumsum(alive) - 1, NOT_ALLOWED), NOT_ALLOWED)
        return Automaton(
            classes=self.classes,
            successors=numbers[table[alive]],
            start=int(numbers[self.start]),
            ends=tuple(ends),
        )


def _distinct(rows: NDArray[np.int32]) -> tuple[NDArray[np.int32], Numbers]:
    """The different ones of ``rows`` ``[n, m]``, and which of them each is, ``[n]``."""
    rows = np.ascontiguousarray(rows)
    whole = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
    _, first, number = np.unique(whole, return_index=True, return_inverse=True)
    return rows[first], number.reshape(-1)


def require_size(num_states: int, num_classes: int) -> None:
    """``UserError`` for a table that would be too large."""
    if num_states * num_classes > LARGEST_AUTOMATON or num_classes > _MOST_CLASSES:
        raise UserError(
            f"its table takes more than {LARGEST_AUTOMATON >> 18} MiB ({num_states:,} states of {num_classes:,} kinds "
            "of tokens): bound its strings and lists, or ask for less of it"
        )


def anything(vocab_size: int) -> Automaton:
    """Any token, anywhere."""
    return Automaton(classes=np.zeros(vocab_size, np.int64), successors=np.zeros((1, 1), np.int64))


def allowing(vocab_size: int, tokens: Iterable[int]) -> Automaton:
    """``tokens`` alone, anywhere."""
    classes = np.zeros(vocab_size, np.int64)
    classes[list(tokens)] = 1
    return Automaton(classes=classes, successors=np.array([[NOT_ALLOWED, 0]]))


def not_first(vocab_size: int, tokens: Iterable[int]) -> Automaton:
    """Anything that does not begin with one of ``tokens``."""
    classes = np.zeros(vocab_size, np.int64)
    classes[list(tokens)] = 1
    return Automaton(classes=classes, successors=np.array([[1, NOT_ALLOWED], [1, 1]]))


def without(vocab_size: int, sequences: Iterable[Sequence[int]], before: Sequence[int] = ()) -> Automaton:
    """Anything in which none of ``sequences`` (each at least one token) occurs: only its last token is not allowed.

    ``before`` are tokens in front of the text, with which a sequence may begin. After Aho and Corasick (1975): a state
    is the longest end of the text that a sequence begins with.
    """
    forbidden = {tuple(each) for each in sequences}
    known = sorted({token for each in forbidden for token in each})
    classes = np.zeros(vocab_size, np.int64)
    classes[known] = np.arange(1, len(known) + 1)
    begun = sorted({each[:size] for each in forbidden for size in range(len(each))}, key=len)
    number_of = {each: number for number, each in enumerate(begun)}
    require_size(len(begun), len(known) + 1)
    successors = np.zeros((len(begun), len(known) + 1), np.int64)

    def longest(text: tuple[int, ...]) -> int:
        return next(number_of[text[at:]] for at in range(len(text) + 1) if text[at:] in number_of)

    following = {each: set[int]() for each in begun}
    for each in forbidden:
        for size, token in enumerate(each):
            following[each[:size]].add(token)
    for state, text in enumerate(begun):
        if text:  # what its longest proper end does, but for the tokens that sequences go on with
            successors[state] = successors[longest(text[1:])]
        for token in following[text]:
            whole = (*text, token)
            ends = any(whole[at:] in forbidden for at in range(len(whole)))
            successors[state, classes[token]] = NOT_ALLOWED if ends else number_of[whole]
    most = len(begun[-1]) if begun else 0
    start = longest(tuple(before[len(before) - min(most, len(before)) :]))
    return Automaton(classes=classes, successors=successors, start=start)


@dataclass(frozen=True, kw_only=True, eq=False)
class ByteAutomaton:
    """The same over the bytes of a text; the start is state 0."""

    successors: Numbers  # [S, 256]
    final: NDArray[np.bool_]  # [S] where a text may end

    def over_tokens(self, tokens: "TokenBytes", ends: Sequence[int]) -> Automaton:
        """The automaton of texts that it takes, with one of ``ends`` behind them. ``UserError`` where it is too large.

        A class of tokens is a map of states to states: those of all tokens grow together, a byte at a time.
        """
        sink = len(self.successors)  # NOT_ALLOWED
        step = np.where(self.successors < 0, sink, self.successors)
        step = np.vstack([step, np.full((1, 256), sink)]).astype(np.int32)
        columns, kind_of = _distinct(step.T)  # of bytes
        kinds = columns.T
        maps = np.arange(sink + 1, dtype=np.int32)[None]  # [n, S + 1] different ones
        current = np.zeros(len(tokens.lengths), np.int64)  # of every token, so far
        rest = np.arange(len(tokens.lengths))  # those that are longer
        done = np.zeros(len(tokens.lengths), np.int64)
        through: list[NDArray[np.int32]] = []  # of tokens that end
        for at in range(int(tokens.lengths.max(initial=0))):
            rest = rest[tokens.lengths[rest] > at]
            given = current[rest] * kinds.shape[1] + kind_of[tokens.data[tokens.offsets[rest] + at]]
            pairs, inverse = np.unique(given, return_inverse=True)
            maps = kinds[maps[pairs // kinds.shape[1]], (pairs % kinds.shape[1])[:, None]]
            maps, merged = _distinct(maps)
            require_size(sink, len(maps))
            current[rest] = merged[inverse]
            ended = rest[tokens.lengths[rest] == at + 1]
            if len(ended):
                used, places = np.unique(current[ended], return_inverse=True)
                done[ended] = sum(map(len, through)) + places
                through.append(maps[used])
        return self._joined(tokens, ends, through, done)

    def _joined(
        self, tokens: "TokenBytes", ends: Sequence[int], maps: list[NDArray[np.int32]], done: Numbers
    ) -> Automaton:
        sink = len(self.successors)
        never, at_end = (
            np.full(sink + 1, sink),
            np.where(np.append(self.final, False), np.arange(sink + 1), sink),
        )
        every = np.vstack([never, at_end, *maps]).astype(np.int32)
        every, number = _distinct(every)
        require_size(sink, len(every))
        classes = np.full(tokens.vocab_size, number[0], np.int64)  # tokens without text
        classes[tokens.ids] = number[2 + done]
        classes[list(ends)] = number[1]
        table = every[:, :sink].T.astype(np.int64)
        table[table == sink] = NOT_ALLOWED
        return Automaton(classes=classes, successors=table).trimmed(ends)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBytes:
    """The bytes that tokens stand for, of a vocabulary of ``vocab_size``; others have no text."""

    vocab_size: int
    ids: Numbers  # [n]
    data: NDArray[np.uint8]  # one after another
    offsets: Numbers  # [n] where each begins
    lengths: Numbers  # [n]

    def text(self, index: int) -> bytes:
        """Of the token at ``index`` of ``ids``."""
        return self.data[self.offsets[index] : self.offsets[index] + self.lengths[index]].tobytes()

    @classmethod
    def of(cls, texts: dict[int, bytes], vocab_size: int) -> "TokenBytes":
        """``texts`` by token; empty ones are left out: a text could have any number of them."""
        given = {token: text for token, text in sorted(texts.items()) if text and token < vocab_size}
        lengths = np.array([len(text) for text in given.values()], np.int64)
        return cls(
            vocab_size=vocab_size,
            ids=np.array(list(given), np.int64),
            data=np.frombuffer(b"".join(given.values()), np.uint8),
            offsets=np.cumsum(lengths) - lengths,
            lengths=lengths,
        )
