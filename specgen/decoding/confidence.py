"""How sure a drafter is of a draft, in levels; and which drafts are verified where not all of them are.

A drafter's confidence is its probability of its most likely token at the draft's place (a head's), how much of the
longest match it found (n-grams), or how often other answers went on so behind their match. It never depends on which
token was drawn there: of drafts that are sampled, verified ones would else be biased towards tokens that the drafter
finds likely.
"""

import torch
from torch import Tensor

from specgen.decoding.outcome import NO_DRAFT, Drafts


def levels(confidence: Tensor, begins: Tensor) -> Tensor:
    """The level of each ``confidence``, int64 of the same shape: the last of ``begins`` that it reaches.

    ``begins`` are ``CONFIDENCE_LEVELS`` on the device. NaN is in the last level, and what is below 0 in level -1.
    """
    return torch.bucketize(confidence.contiguous(), begins, right=True) - 1


def most_likely(
    drafts: Drafts, levels: Tensor, chances: Tensor, active: Tensor, num_verified: int
) -> tuple[Drafts, Tensor]:
    """``drafts`` less all but the ``num_verified`` that are most likely to be accepted with all before them.

    ``chances`` ``[n, len(CONFIDENCE_LEVELS)]`` are those of a draft whose predecessors are accepted, by position and
    level (``levels`` ``[B, K]``), above 0 and below 1: the product over a draft and its predecessors then is the less
    the later it is, so that what is left of a sequence are its first drafts. Missing drafts, and those of sequences
    that are not ``active`` ``[B]``, come last. Also says how many are left of each sequence, ``[B]``.
    """
    num_sequences, k = drafts.tokens.shape
    likely = chances[torch.arange(k, device=levels.device), levels].cumprod(1)
    likely = likely.masked_fill((drafts.tokens == NO_DRAFT) | ~active[:, None], 0)
    # stable, so that of equal ones the earlier come first
    order = likely.flatten().sort(descending=True, stable=True).indices
    chosen = torch.zeros(num_sequences * k, dtype=torch.bool, device=order.device)
    chosen = chosen.index_fill_(0, order[:num_verified], True).view(num_sequences, k)
    left = Drafts(
        tokens=torch.where(chosen, drafts.tokens, NO_DRAFT),
        probs=None if drafts.probs is None else drafts.probs.masked_fill(~chosen[..., None], 0),
        confidence=drafts.confidence,
    )
    return left, chosen.sum(1)
