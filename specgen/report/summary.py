"""Events added up: one event for each finished request, and one for all work between two of them.

A report is computed from these sums alone, so a run that records them instead of its events has the same report.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from specgen.config import require
from specgen.events import (
    Answered,
    Captured,
    Event,
    Finished,
    Merged,
    Preempted,
    Prefilled,
    Resumed,
    Sharded,
    Stepped,
    Submitted,
    Switched,
    Verified,
    Worked,
)
from specgen.report.acceptance import StepCounts
from specgen.report.experts_touched import ExpertSum
from specgen.report.parts_of_texts import PartCounts
from specgen.report.timings import StepSum
from specgen.report.wall_time import WallSum

UNFINISHED = "unfinished"  # the reason of an ``Answered`` that did not end


@dataclass(kw_only=True)
class _Request:
    """An unfinished request."""

    submitted: Submitted
    counts: StepCounts
    num_tokens: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache
    first_token: float | None = None
    parts: PartCounts | None = None  # once its text has reasoning

    def verify(self, step: Verified) -> None:
        self.counts.add(step)
        if self.parts is not None:
            self.parts.add(step, self.num_tokens)

    def emit(self, num_tokens: int, time: float) -> None:
        self.num_tokens += num_tokens
        if num_tokens and self.first_token is None:
            self.first_token = time

    def answered(self, reason: str, time: float, num_tokens: int) -> Answered:
        return Answered(
            sequence=self.submitted.sequence,
            time=time,
            reason=reason,
            num_output_tokens=num_tokens,
            submitted=self.submitted.time,
            first_token=self.first_token,
            num_prompt_tokens=self.submitted.num_prompt_tokens,
            num_cached=self.num_cached,
            category=self.submitted.category,
            turn=self.submitted.turn,
            num_turns=self.submitted.num_turns,
            steps=self.counts.sums(),
            reasoning=None if self.parts is None else self.parts.sums(num_tokens),
        )


class Summary:
    """Adds up the events of a run with K = ``num_spec_tokens``; those that are sums already pass through.

    ``UserError`` for events that cannot belong to one run.
    """

    def __init__(self, num_spec_tokens: int) -> None:
        self._num_spec_tokens = num_spec_tokens
        self._open: dict[str, _Request] = {}
        self._rejected = 0  # drafts in the step whose Stepped event follows
        self._forget_work()

    def _forget_work(self) -> None:
        self._since: float | None = None
        self._until = 0.0
        self._num_preemptions = 0
        self._steps: dict[str, StepSum] = {}
        self._experts = ExpertSum()
        self._wall = WallSum()

    def take(self, event: Event) -> Iterator[Event]:
        """What comes of one event: for most of them nothing yet."""
        match event:
            case Answered() | Worked():
                yield event
            case Resumed() | Sharded() | Merged():
                yield from self.worked()
                if isinstance(event, Resumed):
                    self._open.clear()
                    self._rejected = 0
                yield event
            case _:
                self._since = event.time if self._since is None else min(self._since, event.time)
                self._until = max(self._until, event.time)
                yield from self._count(event)

    def worked(self) -> Iterator[Worked]:
        """What was done since the last call, if anything was."""
        if self._since is not None:
            yield Worked(
                time=self._until,
                since=self._since,
                num_preemptions=self._num_preemptions,
                steps={kind: steps.sums() for kind, steps in self._steps.items()},
                experts=self._experts.sums(),
                wall=self._wall.sums(),
            )
            self._forget_work()

    def rest(self) -> Iterator[Event]:
        """The end of the events: what was done last, and the requests that did not end, with what they have."""
        yield from self.worked()
        for request in self._open.values():
            yield request.answered(UNFINISHED, request.submitted.time, request.num_tokens)
        self._open.clear()

    def _count(self, event: Event) -> Iterator[Event]:
        match event:
            case Submitted():
                self._submit(event)
            case Prefilled():
                request = self._request(event.sequence)
                request.emit(event.emitted, event.time)
                request.num_cached += event.num_cached if event.emitted else 0
            case Verified():
                request = self._request(event.sequence)
                request.verify(event)
                request.emit(event.emitted, event.time)
                self._rejected += len(event.drafts) - event.accepted
            case Switched():
                request = self._request(event.sequence)
                if request.parts is None:
                    request.parts = PartCounts(request.counts)
                request.parts.switch(event.part, event.at)
            case Preempted():
                self._num_preemptions += 1
            case Finished():
                request = self._request(event.sequence)
                del self._open[event.sequence]
                yield request.answered(event.reason, event.time, event.num_output_tokens)
            case Stepped():
                self._steps.setdefault(event.kind, StepSum()).add(event, self._rejected)
                self._experts.add(event)
                self._wall.add(event)
                self._rejected = 0
            case Captured():
                self._wall.add(event)

    def _request(self, sequence: str) -> _Request:
        require(
            sequence in self._open,
            f"{sequence!r} is not running here: the events are corrupt or truncated, run again",
        )
        return self._open[sequence]

    def _submit(self, event: Submitted) -> None:
        require(
            event.sequence not in self._open,
            f"{event.sequence!r} is submitted twice: give every prompt its own id",
        )
        self._open[event.sequence] = _Request(submitted=event, counts=StepCounts(self._num_spec_tokens))
