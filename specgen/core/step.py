"""The two passes of the engine as functions of device tensors: a prefill, and a decode step.

Nothing in them asks the device, so the host may be ahead of it, and a decode step can be captured.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen.attention import Attend, Backend
from specgen.core.graphs import Runner
from specgen.core.packing import PromptBlocks, block_layout
from specgen.core.running_batch import Columns
from specgen.core.sequence import NOT_FINITE
from specgen.decoding.drafting import Drafter
from specgen.decoding.outcome import NO_DRAFT, Drafts, DraftState, Outcome
from specgen.decoding.sampling import (
    ACCEPT,
    EMIT,
    SamplingBatch,
    biased,
    penalised,
    target_probs,
    token_logprobs,
    uniform,
)
from specgen.decoding.verify import accept_greedy, accept_sampled
from specgen.device import on_device
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import Layout
from specgen.models.expert_counts import ExpertSize, num_touched
from specgen.models.layers import Chosen
from specgen.models.protocols import Target

_SCORED_TOGETHER = 256  # rows: a float32 row of 128k logits takes half a MiB


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """What the target says to drafts."""

    accepted: Tensor  # [B]
    tokens: Tensor  # [B, K+1]
    shown: Tensor  # [B, K+1] the same as the host shall see them: NOT_FINITE where there is none
    logprobs: Tensor | None  # [B, K+1, n], see StepResult


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a pass found, one row per sequence, and how many rows it computed."""

    # [B, n] int64: a prefill's first tokens, or of a decode step what ``pack`` has made; or a score's log-probability
    # of each token and whether it is the argmax, [n, 2] float32
    numbers: Tensor
    logprobs: Tensor | None = None  # of the tokens (see ``token_logprobs``), where they are asked for
    target_rows: int
    fill_rows: int = 0
    loop_rows: int = 0
    experts: ExpertSize | None = None  # of a mixture, whose decode steps are counted


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a decode step found, on the host."""

    drafts: list[list[int]]  # [B, K], see NO_DRAFT
    accepted: list[int]  # [B]
    tokens: list[list[int]]  # [B, K+1], see ``verify`` and NOT_FINITE
    touched: list[int]  # experts, see ``num_touched``; empty where they are not counted


def pack(drafts: Tensor, accepted: Tensor, tokens: Tensor, touched: Tensor | None) -> Tensor:
    """[B, K], [B], [B, K+1] and [2] or None as one matrix [B, n], which one copy takes to the host."""
    columns = [drafts, accepted[:, None], tokens]
    if touched is not None:
        columns.append(touched.expand(len(drafts), 2))
    return torch.cat(columns, 1)


def unpack(numbers: list[list[int]], num_drafts: int) -> Found:
    """The rows of what ``pack`` made of a step with ``num_drafts`` (K) drafts."""
    k, end = num_drafts, 2 * num_drafts + 2
    return Found(
        drafts=[row[:k] for row in numbers],
        accepted=[row[k] for row in numbers],
        tokens=[row[k + 1 : end] for row in numbers],
        touched=numbers[0][end:],
    )


class Steps:
    """Target, drafter and their caches at work; decode steps count the ``experts`` of a mixture that they touch."""

    def __init__(
        self,
        *,
        target: Target,
        cache: KVCache,
        backend: Backend,
        drafter: Drafter,
        runner: Runner,
        experts: ExpertSize | None = None,
    ) -> None:
        self._target = target
        self._cache = cache
        self._backend = backend
        self._drafter = drafter
        self._experts = experts
        self.runner = runner
        self._spoilt: set[int] = set()  # pages that are to be cleared

    def prefill(
        self, layout: Layout, token_ids: Tensor, next_tokens: Tensor, fresh: Tensor, sampling: SamplingBatch
    ) -> tuple[DraftState, StepResult]:
        """Put the rows of a ragged ``layout`` into the caches.

        ``next_tokens`` ``[rows]`` follow ``token_ids``; those behind the last rows of ``fresh`` ``[B]`` bool sequences
        are not known and chosen here: a verify without drafts.
        """
        self._clear_spoilt()
        hidden, features = self._prompts(token_ids, layout)
        last = layout.ends - 1
        none = Drafts(tokens=last.new_empty(len(last), 0), probs=None)
        logits = self._logits(hidden[last], sampling)[:, None]
        chosen = self._accept(none, logits, layout.kv_lens - 1, sampling)
        next_tokens[last] = torch.where(fresh, chosen.tokens[:, 0], next_tokens[last])
        sampling.count(chosen.tokens, fresh)
        state, fill_rows = self._drafter.observe(
            Outcome(
                features=features,
                next_tokens=next_tokens,
                layout=layout,
                keep=layout.query_lens,
                all_kept=True,
            )
        )
        return state, StepResult(
            numbers=chosen.shown, logprobs=chosen.logprobs, target_rows=layout.num_rows, fill_rows=fill_rows
        )

    def decode(self, columns: Columns, num_drafts: int) -> StepResult:
        """One step of every row of ``columns``, with ``num_drafts`` (K) drafts each; leaves the next state there.

        Without drafts the head still takes in what the target accepts, so that any later step can draft.
        """
        self._clear_spoilt()
        key = ("step", columns.num_rows, num_drafts, columns.sampling.form)
        return self.runner.step(key, lambda: self._decode(columns, num_drafts))

    def _decode(self, columns: Columns, k: int) -> StepResult:
        state, tables, sampling = columns.state, columns.block_tables, columns.sampling
        num_rows = columns.num_rows

        shared = Layout.uniform(tables, state.positions, k + 1, self._cache.page_size)

        def layout() -> Layout:  # with what is derived from it, unless a piece may run alone
            return replace(shared) if self.runner.pieces_alone else shared

        def verify(drafts: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            newest = state.tokens[:, None]  # also where there is no draft: a row of a token that the text has
            rows = torch.cat([newest, torch.where(drafts == NO_DRAFT, newest, drafts)], 1)
            if self._experts is None:
                hidden, features = self._forward(rows.flatten(), layout())
                touched = None
            else:
                chosen = list[Tensor]()
                hidden, features = self._forward(rows.flatten(), layout(), chosen)
                touched = num_touched(torch.stack(chosen), columns.active, self._experts.num_experts)
            return self._logits(hidden, sampling).view(*rows.shape, -1), features, touched

        def observe(features: Tensor, tokens: Tensor, keep: Tensor) -> tuple[DraftState, int]:
            outcome = Outcome(features=features, next_tokens=tokens.flatten(), layout=layout(), keep=keep)
            return self._drafter.observe(outcome)

        piece, what = self.runner.piece, (num_rows, k, sampling.form)
        drafts = piece(("propose", *what), lambda: self._drafter.propose(state, k, tables, sampling))
        logits, features, touched = piece(("verify", *what), verify, drafts.tokens)
        found = self._accept(drafts, logits, state.positions, sampling)
        next_state, fill_rows = piece(("observe", *what), observe, features, found.tokens, found.accepted + 1)
        result = StepResult(
            numbers=pack(drafts.tokens, found.accepted, found.shown, touched),
            logprobs=found.logprobs,
            target_rows=num_rows * (k + 1),
            fill_rows=fill_rows,
            loop_rows=num_rows * k * self._drafter.rows_per_draft,
            experts=self._experts,
        )
        sampling.count(found.tokens, (found.accepted + 1) * columns.active)
        columns.advance(next_state)  # last: a step whose numbers do not exist has not been made
        return result

    def clear(self, pages: Iterable[int]) -> None:
        """Make ``pages`` of both caches zero before the next pass: what is not a number there would reach its rows."""
        self._spoilt.update(pages)

    def _clear_spoilt(self) -> None:
        if self._spoilt:
            pages = on_device(sorted(self._spoilt), self._target.device)
            self._cache.clear(pages)
            self._drafter.clear(pages)
            self._spoilt.clear()  # not before: a pass that fails here has cleared nothing

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
        latent = self._target.config.latent is not None  # prefills have another form than decode passes
        blocks = PromptBlocks.of(layout) if self.runner.captures and not latent else None
        if blocks is None:
            return self._forward(token_ids, layout)

        def forward(ids: Tensor, starts: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
            return self._forward(ids, block_layout(starts, tables, self._cache.page_size))

        inputs = blocks.spread(token_ids), blocks.starts, blocks.tables
        hidden, features = self.runner.prompts(("prompts", *blocks.size, None), forward, *inputs)
        return hidden[blocks.rows], features[blocks.rows]

    def _forward(self, token_ids: Tensor, layout: Layout, chosen: Chosen = None) -> tuple[Tensor, Tensor]:
        attend = Attend(self._backend, self._cache, layout, self._target.rope)
        hidden, features = self._target.forward(token_ids, attend, self._drafter.aux_layers, chosen)
        return hidden, hidden if self._drafter.reads_output else features

    def _logits(self, hidden: Tensor, sampling: SamplingBatch) -> Tensor:
        """Of rows ``[n, H]``: ``[n, V]``, or where only the argmax is needed, a rank's share of them."""
        vocabulary = self._target.vocabulary
        share = vocabulary.share(hidden)
        return share if sampling.form.greedy_only else vocabulary.whole(share)

    def _accept(self, drafts: Drafts, logits: Tensor, positions: Tensor, sampling: SamplingBatch) -> _Verdict:
        """Drafts against logits ``[B, K+1, V]`` (see ``_logits``) of the rows from ``positions`` ``[B]`` on."""
        decisive = penalised(biased(logits, sampling), drafts.tokens, sampling)
        greedy_tokens, largest = self._target.vocabulary.argmax(decisive)
        if sampling.form.kind == "greedy":
            accepted, tokens = accept_greedy(drafts.tokens, greedy_tokens)
        else:
            decided = positions[:, None] + 1 + torch.arange(logits.shape[1], device=logits.device)
            accepted, tokens = accept_sampled(
                drafts.tokens,
                drafts.probs,
                target_probs(decisive, greedy_tokens, sampling),
                uniform(sampling.seeds, decided[:, :-1], ACCEPT),
                uniform(sampling.seeds, decided, EMIT),
            )
        num_top = sampling.form.num_logprobs
        return _Verdict(
            accepted=accepted,
            tokens=tokens,
            shown=torch.where(largest.abs() < float("inf"), tokens, NOT_FINITE),
            logprobs=None if num_top is None else token_logprobs(logits, tokens, num_top),
        )
