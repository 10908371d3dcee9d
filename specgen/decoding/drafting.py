"""Drafting with a head: what the target has accepted goes in, K drafts per sequence come out.

Prefill and verify end in the same ``Outcome``, so drafting has one entry. Rows follow EAGLE3 (Li et al., 2025):
ids are shifted left by one and positions are not: the feature at p and the token at p + 1 predict the token at p + 2.
Of what was accepted the head's last layer takes in the keys and values alone; the newest row's own pass is the first
of the K that draft, and without drafts there is none. A head that drafts in one pass has masks for the tokens to come:
behind the newest row (P-EAGLE), or behind the newest token at its own position (DFlash).
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specgen.attention import Attend, Backend
from specgen.decoding.answer_pool import AnswerPool
from specgen.decoding.outcome import (
    DrafterBatch,
    Drafts,
    DraftState,
    Outcome,
    PaddedBatch,
    StateColumn,
    no_drafts,
)
from specgen.decoding.sampling import (
    DRAFT,
    SamplingBatch,
    biased,
    constrained,
    draft_places,
    draft_probs,
    draw,
    uniform,
)
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import Layout
from specgen.models.protocols import Head, OnePass

_UNLIKELY = -1e4  # a logit of what is not allowed: finite, as there may be nothing else in a draft vocabulary


class Chosen(NamedTuple):
    """Drafts at ``n`` positions of each sequence."""

    ids: Tensor  # [B, n] of the target
    confidence: Tensor  # [B, n]
    probs: Tensor | None  # [B, n, Vd] they were drawn from: the verifier needs them


class Drafter(Protocol):
    """What the engine needs of a drafter."""

    aux_layers: tuple[int, ...]  # whose inputs make the target's features
    reads_output: bool  # the features are the target's last hidden states instead
    state_columns: tuple[StateColumn, ...]  # of ``DraftState.columns``
    pool: AnswerPool | None  # of answers that have ended, if it drafts from such

    def observe(self, outcome: Outcome) -> tuple[DraftState, int]:
        """Take in what the target accepted; also says how many rows that took."""
        ...

    def propose(
        self,
        state: DraftState,
        num_drafts: int,
        block_tables: Tensor,
        sampling: SamplingBatch,
        windowed_tables: Tensor | None = None,
    ) -> Drafts:
        """``num_drafts`` (K) drafts per sequence, or fewer (``NO_DRAFT``).

        ``windowed_tables``, see ``Layout``, are for one that reads the target's cache. May write KV from
        ``state.positions - 1`` to ``state.positions + K``.
        """
        ...

    def draft_rows(self, num_drafts: int) -> int:
        """Rows of a sequence that go through a head to draft."""
        ...

    def clear(self, pages: Tensor) -> None:
        """Make ``pages`` ``[n]`` of its cache zero."""
        ...


class NoDrafter:
    """Plain decoding: no drafts, and no state but the newest token."""

    aux_layers: tuple[int, ...] = ()
    reads_output = False
    state_columns: tuple[StateColumn, ...] = ()
    pool: AnswerPool | None = None

    def observe(self, outcome: Outcome) -> tuple[DraftState, int]:
        return PaddedBatch().prepare(outcome).state(), 0

    def propose(
        self,
        state: DraftState,
        num_drafts: int,
        block_tables: Tensor,
        sampling: SamplingBatch,
        windowed_tables: Tensor | None = None,
    ) -> Drafts:
        assert num_drafts == 0
        return no_drafts(state.tokens)

    def draft_rows(self, num_drafts: int) -> int:
        return 0

    def clear(self, pages: Tensor) -> None:
        pass


class HeadDrafter:
    """A head with its own cache, or over the target's if that is all it reads; both have the same pages.

    Its state is the fused feature, ``[B, H]``.

    With ``sampled_drafts`` drafts are drawn at the request's temperature, else they are the argmax.
    """

    pool: AnswerPool | None = None

    def __init__(
        self,
        *,
        head: Head,
        cache: KVCache,
        backend: Backend,
        batch: DrafterBatch,
        sampled_drafts: bool,
        target_vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        hidden = StateColumn(shape=(head.config.state_size,), dtype=dtype)
        self.aux_layers = head.config.aux_layers
        self.reads_output = head.config.reads_output
        self.state_columns: tuple[StateColumn, ...] = (hidden,)
        self._head = head
        self._cache = cache
        self._backend = backend
        self._batch = batch
        self._sampled_drafts = sampled_drafts
        self._target_vocab_size = target_vocab_size

    def observe(self, outcome: Outcome) -> tuple[DraftState, int]:
        """Keys and values of the accepted rows into the cache, if it is the head's own."""
        given = self._batch.prepare(outcome)
        hidden = self._head.fuse(given.features)
        if self._head.config.reads_target_kv:
            return given.state(hidden), 0
        self._head.write_kv(given.tokens, hidden, self._attend(given.layout))
        return given.state(hidden), given.layout.num_rows

    def propose(
        self,
        state: DraftState,
        num_drafts: int,
        block_tables: Tensor,
        sampling: SamplingBatch,
        windowed_tables: Tensor | None = None,
    ) -> Drafts:
        """K passes of one row per sequence, or one of K rows for a head that drafts in parallel."""
        if num_drafts == 0:
            return no_drafts(state.tokens)
        one_pass = self._head.one_pass
        if one_pass is None:
            chosen = list(self._one_by_one(state, num_drafts, (block_tables, windowed_tables), sampling))
        else:
            chosen = list(self._at_once(one_pass, state, num_drafts, block_tables, sampling))
        sampled = [self._to_target(each.probs) for each in chosen if each.probs is not None]
        return Drafts(
            tokens=torch.cat([each.ids for each in chosen], 1),
            probs=torch.cat(sampled, 1) if sampled else None,
            confidence=torch.cat([each.confidence for each in chosen], 1),
        )

    def _one_by_one(
        self,
        state: DraftState,
        num_drafts: int,
        tables: tuple[Tensor, Tensor | None],
        sampling: SamplingBatch,
    ) -> Iterator[Chosen]:
        """A pass per draft, all but the first fed the head's own hidden state and draft."""
        ids, (hidden,) = state.tokens, state.columns
        states = sampling.states
        for index, attend in enumerate(self._passes(state.positions, num_drafts, *tables)):
            head = self._head.of_pass(index)
            hidden, normed = (hidden, hidden) if attend is None else head.forward(ids, hidden, attend)
            chosen = self._choose(head.logits(normed)[:, None], state, index, sampling, states)
            ids = chosen.ids[:, 0]
            states = sampling.following(states, ids) if sampling.form.constrained else states
            yield chosen

    def _passes(
        self, newest: Tensor, num_drafts: int, block_tables: Tensor, windowed_tables: Tensor | None
    ) -> Iterable[Attend | None]:
        """Of a row a sequence: the first in front of its ``newest`` token's position [B], where the last is stored.

        The next ones are each behind the one before; those of a head that stores nothing are all there.
        """
        stays = self._head.config.reads_target_kv
        steps = torch.arange(-1, 0 if stays else num_drafts - 1, device=newest.device)
        found = (
            self._attend(
                Layout.uniform(
                    block_tables, positions, 1, self._cache.page_size, windowed_tables=windowed_tables
                )
            )
            for positions in newest + steps[:, None]
        )
        return [*found] * num_drafts if stays else found

    def _at_once(
        self, masks: OnePass, state: DraftState, k: int, block_tables: Tensor, sampling: SamplingBatch
    ) -> Iterator[Chosen]:
        """One pass over the newest token's row and a mask for each later one."""
        num_rows = self._head.config.pass_rows(k)
        layout = Layout.uniform(block_tables, state.positions + masks.first, num_rows, self._cache.page_size)
        ids = pad(state.tokens[:, None], (0, num_rows - 1), value=masks.mask_token_id)
        (hidden,) = state.columns
        if masks.hidden is not None:
            masked = masks.hidden.expand(len(hidden), num_rows - 1, -1)
            hidden = torch.cat((hidden[:, None], masked), 1).flatten(0, 1)
        _, normed = self._head.forward(ids.flatten(), hidden, self._attend(layout))
        drafting = normed.view(len(ids), num_rows, -1)[:, num_rows - k :]
        logits = self._head.logits(drafting.flatten(0, 1)).view(len(ids), k, -1)
        markov, is_constrained = self._head.markov, sampling.form.constrained
        if markov is None and not is_constrained:
            yield self._choose(logits, state, 0, sampling, sampling.states)
            return
        before, carried, sure, states = state.tokens, None, None, sampling.states
        for index in range(k):
            changed = logits[:, index]
            if markov is not None:
                changed, sure, carried = markov.step(changed, drafting[:, index], before, carried)
            chosen = self._choose(changed[:, None], state, index, sampling, states)
            before = chosen.ids[:, 0]
            states = sampling.following(states, before) if is_constrained else states
            yield chosen if sure is None else chosen._replace(confidence=sure[:, None])

    def draft_rows(self, num_drafts: int) -> int:
        at_once = self._head.one_pass is not None and num_drafts > 0
        return self._head.config.pass_rows(num_drafts) if at_once else num_drafts

    def clear(self, pages: Tensor) -> None:
        if not self._head.config.reads_target_kv:
            self._cache.clear(pages)

    def _attend(self, layout: Layout) -> Attend:
        return Attend(self._backend, self._cache, layout, self._head.rope)

    def _choose(
        self, logits: Tensor, state: DraftState, first: int, sampling: SamplingBatch, states: Tensor
    ) -> Chosen:
        """From ``logits`` ``[B, n, Vd]`` of the drafts from ``first`` on, counted from 0 behind the newest tokens.

        With constraints n is 1, and what they do not allow in ``states`` ``[B]`` is left out, if anything is left then.
        """
        draft_to_target = self._head.draft_to_target
        if sampling.form.num_biases:  # what they forbid would be drafted in vain
            zeros = logits.new_zeros(*logits.shape[:2], self._target_vocab_size)
            added = biased(zeros, state.positions + first, sampling).clamp_(min=_UNLIKELY)
            logits = logits + added[..., draft_to_target]
        if sampling.form.constrained:
            logits = constrained(logits, states[:, None], sampling, _UNLIKELY, draft_to_target)
        if not self._sampled_drafts:
            ids, confidence = self._head.most_likely(logits, draft_to_target)
            return Chosen(ids, confidence, None)
        largest, confidence = self._head.most_likely(logits)
        probs = draft_probs(logits, largest, sampling)
        places = draft_places(state.positions, first, logits.shape[1])
        drawn = draw(probs, uniform(sampling.seeds, places, DRAFT))
        return Chosen(draft_to_target[drawn], confidence, probs)

    def _to_target(self, probs: Tensor) -> Tensor:
        """Probabilities over the draft vocabulary ``[B, n, Vd]``, laid out over the target's ``[B, n, V]``."""
        full = probs.new_zeros(*probs.shape[:2], self._target_vocab_size)
        return full.index_copy_(2, self._head.draft_to_target, probs)


class ModelDrafter(HeadDrafter):
    """A language model of the target's vocabulary; its state is the hidden state behind the newest token, ``[B, H]``.

    Ids stand at their own positions. What the target accepted, the newest token included, goes through it in one pass,
    which gives the first draft too; the others take a pass of one row each.
    """

    def observe(self, outcome: Outcome) -> tuple[DraftState, int]:
        given = self._batch.prepare(outcome)
        ids, layout, last = given.tokens, given.layout.shifted(), given.last
        if outcome.token_ids is not None:
            # a prompt, of which nothing is in the cache: its rows, then the token behind them
            self._head.write_kv(outcome.token_ids, given.features, self._attend(given.layout))
            ids, last = ids[last], torch.arange(len(last), device=last.device)
            layout = Layout.uniform(layout.block_tables, given.end, 1, layout.page_size)
        hidden, _ = self._head.forward(ids, given.features, self._attend(layout))
        state = DraftState(tokens=given.tokens[given.last], positions=given.end, columns=(hidden[last],))
        return state, given.layout.num_rows

    def _passes(
        self, newest: Tensor, num_drafts: int, block_tables: Tensor, windowed_tables: Tensor | None
    ) -> Iterable[Attend | None]:
        """The first is made where it was observed; the others stand behind the ``newest`` token's position [B]."""
        return chain([None], super()._passes(newest + 2, num_drafts - 1, block_tables, windowed_tables))

    def draft_rows(self, num_drafts: int) -> int:
        return max(num_drafts - 1, 0)
