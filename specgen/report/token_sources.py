"""How each token of a text came to be: accepted draft, the target's own choice, or the prefill's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from specgen.events import Event, Finished, Prefilled, Resumed, Submitted, Verified

Kind = Literal["prefill", "draft", "correction", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a token came from.

    ``prefill``: of the prompt's pass; ``draft``: accepted, at ``position`` of its step; ``correction``: the target's
    token in place of draft ``position``, ``rejected``; ``bonus``: the target's behind drafts that were all accepted;
    ``plain``: of a step without drafts.
    """

    kind: Kind
    position: int = 0
    rejected: int | None = None  # a token id


@dataclass(slots=True)
class Trace:
    """The steps of one finished request; ``reason`` is why it ended, ``num_prefill`` its tokens of the prefill."""

    name: str
    category: str | None
    turn: int
    reason: str = ""
    num_prefill: int = 0
    steps: list[Verified] = field(default_factory=list)

    @property
    def num_rejections(self) -> int:
        """Steps that rejected a draft."""
        return sum(step.accepted < len(step.drafts) for step in self.steps)

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts over steps with drafts; None without one."""
        accepted = [step.accepted for step in self.steps if step.drafts]
        return 1 + sum(accepted) / len(accepted) if accepted else None

    def sources(self) -> list[Source]:
        """The source of every token."""
        found = [Source("prefill")] * self.num_prefill
        for step in self.steps:
            found += islice(sources_of(step.drafts, step.accepted), step.emitted)
        return found


def sources_of(drafts: Sequence[int], accepted: int) -> Iterator[Source]:
    """The sources of the tokens of one verify step, the last of which the target chose."""
    for position in range(accepted):
        yield Source("draft", position)
    if accepted < len(drafts):
        yield Source("correction", accepted, drafts[accepted])
    else:
        yield Source("bonus" if drafts else "plain", accepted)


def traced(events: Iterable[Event], finished: Callable[[Trace], None]) -> Iterator[Event]:
    """``events`` unchanged; meanwhile ``finished`` gets the trace of every request that ends without an error."""
    running: dict[str, Trace] = {}
    for event in events:
        match event:
            case Verified(sequence=name) if name in running:
                running[name].steps.append(event)
            case Prefilled(sequence=name) if name in running:
                running[name].num_prefill += event.emitted
            case Submitted():  # again, where it is tried again
                running[event.sequence] = Trace(event.sequence, event.category, event.turn)
            case Finished(sequence=name) if name in running:
                trace = running.pop(name)
                trace.reason = event.reason
                if event.reason != "error":
                    finished(trace)
            case Resumed():
                running.clear()
        yield event
