"""What the engine records: every event with the time since the run began."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items

from specgen.core.graphs import Capture
from specgen.core.passes import Pass
from specgen.core.scheduler import Limits
from specgen.core.sequence import Request, Sequence
from specgen.events import (
    Captured,
    Event,
    Finished,
    OutOfMemory,
    Preempted,
    Prefilled,
    Stepped,
    Submitted,
    Switched,
    Touched,
    Verified,
)
from specgen.models.expert_counts import ExpertSize


class Journal:
    """Hands events to ``record``, stamped with seconds since this was made or last reset."""

    def __init__(self, record: Callable[[Event], None]) -> None:
        self.record = record
        self.reset()

    def reset(self) -> None:
        """Count time from now on."""
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began

    def submitted(self, request: Request) -> None:
        """``request`` entered the queue."""
        self.record(
            Submitted(
                sequence=request.id,
                time=self.now(),
                num_prompt_tokens=len(request.prompt_token_ids),
                category=request.category,
                turn=request.turn,
                num_turns=request.num_turns,
            )
        )

    def preempted(self, sequence: Sequence) -> None:
        """``sequence`` gave its pages back and will be computed again."""
        self.record(Preempted(sequence=sequence.request.id, time=self.now()))

    def prefilled(self, sequence: Sequence, emitted: int) -> None:
        """The prompt of ``sequence`` is in the cache, and ``emitted`` tokens came of it."""
        self._switched(sequence)
        self.record(
            Prefilled(
                sequence=sequence.request.id,
                time=self.now(),
                emitted=emitted,
                num_cached=sequence.num_cached,
            )
        )

    def verified(self, sequence: Sequence, drafts: list[int], accepted: int, emitted: int) -> Verified:
        """The target accepted so many of ``drafts``, and ``emitted`` tokens became output; returns the event."""
        self._switched(sequence)
        step = Verified(
            sequence=sequence.request.id,
            time=self.now(),
            drafts=tuple(drafts),
            accepted=accepted,
            emitted=emitted,
        )
        self.record(step)
        return step

    def _switched(self, sequence: Sequence) -> None:
        """Where the newest tokens of ``sequence`` changed the part of its text."""
        for at, part in sequence.switches:
            self.record(Switched(sequence=sequence.request.id, time=self.now(), part=part, at=at))
        sequence.switches.clear()

    def finished(self, sequence: Sequence) -> None:
        """``sequence`` has ended, for the reason that it has."""
        self.record(
            Finished(
                sequence=sequence.request.id,
                time=self.now(),
                reason=str(sequence.finish_reason),
                num_output_tokens=sequence.num_output_tokens,
            )
        )

    def stepped(self, done: Pass, num_kept: int, idle: float, touched: Items[int] = ()) -> None:
        """``done`` was read; the device had waited ``idle`` seconds for it.

        ``touched`` are its experts, summed over layers, and those of the newest tokens alone.
        """
        result = done.result
        kept = result.fill_rows if done.kind == "prefill" else min(num_kept, result.fill_rows)
        self.record(
            Stepped(
                kind=done.kind,
                time=self.now(),
                seconds=done.seconds,
                num_sequences=done.num_sequences,
                num_spec_tokens=done.num_drafts,
                target_rows=result.target_rows,
                first_pass_rows=result.fill_rows,
                first_pass_kept=kept,
                loop_rows=result.loop_rows,
                experts=_experts(result.experts, touched),
                idle=idle,
                idle_outside=min(idle, done.launch.outside),
                num_waiting=done.num_waiting,
            )
        )

    def captured(self, capture: Capture) -> None:
        """A CUDA graph was captured, or did not fit into the memory."""
        what, num_rows, *_ = capture.key
        self.record(
            Captured(
                time=self.now(),
                what=what,
                num_sequences=num_rows,
                seconds=capture.seconds,
                fits=capture.fits,
            )
        )

    def out_of_memory(self, limits: Limits) -> None:
        """A pass found no memory; ``limits`` hold from here on."""
        self.record(
            OutOfMemory(
                time=self.now(),
                max_batch_size=limits.max_batch_size,
                max_prefill_tokens=limits.max_prefill_tokens,
            )
        )


def _experts(size: ExpertSize | None, touched: Items[int]) -> Touched | None:
    """Means over layers of what a mixture's step counted; None in a dense target."""
    if size is None or not touched:
        return None
    every, plain = (number / size.num_layers for number in touched)
    return Touched(
        experts=every, plain=plain, num_experts=size.num_experts, num_bytes=round(size.bytes_of(every))
    )
