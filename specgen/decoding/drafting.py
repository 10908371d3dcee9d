"""Drafting with a head: what the target has accepted goes in, K drafts per sequence come out.

Prefill and verify end in the same ``Outcome``, so drafting has one entry. Rows follow EAGLE3 (Li et al., 2025):
ids are shifted left by one and positions are not: the feature at p and the token at p + 1 predict the token at p + 2.
The head has one layer, so of what was accepted it takes in the keys and values alone; the newest row's own pass is
the first of the K that draft, and without drafts there is none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.attention import Attend, Backend, WriteKV
from specgen.decoding.draft_state import Drafts, DraftState, Outcome, StateColumn, no_drafts
from specgen.decoding.drafter_batch import DrafterBatch, PaddedBatch
from specgen.decoding.sampling import DRAFT, SamplingBatch, draft_probs, draw, uniform
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import Layout
from specgen.models.protocols import Head


class Drafter(Protocol):
    """What the engine needs of a drafter."""

    aux_layers: tuple[int, ...]  # whose inputs make the target's features
    state_columns: tuple[StateColumn, ...]  # of ``DraftState.columns``
    rows_per_draft: int  # that go through a head

    def observe(self, outcome: Outcome) -> tuple[DraftState, int]:
        """Take in what the target accepted; also says how many rows that took."""
        ...

    def propose(
        self, state: DraftState, num_drafts: int, block_tables: Tensor, sampling: SamplingBatch
    ) -> Drafts:
        """``num_drafts`` (K) drafts per sequence, or fewer (``NO_DRAFT``).

        May write KV at the K positions from ``state.positions - 1`` on.
        """
        ...

    def clear(self, pages: Tensor) -> None:
        """Make ``pages`` ``[n]`` of its cache zero."""
        ...


class NoDrafter:
    """Plain decoding: no drafts, and no state but the newest token."""

    aux_layers: tuple[int, ...] = ()
    state_columns: tuple[StateColumn, ...] = ()
    rows_per_draft = 0

    def observe(self, outcome: Outcome) -> tuple[DraftState, int]:
        return PaddedBatch().prepare(outcome).state(), 0

    def propose(
        self, state: DraftState, num_drafts: int, block_tables: Tensor, sampling: SamplingBatch
    ) -> Drafts:
        assert num_drafts == 0
        return no_drafts(state)

    def clear(self, pages: Tensor) -> None:
        pass


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
        return self.argmax(logits), None


class SampledDrafts:
    """A draw at the request's temperature; the verifier needs the distribution."""

    def choose(
        self, logits: Tensor, positions: Tensor, sampling: SamplingBatch
    ) -> tuple[Tensor, Tensor | None]:
        probs = draft_probs(logits[:, None], logits.argmax(-1)[:, None], sampling).squeeze(1)
        return draw(probs, uniform(sampling.seeds, positions, DRAFT)), probs


class HeadDrafter:
    """A head over a cache of its own; pages are shared with the target. Its state is the fused feature, ``[B, H]``."""

    def __init__(
        self,
        *,
        head: Head,
        cache: KVCache,
        backend: Backend,
        batch: DrafterBatch,
        choice: DraftChoice,
        target_vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        hidden = StateColumn(shape=(head.config.hidden_size,), dtype=dtype)
        self.aux_layers = head.config.aux_layers
        self.state_columns: tuple[StateColumn, ...] = (hidden,)
        self.rows_per_draft = 1
        self._head = head
        self._cache = cache
        self._backend = backend
        self._batch = batch
        self._choice = choice
        self._target_vocab_size = target_vocab_size

    def observe(self, outcome: Outcome) -> tuple[DraftState, int]:
        """Keys and values of the accepted rows into the cache."""
        given = self._batch.prepare(outcome)
        hidden = self._head.fuse(given.features)
        self._head.write_kv(given.tokens, hidden, WriteKV(self._cache, given.layout, self._head.rope))
        return given.state(hidden), given.layout.num_rows

    def propose(
        self, state: DraftState, num_drafts: int, block_tables: Tensor, sampling: SamplingBatch
    ) -> Drafts:
        """K passes of one row per sequence, all but the first fed the head's own hidden state."""
        if num_drafts == 0:
            return no_drafts(state)
        ids, (hidden,), positions = state.tokens, state.columns, state.positions - 1
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
