"""How many drafts of a dense head are right: over all rows of a text, and over the steps of speculative decoding."""

from dataclasses import dataclass

from torch import Tensor


def agreement(logits: Tensor, d2t: Tensor, tokens: Tensor, j: int) -> Tensor:
    """Whether draft ``j`` of each row is the token that follows: bool ``[B, T]``."""
    drafts = logits.argmax(-1)
    return drafts + d2t[drafts] == tokens.roll(-2 - j, dims=1)


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Number of steps, and of those in which each draft and all before it were accepted.

    As in the engine's reports every step drafts all positions, and drafts beyond a text's end are not accepted.
    """

    num_drafts: int
    accepted: list[int]

    def summary(self) -> dict[str, object]:
        """Joint rates by position and the mean acceptance length, all positions pooled."""
        joint = [count / max(self.num_drafts, 1) for count in self.accepted]
        return {
            "joint": [round(rate, 4) for rate in joint],
            "mean_acceptance_length": round(1 + sum(joint), 4),
            "num_drafts": self.num_drafts,
        }


def _run(right: Tensor, room: int) -> int:
    """How many leading drafts of one step ``right [K]`` are accepted with ``room`` tokens left in the text."""
    return int(right[: max(room, 0)].long().cumprod(0).sum())


def _count(runs: list[int], num_positions: int) -> Acceptance:
    return Acceptance(
        num_drafts=len(runs), accepted=[sum(run > j for run in runs) for j in range(num_positions)]
    )


def count_rows(right: Tensor, first: int, end: int) -> Acceptance:
    """Counts with every row of one answer as the last accepted one.

    ``right [T, K]``: whether each draft after each row is right; ``first``: the prompt's last
    row; ``end``: the text's length in tokens.
    """
    return _count([_run(right[row], end - row - 2) for row in range(first, end - 2)], right.shape[1])


def count_steps(right: Tensor, first: int, end: int) -> Acceptance:
    """As ``count_rows``, but only for rows where speculative decoding would start a step."""
    runs, row = [], first
    while row < end - 2:
        runs.append(_run(right[row], end - row - 2))
        row += 1 + runs[-1]
    return _count(runs, right.shape[1])


def pool(counts: list[Acceptance]) -> Acceptance:
    """The sum of the counts of several answers."""
    accepted = [sum(column) for column in zip(*(count.accepted for count in counts), strict=True)]
    return Acceptance(num_drafts=sum(count.num_drafts for count in counts), accepted=accepted)
