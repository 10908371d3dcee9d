"""The two passes of the engine as functions of device tensors: a prefill, and a decode step.

Nothing in them asks the device, so the host may be ahead of it, and a decode step can be captured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen.attention import Attend, Backend
from specgen.config import CONFIDENCE_LEVELS, MOST_DRAFTS, VerificationName
from specgen.core.graphs import Runner
from specgen.core.packing import PromptBlocks, block_layout
from specgen.core.running_batch import Columns
from specgen.core.sequence import NOT_FINITE
from specgen.core.spec_length import Chances, StepPlan
from specgen.decoding.confidence import levels, most_likely
from specgen.decoding.drafting import Drafter
from specgen.decoding.outcome import NO_DRAFT, Drafts, DraftState, Outcome, no_drafts
from specgen.decoding.sampling import (
    ACCEPT,
    EMIT,
    SamplingBatch,
    biased,
    constrained,
    draft_places,
    penalised,
    target_probs,
    token_logprobs,
    uniform,
)
from specgen.decoding.verify import accept_block, accept_by_dice, accept_drawn, accept_greedy, accept_sampled
from specgen.device import on_device
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import Layout
from specgen.models.protocols import Target

_SCORED_TOGETHER = 256  # rows: a float32 row of 128k logits takes half a MiB


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What the target says to drafts."""

    accepted: Tensor  # [B]
    tokens: Tensor  # [B, K+1]
    shown: Tensor  # [B, K+1] the same as the host shall see them: NOT_FINITE where there is none
    logprobs: Tensor | None  # [B, K+1, n], see StepResult
    walked: Tensor | None  # [B, K+1] states of the automata, see ``SamplingBatch.walk``


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a pass found, one row per sequence, and how many rows it computed."""

    # [B, n] int64: a prefill's first tokens, or of a decode step what ``pack`` has made; or a score's log-probability
    # of each token and whether it is the argmax, [n, 2] float32
    numbers: Tensor
    logprobs: Tensor | None = None  # of the tokens (see ``token_logprobs``), where they are asked for
    prompt_logprobs: Tensor | None = None  # likewise of tokens of prompts
    target_rows: int
    fill_rows: int = 0
    loop_rows: int = 0


# What a decode step found of one sequence, on the host:
StepOutput = tuple[
    Sequence[int],  # [K] drafts that were verified, see NO_DRAFT
    Sequence[int],  # [K] levels of confidence, also of what was not verified; -1 of missing ones
    int,  # accepted drafts
    list[int],  # these and the token behind them, see NOT_FINITE
]


def pack(drafts: Tensor, levels: Tensor, accepted: Tensor, tokens: Tensor) -> Tensor:
    """[B, K] twice, [B] and [B, K+1] as one matrix [B, n], which one copy takes to the host."""
    return torch.cat([drafts, levels, accepted[:, None], tokens], 1)


def unpack(numbers: list[list[int]], num_drafts: int) -> list[StepOutput]:
    """The rows of what ``pack`` made of a step with ``num_drafts`` (K) drafts."""
    k, at = num_drafts, 2 * num_drafts
    if not k:  # tens of thousands of empty lists a second, which the search for garbage goes through
        return [((), (), 0, row[1:]) for row in numbers]
    return [(row[:k], row[k:at], row[at], row[at + 1 : at + 2 + row[at]]) for row in numbers]


class _Geometry:
    """The rows of a verify pass: of all drafts, or, as many as ``num_verified``, of those that are most likely.

    ``kept``: a layout, and what is derived from it, may be used twice; else a piece may be replayed alone.
    """

    def __init__(self, columns: Columns, plan: StepPlan, page_size: int, *, kept: bool) -> None:
        self.num_verified = plan.num_verified(columns.num_rows)
        self._columns = columns
        self._query_len = plan.num_drafts + 1
        self._page_size = page_size
        self._layout: Layout | None = None
        self._kept = kept

    def layout(self, *lens: Tensor) -> Layout:
        """``lens`` [B] are each sequence's rows, where ``num_verified`` is not None."""
        if self._layout is None or not self._kept:
            columns, positions = self._columns, self._columns.state.positions
            uniform = Layout.uniform(
                columns.block_tables,
                positions,
                self._query_len,
                self._page_size,
                columns.state_slots,
                columns.windowed_tables,
            )
            self._layout = uniform
            if self.num_verified is not None:
                num_rows = len(positions) + self.num_verified
                self._layout = replace(
                    uniform, uniform_q=None, ragged_lens=lens[0], num_rows=num_rows, full=True
                )
        return self._layout

    def rows(self, matrix: Tensor, layout: Layout) -> Tensor:
        """Those of ``matrix`` [B, K + 1]."""
        return matrix.flatten() if layout.uniform_q else matrix.flatten()[layout.padded]


class Steps:
    """Target, drafter and their caches at work."""

    def __init__(
        self,
        *,
        target: Target,
        cache: KVCache,
        backend: Backend,
        drafter: Drafter,
        runner: Runner,
        verification: VerificationName = "token",
        synthetic_acceptance: tuple[float, ...] = (),
    ) -> None:
        self._target = target
        self._cache = cache
        self._backend = backend
        self._drafter = drafter
        self.pool = drafter.pool
        self.runner = runner
        self._accept_sampled = accept_block if verification == "block" else accept_sampled
        # pages that are to be cleared, and windowed ones
        self._spoilt: tuple[set[int], set[int]] = set(), set()
        # of drafts, by position and level; at an address that stays, as captured steps read it
        self._chances = torch.zeros(MOST_DRAFTS, len(CONFIDENCE_LEVELS), device=target.device)
        self._uploaded: Chances = ()
        self._begins = torch.tensor(CONFIDENCE_LEVELS, device=target.device)
        self._dice: Tensor | None = None  # [MOST_DRAFTS] chances of drafts that dice decide on
        if synthetic_acceptance:
            last = synthetic_acceptance[-1:] * MOST_DRAFTS
            self._dice = on_device((*synthetic_acceptance, *last)[:MOST_DRAFTS], target.device, torch.float32)

    def copy_states(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy recurrent states from one slot to another, all at once; slot 0 is nobody's."""
        copied = [pair for pair in pairs if all(pair)]
        if copied and self._cache.states is not None:
            source, to = on_device([*zip(*copied, strict=True)], self._target.device)
            self._cache.states.copy(source, to)

    def prefill(
        self,
        layout: Layout,
        token_ids: Tensor,
        next_tokens: Tensor,
        fresh: Tensor,
        sampling: SamplingBatch,
        scored: tuple[Tensor, Tensor, int] | None = None,
    ) -> tuple[DraftState, StepResult]:
        """Put the rows of a ragged ``layout`` into the caches.

        ``next_tokens`` ``[rows]`` follow ``token_ids``; those behind the last rows of ``fresh`` ``[B]`` bool sequences
        are not known and chosen here: a verify without drafts. ``scored`` has rows ``[n]``, the tokens ``[n]`` behind
        them whose log-probabilities are asked for, and of how many of the most likely beside them.
        """
        self._clear_spoilt()
        hidden, features = self._prompts(token_ids, layout)
        last = layout.ends - 1
        none = no_drafts(last)
        chosen = self._accept(none, self._logits(hidden[last], sampling), layout.kv_lens - 1, sampling)
        next_tokens[last] = torch.where(fresh, chosen.tokens[:, 0], next_tokens[last])
        sampling.count(chosen.tokens, fresh)
        if chosen.walked is not None:
            sampling.enter(chosen.walked, chosen.tokens, chosen.accepted, fresh)
        state, fill_rows = self._drafter.observe(
            Outcome(
                features=features,
                next_tokens=next_tokens,
                layout=layout,
                keep=layout.query_lens,
                all_kept=True,
                token_ids=token_ids,
            )
        )
        return state, StepResult(
            numbers=chosen.shown,
            logprobs=chosen.logprobs,
            prompt_logprobs=None if scored is None else self._prompt_logprobs(hidden, *scored),
            target_rows=layout.num_rows,
            fill_rows=fill_rows,
        )

    def _prompt_logprobs(self, hidden: Tensor, rows: Tensor, targets: Tensor, num_top: int) -> Tensor:
        """``[n, 1 + 2 m]``, see ``token_logprobs``."""
        found = []
        for start in range(0, len(rows), _SCORED_TOGETHER):
            some = slice(start, start + _SCORED_TOGETHER)
            logits = self._target.logits(hidden[rows[some]])
            found.append(token_logprobs(logits, targets[some], num_top))
        return torch.cat(found)

    def decode(self, columns: Columns, plan: StepPlan) -> StepResult:
        """One step of every row of ``columns``, with the drafts of ``plan``; leaves the next state there.

        Without drafts the head still takes in what the target accepts, so that any later step can draft.
        """
        self._clear_spoilt()
        if self.pool is not None:
            self.pool.refresh()
        if plan.chances and plan.chances is not self._uploaded:
            self._chances[: len(plan.chances)] = on_device(plan.chances, self._target.device, torch.float32)
            self._uploaded = plan.chances
        key = ("step", columns.num_rows, plan.num_drafts, (plan.quarters, columns.sampling.form))
        return self.runner.step(key, lambda: self._decode(columns, plan))

    def _decode(self, columns: Columns, plan: StepPlan) -> StepResult:
        state, sampling, num_rows, k = columns.state, columns.sampling, columns.num_rows, plan.num_drafts
        geometry = _Geometry(columns, plan, self._cache.page_size, kept=not self.runner.pieces_alone)

        def propose() -> tuple[Drafts, Tensor]:
            drafts = self._drafter.propose(state, k, columns.block_tables, sampling, columns.windowed_tables)
            return drafts, levels(drafts.confidence, self._begins)

        def verify(drafts: Tensor, *lens: Tensor) -> tuple[Tensor, Tensor]:
            newest = state.tokens[:, None]  # also where there is no draft: a row of a token that the text has
            every = torch.cat([newest, torch.where(drafts == NO_DRAFT, newest, drafts)], 1)
            layout = geometry.layout(*lens)
            hidden, features = self._forward(geometry.rows(every, layout), layout)
            return self._logits(hidden, sampling), features

        def observe(features: Tensor, tokens: Tensor, keep: Tensor, *lens: Tensor) -> tuple[DraftState, int]:
            layout = geometry.layout(*lens)
            following = geometry.rows(tokens, layout)
            return self._drafter.observe(
                Outcome(features=features, next_tokens=following, layout=layout, keep=keep)
            )

        piece, what = self.runner.piece, (num_rows, k, (plan.quarters, sampling.form))
        drafts, sure = piece(("propose", *what), propose)
        lens: tuple[Tensor, ...] = ()
        if geometry.num_verified is not None:
            drafts, left = most_likely(drafts, sure, self._chances, columns.active, geometry.num_verified)
            lens = (left + 1,)
        logits, features = piece(("verify", *what), verify, drafts.tokens, *lens)
        rows = geometry.layout(*lens).rows_of(k + 1) if lens else None
        found = self._accept(drafts, logits, state.positions, sampling, rows)
        next_state, fill_rows = piece(
            ("observe", *what), observe, features, found.tokens, found.accepted + 1, *lens
        )
        result = StepResult(
            numbers=pack(drafts.tokens, sure, found.accepted, found.shown),
            logprobs=found.logprobs,
            target_rows=len(features),
            fill_rows=fill_rows,
            loop_rows=num_rows * self._drafter.draft_rows(k),
        )
        sampling.count(found.tokens, (found.accepted + 1) * columns.active)
        if found.walked is not None:
            sampling.enter(found.walked, found.tokens, found.accepted)
        columns.advance(next_state)  # last: a step whose numbers do not exist has not been made
        return result

    def clear(self, pages: Iterable[int], windowed: Iterable[int] = ()) -> None:
        """Make ``pages`` of both caches zero before the next pass: what is not a number there would reach its rows.

        ``windowed`` are those of the target's layers whose pages go back behind a window.
        """
        for spoilt, some in zip(self._spoilt, (pages, windowed), strict=True):
            spoilt.update(some)

    def _clear_spoilt(self) -> None:
        if any(self._spoilt):
            pages, windowed = (on_device(sorted(each), self._target.device) for each in self._spoilt)
            self._cache.clear(pages, windowed)
            self._drafter.clear(pages)
            for spoilt in self._spoilt:
                spoilt.clear()  # not before: a pass that fails here has cleared nothing

    def score(self, layout: Layout, token_ids: Tensor, rows: Tensor, targets: Tensor) -> StepResult:
        """Put a ragged ``layout`` into the target's cache and score ``targets`` ``[n]`` behind ``rows`` ``[n]``."""
        self._clear_spoilt()
        attend = Attend(self._backend, self._cache, layout, self._target.rope)
        hidden, _ = self._target.forward(token_ids, attend)
        log_probs = [hidden.new_empty(0, dtype=torch.float32)]
        greedy = [targets.new_empty(0, dtype=torch.bool)]
        for start in range(0, len(rows), _SCORED_TOGETHER):
            some = slice(start, start + _SCORED_TOGETHER)
            logits = self._target.logits(hidden[rows[some]])
            every = logits.log_softmax(-1, dtype=torch.float32)
            log_probs.append(every.gather(-1, targets[some, None])[:, 0])
            greedy.append(self._target.vocabulary.argmax(logits)[0] == targets[some])
        numbers = torch.stack((torch.cat(log_probs), torch.cat(greedy).float()), 1)
        return StepResult(numbers=numbers, target_rows=layout.num_rows)

    def _prompts(self, token_ids: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """``_forward``; captured, where the host would be slower than the device."""
        in_blocks = self.runner.captures and self._target.config.prompts_in_blocks
        blocks = PromptBlocks.of(layout) if in_blocks else None
        if blocks is None:
            return self._forward(token_ids, layout)

        def forward(ids: Tensor, starts: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
            return self._forward(ids, block_layout(starts, tables, self._cache.page_size))

        inputs = blocks.spread(token_ids), blocks.starts, *blocks.tables
        hidden, features = self.runner.prompts(("prompts", *blocks.size, None), forward, *inputs)
        return hidden[blocks.rows], features[blocks.rows]

    def _forward(self, token_ids: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        attend = Attend(self._backend, self._cache, layout, self._target.rope)
        hidden, features = self._target.forward(token_ids, attend, self._drafter.aux_layers)
        return hidden, hidden if self._drafter.reads_output else features

    def _logits(self, hidden: Tensor, sampling: SamplingBatch) -> Tensor:
        """Of rows ``[n, H]``: ``[n, V]``, or where only the argmax is needed, a rank's share of them."""
        vocabulary = self._target.vocabulary
        share = vocabulary.share(hidden)
        return share if sampling.form.greedy_only else vocabulary.whole(share)

    def _accept(
        self,
        drafts: Drafts,
        logits: Tensor,
        positions: Tensor,
        sampling: SamplingBatch,
        rows: Tensor | None = None,
    ) -> VerifyResult:
        """Drafts against logits of the rows from ``positions`` ``[B]`` on.

        ``logits`` ``[B * (K+1), V]`` are as of ``_logits``; or those of a ragged pass, of which ``rows`` ``[B, K+1]``
        are each sequence's, and its last one where it has no more.
        """
        argmax = self._target.vocabulary.argmax
        walked = sampling.walk(drafts.tokens) if sampling.form.constrained else None
        if rows is not None and sampling.form.greedy_only:  # logits take much memory, and it is on them alone
            greedy_tokens, largest = (each[rows] for each in argmax(logits))
        else:
            num_sequences, k = drafts.tokens.shape
            logits = logits.view(num_sequences, k + 1, -1) if rows is None else logits[rows]
            decisive = penalised(biased(logits, positions, sampling), drafts.tokens, sampling)
            if walked is not None:
                decisive = constrained(decisive, walked, sampling)
            greedy_tokens, largest = argmax(decisive)
        chances = None if self._dice is None else self._dice[: drafts.tokens.shape[1]]
        if sampling.form.kind == "greedy" and (chances is None or not len(chances)):
            accepted, tokens = accept_greedy(drafts.tokens, greedy_tokens)
        else:
            decided = positions[:, None] + 1 + torch.arange(greedy_tokens.shape[1], device=logits.device)
            places = draft_places(positions, 0, drafts.tokens.shape[1])
            if chances is not None:
                dice = uniform(sampling.seeds, places, ACCEPT)
                accepted, tokens = accept_by_dice(drafts.tokens, greedy_tokens, chances, dice)
            else:
                probs = target_probs(decisive, greedy_tokens, sampling)
                emitting = uniform(sampling.seeds, decided, EMIT)
                if drafts.probs is None:
                    accepted, tokens = accept_drawn(drafts.tokens, probs, emitting)
                else:
                    dice = uniform(sampling.seeds, places, ACCEPT)
                    judged = (drafts.tokens, drafts.probs, probs, dice, emitting)
                    accepted, tokens = self._accept_sampled(*judged)
        num_top = sampling.form.num_logprobs
        return VerifyResult(
            accepted=accepted,
            tokens=tokens,
            shown=torch.where(largest.abs() < float("inf"), tokens, NOT_FINITE),
            logprobs=None if num_top is None else token_logprobs(logits, tokens, num_top),
            walked=walked,
        )
