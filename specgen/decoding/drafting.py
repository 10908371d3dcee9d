"""Drafting with an EAGLE3 head: what the target has confirmed goes in, K drafts a sequence come out.

Prefill and verify end in the same ``Outcome``, so drafting has one entry. Rows follow EAGLE3 (Li et al., 2025):
ids are shifted left by one and positions are not: the feature at p and the token at p + 1 predict the token at p + 2.
The head has one layer, so of what was confirmed it takes in the keys and values alone; the newest row's own pass is
the first of the K that draft, and without drafts there is none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.attention import Attend, Backend, Keep
from specgen.decoding.sampling import DRAFT, SamplingBatch, draft_probs, draw, uniform
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import Layout
from specgen.models.protocols import Head


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the target has just confirmed; each sequence's first ``keep[b]`` rows hold, the rest were rejected."""

    features: Tensor  # [rows, num_aux * hidden_size]
    next_tokens: Tensor  # [rows] the token after each row
    layout: Layout
    keep: Tensor  # [B] int64, at least 1


@dataclass(frozen=True, kw_only=True)
class Seed:
    """Where drafting resumes, one row a sequence."""

    tokens: Tensor  # [B] the newest token, not yet in the target's cache
    positions: Tensor  # [B] its position
    hidden: Tensor  # [B, hidden_size] the fused feature before it; [B, 0] without a head

    def take(self, rows: Tensor | slice) -> "Seed":
        """The sequences at ``rows``, in that order; a slice gives views."""
        return Seed(tokens=self.tokens[rows], positions=self.positions[rows], hidden=self.hidden[rows])


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """K proposed tokens a sequence and, where they were sampled, the distributions they came from."""

    tokens: Tensor  # [B, K] target token ids
    probs: Tensor | None  # [B, K, V]


def no_drafts(seed: Seed) -> Drafts:
    """What a step of plain decoding verifies."""
    return Drafts(tokens=seed.tokens.new_empty(len(seed.tokens), 0), probs=None)


@dataclass(frozen=True, kw_only=True)
class DraftInput:
    """The rows that the head takes in."""

    features: Tensor  # [rows, num_aux * hidden_size]
    tokens: Tensor  # [rows]
    layout: Layout
    last: Tensor  # [B] each sequence's last confirmed row


class DrafterBatch(Protocol):
    """Which of an outcome's rows the head takes in."""

    def prepare(self, outcome: Outcome) -> DraftInput:
        """Both kinds give the head the same confirmed rows, so both lead to the same drafts."""
        ...


class PaddedBatch:
    """All rows: uniform after a verify and never waiting for the device.

    KV of rejected rows lies past the sequence's end, where it is overwritten before anything looks at it.
    """

    def prepare(self, outcome: Outcome) -> DraftInput:
        """See ``DrafterBatch.prepare``."""
        layout = outcome.layout
        last = layout.first_rows + outcome.keep - 1
        return DraftInput(features=outcome.features, tokens=outcome.next_tokens, layout=layout, last=last)


class NonPaddedBatch:
    """The confirmed rows alone: ragged, and the least compute; the host waits for their number."""

    def prepare(self, outcome: Outcome) -> DraftInput:
        """See ``DrafterBatch.prepare``."""
        return _leading(outcome, int(outcome.keep.sum()))


class PackedBatch:
    """The confirmed rows side by side, in as many rows as ``PaddedBatch`` has: nobody waits, and nothing is saved.

    Nobody's rows at the end still go through the matrices.
    """

    def prepare(self, outcome: Outcome) -> DraftInput:
        """See ``DrafterBatch.prepare``."""
        return _leading(outcome, outcome.layout.num_rows)


def _leading(outcome: Outcome, num_rows: int) -> DraftInput:
    if outcome.keep is outcome.layout.query_lens:  # a prefill: nothing was rejected
        return PaddedBatch().prepare(outcome)
    rows, layout = outcome.layout.leading(outcome.keep, num_rows)
    return DraftInput(
        features=outcome.features[rows],
        tokens=outcome.next_tokens[rows],
        layout=layout,
        last=layout.ends - 1,
    )


class Drafter(Protocol):
    """What the engine needs of a drafter."""

    aux_layers: tuple[int, ...]  # whose inputs make the target's features

    def observe(self, outcome: Outcome) -> tuple[Seed, int]:
        """Take in what the target confirmed; also says how many rows that took."""
        ...

    def propose(self, seed: Seed, num_drafts: int, block_tables: Tensor, sampling: SamplingBatch) -> Drafts:
        """``num_drafts`` (K) drafts a sequence; may write KV at the K positions from ``seed.positions - 1`` on."""
        ...

    def clear(self, pages: Tensor) -> None:
        """Make ``pages`` ``[n]`` of its cache zero."""
        ...


class NoDrafter:
    """Plain decoding: no drafts, and nothing to remember but the newest token."""

    aux_layers: tuple[int, ...] = ()

    def observe(self, outcome: Outcome) -> tuple[Seed, int]:
        """See ``Drafter.observe``."""
        given = PaddedBatch().prepare(outcome)
        return _seed(given, given.features), 0

    def propose(self, seed: Seed, num_drafts: int, block_tables: Tensor, sampling: SamplingBatch) -> Drafts:
        """See ``Drafter.propose``."""
        assert num_drafts == 0
        return no_drafts(seed)

    def clear(self, pages: Tensor) -> None:
        """See ``Drafter.clear``; there is none."""


class DraftChoice(Protocol):
    """How a draft is chosen from the head's logits."""

    def choose(
        self, logits: Tensor, positions: Tensor, sampling: SamplingBatch
    ) -> tuple[Tensor, Tensor | None]:
        """From logits ``[B, Vd]`` at the drafts' positions ``[B]``: draft ids ``[B]``, and probabilities if sampled."""
        ...


@dataclass(frozen=True)
class GreedyDrafts:
    """The likeliest token; ``argmax`` is the head's, ``[B, Vd] -> [B]``."""

    argmax: Callable[[Tensor], Tensor]

    def choose(
        self, logits: Tensor, positions: Tensor, sampling: SamplingBatch
    ) -> tuple[Tensor, Tensor | None]:
        """See ``DraftChoice.choose``."""
        return self.argmax(logits), None


class SampledDrafts:
    """A draw at the request's temperature; the verifier needs the distribution."""

    def choose(
        self, logits: Tensor, positions: Tensor, sampling: SamplingBatch
    ) -> tuple[Tensor, Tensor | None]:
        """See ``DraftChoice.choose``."""
        probs = draft_probs(logits[:, None], logits.argmax(-1)[:, None], sampling).squeeze(1)
        return draw(probs, uniform(sampling.seeds, positions, DRAFT)), probs


class Eagle3Drafter:
    """An EAGLE3 head over its own one-layer cache; pages are shared with the target."""

    def __init__(
        self,
        *,
        head: Head,
        cache: KVCache,
        backend: Backend,
        batch: DrafterBatch,
        choice: DraftChoice,
        target_vocab_size: int,
    ) -> None:
        self.aux_layers = head.config.aux_layers
        self._head = head
        self._cache = cache
        self._backend = backend
        self._batch = batch
        self._choice = choice
        self._target_vocab_size = target_vocab_size

    def observe(self, outcome: Outcome) -> tuple[Seed, int]:
        """Keys and values of the confirmed rows into the cache. See ``Drafter.observe``."""
        given = self._batch.prepare(outcome)
        hidden = self._head.fuse(given.features)
        self._head.remember(given.tokens, hidden, Keep(self._cache, given.layout, self._head.rope))
        return _seed(given, hidden), given.layout.num_rows

    def propose(self, seed: Seed, num_drafts: int, block_tables: Tensor, sampling: SamplingBatch) -> Drafts:
        """K passes of one row a sequence, all but the first fed the head's own state. See ``Drafter.propose``."""
        if num_drafts == 0:
            return no_drafts(seed)
        ids, hidden, positions = seed.tokens, seed.hidden, seed.positions - 1
        steps = []
        for _ in range(num_drafts):
            layout = Layout.uniform(block_tables, positions, 1, self._cache.page_size)
            attend = Attend(self._backend, self._cache, layout, self._head.rope)
            hidden = self._head.forward(ids, hidden, attend)
            positions = positions + 1
            ids, probs = self._choose(hidden, positions + 1, sampling)
            steps.append((ids, probs))
        tokens = torch.stack([ids for ids, _ in steps], 1)
        sampled = [self._to_target(probs) for _, probs in steps if probs is not None]
        return Drafts(tokens=tokens, probs=torch.stack(sampled, 1) if sampled else None)

    def clear(self, pages: Tensor) -> None:
        """See ``Drafter.clear``."""
        self._cache.clear(pages)

    def _choose(
        self, hidden: Tensor, positions: Tensor, sampling: SamplingBatch
    ) -> tuple[Tensor, Tensor | None]:
        ids, probs = self._choice.choose(self._head.logits(hidden), positions, sampling)
        return self._head.draft_to_target[ids], probs

    def _to_target(self, probs: Tensor) -> Tensor:
        """Probabilities over the draft vocabulary ``[B, Vd]``, laid out over the target's ``[B, V]``."""
        full = probs.new_zeros(probs.shape[0], self._target_vocab_size)
        return full.index_copy_(1, self._head.draft_to_target, probs)


def _seed(given: DraftInput, hidden: Tensor) -> Seed:
    return Seed(
        tokens=given.tokens[given.last],
        positions=given.layout.positions[given.last] + 1,
        hidden=hidden[given.last],
    )
