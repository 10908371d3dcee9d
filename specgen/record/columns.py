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
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from specgen.config import CONFIDENCE_LEVELS, require
from specgen.record.files import Rows
from specgen.record.record_rows import (
    ONLY_SESSION,
    Line,
    Record,
    RequestRow,
    StepCounts,
    conversation_of,
    damaged,
)

Array = NDArray[Any]
NO_CATEGORY = "(none)"
_CHUNK = 1024  # rows whose counts are lists before they are columns
_BY_POSITION = ("drafted", "reached", "accepted")
_BY_LEVEL = ("level_reached", "level_accepted")
_NUMBERS = ("without_drafts", "unverified")
_NO_TEXT = hash(None)
_Line = TypeVar("_Line")


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
    reasoning: Counts | None
    num_reasoning_tokens: Array
    prompt: Array  # a digest
    tokens: Array  # a digest
    without_record: str | None = None  # the first row of an earlier version, which has counts alone

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


def read(directory: Path, num_spec_tokens: int | None = None, rows: Rows | None = None) -> Run:
    """The requests in ``completions.jsonl`` of a run's directory, none without that file; ``rows`` if it is open.

    K is ``num_spec_tokens``, or that of the longest step. Rows without tokens, of texts that were only scored, are
    left out. ``UserError`` for a damaged row, and for one with more drafts than K.
    """
    rows, found = Rows(directory / "completions.jsonl") if rows is None else rows, _Columns()
    for name, content in rows.lines():
        line = _line(name, content, _decode_line)
        if line.token_ids is None:
            continue
        if line.record is None:
            found.without_record = found.without_record or name
            line.record = _of_earlier(_line(name, content, _decode_earlier).metrics)
        row = line.request({}, None)
        several = line.record.num_turns > 1 or found.without_record is not None
        unit = conversation_of(row.name, row.turn) if several else ""
        found.add(row, unit, hash(line.prompt), hash(tuple(line.token_ids)))
    run = found.run(num_spec_tokens)
    return replace(run, unit=_with_one_prompt(run))


def in_both(run: Run, other: Run) -> tuple[Array, Array]:
    """The rows of ``run`` and those of ``other`` of the requests that both have, by id, in the order of ``run``."""
    there = other.rows
    pairs = [(row, there[name]) for row, name in enumerate(run.names) if name in there]
    ours, theirs = np.array(pairs, np.int64).reshape(-1, 2).T
    return ours, theirs


def of(requests: Iterable[RequestRow], num_spec_tokens: int) -> Run:
    """The columns of ``requests``, of which those that failed are left out; without digests of texts."""
    found = _Columns()
    for row in requests:
        if row.reason != "error":
            found.add(row, row.unit or conversation_of(row.name, row.turn), _NO_TEXT, _NO_TEXT)
    return found.run(num_spec_tokens)


def _line(name: str, content: bytes, decoder: msgspec.json.Decoder[_Line]) -> _Line:
    try:
        try:
            return decoder.decode(content)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, ValueError):
            return msgspec.convert(json.loads(content), decoder.type)  # which takes NaN too
    except ValueError as error:
        raise damaged(name, error) from error


class _EarlierMetrics(msgspec.Struct):
    acceptance_histogram: list[int]
    num_draft_tokens: int
    num_steps_without_drafts: int


class _EarlierLine(msgspec.Struct):
    metrics: _EarlierMetrics | None = None


_decode_line, _decode_earlier = msgspec.json.Decoder(Line), msgspec.json.Decoder(_EarlierLine)


def _of_earlier(metrics: _EarlierMetrics | None) -> Record:
    """What a row of a version without records says: what was accepted; where not every step drafted K, not where."""
    metrics = metrics or _EarlierMetrics([0], 0, 0)
    histogram = metrics.acceptance_histogram
    # [K + 1]: steps that accepted so many drafts or more
    steps, *accepted = [*accumulate(reversed(histogram))][::-1]
    is_whole = metrics.num_draft_tokens == steps * len(accepted)
    drafted = [steps] * len(accepted) if is_whole else [steps, *accepted[1:]]  # at least
    counts = StepCounts(
        drafted, drafted, accepted, histogram, metrics.num_steps_without_drafts if accepted else 0
    )
    return Record(
        session=ONLY_SESSION, arrival=0.0, first_token=None, ended=0.0, num_cached_tokens=0, counts=counts
    )


def _with_one_prompt(run: Run) -> Array:
    """The units of ``run``, those of conversations with the same first prompt made one: the first one's."""
    first = np.flatnonzero((run.turn == 1) & (run.prompt != _NO_TEXT))
    _, at, prompts = np.unique(run.prompt[first], return_index=True, return_inverse=True)
    became = np.arange(len(run))  # by unit, which is the row that it was first seen in
    became[run.unit[first]] = run.unit[first[at[prompts]]]
    return became[run.unit]


class _Columns:
    """Columns that grow, row by row."""

    def __init__(self) -> None:
        self.without_record: str | None = None
        self._names: list[str] = []
        self._columns = {
            name: array(kind)
            for kind, names in {
                "i": ("unit", "turn", "category", "reason", "session"),
                "l": ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_reasoning_tokens"),
                "d": ("arrival", "first_token", "ended"),
                "b": ("is_empty", "in_reasoning"),
                "q": ("prompt", "tokens"),
            }.items()
            for name in names
        }
        self._units: dict[str, int] = {}
        self._codes: dict[str, dict[Any, int]] = {name: {} for name in ("category", "reason", "session")}
        self._counts = _GrowingCounts()
        self._reasoning: _GrowingCounts | None = None  # with the first text that has some

    def add(self, row: RequestRow, unit: str, prompt: int, tokens: int) -> None:
        """One request; without a name its ``unit`` is its own."""
        at = len(self._names)
        self._names.append(row.name)
        parts = row.parts
        values: dict[str, Any] = {
            "unit": self._units.setdefault(unit, at) if unit else at,
            "turn": row.turn,
            "num_prompt_tokens": row.num_prompt_tokens,
            "num_cached_tokens": row.num_cached_tokens,
            "num_output_tokens": row.num_output_tokens,
            "num_reasoning_tokens": 0 if parts is None else parts.tokens["reasoning"],
            "arrival": row.arrival,
            "first_token": math.nan if row.first_token is None else row.first_token,
            "ended": row.ended,
            "is_empty": row.is_empty,
            "in_reasoning": parts is not None and parts.part == "reasoning",
            "prompt": prompt,
            "tokens": tokens,
        }
        for name, codes in self._codes.items():
            values[name] = codes.setdefault(getattr(row, name), len(codes))
        for name, value in values.items():
            self._columns[name].append(value)
        self._counts.add(row.counts)
        if parts is not None and self._reasoning is None:
            self._reasoning = _GrowingCounts()
            for _ in range(at):
                self._reasoning.add(_NONE)
        if self._reasoning is not None:
            self._reasoning.add(_NONE if parts is None else parts.steps["reasoning"])

    def run(self, num_spec_tokens: int | None) -> Run:
        """All of them, with this K or that of the longest step."""
        most = self._counts.width
        k = most if num_spec_tokens is None else num_spec_tokens
        require(most <= k, f"a step has {most} drafts but K is {k}: give the run's K")
        columns = {name: np.array(column) for name, column in self._columns.items()}
        return Run(
            names=self._names,
            categories=tuple(self._codes["category"]),
            reasons=tuple(self._codes["reason"]),
            sessions=tuple(self._codes["session"]),
            counts=self._counts.result(k),
            reasoning=None if self._reasoning is None else self._reasoning.result(k),
            without_record=self.without_record,
            **{
                name: column.astype(bool) if column.dtype == np.int8 else column
                for name, column in columns.items()
            },
        )


_NONE = StepCounts([], [], [], [0])


class _GrowingCounts:
    def __init__(self) -> None:
        self.width = 0  # K so far
        self._rows: list[StepCounts] = []
        self._chunks: list[dict[str, Array]] = []

    def add(self, row: StepCounts) -> None:
        self.width = max(self.width, len(row.drafted))
        self._rows.append(row)
        if len(self._rows) == _CHUNK:
            self._flush()

    def _flush(self) -> None:
        self._chunks.append({name: _narrow([getattr(row, name) for row in self._rows]) for name in _NUMBERS})
        for name in (*_BY_POSITION, *_BY_LEVEL):
            most = self.width if name in _BY_POSITION else len(CONFIDENCE_LEVELS)
            lists = [
                [*each, *[0] * (most - len(each))] for each in (getattr(row, name) for row in self._rows)
            ]
            self._chunks[-1][name] = _narrow(lists).reshape(len(lists), most)
        self._rows = []

    def result(self, num_spec_tokens: int) -> Counts:
        """All of them, with 0 up to this K."""
        self._flush()
        columns = {}
        for name in (*_BY_POSITION, *_BY_LEVEL, *_NUMBERS):
            each = [chunk.pop(name) for chunk in self._chunks]
            if name in _BY_POSITION:
                each = [np.pad(column, ((0, 0), (0, num_spec_tokens - column.shape[1]))) for column in each]
            columns[name] = np.concatenate(each)
        return Counts(**columns)


def _narrow(rows: Sequence[Any]) -> Array:
    """``rows`` as numbers of two bytes, if they fit."""
    found = np.array(rows, np.int64)
    return found.astype(np.uint16 if found.max(initial=0) <= np.iinfo(np.uint16).max else np.uint32)
