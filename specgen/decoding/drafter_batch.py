"""The drafter batch: which rows of an outcome the head takes in, padded or non-padded.

Both kinds give the head the same accepted rows, so both lead to the same drafts.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specgen.decoding.draft_state import DraftState, Outcome
from specgen.kv.layout import Layout


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
