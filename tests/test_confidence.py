"""Which drafts are verified: the most likely of the batch, a sequence's first ones, and never by the tokens drawn."""

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from specgen.config import CONFIDENCE_LEVELS
from specgen.decoding.confidence import levels, most_likely
from specgen.decoding.outcome import NO_DRAFT, Drafts
from specgen.decoding.verify import accept_sampled

BEGINS = torch.tensor(CONFIDENCE_LEVELS)
CHANCES = torch.linspace(0.05, 0.95, len(CONFIDENCE_LEVELS)).repeat(8, 1)


def drafts_of(tokens: Tensor, probs: Tensor | None = None) -> Drafts:
    return Drafts(tokens=tokens, probs=probs, confidence=torch.zeros_like(tokens, dtype=torch.float32))


def test_levels_are_tenths_and_finer_near_certainty():
    given = torch.tensor([-1.0, 0.0, 0.05, 0.1, 0.5, 0.899, 0.9, 0.94, 0.96, 0.985, 0.995, 1.0, float("nan")])
    assert levels(given, BEGINS).tolist() == [-1, 0, 0, 1, 5, 8, 9, 9, 10, 10, 11, 11, 11]


@pytest.mark.parametrize("num_verified", range(1, 24))
def test_the_most_likely_drafts_are_verified_and_each_behind_all_before_it(num_verified):
    torch.manual_seed(num_verified)
    found_levels = torch.randint(len(CONFIDENCE_LEVELS), (6, 4))
    tokens = torch.arange(24).view(6, 4)
    left, counts = most_likely(
        drafts_of(tokens), found_levels, CHANCES, torch.ones(6, dtype=torch.bool), num_verified
    )
    likely = CHANCES[0][found_levels].cumprod(1)
    kept = left.tokens != NO_DRAFT
    assert int(counts.sum()) == int(kept.sum()) == num_verified
    assert kept.sum(1).tolist() == counts.tolist()
    assert (kept.int().cumprod(1) == kept.int()).all(), "the first ones"
    assert likely[kept].min() >= likely[~kept].max()
    assert torch.equal(left.tokens[kept], tokens[kept])


def test_missing_drafts_and_padding_rows_come_last():
    tokens = torch.tensor([[5, 6], [7, NO_DRAFT], [8, 9], [NO_DRAFT, NO_DRAFT]])
    highest = torch.full((4, 2), len(CONFIDENCE_LEVELS) - 1)
    active = torch.tensor([True, True, False, True])
    left, counts = most_likely(drafts_of(tokens), highest, CHANCES, active, 3)
    assert left.tokens.tolist() == [[5, 6], [7, NO_DRAFT], [NO_DRAFT] * 2, [NO_DRAFT] * 2]
    left, counts = most_likely(drafts_of(tokens), highest, CHANCES, active, 5)
    assert int(counts.sum()) == 5, "rows are as many as there is room for"
    assert left.tokens[0].tolist() == [5, 6]


# --- texts that are sampled -----------------------------------------------------------------------

V, MANY = 4, 200_000
Rule = Callable[[Tensor, Tensor, Drafts], Tensor]  # largest q, q of the draws, drafts -> confidence [B, 2]


def by_distribution(largest: Tensor, drawn: Tensor, drafts: Drafts) -> Tensor:
    return largest


def by_drawn_token(largest: Tensor, drawn: Tensor, drafts: Drafts) -> Tensor:
    """Biased: of the tokens that are drawn, likely ones would be verified more often."""
    return drawn


def by_successors(largest: Tensor, drawn: Tensor, drafts: Drafts) -> Tensor:
    """Biased: whether the first is verified depends on how sure the second is, and so on the first one's token."""
    return largest[:, 1:].expand(-1, 2)


def p_value(rule: Rule) -> float:
    """Of the first two tokens of many texts, whose drafts are verified by ``rule``, against the target's own."""
    torch.manual_seed(3)
    target = torch.rand(V + 1, V) + 0.1  # of a token behind each token, and of the first
    drafter = torch.tensor([0.05, 0.3, 1.5, 6.0]).repeat(V + 1, 1)[:, torch.randperm(V)] ** torch.linspace(
        0.1, 1.6, V + 1
    ).view(-1, 1)  # after some tokens it is sure, after others not
    target, drafter = (each / each.sum(1, keepdim=True) for each in (target, drafter))
    one = torch.multinomial(drafter[V].expand(MANY, V), 1)
    two = torch.multinomial(drafter[one[:, 0]], 1)
    q = torch.stack((drafter[V].expand(MANY, V), drafter[one[:, 0]]), 1)
    drafts = drafts_of(torch.cat((one, two), 1), q)
    drawn = q.gather(2, drafts.tokens[..., None])[..., 0]
    sure = levels(rule(q.amax(2), drawn, drafts), BEGINS)
    left, _ = most_likely(drafts, sure, CHANCES, torch.ones(MANY, dtype=torch.bool), MANY)
    p = torch.stack((target[V].expand(MANY, V), target[one[:, 0]], target[two[:, 0]]), 1)
    accepted, tokens = accept_sampled(left.tokens, left.probs, p, torch.rand(MANY, 2), torch.rand(MANY, 3))
    first = tokens[:, 0]
    second = torch.where(accepted > 0, tokens[:, 1], torch.multinomial(target[first], 1)[:, 0])
    seen = torch.bincount(first * V + second, minlength=V * V)
    expected = (target[V][:, None] * target[:V]).flatten().double()
    return float(chisquare(seen.numpy(), (expected / expected.sum() * MANY).numpy()).pvalue)


def test_texts_are_distributed_as_the_targets_own():
    assert p_value(by_distribution) > 0.01


@pytest.mark.parametrize("rule", [by_drawn_token, by_successors])
def test_a_rule_that_looks_at_the_tokens_drawn_would_be_found(rule):
    assert p_value(rule) < 1e-6
