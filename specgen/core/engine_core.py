"""The order of work: admit and prefill, launch a step, read what an earlier one found, retire."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

import torch

from specgen.config import SamplingParams, first_line
from specgen.core.endings import Endings, require_device
from specgen.core.garbage import rarely_collecting
from specgen.core.in_flight import InFlight
from specgen.core.intake import Followers, Intake
from specgen.core.journal import Journal
from specgen.core.passes import Pass, Passes
from specgen.core.peers import Peers
from specgen.core.running_batch import RunningBatch
from specgen.core.scheduler import Scheduler
from specgen.core.scoring import Scored, Scorer, ScoreRequest
from specgen.core.sequence import Completion, Request, Sequence
from specgen.core.shortages import NO_MEMORY, Shortages, attempt
from specgen.core.spec_length import SpecLength
from specgen.core.step import Steps
from specgen.core.waits import Waits
from specgen.device import use
from specgen.events import Event
from specgen.models.model_config import TargetConfig
from specgen.startup import phase

WARM_UP_TOKENS = 16


def no_follow_up(completion: Completion) -> Request | None:
    """Every request stands alone."""
    return None


def never_stop() -> bool:
    """Nothing ends the run before its last request."""
    return False


def discard(event: Event) -> None:
    """Record nothing."""


class EngineCore:
    """Generates for many requests at once; made by ``engine.build.build_engine``.

    ``lookahead`` is how many decode steps the host may launch before it reads what an earlier one found. With 1 the
    device never waits for the host, and a sequence that has ended is found one step late: what that step gave it is
    dropped. ``spec_length`` chooses the number of drafts of every step; ``followers`` finds stop strings and
    the parts of texts; ``record`` takes every event. ``peers`` are told every call that changes the engine.
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
        followers: Followers,
        record: Callable[[Event], None],
        peers: Peers,
    ) -> None:
        self.vocab_size = config.vocab_size
        self._peers = peers
        self._runner = steps.runner
        self._batch = batch
        self._scheduler = scheduler
        self._lookahead = lookahead
        self._device = device
        self._scorer = Scorer(config=config, steps=steps, scheduler=scheduler, device=device, peers=peers)
        self._journal = journal = Journal(record)
        self._waits = waits = Waits(device)
        self._intake = Intake(config=config, scheduler=scheduler, journal=journal, followers=followers)
        self._passes = Passes(
            steps=steps, batch=batch, scheduler=scheduler, vocab_size=config.vocab_size, device=device
        )
        self._endings = endings = Endings(
            scheduler=scheduler, steps=steps, journal=journal, new_sequence=self._intake.sequence
        )
        self._shortages = Shortages(scheduler=scheduler, batch=batch, journal=journal, endings=endings)
        self._in_flight = InFlight(
            journal=journal, endings=endings, spec_length=spec_length, waits=waits, peers=peers
        )

    @property
    def spec_length(self) -> SpecLength:
        """Says how many drafts each step has."""
        return self._in_flight.spec_length

    @spec_length.setter
    def spec_length(self, spec_length: SpecLength) -> None:
        self._peers.tell("spec_length", spec_length)
        self._in_flight.spec_length = spec_length

    def generate(
        self,
        requests: Iterable[Request],
        follow_up: Callable[[Completion], Request | None] = no_follow_up,
        until: Callable[[], bool] = never_stop,
    ) -> Generator[Completion, None, None]:
        """The completions as they finish, in no fixed order.

        A request is pulled from ``requests`` when the batch has room for it. ``follow_up`` may answer a completion
        with the next request of the same conversation. Once ``until``, which is asked between steps, is true, what
        the passes in flight have finished is yielded, and the other requests are dropped.
        """
        return rarely_collecting(self._generate(iter(requests), follow_up, until))

    def _generate(
        self,
        source: Iterator[Request],
        follow_up: Callable[[Completion], Request | None],
        until: Callable[[], bool],
    ) -> Generator[Completion, None, None]:
        try:
            while not until():
                finished = [*self._pull_requests(source), *self.step()]
                if finished and self._lookahead and not self._in_flight:
                    try:  # the device would have nothing to do while they are handed out
                        finished += [*self._pull_requests(source), *self.step()]
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
                if not finished and not self._has_work:
                    return
            yield from self.drain()
        finally:  # also where the caller has seen enough, or something failed
            self.abandon()

    def score(self, requests: Iterable[ScoreRequest]) -> Iterator[Scored]:
        """Yield the scores of given texts as they are found, in no fixed order; nothing is drafted or recorded.

        A text is pulled from ``requests`` when the batch has room for it. ``UserError`` for one that cannot run;
        ``RuntimeError`` where one fails twice, or ``DeviceLost``.
        """
        assert self._scheduler.idle, "texts are scored between runs"
        assert not self._in_flight
        try:
            yield from self._scorer.score(requests)
        except RuntimeError as error:
            self._require_device(error)
            raise

    def warm_up(self) -> None:
        """Generate a little and record nothing: first calls load, allocate and compile, which no run should measure."""
        sampling = SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        with phase("warm-up"), self.rehearsal():
            for i in range(2):
                self.submit(Request(id=f"warm-up {i}", prompt_token_ids=(0,) * 16, sampling=sampling))
            while self._has_work:
                self._advance()
        self._journal.reset()

    @contextmanager
    def rehearsal(self, record: Callable[[Event], None] = discard) -> Iterator[None]:
        """Steps that are no run's: ``record`` alone sees them, and their requests are dropped at the end.

        ``spec_length`` may be changed meanwhile. ``DeviceLost`` where what fails is the device.
        """
        kept = self._journal.record, self.spec_length
        self._journal.record = record
        try:
            yield
        except RuntimeError as error:  # of no request
            self._require_device(error)
            raise
        finally:
            self._journal.record, self.spec_length = kept
            self.abandon()

    def be_patient(self, num_steps: int) -> None:
        """Capture the graph of a batch size when as many steps of it have run in a larger one; 0, as at first: at once.

        A run that is timed is not to capture what it did not when it was warmed up.
        """
        self._peers.tell("be_patient", num_steps)
        self._runner.be_patient(num_steps)

    def sizes(self, max_sequences: int) -> list[int]:
        return self._runner.sizes(max_sequences)

    def submit(self, request: Request) -> Completion | None:
        """Queue ``request``; a completion with the reason comes back at once if it can never run."""
        self._peers.tell("submit", request)
        return self._intake.submit(request)

    def step(self) -> list[Completion]:
        """Launch one prefill pass, if prompts wait and fit, and one decode step of all that run; read older ones.

        With lookahead, passes that nothing was in flight before are left for the next step to read.
        What fails ends the requests that it concerns and nothing else. ``DeviceLost`` where no pass can run any more.
        """
        self._waits.enter()
        self._guard(self._advance)
        self._waits.leave()
        return self._take()

    def drain(self) -> list[Completion]:
        """Read the passes in flight, and launch nothing. Fails as ``step`` does."""

        def read() -> None:
            with self._peers.working("drain"):
                self._in_flight.read_all_but(0)

        self._guard(read)
        return self._take()

    def abandon(self) -> None:
        """Drop all requests in hand without an answer. Asks nothing of the device, which may be the reason."""
        self._peers.tell("abandon")
        self._in_flight.clear()
        self._scheduler.clear()
        self._batch.reset()
        self._endings.take()

    def score_pass(self, requests: list[ScoreRequest]) -> list[Scored] | None:
        """One pass of ``score`` with ``requests`` behind those that it has; None where it has none left."""
        return self._scorer.run(requests)

    def abandon_scores(self) -> None:
        """Drop all texts that are not scored yet."""
        self._scorer.abandon()

    def _take(self) -> list[Completion]:
        completions = self._endings.take()
        if completions:
            self._peers.agree((*(each.request.id for each in completions), *_ids(self._scheduler.in_hand)))
        return completions

    @property
    def _has_work(self) -> bool:
        return not self._scheduler.idle or bool(self._in_flight)

    def _pull_requests(self, source: Iterator[Request]) -> Iterator[Completion]:
        while self._scheduler.wants_request:
            request = next(source, None)
            if request is None:
                return
            refused = self.submit(request)
            if refused is not None:
                yield refused

    def _guard(self, work: Callable[[], None]) -> None:
        """Do ``work``; those in flight fail with it."""
        failure = None
        try:
            work()
        except RuntimeError as error:
            self._peers.require(error, _ids(self._scheduler.in_hand))
            failure = first_line(error)  # alone: the exception holds on to the tensors of the pass
        if failure is not None:
            self._fail_all(failure)

    def _fail_all(self, reason: str) -> None:
        """A pass has failed: so have those who were in it or in one that is not read yet."""
        hit, in_flight = self._scheduler.in_hand, bool(self._in_flight)
        self._in_flight.clear()
        self._batch.reset()
        require_device(self._device, _ids(hit))
        if not hit and not in_flight:
            raise RuntimeError(reason)  # there is no request to answer with it
        for sequence in hit:
            self._endings.fail(sequence, f"the device failed: {reason}")

    def _require_device(self, error: RuntimeError) -> None:
        """``DeviceLost`` where ``error``, which is of no request, is the device's or a peer's."""
        self._peers.require(error)
        require_device(self._device)

    @torch.inference_mode()
    def _advance(self) -> None:
        use(self._device)  # another engine of this process may be on another
        with self._peers.working("step"):
            ahead = bool(self._in_flight)
            prefilled = self._prefill()
            if self._lookahead == 0:
                self._in_flight.read_all_but(
                    0
                )  # so that no step is spent on a text that its first token ended
            decoded = self._decode()
            num_left = self._lookahead if prefilled or decoded else 0
            if ahead or num_left == 0:
                self._in_flight.read_all_but(num_left)
            self._peers.see(*self._scheduler.counts)

    def _prefill(self) -> bool:
        """Whether a prefill was launched."""
        chunks = self._scheduler.next_chunks()
        if not chunks:
            return False
        if chunks[0].sequence.alone:
            self._in_flight.read_all_but(0)  # so that no other request can be to blame for a failure
        launched = attempt(lambda: self._passes.prefill(chunks, self._waits.launch()))
        if launched is None:
            self._peers.give_up(RuntimeError(NO_MEMORY))
            self._in_flight.read_all_but(0)
            self._shortages.of_prefill()
            return False
        self._scheduler.launched(chunks)
        self._add(launched)
        return True

    def _decode(self) -> bool:
        """Whether a decode step was launched."""
        if all(sequence.may_finish for sequence in self._scheduler.running):
            self._in_flight.read_all_but(0)  # a short wait costs less than a step that may not be needed
        for sequence in [sequence for sequence in self._scheduler.running if sequence.will_finish]:
            self._scheduler.leave(sequence)
        self._reserve()
        if not self._scheduler.running:
            return False
        num_drafts = self.spec_length.choose(len(self._scheduler.running))
        launched = attempt(lambda: self._passes.decode(num_drafts, self._waits.launch()))
        if launched is None:
            self._peers.give_up(RuntimeError(NO_MEMORY))
            self._in_flight.read_all_but(0)
            self._shortages.of_decode()
            return False
        self._add(launched)
        return True

    def _reserve(self) -> None:
        """Make sure that the next step's KV has pages, at the cost of the youngest sequences if need be."""
        while not self._scheduler.reserve():
            if self._in_flight:  # what has ended gives its pages back
                self._in_flight.read()
            else:
                self._journal.preempted(self._scheduler.preempt())

    def _add(self, launched: Pass) -> None:
        """Note that a pass was launched."""
        self._peers.see(launched.num_sequences, launched.num_drafts, launched.result.target_rows)
        self._in_flight.add(launched)
        if self._scheduler.limits.see_pass():
            self._runner.try_again()
        for capture in launched.captures:
            self._journal.captured(capture)


def _ids(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(sequence.request.id for sequence in sequences)
