"""The requests of a run as numpy columns, read once: every figure of a report or of a comparison is made of them.

A request takes about 100 bytes and 6 K for its counts: a million requests at K = 8 some 200 MB, whatever their texts
and steps. Passes are no columns: there may be hundreds for each request, and they are summed as they are read.
"""

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from specgen.config import CONFIDENCE_LEVELS, require
from specgen.record.files import Rows
from specgen.record.record_rows import (
    Line,
    RequestRow,
    StepCounts,
    conversation_of,
    damaged,
)

Array = NDArray[Any]
NO_CATEGORY = "(none)"
_CHUNK = 1024  # rows whose counts are lists before they are columns
_NO_TEXT = hash(None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """The verify steps of n requests by draft position and by level of confidence; see ``StepCounts``."""

    drafted: Array  # [n, K]
    reached: Array  # [n, K]
    accepted: Array  # [n, K]
    level_reached: Array  # [n, levels]
    level_accepted: Array  # [n, levels]
    without_drafts: Array  # [n]
    unverified: Array  # [n]
    cut: Array  # [n]

    def __len__(self) -> int:
        return len(self.without_drafts)

    def at(self, rows: Array) -> "Counts":
        """Those of ``rows``, by index."""
        return Counts(**{name: column[rows] for name, column in vars(self).items()})

    def __sub__(self, other: "Counts") -> "Counts":
        """What is left of the same requests without ``other``, a part of them."""
        return Counts(**{name: column - getattr(other, name) for name, column in vars(self).items()})

    @property
    def num_spec_tokens(self) -> int:
        return int(self.drafted.shape[1])

    @property
    def num_drafts(self) -> Array:
        """[n]: steps with drafts."""
        return self.drafted[:, 0].astype(np.int64) if self.num_spec_tokens else np.zeros(len(self), np.int64)

    @property
    def num_steps(self) -> Array:
        """[n]: those without drafts too."""
        return self.num_drafts + self.without_drafts

    @property
    def num_accepted(self) -> Array:
        """[n]: accepted drafts."""
        found: Array = self.accepted.sum(axis=1, dtype=np.int64)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The requests of a run that generated texts, in the order of its rows; codes are indices of the tuple beside.

    Requests of one ``unit`` are not independent: the turns of a conversation, and conversations that begin with the
    same prompt. Times are seconds since the session's engine was warm. ``reasoning`` are the steps and tokens of the
    part before the answer, None where no text has one. Equal digests are of equal texts, within a process.
    """

    names: Sequence[str]
    unit: Array  # [n]
    turn: Array
    category: Array
    categories: tuple[str | None, ...]
    reason: Array  # why it ended
    reasons: tuple[str, ...]
    session: Array
    sessions: tuple[str, ...]
    num_prompt_tokens: Array
    num_cached_tokens: Array
    num_output_tokens: Array
    arrival: Array
    first_token: Array  # not a number without one
    ended: Array
    is_empty: Array  # without a character
    in_reasoning: Array  # it ended there
    counts: Counts
    num_reasoning_tokens: Array
    prompt: Array  # a digest
    tokens: Array  # a digest
    reasoning: Counts | None = None

    def __len__(self) -> int:
        return len(self.names)

    def at(self, rows: Array) -> Self:
        """The run of ``rows`` alone, by index."""
        found: dict[str, Any] = {"names": [self.names[row] for row in rows]}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Counts):
                found[each.name] = value.at(rows)
            elif isinstance(value, np.ndarray):
                found[each.name] = value[rows]
        return replace(self, **found)

    def by(self, what: str) -> "dict[str, Self]":
        """The runs of each ``category`` or ``turn`` alone, in the order of their first rows."""
        labels = [NO_CATEGORY if each is None else each for each in self.categories]
        codes = self.turn
        if what == "category":  # of one that is called as those without are, all
            codes = np.array([labels.index(each) for each in labels], np.int64)[self.category]
        order = np.argsort(codes, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(self) else []
        groups.sort(key=lambda rows: int(rows[0]))
        named = [
            str(code) if what == "turn" else labels[code] for code in (codes[rows[0]] for rows in groups)
        ]
        return {name: self.at(rows) for name, rows in zip(named, groups, strict=True)}

    def part(self, name: str) -> Self:
        """The steps and tokens of one of ``PARTS``, of the requests that have tokens in it."""
        if self.reasoning is None:
            return self if name == "answer" else self.at(np.zeros(0, np.int64))
        counts, tokens = self.reasoning, self.num_reasoning_tokens
        if name == "answer":
            counts, tokens = self.counts - counts, self.num_output_tokens - tokens
        found = replace(self, counts=counts, num_output_tokens=tokens)
        return found.at(
            np.flatnonzero((tokens > 0) | ((name == "answer") & (self.num_reasoning_tokens == 0)))
        )

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each request by name."""
        return {name: row for row, name in enumerate(self.names)}


def read(directory: Path, num_spec_tokens: int, rows: Rows | None = None) -> Run:
    """The requests in ``completions.jsonl`` of a run's directory, none without that file; ``rows`` if it is open.

    K is ``num_spec_tokens``. Rows without tokens, of texts that were only scored, are left out. ``UserError`` for a
    damaged row, and for one with more drafts than K.
    """
    rows = Rows(directory / "completions.jsonl") if rows is None else rows
    found = _Columns(num_spec_tokens)
    for name, content in rows.lines():
        line = _line(name, content)
        if line.token_ids is None:
            continue
        several, own = line.sample is not None, line.id
        line.id, line.sample = name, None  # the same string, of which there are as many as rows
        row = line.request()
        unit = conversation_of(own, line.turn) if several or row.num_turns > 1 else ""
        found.add(row, unit, hash(line.prompt), hash(tuple(line.token_ids)))
    return found.run()


def in_both(run: Run, other: Run) -> tuple[Array, Array]:
    """The rows of ``run`` and those of ``other`` of the requests that both have, by id, in the order of ``run``."""
    there = other.rows
    pairs = [(row, there[name]) for row, name in enumerate(run.names) if name in there]
    ours, theirs = np.array(pairs, np.int64).reshape(-1, 2).T
    return ours, theirs


def of(requests: Iterable[RequestRow], num_spec_tokens: int, prompts: Iterable[str] | None = None) -> Run:
    """The columns of ``requests`` and, where they are known, of their ``prompts``; those that failed are left out."""
    found = _Columns(num_spec_tokens)
    for row, prompt in zip(requests, repeat(None) if prompts is None else prompts, strict=False):
        if row.reason != "error":
            found.add(row, conversation_of(row.name, row.turn), hash(prompt), _NO_TEXT)
    return found.run()


def _line(name: str, content: bytes) -> Line:
    try:
        try:
            return _decode(content)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, ValueError):
            return msgspec.convert(json.loads(content), Line)  # which takes NaN too
    except ValueError as error:
        raise damaged(name, error) from error


_decode = msgspec.json.Decoder(Line).decode


def _with_one_prompt(unit: Array, turn: Array, prompt: Array) -> Array:
    """``unit``, those of conversations with the same first prompt made one: the first one's."""
    first = np.flatnonzero((turn == 1) & (prompt != _NO_TEXT))
    _, at, prompts = np.unique(prompt[first], return_index=True, return_inverse=True)
    became = np.arange(len(unit))  # by unit, which is the row that it was first seen in
    became[unit[first]] = unit[first[at[prompts]]]
    return became[unit]


_NONE = StepCounts([], [], [], [0])
_NUMBERS = {  # and their types, as of ``array``
    **dict.fromkeys(("unit", "turn", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens"), "i"),
    **dict.fromkeys(("arrival", "first_token", "ended"), "d"),
    **dict.fromkeys(("is_empty", "in_reasoning"), "b"),
    "num_reasoning_tokens": "i",
    **dict.fromkeys(("prompt", "tokens"), "q"),
    **dict.fromkeys(("category", "reason", "session"), "i"),
}


class _CountRows:
    """The counts of requests, row by row; those before the first that has some take no memory."""

    def __init__(self, num_spec_tokens: int) -> None:
        self._most, self._num_none = num_spec_tokens, 0
        self._rows: list[list[int]] = []
        self._chunks: list[Array] = []

    @property
    def has_some(self) -> bool:
        return bool(self._rows or self._chunks)

    def add(self, counts: StepCounts | None) -> None:
        """``UserError`` for more drafts than K."""
        if counts is None and not self.has_some:
            self._num_none += 1
            return
        each = counts or _NONE
        num, most = len(each.drafted), self._most
        require(num <= most, f"a step has {num} drafts but K is {most}: give the run's K")
        zeros = [0] * (most - num)
        by_position = (*each.drafted, *zeros, *each.reached, *zeros, *each.accepted, *zeros)
        of_steps = (each.without_drafts, each.unverified, each.cut)
        self._rows.append([*by_position, *each.level_reached, *each.level_accepted, *of_steps])
        if len(self._rows) == _CHUNK:
            self._flush()

    def _flush(self) -> None:
        """Numbers of two bytes, if they fit."""
        found = np.array(self._rows, np.int64)
        is_small = found.max(initial=0) <= np.iinfo(np.uint16).max
        self._chunks.append(found.astype(np.uint16 if is_small else np.uint32))
        self._rows = []

    def counts(self) -> Counts:
        """All of them."""
        ends = np.cumsum([self._most] * 3 + [len(CONFIDENCE_LEVELS)] * 2)
        self._flush()
        width = ends[-1] + 3
        rows = [
            np.zeros((self._num_none, width), np.uint16),
            *(each.reshape(-1, width) for each in self._chunks),
        ]
        self._chunks = []
        *lists, of_steps = np.split(np.concatenate(rows), ends, axis=1)
        return Counts(**dict(zip(Counts.__dataclass_fields__, (*lists, *of_steps.T), strict=True)))


class _Columns:
    """Columns that grow, row by row."""

    def __init__(self, num_spec_tokens: int) -> None:
        self._names: list[str] = []
        self._units: dict[str, int] = {}
        self._codes: tuple[dict[Any, int], ...] = ({}, {}, {})  # of category, reason, session
        self._numbers = {name: array(kind) for name, kind in _NUMBERS.items()}
        self._counts, self._of_reasoning = _CountRows(num_spec_tokens), _CountRows(num_spec_tokens)

    def add(self, row: RequestRow, unit: str, prompt: int, tokens: int) -> None:
        """One request; without a name its ``unit`` is its own."""
        at, parts = len(self._names), row.parts
        self._names.append(row.name)
        categories, reasons, sessions = self._codes
        values: tuple[Any, ...] = (
            self._units.setdefault(unit, at) if unit else at,
            row.turn,
            row.num_prompt_tokens,
            row.num_cached_tokens,
            row.num_output_tokens,
            row.arrival,
            math.nan if row.first_token is None else row.first_token,
            row.ended,
            row.is_empty,
            parts is not None and parts.part == "reasoning",
            0 if parts is None else parts.tokens["reasoning"],
            prompt,
            tokens,
            categories.setdefault(row.category, len(categories)),
            reasons.setdefault(row.reason, len(reasons)),
            sessions.setdefault(row.session, len(sessions)),
        )
        for column, value in zip(self._numbers.values(), values, strict=True):
            column.append(value)
        self._counts.add(row.counts)
        self._of_reasoning.add(None if parts is None else parts.steps["reasoning"])

    def run(self) -> Run:
        """All of them."""
        found: dict[str, Any] = {
            name: np.array(column, np.bool_ if column.typecode == "b" else column.typecode)
            for name, column in self._numbers.items()
        }
        found["unit"] = _with_one_prompt(*(found[name] for name in ("unit", "turn", "prompt")))
        for name, codes in zip(("categories", "reasons", "sessions"), self._codes, strict=True):
            found[name] = tuple(codes)
        reasoning = self._of_reasoning.counts() if self._of_reasoning.has_some else None
        return Run(names=self._names, counts=self._counts.counts(), reasoning=reasoning, **found)
