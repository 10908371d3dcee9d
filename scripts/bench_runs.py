"""Runs of known texts through one engine, and the figures that they give."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench_workload import Workload, num_wrong
from calibrated_cycle import Cycle

from specgen.bench.profile import KernelTrace, Profile, Window, summarize
from specgen.bench.runs import Run, Tape, joint_acceptance, run, step_seconds
from specgen.config import EngineConfig
from specgen.core.engine_core import EngineCore
from specgen.engine.build import build_engine
from specgen.engine.loading import Models
from specgen.events import Captured, Event, Verified


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


def measure(
    config: EngineConfig, models: Models, workloads: Sequence[Workload], cycle: Cycle, *, profiled: bool
) -> Figures:
    """Run ``workloads`` of one batch, each once, through an engine of a resolved ``config``.

    The first runs once unmeasured before; where it is to be ``profiled``, a batch of it runs once more at the end.
    """
    trace = KernelTrace() if profiled else None
    tape = Tape()
    engine = build_engine(config, models, tape.record)
    engine.warm_up()
    run(engine, workloads[0].groups)
    tape.events.clear()
    runs = [run(engine, workload.groups) for workload in workloads]
    events = list(tape.events)
    profile = _profile(engine, tape, workloads[0], trace) if trace is not None else None
    return _figures(config, workloads[0].batch, cycle, runs, events, profile)


def _figures(
    config: EngineConfig,
    batch: int,
    cycle: Cycle,
    runs: list[Run],
    events: list[Event],
    profile: Profile | None,
) -> Figures:
    speeds = [run.tokens_per_second for run in runs]
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


def _profile(engine: EngineCore, tape: Tape, workload: Workload, trace: KernelTrace) -> Profile | None:
    tape.window = window = Window(workload.batch, trace)
    run(engine, [workload.requests[: workload.batch]])
    return summarize(trace.spans(), window.num_steps) if window.complete else None
