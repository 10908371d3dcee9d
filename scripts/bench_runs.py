"""Runs of one workload through one engine, and the figures that they give."""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from bench_profile import Profile, Window, warm_up
from bench_workload import Workload, num_wrong
from calibrated_cycle import Cycle

from specgen.bench.environment import settle
from specgen.build import Models, build_engine
from specgen.config import EngineConfig
from specgen.engine import Engine
from specgen.events import Captured, Event, Stepped, Verified
from specgen.sequence import Completion


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pass through a workload: wall time of ``generate``, prefill included."""

    seconds: float
    completions: list[Completion]

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(completion.token_ids) for completion in self.completions)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the runs of a workload gave, taken together."""

    output_tokens_per_second: float  # median of the runs
    fastest: float
    slowest: float
    num_tokens: int
    num_wrong: int  # of them, not the known text's
    ms_per_step: float | None  # of decode steps of a full batch; None where there were none
    num_steps: int  # that ``ms_per_step`` is the mean of
    acceptance: tuple[float, ...]  # joint, at each draft position
    num_drafts: int  # steps with drafts
    num_captures: int  # graphs that were captured within the measured time, where there should be none
    profile: Profile | None

    def to_json(self) -> dict[str, Any]:
        """The fields under their names."""
        return asdict(self)


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


def measure(
    config: EngineConfig, models: Models, workloads: Sequence[Workload], cycle: Cycle, *, profiled: bool
) -> Figures:
    """Run ``workloads`` of one batch, each once, through an engine of a resolved ``config``.

    The first runs once unmeasured before; where it is to be ``profiled``, a batch of it runs once more at the end.
    """
    if profiled:
        warm_up()
    tape = Tape()
    engine = build_engine(config, models, tape.record)
    engine.warm_up()
    run(engine, workloads[0].groups)
    tape.events.clear()
    runs = [run(engine, workload.groups) for workload in workloads]
    events = list(tape.events)
    profile = _profile(engine, tape, workloads[0]) if profiled else None
    return _figures(config, workloads[0].batch, cycle, runs, events, profile)


def run(engine: Engine, groups: Iterable[Iterable[Any]]) -> Run:
    """Generate for one group of requests after the other."""
    settle()
    began = time.perf_counter()
    completions = [completion for group in groups for completion in engine.generate(group)]
    settle()
    seconds = time.perf_counter() - began
    refused = [completion.error for completion in completions if completion.error]
    if refused:
        raise ValueError(f"{len(refused)} requests were refused, the first because {refused[0]}")
    return Run(seconds=seconds, completions=completions)


def step_seconds(events: Iterable[Event], batch: int) -> list[float]:
    """Seconds from the end of each decode step of ``batch`` sequences to the end of the next, if that is another."""
    steps = [event for event in events if isinstance(event, Stepped)]
    return [
        after.time - before.time
        for before, after in pairwise(steps)
        if before.kind == after.kind == "decode" and before.num_sequences == after.num_sequences == batch
    ]


def joint_acceptance(accepted: Sequence[int], num_spec_tokens: int) -> tuple[float, ...]:
    """Share of the steps, given by how many drafts they accepted, that accepted more than each position."""
    return tuple(
        sum(count > position for count in accepted) / max(len(accepted), 1)
        for position in range(num_spec_tokens)
    )


def _figures(
    config: EngineConfig,
    batch: int,
    cycle: Cycle,
    runs: list[Run],
    events: list[Event],
    profile: Profile | None,
) -> Figures:
    speeds = [run.num_tokens / run.seconds for run in runs]
    steps = step_seconds(events, batch)
    accepted = [event.accepted for event in events if isinstance(event, Verified) and event.drafts]
    return Figures(
        output_tokens_per_second=statistics.median(speeds),
        fastest=max(speeds),
        slowest=min(speeds),
        num_tokens=sum(run.num_tokens for run in runs),
        num_wrong=sum(num_wrong(cycle, run.completions) for run in runs),
        ms_per_step=1e3 * statistics.mean(steps) if steps else None,
        num_steps=len(steps),
        acceptance=joint_acceptance(accepted, config.num_spec_tokens),
        num_drafts=len(accepted),
        num_captures=sum(isinstance(event, Captured) for event in events),
        profile=profile,
    )


def _profile(engine: Engine, tape: Tape, workload: Workload) -> Profile | None:
    tape.window = Window(workload.batch)
    run(engine, [workload.requests[: workload.batch]])
    return tape.window.result()
