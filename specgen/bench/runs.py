"""Running one list of requests through one engine: the tape of its events, the wall time, and what both give."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specgen.bench.environment import settle
from specgen.bench.profile import Window
from specgen.config import UserError
from specgen.core.engine_core import EngineCore
from specgen.core.sequence import Completion, Request
from specgen.events import Event, Finished, Prefilled, Stepped, Verified


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pass through a workload: wall time of ``generate``, prefill included."""

    seconds: float
    completions: list[Completion]

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the wall time."""
        return self.num_tokens / self.seconds


class Tape:
    """Takes an engine's events, and shows them to a window while one is open."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.window: Window | None = None

    def record(self, event: Event) -> None:
        """Something happened."""
        self.events.append(event)
        if self.window is not None:
            self.window.see(event)


def run(engine: EngineCore, groups: Iterable[Iterable[Request]]) -> Run:
    """Generate for one group of requests after the other. ``UserError`` if the engine refuses one."""
    settle()
    began = time.perf_counter()
    completions = [completion for group in groups for completion in engine.generate(group)]
    settle()
    seconds = time.perf_counter() - began
    refused = [completion.error for completion in completions if completion.error]
    if refused:
        raise UserError(f"{len(refused)} requests were refused, the first because {refused[0]}")
    return Run(seconds=seconds, completions=completions)


def step_seconds(events: Iterable[Event], batch: int) -> list[float]:
    """Seconds from the end of each decode step of ``batch`` sequences to the end of the next, if that is another."""
    steps = [event for event in events if isinstance(event, Stepped)]
    return [
        after.time - before.time
        for before, after in pairwise(steps)
        if before.kind == after.kind == "decode" and before.num_sequences == after.num_sequences == batch
    ]


def inter_token_seconds(events: Iterable[Event]) -> Iterator[float]:
    """The time between two moments in which a request gets tokens: its inter-token latencies (ITL).

    All tokens of a step come at once, so a step is one gap, however many it emits, and there are no gaps of zero in
    between. So counts vLLM's serving benchmark too, which takes the time between two chunks of the stream.
    """
    latest: dict[str, float] = {}
    for event in events:
        if isinstance(event, Finished):
            latest.pop(event.sequence, None)
        elif isinstance(event, Prefilled | Verified) and event.emitted:
            if event.sequence in latest:
                yield event.time - latest[event.sequence]
            latest[event.sequence] = event.time


def joint_acceptance(accepted: Sequence[int], num_spec_tokens: int) -> tuple[float, ...]:
    """Share of the steps, given by how many drafts they accepted, that accepted more than each position."""
    return tuple(
        sum(count > position for count in accepted) / max(len(accepted), 1)
        for position in range(num_spec_tokens)
    )
