"""What goes into drafting and comes out of it: an outcome of the target, the state between steps, drafts."""

from dataclasses import dataclass

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


def no_drafts(state: DraftState) -> Drafts:
    """What a step of plain decoding verifies."""
    return Drafts(tokens=state.tokens.new_empty(len(state.tokens), 0), probs=None)
