"""The order of one step: admit and prefill, propose, verify, observe, commit."""

import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from specgen.attention import Attend, Backend
from specgen.config import SamplingParams
from specgen.drafting import Drafter, Drafts, Outcome, Seed
from specgen.events import Event, Finished, Preempted, Prefilled, Stepped, Submitted, Verified
from specgen.kv_cache import KVCache
from specgen.layout import Layout
from specgen.models.llama import Llama
from specgen.sampling import ACCEPT, EMIT, SamplingBatch, request_seed, target_probs, uniform
from specgen.scheduler import Chunk, Scheduler
from specgen.sequence import Completion, Request, Sequence, StopFinder
from specgen.verify import accept_greedy, accept_sampled


def no_follow_up(completion: Completion) -> Request | None:
    """Every request stands alone."""
    return None


class Engine:
    """Generates for many requests at once; made by ``build.build_engine``.

    ``stop_finder`` makes the detector of one request's stop strings; ``record`` takes every event as it happens.
    """

    def __init__(
        self,
        *,
        target: Llama,
        cache: KVCache,
        backend: Backend,
        drafter: Drafter,
        scheduler: Scheduler,
        stop_finder: Callable[[tuple[str, ...]], StopFinder],
        record: Callable[[Event], None],
    ) -> None:
        self._target = target
        self._cache = cache
        self._backend = backend
        self._drafter = drafter
        self._scheduler = scheduler
        self._stop_finder = stop_finder
        self._record = record
        self._began = time.perf_counter()
        self._device = target.device
        self._seed: Seed | None = None  # one row for each of scheduler.running
        self._sampling: SamplingBatch | None = None  # the same rows; None when they have changed

    # --- requests ---------------------------------------------------------------------------------

    def generate(
        self,
        requests: Iterable[Request],
        follow_up: Callable[[Completion], Request | None] = no_follow_up,
    ) -> Iterator[Completion]:
        """Yield completions as they finish, in no fixed order.

        A request is drawn from ``requests`` when the batch has a place for it. ``follow_up`` may answer a completion
        with the next request of the same conversation.
        """
        source = iter(requests)
        while True:
            finished = [*self._draw_requests(source), *self.step()]
            for completion in finished:
                yield completion
                while (request := follow_up(completion)) is not None:
                    refused = self.submit(request)
                    if refused is None:
                        break
                    yield (completion := refused)
            if not finished and self._scheduler.idle:
                return

    def warm_up(self) -> None:
        """Generate a little and record nothing: first calls load, allocate and compile, which no run should measure."""
        record, self._record = self._record, lambda event: None
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        for _ in self.generate(
            Request(id=f"warm-up {i}", prompt_token_ids=(0,) * 16, sampling=sampling) for i in range(2)
        ):
            pass
        self._record, self._began = record, time.perf_counter()

    def _draw_requests(self, source: Iterator[Request]) -> Iterator[Completion]:
        while self._scheduler.has_place:
            request = next(source, None)
            if request is None:
                return
            refused = self.submit(request)
            if refused is not None:
                yield refused

    def submit(self, request: Request) -> Completion | None:
        """Queue ``request``; a completion with the reason comes back at once if it can never run."""
        sequence = self._new_sequence(request)
        self._record(
            Submitted(
                sequence=request.id,
                time=self._now(),
                num_prompt_tokens=len(request.prompt_token_ids),
                category=request.category,
                turn=request.turn,
            )
        )
        reason = self._refusal(sequence)
        if reason is None:
            self._scheduler.submit(sequence)
            return None
        self._record(Finished(sequence=request.id, time=self._now(), reason="error", num_output_tokens=0))
        return Completion(request=request, token_ids=(), finish_reason="error", error=reason)

    def _new_sequence(self, request: Request) -> Sequence:
        sampling, prompt = request.sampling, list(request.prompt_token_ids)
        eos = () if sampling.ignore_eos else self._target.config.eos_token_ids
        return Sequence(
            request=request,
            tokens=prompt,
            max_length=min(len(prompt) + sampling.max_tokens, self._target.config.max_positions),
            seed=request_seed(sampling.seed, request.id),
            eos_token_ids=frozenset(eos),
            stop=self._stop_finder(sampling.stop) if sampling.stop else None,
        )

    def _refusal(self, sequence: Sequence) -> str | None:
        num_prompt, limit = len(sequence.tokens), self._target.config.max_positions
        if num_prompt == 0:
            return "the prompt is empty: give at least one token"
        outside = [t for t in sequence.tokens if not 0 <= t < self._target.config.vocab_size]
        if outside:
            return f"token id {outside[0]} is not in the vocabulary of {self._target.config.vocab_size}"
        if num_prompt >= limit:
            return (
                f"the prompt has {num_prompt} tokens and the model's context is {limit}: shorten the prompt"
            )
        return self._scheduler.refusal(sequence)

    # --- one step ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One prefill pass, if prompts wait and fit, and one decode step of all that run."""
        return [*self._prefill(), *self._decode()]

    def _prefill(self) -> list[Completion]:
        began = self._now()
        chunks = self._scheduler.next_chunks()
        if not chunks:
            return []
        layout = self._prefill_layout(chunks)
        hidden, features = self._forward(self._rows(chunks, shift=0), layout)
        last = layout.last_rows
        fresh = [i for i, chunk in enumerate(chunks) if chunk.last and not chunk.sequence.num_output_tokens]
        next_tokens = self._rows(chunks, shift=1)
        first = self._first_tokens([chunks[i].sequence for i in fresh], hidden[last[fresh]])
        next_tokens[last[fresh]] = first
        outcome = Outcome(features=features, next_tokens=next_tokens, layout=layout, keep=layout.query_lens)
        seed, first_pass_rows = self._drafter.observe(outcome)
        self._join(chunks, seed, dict(zip(fresh, first.tolist(), strict=True)))
        self._record_step("prefill", began, layout, first_pass_rows, first_pass_rows, 0)
        return self._retire()

    def _decode(self) -> list[Completion]:
        began = self._now()
        self._reserve()
        running = self._scheduler.running
        if not running:
            return []
        assert self._seed is not None
        seed, sampling = self._seed, self._running_sampling()
        tables = self._block_tables(running)
        drafts = self._drafter.propose(seed, tables, sampling)
        layout = Layout.uniform(tables, seed.positions, drafts.tokens.shape[1] + 1, self._cache.page_size)
        rows = torch.cat([seed.tokens[:, None], drafts.tokens], 1)
        hidden, features = self._forward(rows.flatten(), layout)
        logits = self._target.logits(hidden).view(*rows.shape, -1)
        accepted, tokens = self._accept(drafts, logits, seed.positions, sampling)
        outcome = Outcome(features=features, next_tokens=tokens.flatten(), layout=layout, keep=accepted + 1)
        self._seed, first_pass_rows = self._drafter.observe(outcome)
        num_kept = self._commit(drafts.tokens, accepted, tokens)
        loop_rows = len(running) * max(drafts.tokens.shape[1] - 1, 0)
        self._record_step("decode", began, layout, first_pass_rows, min(num_kept, first_pass_rows), loop_rows)
        return self._retire()

    def _forward(self, token_ids: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        attend = Attend(self._backend, self._cache, layout, self._target.rope)
        return self._target.forward(token_ids, attend, self._drafter.aux_layers)

    def _accept(
        self, drafts: Drafts, logits: Tensor, positions: Tensor, sampling: SamplingBatch
    ) -> tuple[Tensor, Tensor]:
        """Drafts against logits ``[B, K+1, V]`` of the rows from ``positions`` ``[B]`` on."""
        if sampling.greedy:
            return accept_greedy(drafts.tokens, logits)
        decided = positions[:, None] + 1 + torch.arange(logits.shape[1], device=self._device)
        return accept_sampled(
            drafts.tokens,
            drafts.probs,
            target_probs(logits, sampling),
            uniform(sampling.seeds, decided[:, :-1], ACCEPT),
            uniform(sampling.seeds, decided, EMIT),
        )

    # --- prefill ----------------------------------------------------------------------------------

    def _prefill_layout(self, chunks: list[Chunk]) -> Layout:
        return Layout.ragged(
            self._block_tables([chunk.sequence for chunk in chunks]),
            [chunk.start for chunk in chunks],
            [chunk.num_rows for chunk in chunks],
            self._cache.page_size,
        )

    def _rows(self, chunks: list[Chunk], *, shift: int) -> Tensor:
        """The chunks' tokens ``shift`` places on; 0 stands for one that is not known yet."""
        rows: list[int] = []
        for chunk in chunks:
            start = chunk.start + shift
            known = chunk.sequence.tokens[start : start + chunk.num_rows]
            rows += known + [0] * (chunk.num_rows - len(known))
        return self._ints(rows)

    def _first_tokens(self, sequences: list[Sequence], hidden: Tensor) -> Tensor:
        """The token after each prompt, ``[n]``, from the state ``[n, H]`` of its last row: a verify without drafts."""
        logits = self._target.logits(hidden)[:, None]
        positions = self._ints([len(sequence.tokens) - 1 for sequence in sequences])
        drafts = Drafts(tokens=positions.new_empty(len(sequences), 0), probs=None)
        _, tokens = self._accept(drafts, logits, positions, self._sampling_of(sequences))
        return tokens[:, 0]

    def _join(self, chunks: list[Chunk], seed: Seed, first_tokens: dict[int, int]) -> None:
        """Move the completed prompts into the running batch, with the first token where it is new."""
        complete = [i for i, chunk in enumerate(chunks) if chunk.last]
        for i, chunk in enumerate(chunks):
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_rows
            if not chunk.last:
                continue
            self._scheduler.start(sequence)
            emitted = sequence.append([first_tokens[i]]) if i in first_tokens else 0
            self._record(Prefilled(sequence=sequence.request.id, time=self._now(), emitted=emitted))
        joined = seed.take(complete)
        self._seed = joined if self._seed is None else Seed.cat([self._seed, joined])
        self._sampling = None

    # --- the running batch ------------------------------------------------------------------------

    def _reserve(self) -> None:
        """Make sure that the next step's KV has pages, at the cost of the youngest sequences if need be."""
        before = list(self._scheduler.running)
        for sequence in self._scheduler.reserve():
            self._record(Preempted(sequence=sequence.request.id, time=self._now()))
        self._keep([i for i, sequence in enumerate(before) if sequence.pages])

    def _commit(self, drafts: Tensor, accepted: Tensor, tokens: Tensor) -> int:
        """Give every running sequence its tokens; returns how many rows the target confirmed in all."""
        columns = zip(
            self._scheduler.running, drafts.tolist(), accepted.tolist(), tokens.tolist(), strict=True
        )
        num_kept, now = 0, self._now()
        for sequence, proposed, num_accepted, emitted in columns:
            kept = sequence.append(emitted[: num_accepted + 1])
            num_kept += num_accepted + 1
            self._record(
                Verified(
                    sequence=sequence.request.id,
                    time=now,
                    drafts=tuple(proposed),
                    accepted=num_accepted,
                    emitted=kept,
                )
            )
        return num_kept

    def _retire(self) -> list[Completion]:
        running = list(self._scheduler.running)
        finished = [sequence for sequence in running if sequence.finish_reason is not None]
        self._keep([i for i, sequence in enumerate(running) if sequence.finish_reason is None])
        for sequence in finished:
            self._scheduler.retire(sequence)
            self._record(
                Finished(
                    sequence=sequence.request.id,
                    time=self._now(),
                    reason=str(sequence.finish_reason),
                    num_output_tokens=sequence.num_output_tokens,
                )
            )
        return [sequence.completion() for sequence in finished]

    def _keep(self, rows: list[int]) -> None:
        """Drop all other rows of the running batch."""
        if self._seed is not None and len(rows) < len(self._seed.tokens):
            self._seed = self._seed.take(rows)
            self._sampling = None

    def _running_sampling(self) -> SamplingBatch:
        if self._sampling is None:
            self._sampling = self._sampling_of(self._scheduler.running)
        return self._sampling

    def _sampling_of(self, sequences: list[Sequence]) -> SamplingBatch:
        return SamplingBatch.of(
            [sequence.request.sampling for sequence in sequences],
            [sequence.seed for sequence in sequences],
            self._device,
        )

    def _block_tables(self, sequences: list[Sequence]) -> Tensor:
        width = max(len(sequence.pages) for sequence in sequences)
        return torch.tensor(
            [sequence.pages + [0] * (width - len(sequence.pages)) for sequence in sequences],
            dtype=torch.int32,
            device=self._device,
        )

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _record_step(
        self, kind: str, began: float, layout: Layout, first_pass_rows: int, kept: int, loop_rows: int
    ) -> None:
        now = self._now()
        self._record(
            Stepped(
                kind=kind,
                time=now,
                seconds=now - began,
                num_sequences=layout.num_sequences,
                target_rows=layout.num_rows,
                first_pass_rows=first_pass_rows,
                first_pass_kept=kept,
                loop_rows=loop_rows,
            )
        )
