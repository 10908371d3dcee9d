"""The engine's passes: a prefill and a decode step, launched from host state and read later."""

from dataclasses import dataclass
from typing import Literal

import torch

from specgen.core.graphs import Capture
from specgen.core.packing import chunk_layout, chunk_tokens
from specgen.core.running_batch import RunningBatch
from specgen.core.scheduler import Chunk, Scheduler
from specgen.core.sequence import Sequence
from specgen.core.step import StepResult, Steps
from specgen.core.waits import Launch
from specgen.decoding.sampling import SamplingBatch, token_counts
from specgen.device import HostCopy, on_device


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass that was launched and whose numbers are not read yet."""

    kind: Literal["prefill", "decode"]
    sequences: list[tuple[Sequence, int | None]]  # and the row of the numbers that holds tokens for it
    num_sequences: int
    num_drafts: int  # per sequence
    num_waiting: int  # prompts that had not begun
    result: StepResult
    numbers: HostCopy
    logprobs: HostCopy | None
    launch: Launch
    captures: list[Capture]  # within it

    @property
    def seconds(self) -> float:
        """Of the device, once it has ended; without captures, in which the device does nothing."""
        taken = self.numbers.done.since(self.launch.begun)
        return max(taken - sum(capture.seconds for capture in self.captures), 0.0)


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
        device: torch.device,
    ) -> None:
        self._steps = steps
        self._batch = batch
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._device = device

    def prefill(self, chunks: list[Chunk], launch: Launch) -> Pass:
        """Compute ``chunks``; sequences whose prompt is complete join the running batch."""
        sampling = self._sampling(chunks)
        complete = [i for i, chunk in enumerate(chunks) if chunk.last]
        fresh = [chunk.last and not chunk.sequence.num_output_tokens for chunk in chunks]
        state, result = self._steps.prefill(
            chunk_layout(chunks, self._scheduler.page_size, self._device),
            chunk_tokens(chunks, self._device, shift=0),
            chunk_tokens(chunks, self._device, shift=1),
            on_device(fresh, self._device, torch.bool),
            sampling,
        )
        rows = on_device(complete, self._device)
        self._batch.arrange(self._scheduler.running)
        self._batch.join([chunks[i].sequence for i in complete], state.take(rows), sampling.take(rows))
        return Pass(
            kind="prefill",
            sequences=[(chunks[i].sequence, i if fresh[i] else None) for i in complete],
            num_sequences=len(chunks),
            num_drafts=0,
            num_waiting=len(self._scheduler.waiting),
            result=result,
            numbers=HostCopy(result.numbers),
            logprobs=None if result.logprobs is None else HostCopy(result.logprobs),
            launch=launch,
            captures=self._steps.runner.take_captures(),
        )

    def _sampling(self, chunks: list[Chunk]) -> SamplingBatch:
        """The columns of ``chunks``; tokens are counted, from the first one on, where the next is to be chosen."""
        params = [chunk.sequence.request.sampling for chunk in chunks]
        seeds = [chunk.sequence.seed for chunk in chunks]
        if not any(each.penalised for each in params):
            return SamplingBatch.of(params, seeds, self._device)
        texts = [
            chunk.sequence.prompt_and_output if chunk.last and each.penalised else ((), ())
            for chunk, each in zip(chunks, params, strict=True)
        ]
        counts = token_counts(texts, self._vocab_size, self._device)
        return SamplingBatch.of(params, seeds, self._device, counts)

    def decode(self, num_drafts: int, launch: Launch) -> Pass:
        """One step of all running sequences, with ``num_drafts`` drafts each."""
        running = self._scheduler.running
        self._batch.arrange(running)
        num_rows = self._steps.runner.choose_rows(len(running), (num_drafts, self._batch.form))
        columns = self._batch.columns(num_rows)
        result = self._steps.decode(columns, num_drafts)
        return Pass(
            kind="decode",
            sequences=[(sequence, row) for row, sequence in enumerate(running)],
            num_sequences=len(running),
            num_drafts=num_drafts,
            num_waiting=len(self._scheduler.waiting),
            result=result,
            numbers=HostCopy(result.numbers),
            logprobs=None if result.logprobs is None else HostCopy(result.logprobs),
            launch=launch,
            captures=self._steps.runner.take_captures(),
        )
