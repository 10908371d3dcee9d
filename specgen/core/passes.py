"""The engine's passes: launched from host state, timed by the device's clock, and read later."""

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

import torch

from specgen.core.graphs import Capture
from specgen.core.packing import chunk_layout, chunk_tokens
from specgen.core.running_batch import RunningBatch
from specgen.core.scheduler import Chunk, Scheduler
from specgen.core.sequence import Sequence
from specgen.core.spec_length import StepPlan
from specgen.core.step import StepResult, Steps
from specgen.decoding.sampling import SamplingBatch, token_counts
from specgen.device import DeviceEvent, HostCopy, on_device
from specgen.record.record_rows import PassRow, Step

PassKind = Literal["prefill", "decode", "score"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The beginning of a pass, and the seconds that the engine's caller had since the launch before."""

    begun: DeviceEvent
    caller_seconds: float


class IdleClock:
    """Times passes by the clock of ``device``. Nothing in here waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left: float | None = None  # when the engine handed back to its caller
        self._caller_seconds = 0.0
        self._end: DeviceEvent | None = None  # of the pass that was read last

    def enter(self) -> None:
        """The caller asks for a step."""
        if self._left is not None:
            self._caller_seconds += time.perf_counter() - self._left
            self._left = None

    def leave(self) -> None:
        """The caller goes on."""
        self._left = time.perf_counter()

    def launch(self) -> Launch:
        """A pass begins here."""
        caller_seconds, self._caller_seconds = self._caller_seconds, 0.0
        return Launch(begun=DeviceEvent(self._device), caller_seconds=caller_seconds)

    def before(self, launch: Launch, end: DeviceEvent) -> float:
        """Seconds that the device waited for a pass, which has ended; passes come in the order of launch."""
        idle = 0.0 if self._end is None else max(launch.begun.since(self._end), 0.0)
        self._end = end
        return idle

    def forget(self) -> None:
        """What comes next continues nothing: time before it is nobody's."""
        self._left = self._end = None
        self._caller_seconds = 0.0


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass that was launched and whose numbers are not read yet."""

    kind: PassKind
    sequences: list[tuple[Sequence, int | None]]  # who gets something, and the row of its tokens
    scored: Items[tuple[Sequence, int]]  # of each row of it: a text or prompt, and the position of its token
    num_sequences: int
    num_drafts: int  # per sequence
    num_waiting: int  # prompts that had not begun
    result: StepResult
    numbers: HostCopy
    logprobs: HostCopy | None
    prompt_logprobs: HostCopy | None  # of ``scored``, in a prefill
    launch: Launch
    captures: list[Capture]  # within it

    @property
    def seconds(self) -> float:
        """Of the device, once it has ended; without captures, in which the device does nothing."""
        taken = self.numbers.done.since(self.launch.begun)
        return max(taken - sum(capture.seconds for capture in self.captures), 0.0)

    def row(
        self,
        number: int,
        now: float,
        idle: float,
        num_tokens: int,
        steps: Items[Step],
        num_preempted: int,
    ) -> PassRow:
        """What happened in it; the device had waited ``idle`` seconds for it."""
        result = self.result
        num_accepted, drafts = sum([step.accepted for step in steps]), [step.drafts for step in steps]
        kept = result.fill_rows
        if self.kind == "decode":
            kept = min(num_accepted + len(steps), kept)
        return PassRow(
            number=number,
            kind=self.kind,
            time=now,
            seconds=round(self.seconds, 9),
            num_sequences=self.num_sequences,
            num_spec_tokens=self.num_drafts,
            target_rows=result.target_rows,
            first_pass_rows=result.fill_rows,
            first_pass_kept=kept,
            loop_rows=result.loop_rows,
            num_tokens=num_tokens,
            num_drafting=sum(map(bool, drafts)),
            num_accepted=num_accepted,
            num_rejected=sum(map(len, drafts)) - num_accepted,
            num_preempted=num_preempted,
            num_waiting=self.num_waiting,
            idle=round(idle, 9),
            idle_outside=round(min(idle, self.launch.caller_seconds), 9),
        )


class Passes:
    """Launches passes over ``batch`` for what ``scheduler`` says; nothing here waits for the device.

    What raises here leaves the running batch undefined: see ``RunningBatch.reset``.
    """

    def __init__(
        self,
        *,
        steps: Steps,
        batch: RunningBatch,
        scheduler: Scheduler,
        vocab_size: int,
        end_tokens: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._steps = steps
        self._batch = batch
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens  # the model's
        self._device = device

    def prefill(self, chunks: list[Chunk], launch: Launch) -> Pass:
        """Compute ``chunks``; sequences whose prompt is complete join the running batch."""
        sampling = self._sampling(chunks)
        complete = [i for i, chunk in enumerate(chunks) if chunk.last]
        fresh = [chunk.last and not chunk.sequence.num_output_tokens for chunk in chunks]
        num_top = max(chunk.sequence.request.sampling.prompt_logprobs or 0 for chunk in chunks)
        scored_rows, targets, scored = self._scored(chunks)
        self._steps.copy_states([(each.state_source, each.sequence.state_slot) for each in chunks])
        state, result = self._steps.prefill(
            chunk_layout(chunks, self._scheduler.page_size, self._device),
            chunk_tokens(chunks, self._device, shift=0),
            chunk_tokens(chunks, self._device, shift=1),
            on_device(fresh, self._device, torch.bool),
            sampling,
            (on_device(scored_rows, self._device), on_device(targets, self._device), num_top)
            if scored
            else None,
        )
        self._steps.copy_states([(each.sequence.state_slot, each.state_copy) for each in chunks])
        rows = on_device(complete, self._device)
        self._batch.arrange(self._scheduler.running)
        self._batch.join([chunks[i].sequence for i in complete], state.take(rows), sampling.take(rows))
        sequences = [(chunks[i].sequence, i if fresh[i] else None) for i in complete]
        return self._launched("prefill", sequences, len(chunks), result, launch, scored=scored)

    def _sampling(self, chunks: list[Chunk]) -> SamplingBatch:
        """The columns of ``chunks``; tokens are counted, from the first one on, where the next is to be chosen."""
        params = [chunk.sequence.request.sampling for chunk in chunks]
        seeds = [chunk.sequence.seed for chunk in chunks]
        places = list[tuple[int, int]]()
        if any(each.constrained for each in params):
            places = [self._place(chunk.sequence) for chunk in chunks]
        texts = [
            chunk.sequence.prompt_and_output if chunk.last and each.penalised else ((), ())
            for chunk, each in zip(chunks, params, strict=True)
        ]
        penalised = any(each.penalised for each in params)
        return SamplingBatch.of(
            params,
            seeds,
            self._device,
            token_counts(texts if penalised else (), self._vocab_size, self._device),
            end_tokens=self._end_tokens,
            num_prompt=[len(chunk.sequence.request.prompt_token_ids) for chunk in chunks],
            places=places,
            tables=self._batch.tables,
        )

    def _place(self, sequence: Sequence) -> tuple[int, int]:
        """Number and state of its automaton in the tables, which have it from here on; see ``Tables``."""
        automaton, place = sequence.automaton, sequence.place
        if automaton is None or place is None:
            return 0, 0
        if not place.filled:
            assert self._batch.tables is not None
            self._batch.tables.fill(place.number, place.first, automaton.classes, automaton.table)
            place.filled = True
        return place.number, place.first + sequence.state * (1 + automaton.successors.shape[1])

    def decode(self, plan: StepPlan, launch: Launch) -> Pass:
        """One step of all running sequences."""
        running = self._scheduler.running
        self._batch.arrange(running)
        num_rows = self._steps.runner.choose_rows(
            len(running), (plan.num_drafts, plan.quarters, self._batch.form)
        )
        result = self._steps.decode(self._batch.columns(num_rows), plan)
        sequences: list[tuple[Sequence, int | None]] = [(each, row) for row, each in enumerate(running)]
        return self._launched("decode", sequences, len(running), result, launch, plan.num_drafts)

    def score(self, chunks: list[Chunk], launch: Launch) -> Pass:
        """Compute ``chunks`` of texts with the target alone, and look at every token that is asked for."""
        rows, targets, scored = self._scored(chunks)
        result = self._steps.score(
            chunk_layout(chunks, self._scheduler.page_size, self._device),
            chunk_tokens(chunks, self._device, shift=0),
            on_device(rows, self._device),
            on_device(targets, self._device),
        )
        complete: list[tuple[Sequence, int | None]] = [
            (chunk.sequence, None) for chunk in chunks if chunk.last
        ]
        return self._launched("score", complete, len(chunks), result, launch, scored=scored)

    def _scored(self, chunks: list[Chunk]) -> tuple[list[int], list[int], list[tuple[Sequence, int]]]:
        """Rows of ``chunks`` and the tokens behind them whose probabilities are asked for, and their positions."""
        rows, targets, scored, first = list[int](), list[int](), list[tuple[Sequence, int]](), 0
        for chunk in chunks:
            request, asked = chunk.sequence.request, chunk.sequence.scored
            tokens = request.prompt_token_ids if request.text is None else request.text.token_ids
            end = chunk.start + chunk.num_rows
            for position in range(max(chunk.start + 1, asked.start), min(end + 1, asked.stop)):
                rows.append(first + position - 1 - chunk.start)
                targets.append(tokens[position])
                scored.append((chunk.sequence, position))
            first += chunk.num_rows
        return rows, targets, scored

    def _launched(
        self,
        kind: PassKind,
        sequences: list[tuple[Sequence, int | None]],
        num_sequences: int,
        result: StepResult,
        launch: Launch,
        num_drafts: int = 0,
        scored: Items[tuple[Sequence, int]] = (),
    ) -> Pass:
        """A pass whose numbers are on their way to the host; see ``Pass``."""
        return Pass(
            kind=kind,
            sequences=sequences,
            scored=scored,
            num_sequences=num_sequences,
            num_drafts=num_drafts,
            num_waiting=len(self._scheduler.waiting),
            result=result,
            numbers=HostCopy(result.numbers),
            logprobs=None if result.logprobs is None else HostCopy(result.logprobs),
            prompt_logprobs=None if result.prompt_logprobs is None else HostCopy(result.prompt_logprobs),
            launch=launch,
            captures=self._steps.runner.take_captures(),
        )
