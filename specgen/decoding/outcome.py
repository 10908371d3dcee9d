"""What goes into drafting and comes out of it: an outcome of the target, the rows of it that a head takes in, drafts.

A drafter batch is padded or non-padded. Both kinds give the head the same accepted rows, so both lead to the same
drafts.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.kv.layout import Layout

NO_DRAFT = -1  # in place of a token id where a drafter has none to propose; none follows it in its row


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the target has just computed; each sequence's first ``keep[b]`` rows were accepted, the rest rejected."""

    features: Tensor  # [rows, num_aux * hidden_size]
    next_tokens: Tensor  # [rows] the token after each row
    layout: Layout
    keep: Tensor  # [B] int64, at least 1
    all_kept: bool = False  # a prefill: nothing was rejected
    token_ids: Tensor | None = None  # [rows] of a prefill: what its rows are of


@dataclass(frozen=True, kw_only=True)
class StateColumn:
    """One tensor of a drafter's state: ``[B, *shape]``."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class DraftState:
    """Where drafting resumes, a row per sequence."""

    tokens: Tensor  # [B] the newest token, not yet in the target's cache
    positions: Tensor  # [B] its position
    columns: tuple[Tensor, ...]  # what the drafter alone understands, see ``Drafter.state_columns``

    def take(self, rows: Tensor | slice) -> "DraftState":
        """The sequences at ``rows``, in that order; a slice gives views."""
        return DraftState(
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            columns=tuple(column[rows] for column in self.columns),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, each ``[B, ...]``."""
        return self.tokens, self.positions, *self.columns


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """K proposed tokens per sequence and, where they were sampled, the distributions they came from."""

    tokens: Tensor  # [B, K] target token ids; NO_DRAFT from a sequence's first missing draft on
    probs: Tensor | None  # [B, K, V]
    # [B, K] float32 in [0, 1]: how sure the drafter is, see ``confidence``; -1 of missing ones
    confidence: Tensor


def no_drafts(tokens: Tensor) -> Drafts:
    """What a step of plain decoding verifies behind ``tokens`` [B]."""
    none = tokens.new_empty(len(tokens), 0)
    return Drafts(tokens=none, probs=None, confidence=none.float())


@dataclass(frozen=True, kw_only=True)
class DraftInput:
    """The rows that the head takes in."""

    features: Tensor  # [rows, num_aux * hidden_size]
    tokens: Tensor  # [rows]
    layout: Layout
    last: Tensor  # [B] each sequence's last accepted row
    end: Tensor  # [B] the position behind it

    def state(self, *columns: Tensor) -> DraftState:
        """The state behind these rows; each of ``columns`` ``[rows, ...]`` gives its row at ``last``."""
        return DraftState(
            tokens=self.tokens[self.last],
            positions=self.end,
            columns=tuple(column[self.last] for column in columns),
        )


class DrafterBatch(Protocol):
    """Which of an outcome's rows the head takes in."""

    def prepare(self, outcome: Outcome) -> DraftInput: ...


class PaddedBatch:
    """All rows: uniform after a verify and never waiting for the device.

    KV of rejected rows lies past the sequence's end, where it is overwritten before anything attends to it.
    """

    def prepare(self, outcome: Outcome) -> DraftInput:
        layout = outcome.layout
        return DraftInput(
            features=outcome.features,
            tokens=outcome.next_tokens,
            layout=layout,
            last=layout.first_rows + outcome.keep - 1,
            end=layout.starts + outcome.keep,
        )


class NonPaddedBatch:
    """The accepted rows alone: ragged, and the least compute; the host waits for their number."""

    def prepare(self, outcome: Outcome) -> DraftInput:
        return _leading(outcome, int(outcome.keep.sum()))


class PackedBatch:
    """The accepted rows side by side, in as many rows as ``PaddedBatch`` has: no host sync, and no compute saved.

    Padding rows at the end still go through the matrices.
    """

    def prepare(self, outcome: Outcome) -> DraftInput:
        return _leading(outcome, outcome.layout.num_rows)


def _leading(outcome: Outcome, num_rows: int) -> DraftInput:
    if outcome.all_kept:
        return PaddedBatch().prepare(outcome)
    rows, layout = outcome.layout.leading(outcome.keep, num_rows)
    return DraftInput(
        features=outcome.features[rows],
        tokens=outcome.next_tokens[rows],
        layout=layout,
        last=layout.ends - 1,
        end=layout.starts + outcome.keep,
    )
