"""The order of work: admit and prefill, launch a step, read what an earlier one found, retire."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from itertools import chain

import torch

from specgen.config import MAX_LOGIT_BIASES, SamplingParams, UserError, first_line, require
from specgen.config.errors import DeviceLost
from specgen.core.garbage import with_fewer_gc_passes
from specgen.core.passes import IdleClock, Pass, Passes, PassKind
from specgen.core.peers import Peers
from specgen.core.running_batch import RunningBatch
from specgen.core.scheduler import Scheduler
from specgen.core.sequence import Completion, Request, Scored, ScoreRequest, Sequence, TokenLogprobs
from specgen.core.spec_length import SpecLength
from specgen.core.step import StepOutput, Steps, unpack
from specgen.decoding.outcome import NO_DRAFT
from specgen.decoding.sampling import biases_of, request_seed
from specgen.device import use
from specgen.models.model_config import TargetConfig
from specgen.record.record_rows import EngineRow, Step, drawn_as
from specgen.record.startup import phase
from specgen.text.automaton import Automaton
from specgen.text.constraints import Constraints
from specgen.text.reasoning import part_finder, stop_finder
from specgen.text.tokenizer import Tokenizer

WARM_UP_TOKENS = 16
_NO_MEMORY = "no memory for a pass: lower --max-batch-size, --max-prefill-tokens or --gpu-memory-utilization"
_NONE_ALONE = "the device has no memory for it even alone: lower --gpu-memory-utilization"
_MAX_SHORTAGES = 3  # of a sequence that is alone: a shortage may be another program's, and pass
_MOST_UNCOMPILED = 256  # requests that wait for their constraints, while others are pulled
_PATIENCE = 0.1  # seconds between two looks at whether a run shall end, while nothing runs
_BEFORE_ANSWER = 8  # tokens of a prompt
_SCORING = SamplingParams(max_tokens=1)  # says nothing of a text that is scored


def no_follow_up(completion: Completion) -> Request | None:
    """Every request stands alone."""
    return None


def never_stop() -> bool:
    """Nothing ends the run before its last request."""
    return False


def discard(_: object) -> None:
    """Nothing is done with a row, or with a completion."""


class Incoming:
    """The requests of ``source`` in its order; while the constraints of some are compiled, those behind go first."""

    def __init__(self, source: Iterator[Request | None], constraints: Constraints) -> None:
        self._source, self._constraints = source, constraints
        self._waiting: dict[Future[Automaton], deque[Request]] = {}  # by constraint

    def next(self) -> Request | None:
        """The next whose constraint is there, of one constraint in the order of the source; None: there is none now."""
        for compiled, requests in self._waiting.items():
            if compiled.done():
                ready = requests.popleft()
                if not requests:
                    del self._waiting[compiled]
                return ready
        while sum(map(len, self._waiting.values())) < _MOST_UNCOMPILED:
            request = next(self._source, None)
            if request is None:
                return None
            automaton = self._constraints.compiling(request.sampling, request.prompt_token_ids)
            if automaton is None or (automaton not in self._waiting and automaton.done()):
                return request
            self._waiting.setdefault(automaton, deque()).append(request)
        return None

    def wait(self) -> bool:
        """Wait a little, while nothing runs, for a constraint; whether there is one to wait for."""
        wait(self._waiting, _PATIENCE, FIRST_COMPLETED)
        return bool(self._waiting)


class EngineCore:
    """Generates for many requests at once; made by ``engine.build.build_engine``.

    ``lookahead`` is how many decode steps the host may launch before it reads what an earlier one found. With 1 the
    device never waits for the host, and a sequence that has ended is found one step late: what that step gave it is
    dropped. ``spec_length`` chooses the number of drafts of every step; ``tokenizer`` finds stop strings and
    the parts of texts; ``record`` takes a row for every pass, capture and shortage of memory. ``peers`` receive every
    call that changes the engine.
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
        tokenizer: Tokenizer,
        record: Callable[[EngineRow], None],
        peers: Peers,
    ) -> None:
        self.vocab_size = config.vocab_size
        self._max_positions = config.max_positions
        self._end_tokens = config.eos_token_ids
        self._peers = peers
        self._steps = steps
        self._runner = steps.runner
        self._batch = batch
        self._scheduler = scheduler
        self._spec_length = spec_length
        self._lookahead = lookahead
        self.device = device
        self._tokenizer = tokenizer
        self._constraints = Constraints(tokenizer, config.vocab_size, config.eos_token_ids)
        self._record = record
        self._began = time.perf_counter()
        self._num_passes = self._num_preempted = 0  # so far, and of those since the last pass
        self._idle = IdleClock(device)
        self._passes = Passes(
            steps=steps,
            batch=batch,
            scheduler=scheduler,
            vocab_size=config.vocab_size,
            end_tokens=config.eos_token_ids,
            device=device,
        )
        self._in_flight: deque[Pass] = deque()  # launched and not read yet, the oldest first
        self._completions: list[Completion] = []  # not handed out yet

    # Runs

    @property
    def spec_length(self) -> SpecLength:
        """Says how many drafts each step has."""
        return self._spec_length

    @spec_length.setter
    def spec_length(self, spec_length: SpecLength) -> None:
        self.use_spec_length(spec_length)

    def use_spec_length(self, spec_length: SpecLength) -> None:
        """Let ``spec_length`` say it from now on."""
        self._peers.broadcast(EngineCore.use_spec_length, spec_length)
        self._spec_length = spec_length

    def generate(
        self,
        requests: Iterable[Request | None],
        follow_up: Callable[[Completion], Request | None] = no_follow_up,
        until: Callable[[], bool] = never_stop,
    ) -> Generator[Completion, None, None]:
        """The completions as they finish, in no fixed order.

        A request is pulled from ``requests`` when the batch has room for it; None: there is none now. While constraints
        of some are compiled, those behind them go first. ``follow_up``
        may answer a completion with the next request of the same conversation. Once ``until``, which is asked between
        steps, is true, what the passes in flight have finished is yielded, and the other requests are dropped. Where
        ``requests`` raises, or the device is lost, so are they; what had finished is yielded first, without asking
        ``follow_up``, as no next request could be answered.
        """
        return with_fewer_gc_passes(self._generate(iter(requests), follow_up, until))

    def _generate(
        self,
        source: Iterator[Request | None],
        follow_up: Callable[[Completion], Request | None] = no_follow_up,
        until: Callable[[], bool] = never_stop,
    ) -> Generator[Completion, None, None]:
        incoming = Incoming(source, self._constraints)
        try:
            while not until():
                finished = list[Completion]()
                try:
                    self._work(incoming, finished)
                    if finished and self._lookahead and not self._in_flight:
                        self._work(incoming, finished)  # or the device would wait while they are handed out
                except Exception:  # of the source, or the device is lost
                    yield from finished
                    raise
                for completion in finished:
                    yield completion
                    while (request := follow_up(completion)) is not None:
                        refused = self.submit(request)
                        if refused is None:
                            break
                        yield (completion := refused)
                if not finished and not self._has_work and not incoming.wait():
                    return
            yield from self.drain()
        finally:  # also where the caller has seen enough, or something failed
            self.abandon()

    def learn(self, answers: Iterable[Items[int]]) -> None:
        """Let drafts come from ``answers``, of token ids, if the drafter takes them from such.

        ``UserError`` where the model has no such token.
        """
        if self._steps.pool is not None and (answers := [*answers]):
            size = self.vocab_size
            if (token := _outside(chain.from_iterable(answers), size)) is not None:
                raise UserError(
                    f"an answer to learn from has token {token}, which is not in the vocabulary of {size}: use answers "
                    "of this model's tokens"
                )
            self._peers.broadcast(EngineCore.learn, answers)
            self._steps.pool.add(answers)

    def forget(self) -> None:
        """Draft from no answer so far."""
        if self._steps.pool is not None:
            self._peers.broadcast(EngineCore.forget)
            self._steps.pool.clear()

    def _work(self, incoming: Incoming, finished: list[Completion]) -> None:
        """Pull requests and do a step; what was ``finished`` before something failed is kept."""
        while self._scheduler.wants_request and (request := incoming.next()) is not None:
            if (refused := self.submit(request)) is not None:
                finished.append(refused)
        ended = self.step()
        finished.extend(ended)
        self.learn(_answer(completion) for completion in ended if completion.token_ids)

    def score(self, requests: Iterable[ScoreRequest]) -> Iterator[Scored]:
        """Yield the scores of given texts as they are found, in no fixed order; nothing is drafted or recorded.

        A text is pulled from ``requests`` when the batch has room for it. ``UserError`` for one that cannot run;
        ``RuntimeError`` where one fails twice, or ``DeviceLost``.
        """
        assert not self._has_work, "texts are scored between runs"
        with self.rehearsal():
            for completion in self._generate(map(self._scoring, requests)):
                if completion.scored is None:
                    raise RuntimeError(f"{completion.request.id} could not be scored: {completion.error}")
                yield completion.scored

    def _scoring(self, text: ScoreRequest) -> Request:
        """The request for the scores of ``text``; ``UserError`` if it can never run."""
        request = Request(id=text.id, prompt_token_ids=text.token_ids[:-1], sampling=_SCORING, text=text)
        reason = self._refusal(self._new_sequence(request))
        require(reason is None, f"{text.id}: {reason}")
        return request

    def warm_up(self) -> None:
        """Generate a little and record nothing: first calls load, allocate and compile, which no run should measure."""
        sampling = SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        with phase("warm-up"), self.rehearsal():
            for i in range(2):
                self.submit(Request(id=f"warm-up {i}", prompt_token_ids=(0,) * 16, sampling=sampling))
            while self._has_work:
                self._advance()
        self._began, self._num_passes = time.perf_counter(), 0

    @contextmanager
    def rehearsal(self, record: Callable[[EngineRow], None] = discard) -> Iterator[None]:
        """Steps that are no run's: ``record`` alone sees them, and their requests are dropped at the end.

        ``spec_length`` may be changed meanwhile. ``DeviceLost`` where what fails is the device.
        """
        kept = self._record, self.spec_length
        num_passes, self._record = self._num_passes, record
        try:
            yield
        except RuntimeError as error:  # of no request
            self._peers.require(error)
            require_device(self.device)
            raise
        finally:
            self._record, self.spec_length = kept
            self._num_passes, self._num_preempted = num_passes, 0
            self.abandon()

    def delay_captures(self, num_steps: int) -> None:
        """Capture the graph of a batch size when as many steps of it have run in a larger one; 0, as at first: at once.

        A run that is timed is not to capture what it did not when it was warmed up.
        """
        self._peers.broadcast(EngineCore.delay_captures, num_steps)
        self._runner.delay_captures(num_steps)

    def sizes(self, max_sequences: int) -> list[int]:
        return self._runner.sizes(max_sequences)

    def room(self, num_sequences: int) -> int:
        """Tokens that each of so many sequences may have, by the cache and the model's context."""
        return min(self._scheduler.room(num_sequences), self._max_positions)

    def require_possible(self, sampling: SamplingParams) -> None:
        """``UserError`` where the constraints of ``sampling`` cannot be kept."""
        self._constraints.automaton(sampling, ())

    @property
    def max_prefill_tokens(self) -> int:
        """Rows of a prefill pass, as they are limited now."""
        return self._scheduler.limits.max_prefill_tokens

    def _now(self) -> float:
        """Seconds since the engine was warm; the clock counts in nanoseconds."""
        return round(time.perf_counter() - self._began, 9)

    # Requests enter

    def submit(self, request: Request) -> Completion | None:
        """Queue ``request``; a completion with the reason comes back at once if it can never run."""
        sequence = self._new_sequence(request)
        reason = self._refusal(sequence)
        if reason is None:  # peers, which could come to another limit of what compiles, are not asked
            self._peers.broadcast(EngineCore.submit, request)
            self._scheduler.submit(sequence)
            return None
        sequence.finish_reason = "error"
        return sequence.completion(self._now(), reason)

    def _new_sequence(self, request: Request) -> Sequence:
        """The state of ``request``, which enters the queue."""
        now, sampling, prompt = self._now(), request.sampling, list(request.prompt_token_ids)
        if request.text is not None:
            return Sequence(
                request=request,
                arrival=now,
                tokens=prompt,
                max_length=len(prompt),
                seed=0,
                eos_token_ids=frozenset(),
                prefix_root=b"target",  # the head's cache is left as it is
            )
        asked, context = len(prompt) + sampling.max_tokens, self._max_positions
        automaton, refused = None, None
        try:
            automaton = self._constraints.automaton(sampling, prompt)
        except UserError as error:
            refused = str(error)
        return Sequence(
            request=request,
            arrival=now,
            tokens=prompt,
            max_length=min(asked, context),
            ends_by="length" if asked <= context else "context",
            seed=request_seed(sampling.seed, drawn_as(request.id)),
            alone=request.alone,
            eos_token_ids=frozenset(
                (*(() if sampling.ignore_eos else self._end_tokens), *sampling.stop_token_ids)
            ),
            stop=stop_finder(self._tokenizer, sampling.stop_strings, prompt, sampling.min_tokens),
            parts=part_finder(self._tokenizer, prompt),
            automaton=automaton,
            state=0 if automaton is None else automaton.start,
            refused=refused,
        )

    def _refusal(self, sequence: Sequence) -> str | None:
        """Why ``sequence`` can never run, or None."""
        request, limit, size = sequence.request, self._max_positions, self.vocab_size
        num_prompt, sampling = len(sequence.tokens), request.sampling
        tokens = sequence.tokens if request.text is None else request.text.token_ids
        if num_prompt == 0:
            return "the prompt is empty: give at least one token"
        if request.text is not None and num_prompt > limit:
            return (
                f"{num_prompt} tokens come before the last and the model's context is {limit}: "
                "cut them from the left"
            )
        if (token := _outside(tokens, size)) is not None:
            remedy = "" if request.text is None else ": use the tokenizer of this model"
            return f"token id {token} is not in the vocabulary of {size}{remedy}"
        if (token := _outside(sampling.suppress_tokens, size)) is not None:
            return f"suppress-tokens names {token}, which is not in the vocabulary of {size}"
        if (token := _outside(sampling.stop_token_ids, size)) is not None:
            return f"stop-token-ids names {token}, which is not in the vocabulary of {size}"
        if (number := len(biases_of(sampling, self._end_tokens))) > MAX_LOGIT_BIASES:
            return (
                f"logit-bias, suppress-tokens and what min-tokens holds back are {number} tokens: "
                f"use at most {MAX_LOGIT_BIASES}"
            )
        if (token := _outside((token for token, _ in sampling.logit_bias), size)) is not None:
            return f"logit-bias names token {token}, which is not in the vocabulary of {size}"
        if sequence.refused is not None:
            return sequence.refused
        if request.text is None and num_prompt >= limit:
            return (
                f"the prompt has {num_prompt} tokens and the model's context is {limit}: shorten the prompt"
            )
        return self._scheduler.refusal(sequence)

    # A step

    def step(self) -> list[Completion]:
        """Launch one prefill pass, if prompts wait and fit, and one decode step of all that run; read older ones.

        With lookahead, passes that nothing was in flight before are left for the next step to read.
        What fails ends the requests that it concerns and nothing else. ``DeviceLost`` where no pass can run any more.
        """
        self._idle.enter()
        self._guard(self._advance)
        self._idle.leave()
        return self._take()

    def drain(self) -> list[Completion]:
        """Read the passes in flight, and launch nothing. Fails as ``step`` does."""

        def read() -> None:
            with self._peers.working(EngineCore.drain):
                self._read_all_but(0)

        self._guard(read)
        return self._take()

    def abandon(self) -> None:
        """Drop all requests in hand without an answer. Asks nothing of the device, which may be the reason."""
        self._peers.broadcast(EngineCore.abandon)
        self._forget_passes()
        self._scheduler.clear()
        self._batch.reset()
        self._completions.clear()

    def _take(self) -> list[Completion]:
        taken, self._completions = self._completions, []
        if taken:
            every: list[Completion | Sequence] = [*taken, *self._scheduler.active]
            self._peers.agree(each.request.id for each in every)
        return taken

    @property
    def _has_work(self) -> bool:
        return not self._scheduler.idle or bool(self._in_flight)

    @torch.inference_mode()
    def _advance(self) -> None:
        use(self.device)  # another engine of this process may be on another
        with self._peers.working(EngineCore.step):
            ahead = bool(self._in_flight)
            prefilled = self._prefill()
            if self._lookahead == 0:  # so that no step is spent on a text that its first token ended
                self._read_all_but(0)
            decoded = self._decode()
            num_left = self._lookahead if prefilled or decoded else 0
            if ahead or num_left == 0:
                self._read_all_but(num_left)
            self._peers.record(self._scheduler.counts)

    def _prefill(self) -> bool:
        """Whether a prefill was launched."""
        chunks = self._scheduler.next_chunks()
        if not chunks:
            return False
        if chunks[0].sequence.alone:
            self._read_all_but(0)  # so that no other request can have caused a failure
        launch = self._passes.prefill if chunks[0].sequence.request.text is None else self._passes.score
        launched = _attempt(lambda: launch(chunks, self._idle.launch()))
        if launched is None:
            self._recover("prefill")
            return False
        self._scheduler.launched(chunks)
        self._add(launched)
        return True

    def _decode(self) -> bool:
        """Whether a decode step was launched."""
        if all(sequence.may_finish for sequence in self._scheduler.running):
            self._read_all_but(0)  # a short wait costs less than a step that may not be needed
        for sequence in [sequence for sequence in self._scheduler.running if sequence.will_finish]:
            self._scheduler.leave(sequence)
        self._reserve()
        if not self._scheduler.running:
            return False
        running = self._scheduler.running
        plan = self._spec_length.choose(len(running), sum([len(sequence.tokens) for sequence in running]))
        launched = _attempt(lambda: self._passes.decode(plan, self._idle.launch()))
        if launched is None:
            self._recover("decode")
            return False
        self._add(launched)
        return True

    def _reserve(self) -> None:
        """Make sure that the next step's KV has pages, at the cost of the youngest sequences if need be."""
        while not self._scheduler.reserve():
            if self._in_flight:  # what has ended gives its pages back
                self._read()
            else:
                self._scheduler.preempt()
                self._num_preempted += 1

    def _add(self, launched: Pass) -> None:
        """``launched`` will be read later; nothing in here can fail, so host and device agree."""
        self._peers.record((launched.num_sequences, launched.num_drafts, launched.result.target_rows))
        for sequence, row in launched.sequences:
            if row is not None:
                sequence.in_flight_min += 1
                sequence.in_flight_max += launched.num_drafts + 1
        self._in_flight.append(launched)
        if self._scheduler.limits.record_pass():
            self._runner.try_again()
        for capture in launched.captures:
            self._record(capture.row(self._now()))

    # Reading

    def _forget_passes(self) -> None:
        """Nobody reads the passes in flight."""
        self._in_flight.clear()
        self._idle.forget()

    def _read_all_but(self, num_newest: int) -> None:
        """Read passes, the oldest first, until so many are left."""
        while len(self._in_flight) > num_newest:
            self._read()

    def _read(self) -> None:
        """Wait for the oldest pass and hand out what it found; a sequence that ended before gets nothing."""
        done = self._in_flight[0]
        self._peers.wait(done.numbers)
        numbers = done.numbers.read()
        logprobs = done.logprobs.read() if done.logprobs is not None else [()] * len(numbers)
        now, steps = self._now(), list[Step]()
        if done.kind == "prefill":
            num_tokens = self._read_prefill(done, numbers, logprobs, now)
        elif done.kind == "decode":
            steps = self._read_decode(done, unpack(numbers, done.num_drafts), logprobs)
            num_tokens = sum([step.emitted for step in steps])
        else:
            self._read_score(done, numbers)
        idle = self._idle.before(done.launch, done.numbers.done)
        if done.kind != "score":
            self._record(done.row(self._num_passes, now, idle, num_tokens, steps, self._num_preempted))
            self._num_passes, self._num_preempted = self._num_passes + 1, 0
        self._in_flight.popleft()  # not before: its sequences fail with it

    def _read_prefill(
        self, done: Pass, tokens: list[list[int]], logprobs: Items[Items[Items[float]]], now: float
    ) -> int:
        """Prompts are in the cache, each with the first token of its text unless that was known; returns how many."""
        num_tokens = 0
        self._read_prompt_logprobs(done)
        for sequence, row in done.sequences:
            if sequence.finish_reason is not None:
                continue
            if row is not None:
                sequence.in_flight_min -= 1
                sequence.in_flight_max -= 1
                if sequence.append(tokens[row], logprobs[row]):
                    sequence.begin(now)
                    num_tokens += 1
                self._peers.record(tokens[row])
            self._end(sequence)
        return num_tokens

    def _read_decode(
        self, done: Pass, found: Items[StepOutput], logprobs: Items[Items[Items[float]]]
    ) -> list[Step]:
        """Returns the steps of the sequences, which keep them.

        ``spec_length`` sees them too, with the levels of all drafts.
        """
        number, k, steps, taken = self._num_passes, done.num_drafts, list[Step](), list[StepOutput]()
        for sequence, row in done.sequences:
            if sequence.finish_reason is not None or row is None:
                continue
            taken.append(found[row])
            drafts, levels, accepted, tokens = found[row]
            sequence.in_flight_min -= 1
            sequence.in_flight_max -= k + 1
            proposed = drafts[: drafts.index(NO_DRAFT)] if NO_DRAFT in drafts else drafts
            is_cut = sequence.automaton is not None and sequence.is_cut(proposed, accepted)
            emitted = sequence.append(tokens, logprobs[row])
            self._spec_length.update(levels, len(proposed), accepted)
            made = levels[: levels.index(NO_DRAFT)] if NO_DRAFT in levels else levels
            step = Step(number, proposed, accepted, emitted, made, is_cut)
            sequence.steps.append(step)
            steps.append(step)
            if sequence.finish_reason is not None:
                self._end(sequence)
        self._peers.record(
            number for drafts, _, accepted, tokens in taken for number in (*drafts, accepted, *tokens)
        )
        return steps

    def _read_prompt_logprobs(self, done: Pass) -> None:
        rows = () if done.prompt_logprobs is None else done.prompt_logprobs.read()
        for (sequence, position), row in zip(done.scored, rows, strict=True):
            if sequence.finish_reason is None and row[0] != row[0]:
                self._fail(sequence, f"the model's logits were not finite (NaN) at prompt token {position}")
            found = TokenLogprobs.of(row, sequence.request.sampling.prompt_logprobs or 0)
            sequence.prompt_logprobs[position] = found

    def _read_score(self, done: Pass, numbers: list[list[float]]) -> None:
        for (sequence, position), (log_prob, is_greedy) in zip(done.scored, numbers, strict=True):
            sequence.scores[position] = log_prob, bool(is_greedy)
        for sequence, _ in done.sequences:
            sequence.finish_reason = "length"
            self._end(sequence)

    # Endings

    def _end(self, sequence: Sequence) -> None:
        """Take ``sequence`` out if it has finished."""
        if sequence.finish_reason == "error":
            at = sequence.num_output_tokens + 1
            least = sequence.request.sampling.min_tokens
            early = f" (and min_tokens, {least}: ask for fewer)" if at <= least else ""
            allowed = f", or -inf for all that its constraints{early} allow,"
            where = f"{'' if sequence.automaton is None else allowed} at output token {at}"
            self._fail(sequence, f"the model's logits were not finite (NaN){where}")
        elif sequence.finish_reason is not None:
            self._retire(sequence)

    def _retire(self, sequence: Sequence, error: str | None = None) -> None:
        """``sequence`` has finished; ``error`` says why it could not go on."""
        self._scheduler.retire(sequence)
        self._completions.append(sequence.completion(self._now(), error))

    def _fail(self, sequence: Sequence, reason: str) -> None:
        """End ``sequence``; the first time it begins again, and runs alone."""
        sequence.finish_reason = "error"
        own, *windowed = self._scheduler.discard(sequence)
        self._steps.clear([0, *own], [0, *chain(*windowed)])  # and page 0, where padding rows are written
        if sequence.alone:
            self._completions.append(
                sequence.completion(self._now(), f"{reason}, and again when tried alone")
            )
        else:
            self._scheduler.retry(self._new_sequence(sequence.request))

    def _guard(self, work: Callable[[], None]) -> None:
        """Do ``work``; those in flight fail with it."""
        failure = None
        try:
            work()
        except RuntimeError as error:
            self._peers.require(error, _ids(self._scheduler.active))
            failure = first_line(error)  # alone: the exception holds on to the tensors of the pass
        if failure is not None:
            self._fail_all(failure)

    def _fail_all(self, reason: str) -> None:
        """A pass has failed: so have those who were in it or in one that is not read yet."""
        hit, in_flight = self._scheduler.active, bool(self._in_flight)
        self._forget_passes()
        self._batch.reset()
        require_device(self.device, _ids(hit))
        if not hit and not in_flight:
            raise RuntimeError(reason)  # there is no request to answer with it
        for sequence in hit:
            self._fail(sequence, f"the device failed: {reason}")

    def _recover(self, kind: PassKind) -> None:
        """Go on behind a pass that found no memory, within lower limits: fewer rows of a prefill, or fewer sequences.

        How far that pass came is unknown, so nothing of the running batch on the device is used again: every sequence
        is computed again from what was read (the prefix cache has most of it).
        """
        self._peers.require_recoverable(RuntimeError(_NO_MEMORY))
        self._read_all_but(0)
        sent = self._scheduler.preempt_all()
        self._num_preempted += len(sent)
        self._batch.reset()
        if kind == "decode" or not self._scheduler.limits.lower_prefill():
            self._lower_batch(len(sent))
        torch.cuda.empty_cache()
        self._record(self._scheduler.limits.row(self._now()))

    def _lower_batch(self, num_admitted: int) -> None:
        """Lower the limit of the batch; of a sequence that was alone there is nothing to lower."""
        if num_admitted > 1:
            self._scheduler.limits.lower_batch(num_admitted)
        elif num_admitted == 1:
            sequence = self._scheduler.waiting[0]
            sequence.num_shortages += 1
            if sequence.num_shortages >= _MAX_SHORTAGES:
                self._scheduler.waiting.remove(sequence)
                sequence.finish_reason = "error"
                self._retire(sequence, _NONE_ALONE)


def require_device(device: torch.device, requests: tuple[str, ...] = ()) -> None:
    """``DeviceLost`` with ``requests``, those in flight, if ``device`` does not even finish what was launched."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(first_line(error), requests) from error


def _answer(completion: Completion) -> tuple[int, ...]:
    """Its tokens, and a few before them, by which the beginning of another is known."""
    return *completion.request.prompt_token_ids[-_BEFORE_ANSWER:], *completion.token_ids


def _attempt(launch: Callable[[], Pass]) -> Pass | None:
    """Launch a pass; None where the device has no memory for it."""
    try:
        return launch()
    except torch.OutOfMemoryError:
        return None  # and let go of the exception, which holds on to the tensors of the pass


def _outside(tokens: Iterable[int], vocab_size: int) -> int | None:
    """The first of ``tokens`` that is not in the vocabulary."""
    return next((token for token in tokens if not 0 <= token < vocab_size), None)


def _ids(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(sequence.request.id for sequence in sequences)
