"""The order of work: admit and prefill, launch a step, read what an earlier one found, commit, retire."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

import torch

from specgen.config import SamplingParams, first_line
from specgen.core.packing import chunk_layout, chunk_tokens
from specgen.core.running_batch import RunningBatch
from specgen.core.scheduler import Chunk, Scheduler
from specgen.core.scoring import Scored, Scorer, ScoreRequest
from specgen.core.sequence import Completion, Request, Sequence, StopFinder
from specgen.core.spec_length import SpecLength
from specgen.core.step import StepResult, Steps
from specgen.decoding.sampling import SamplingBatch, request_seed
from specgen.device import HostCopy, on_device, use
from specgen.events import (
    Captured,
    Event,
    Finished,
    OutOfMemory,
    Preempted,
    Prefilled,
    Stepped,
    Submitted,
    Verified,
)
from specgen.models.model_config import TargetConfig

_MAX_SHORTAGES = 3  # of a sequence that is alone: a shortage may be another program's, and pass


def no_follow_up(completion: Completion) -> Request | None:
    """Every request stands alone."""
    return None


def until_done() -> bool:
    """Nothing ends the run before its last request."""
    return False


class DeviceLost(RuntimeError):  # noqa: N818
    """The device answers nothing any more, and only a new process gets it back; what has finished is not touched.

    ``reason`` is what the device said, and ``requests`` has the ids of all that were in flight, one of which may be
    to blame.
    """

    def __init__(self, reason: str, requests: tuple[str, ...]) -> None:
        super().__init__(reason, requests)
        self.reason = reason
        self.requests = requests

    def __str__(self) -> str:
        return f"the device is lost ({self.reason}): go on in a new process"


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """A pass that was launched and whose numbers are not read yet."""

    kind: Literal["prefill", "decode"]
    sequences: list[tuple[Sequence, int | None]]  # and the row of the numbers that holds tokens for it
    num_sequences: int
    num_drafts: int  # of each sequence
    result: StepResult
    numbers: HostCopy
    logprobs: HostCopy | None
    launched: float

    @staticmethod
    def of(
        kind: Literal["prefill", "decode"],
        sequences: list[tuple[Sequence, int | None]],
        num_drafts: int,
        num_sequences: int,
        result: StepResult,
        launched: float,
    ) -> "_Pass":
        """The pass that has ``result``, which is fetched."""
        return _Pass(
            kind=kind,
            sequences=sequences,
            num_sequences=num_sequences,
            num_drafts=num_drafts,
            result=result,
            numbers=HostCopy(result.numbers),
            logprobs=None if result.logprobs is None else HostCopy(result.logprobs),
            launched=launched,
        )


class EngineCore:
    """Generates for many requests at once; made by ``build.build_engine``.

    ``lookahead`` is how many decode steps the host may launch before it reads what an earlier one found. With 1 the
    device never waits for the host, and a sequence that has ended is found one step late: what that step gave it is
    dropped. ``spec_length`` says how many drafts a step has; ``stop_finder`` makes the detector of one request's stop
    strings; ``record`` takes every event.
    """

    def __init__(
        self,
        *,
        config: TargetConfig,
        steps: Steps,
        batch: RunningBatch,
        scheduler: Scheduler,
        spec_length: SpecLength,
        lookahead: int,
        device: torch.device,
        stop_finder: Callable[[tuple[str, ...]], StopFinder],
        record: Callable[[Event], None],
    ) -> None:
        self._config = config
        self._steps = steps
        self._batch = batch
        self._scheduler = scheduler
        self.spec_length = spec_length
        self._lookahead = lookahead
        self._device = device
        self._stop_finder = stop_finder
        self.record = record
        self._began = time.perf_counter()
        self._read_at = 0.0  # when the last numbers were read
        self._in_flight: deque[_Pass] = deque()
        self._completions: list[Completion] = []  # finished and not yet handed out

    # --- requests ---------------------------------------------------------------------------------

    def generate(
        self,
        requests: Iterable[Request],
        follow_up: Callable[[Completion], Request | None] = no_follow_up,
        until: Callable[[], bool] = until_done,
    ) -> Generator[Completion, None, None]:
        """Yield completions as they finish, in no fixed order.

        A request is drawn from ``requests`` when the batch has a place for it. ``follow_up`` may answer a completion
        with the next request of the same conversation. Once ``until``, which is asked between steps, is true, what
        the passes in flight have finished is yielded, and the other requests are dropped.
        """
        source = iter(requests)
        try:
            while not until():
                finished = [*self._draw_requests(source), *self.step()]
                for completion in finished:
                    yield completion
                    while (request := follow_up(completion)) is not None:
                        refused = self.submit(request)
                        if refused is None:
                            break
                        yield (completion := refused)
                if not finished and not self._has_work:
                    return
            self._guard(lambda: self._read_all_but(0))
            yield from self._take_completions()
        finally:  # also where the caller has seen enough, or something failed
            self.abandon()

    def score(self, requests: Iterable[ScoreRequest]) -> Iterator[Scored]:
        """Yield the scores of given texts as they are found, in no fixed order; nothing is drafted or recorded.

        A text is drawn from ``requests`` when the batch has a place for it. ``UserError`` for one that cannot run;
        ``RuntimeError`` where one fails twice, or ``DeviceLost``.
        """
        assert self._scheduler.idle, "texts are scored between runs"
        assert not self._in_flight
        scorer = Scorer(
            config=self._config, steps=self._steps, scheduler=self._scheduler, device=self._device
        )
        try:
            yield from scorer.score(requests)
        except RuntimeError:
            self._require_device(())
            raise

    def warm_up(self) -> None:
        """Generate a little and record nothing: first calls load, allocate and compile, which no run should measure."""
        record, self.record = self.record, lambda event: None
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        for i in range(2):
            self.submit(Request(id=f"warm-up {i}", prompt_token_ids=(0,) * 16, sampling=sampling))
        try:
            while self._has_work:
                self._advance()
        except RuntimeError:  # one of the start, and of no request
            self._require_device(())
            raise
        self._completions.clear()
        self.record, self._began, self._read_at = record, time.perf_counter(), 0.0

    def sizes(self, max_sequences: int) -> list[int]:
        """See ``graphs.Runner.sizes``."""
        return self._steps.runner.sizes(max_sequences)

    def abandon(self) -> None:
        """Drop all requests in hand without an answer. Asks nothing of the device, which may be the reason."""
        self._in_flight.clear()
        self._scheduler.clear()
        self._batch.reset()
        self._completions.clear()

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
        reason = self._refusal(sequence)
        if reason is None:
            self._scheduler.submit(sequence)
            return None
        self.record(Finished(sequence=request.id, time=self._now(), reason="error", num_output_tokens=0))
        return Completion(request=request, token_ids=(), finish_reason="error", error=reason)

    @property
    def _has_work(self) -> bool:
        return not self._scheduler.idle or bool(self._in_flight)

    def _new_sequence(self, request: Request) -> Sequence:
        """The state of ``request``, which enters the queue."""
        self.record(
            Submitted(
                sequence=request.id,
                time=self._now(),
                num_prompt_tokens=len(request.prompt_token_ids),
                category=request.category,
                turn=request.turn,
            )
        )
        sampling, prompt = request.sampling, list(request.prompt_token_ids)
        eos = () if sampling.ignore_eos else self._config.eos_token_ids
        return Sequence(
            request=request,
            tokens=prompt,
            max_length=min(len(prompt) + sampling.max_tokens, self._config.max_positions),
            seed=request_seed(sampling.seed, request.id),
            alone=request.alone,
            eos_token_ids=frozenset(eos),
            stop=self._stop_finder(sampling.stop) if sampling.stop else None,
        )

    def _refusal(self, sequence: Sequence) -> str | None:
        num_prompt, limit = len(sequence.tokens), self._config.max_positions
        if num_prompt == 0:
            return "the prompt is empty: give at least one token"
        vocab_size = self._config.vocab_size
        outside = [t for t in sequence.tokens if not 0 <= t < vocab_size]
        if outside:
            return f"token id {outside[0]} is not in the vocabulary of {vocab_size}"
        biased = [t for t, _ in sequence.request.sampling.logit_bias if not 0 <= t < vocab_size]
        if biased:
            return f"logit-bias names token {biased[0]}, which is not in the vocabulary of {vocab_size}"
        if num_prompt >= limit:
            return (
                f"the prompt has {num_prompt} tokens and the model's context is {limit}: shorten the prompt"
            )
        return self._scheduler.refusal(sequence)

    # --- one step ---------------------------------------------------------------------------------

    def step(self) -> list[Completion]:
        """Launch one prefill pass, if prompts wait and fit, and one decode step of all that run; read older ones.

        What fails ends the requests that it concerns and nothing else. ``DeviceLost`` where no pass can run any more.
        """
        self._guard(self._advance)
        return self._take_completions()

    def _guard(self, work: Callable[[], None]) -> None:
        """Do ``work``; those in flight fail with it."""
        failure = None
        try:
            work()
        except RuntimeError as error:
            failure = first_line(error)  # alone: the exception holds on to the tensors of the pass
        if failure is not None:
            self._fail_all(failure)

    @torch.inference_mode()
    def _advance(self) -> None:
        use(self._device)  # another engine of this process may be on another
        prefilled = self._prefill()
        if self._lookahead == 0:
            self._read_all_but(0)  # so that no step is spent on a text that its first token ended
        decoded = self._decode()
        self._read_all_but(self._lookahead if prefilled or decoded else 0)

    def _take_completions(self) -> list[Completion]:
        finished, self._completions = self._completions, []
        return finished

    def _prefill(self) -> bool:
        """Whether a prefill is on its way."""
        began, chunks = self._now(), self._scheduler.next_chunks()
        if not chunks:
            return False
        if chunks[0].sequence.alone:
            self._read_all_but(0)  # so that nobody else can be to blame for what fails
        launched = self._attempt(lambda: self._launch_prefill(chunks, began))
        if launched is None:
            self._recover(self._fewer_rows)
            return False
        self._scheduler.launched(chunks)
        self._take_off(launched)
        return True

    def _launch_prefill(self, chunks: list[Chunk], began: float) -> _Pass:
        sampling = SamplingBatch.of(
            [chunk.sequence.request.sampling for chunk in chunks],
            [chunk.sequence.seed for chunk in chunks],
            self._device,
        )
        complete = [i for i, chunk in enumerate(chunks) if chunk.last]
        fresh = [chunk.last and not chunk.sequence.num_output_tokens for chunk in chunks]
        seed, result = self._steps.prefill(
            chunk_layout(chunks, self._scheduler.page_size, self._device),
            chunk_tokens(chunks, self._device, shift=0),
            chunk_tokens(chunks, self._device, shift=1),
            on_device(fresh, self._device, torch.bool),
            sampling,
        )
        rows = on_device(complete, self._device)
        self._batch.arrange(self._scheduler.running)
        self._batch.join([chunks[i].sequence for i in complete], seed.take(rows), sampling.take(rows))
        sequences = [(chunks[i].sequence, i if fresh[i] else None) for i in complete]
        return _Pass.of("prefill", sequences, 0, len(chunks), result, began)

    def _decode(self) -> bool:
        """Whether a decode step is on its way."""
        began = self._now()
        if all(sequence.may_end for sequence in self._scheduler.running):
            self._read_all_but(0)  # a short wait costs less than a step that perhaps nobody needs
        for sequence in [sequence for sequence in self._scheduler.running if sequence.surely_ends]:
            self._scheduler.leave(sequence)
        self._reserve()
        if not self._scheduler.running:
            return False
        launched = self._attempt(lambda: self._launch_decode(self._scheduler.running, began))
        if launched is None:
            self._recover(self._fewer_sequences)
            return False
        self._take_off(launched)
        return True

    def _launch_decode(self, running: list[Sequence], began: float) -> _Pass:
        self._batch.arrange(running)
        num_drafts = self.spec_length.choose(len(running))
        columns = self._batch.columns(self._steps.runner.num_rows(len(running)))
        result = self._steps.decode(columns, num_drafts)
        rows: list[tuple[Sequence, int | None]] = [(sequence, row) for row, sequence in enumerate(running)]
        return _Pass.of("decode", rows, num_drafts, len(running), result, began)

    def _reserve(self) -> None:
        """Make sure that the next step's KV has pages, at the cost of the youngest sequences if need be."""
        while not self._scheduler.reserve():
            if self._in_flight:  # what has ended gives its pages back
                self._read()
            else:
                self._record_preempted(self._scheduler.preempt())

    def _record_preempted(self, sequence: Sequence) -> None:
        self.record(Preempted(sequence=sequence.request.id, time=self._now()))

    def _take_off(self, launched: _Pass) -> None:
        """Note that a pass is on its way; nothing in here can fail, so the host's state agrees with the device's."""
        for sequence, row in launched.sequences:
            if row is not None:
                sequence.launch(1, launched.num_drafts + 1)
        self._in_flight.append(launched)
        self._scheduler.limits.see_pass()
        self._record_captures()

    # --- out of memory ----------------------------------------------------------------------------

    def _attempt(self, launch: Callable[[], _Pass]) -> _Pass | None:
        """Launch a pass; None where the device has no memory for it."""
        try:
            return launch()
        except torch.OutOfMemoryError:
            return None  # and let go of the exception, which holds on to the tensors of the pass

    def _recover(self, lower: Callable[[int], None]) -> None:
        """Go on behind a pass that found no memory, within lower limits.

        How far it came nobody knows, so nothing of the running batch on the device is used again: what the passes
        before it have found is read, and everybody is computed again from there (the prefix cache has most of it).
        """
        self._read_all_but(0)
        num_admitted = self._scheduler.num_admitted
        for sequence in self._scheduler.send_all_back():
            self._record_preempted(sequence)
        self._batch.reset()
        lower(num_admitted)
        torch.cuda.empty_cache()
        limits = self._scheduler.limits
        self.record(
            OutOfMemory(
                time=self._now(),
                max_batch_size=limits.max_batch_size,
                max_prefill_tokens=limits.max_prefill_tokens,
            )
        )

    def _fewer_rows(self, num_admitted: int) -> None:
        if not self._scheduler.limits.lower_prefill():
            self._fewer_sequences(num_admitted)

    def _fewer_sequences(self, num_admitted: int) -> None:
        """Lower the limit of the batch; of a sequence that was alone there is nothing to lower."""
        if num_admitted > 1:
            self._scheduler.limits.lower_batch(num_admitted)
        elif num_admitted == 1:
            sequence = self._scheduler.waiting[0]
            sequence.num_shortages += 1
            if sequence.num_shortages >= _MAX_SHORTAGES:
                self._give_up(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """End a waiting sequence that does not fit alone."""
        self._scheduler.waiting.remove(sequence)
        sequence.finish_reason = "error"
        self._retire(
            sequence, error="the device has no memory for it even alone: lower --gpu-memory-utilization"
        )

    # --- failures ---------------------------------------------------------------------------------

    def _fail_all(self, reason: str) -> None:
        """A pass has failed: so have those who were in it or in one that is not read yet."""
        hit, in_flight = self._scheduler.in_hand, bool(self._in_flight)
        self._in_flight.clear()
        self._batch.reset()
        self._require_device(tuple(sequence.request.id for sequence in hit))
        if not hit and not in_flight:
            raise RuntimeError(reason)  # nobody could be told
        for sequence in hit:
            self._fail(sequence, f"the device failed: {reason}")

    def _require_device(self, requests: tuple[str, ...]) -> None:
        """``DeviceLost`` with those in flight if the device does not even finish what was launched."""
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise DeviceLost(first_line(error), requests) from error

    def _fail(self, sequence: Sequence, reason: str) -> None:
        """End ``sequence``; the first time it begins again, with nobody beside it."""
        sequence.finish_reason = "error"
        pages = self._scheduler.discard(sequence)
        self._steps.clear([0, *pages])  # and page 0, where padding rows are written
        self._record_end(sequence)
        if sequence.alone:
            self._completions.append(sequence.completion(f"{reason}, and again when tried alone"))
        else:
            self._scheduler.retry(self._new_sequence(sequence.request))

    # --- what passes have found -------------------------------------------------------------------

    def _read_all_but(self, num_newest: int) -> None:
        while len(self._in_flight) > num_newest:
            self._read()

    def _read(self) -> None:
        """Wait for the oldest pass in flight and hand out its tokens; a sequence that ended before gets none."""
        done, num_kept = self._in_flight[0], 0
        numbers = done.numbers.read()
        logprobs = done.logprobs.read() if done.logprobs is not None else [()] * len(numbers)
        for sequence, row in done.sequences:
            if sequence.finish_reason is not None:
                continue
            if row is None:
                self._commit_first(sequence, [], ())
            elif done.kind == "prefill":
                self._commit_first(sequence, numbers[row], logprobs[row])
            else:
                num_kept += self._commit(sequence, numbers[row], logprobs[row], done.num_drafts)
            if sequence.finish_reason == "error":
                at = sequence.num_output_tokens + 1
                self._fail(sequence, f"the model's logits were not finite (NaN) at output token {at}")
            elif sequence.finish_reason is not None:
                self._retire(sequence)
        self._record_pass(done, num_kept)
        self._in_flight.popleft()  # not before: whoever is in it fails with it

    def _commit_first(self, sequence: Sequence, tokens: list[int], logprobs: Items[Items[float]]) -> None:
        """A prompt is in the cache, with the first token of the text unless that was known."""
        emitted = 0
        if tokens:
            sequence.land(1, 1)
            emitted = sequence.append(tokens, logprobs)
        self.record(
            Prefilled(
                sequence=sequence.request.id,
                time=self._now(),
                emitted=emitted,
                num_cached=sequence.num_cached,
            )
        )

    def _commit(self, sequence: Sequence, row: list[int], logprobs: Items[Items[float]], k: int) -> int:
        """What a step with ``k`` drafts found for ``sequence``; returns how many of its rows the target confirmed."""
        drafts, accepted, tokens = row[:k], row[k], row[k + 1 :]
        sequence.land(1, k + 1)
        emitted = sequence.append(tokens[: accepted + 1], logprobs)
        self.spec_length.see(k, accepted)
        step = Verified(
            sequence=sequence.request.id,
            time=self._now(),
            drafts=tuple(drafts),
            accepted=accepted,
            emitted=emitted,
        )
        sequence.steps.append(step)
        self.record(step)
        return accepted + 1

    def _retire(self, sequence: Sequence, error: str | None = None) -> None:
        self._scheduler.retire(sequence)
        self._record_end(sequence)
        self._completions.append(sequence.completion(error))

    def _record_end(self, sequence: Sequence) -> None:
        self.record(
            Finished(
                sequence=sequence.request.id,
                time=self._now(),
                reason=str(sequence.finish_reason),
                num_output_tokens=sequence.num_output_tokens,
            )
        )

    def _record_pass(self, done: _Pass, num_kept: int) -> None:
        """Passes overlap on the host, so the time of one counts from when the one before was read."""
        now, rows = self._now(), done.result.first_pass_rows
        self.record(
            Stepped(
                kind=done.kind,
                time=now,
                seconds=now - max(done.launched, self._read_at),
                num_sequences=done.num_sequences,
                num_spec_tokens=done.num_drafts,
                target_rows=done.result.target_rows,
                first_pass_rows=rows,
                first_pass_kept=rows if done.kind == "prefill" else min(num_kept, rows),
                loop_rows=done.result.loop_rows,
            )
        )
        self._read_at = now

    def _record_captures(self) -> None:
        for capture in self._steps.runner.take_captures():
            what, num_rows, *_ = capture.key
            self.record(
                Captured(
                    time=self._now(),
                    what=what,
                    num_sequences=num_rows,
                    seconds=capture.seconds,
                    fits=capture.fits,
                )
            )

    def _now(self) -> float:
        return time.perf_counter() - self._began
