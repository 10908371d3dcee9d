"""Arms that take turns on the same requests, round after round: of every command that says how fast something is.

Not in the times: loading, compilation, CUDA graph capture, tokenization and one warm-up run of all requests by every
engine. In the times: prefill, without a prefix cache. Every repeat has the same prompts, so repeats differ in time
only.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import TypeVar

import numpy as np

from specgen.config.errors import DeviceLost
from specgen.core.engine_core import discard, never_stop
from specgen.engine.loading import Models
from specgen.engine.warm_engine import Run, WarmEngine
from specgen.experiments.plans import KnownText, Plan, free_memory
from specgen.experiments.rounds import BUSY, JUDGED, Repeat, Rounds, Search
from specgen.record.interrupt import StoppedError
from specgen.record.provenance import busy, state_after
from specgen.record.record_rows import Captured, EngineRow, OutOfMemory, PassRow, RequestRow
from specgen.report.acceptance import Acceptance
from specgen.report.timings import PassSums, latencies, latency_stats

_Done = TypeVar("_Done")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What an arm has just done, for whoever watches."""

    arm: str
    number: int  # of the arm's repeats; 0 is its warm-up
    repeat: Repeat | None  # None for a warm-up, and for an arm that failed
    failure: Exception | None
    plain: Repeat | None  # of plain decoding in the same round, where it took part before
    seconds_left: float  # of all turns, by those so far: at most, where arms may end early


Watch = Callable[[Turn], None]


class Turns:
    """Runs rounds and keeps them. An arm that fails is in ``failed``, and costs the others nothing.

    ``load`` returns the weights of an arm's configuration. ``watch`` receives every turn; what it raises ends all of
    them, without the round. Once ``until`` is true, which is asked between steps, a run ends with ``StoppedError``.
    """

    def __init__(
        self,
        load: Callable[[Plan], Models],
        known: KnownText | None,
        rounds: Rounds,
        watch: Watch = discard,
        until: Callable[[], bool] = never_stop,
    ) -> None:
        self.load, self.known, self.rounds, self.watch, self.until = load, known, rounds, watch, until
        self.failed: dict[str, Exception] = {}  # by arm
        self.turns_behind = 0  # at most, of the arms that come after those at hand
        self._num_turns, self._seconds = 0, 0.0
        # seconds of the last run by arm; its warm-up is about as long as a repeat
        self._took: dict[str, float] = {}

    @property
    def notes(self) -> list[str]:
        """A line for each arm that failed."""
        return [f"failed: {arm}: {type(error).__name__}: {error}" for arm, error in self.failed.items()]

    def run(self, plans: Sequence[Plan], search: Search, deadline: float = math.inf) -> Iterator[None]:
        """Yield after each round of ``plans``, in which those take part whom ``search`` still needs.

        An engine is built when its arm takes part for the first time: what was measured earlier costs nothing. No
        engine is built and no round begins that would not end before the ``deadline``, a time of ``time.monotonic``, by
        what the runs before took; of the first engine, and of compilation, nothing is known.
        """
        engines: dict[str, WarmEngine] = {}
        waiting = {plan.arm.name: plan for plan in plans}  # without an engine
        while able := [plan.arm.name for plan in plans if plan.arm.name in {*engines, *waiting}]:
            asked = search.next_arms(able, self.rounds)
            if not asked:
                break
            judged = any(self.rounds.count(name) >= JUDGED for name in able if name != search.plain)
            # those without repeats first: a deadline must not leave the same ones out every time
            for name in sorted((name for name in waiting if name in asked), key=self.rounds.count):
                # its warm-up and a round, then what the fastest arm needs for a verdict
                verdict = [] if judged else [search.plain, name]
                if not self._fits([name, name, *engines, *verdict], deadline):
                    continue
                plan = waiting.pop(name)
                engine = self._attempt(name, partial(self._warm, plan))
                if engine is not None:
                    engines[name] = engine
                self._tell(name, None, {}, search, [*engines, *waiting])
            found: dict[str, Repeat] = {}
            names = [plan.arm.name for plan in plans if plan.arm.name in {*asked} & engines.keys()]
            names = self._in_time(names, search, deadline)
            if not names:
                break
            for name in balanced_order(names, len(self.rounds)):  # rounds of earlier commands count too
                repeat = self._attempt(name, partial(self._repeat, name, engines[name]))
                if repeat is not None:
                    found[name] = repeat
                else:
                    del engines[name]
                self._tell(name, repeat, found, search, [*engines, *waiting])
            if found:
                self.rounds.add({name: found[name] for name in names if name in found})
                yield
        engines.clear()
        free_memory()

    def _in_time(self, names: Sequence[str], search: Search, deadline: float) -> list[str]:
        """``names`` where a round of them would end in time, else ``plain``, those without repeats and the two fastest.

        The fastest comes first until it can be called that. None of several where only one would end in time: a round
        of one compares nothing.
        """
        if self._fits(names, deadline):
            return list(names)
        ranking = replace(search, arms=tuple(names)).ranking(self.rounds)
        drafting = [name for name in ranking.arms if name != search.plain]
        fastest = sorted(drafting, key=ranking.strength, reverse=True)[:2]
        unjudged = [name for name in fastest[:1] if self.rounds.count(name) < JUDGED]
        new = [name for name in names if name not in ranking.arms]
        first = [name for name in names if name == search.plain]
        kept = list(dict.fromkeys((*first, *unjudged, *new, *fastest)))
        while kept and not self._fits(kept, deadline):
            kept.pop()
        return [name for name in names if name in kept and len(kept) >= min(2, len(names))]

    def _fits(self, names: Sequence[str], deadline: float) -> bool:
        """Whether a run of each of ``names`` would end in time; one that has not run may take as long as any."""
        longest = max(self._took.values(), default=0.0)
        return time.monotonic() + sum(self._took.get(name, longest) for name in names) <= deadline

    def _warm(self, plan: Plan) -> WarmEngine:
        engine = WarmEngine(plan.config, self.load(plan), plan.requests)
        self._run(plan.arm.name, engine)
        return engine

    def _repeat(self, name: str, engine: WarmEngine) -> Repeat:
        repeat = repeat_of(self._run(name, engine), self.known)
        is_busy = busy(state_after(engine.config))
        return replace(repeat, disturbances=(*repeat.disturbances, BUSY)) if is_busy else repeat

    def _run(self, name: str, engine: WarmEngine) -> Run:
        run = engine.run(until=self.until)
        if self.until():
            raise StoppedError("interrupted while speeds were measured")
        self._took[name] = run.seconds
        return run.whole()

    def _attempt(self, name: str, work: Callable[[], _Done]) -> _Done | None:
        """The result of ``work``; None where it fails: one arm must not cost the others."""
        began = time.monotonic()
        try:
            return work()
        except (DeviceLost, StoppedError):  # no other arm can run
            raise
        except Exception as error:
            self.failed[name] = error
            return None
        finally:
            self._num_turns += 1
            self._seconds += time.monotonic() - began

    def _tell(
        self,
        name: str,
        repeat: Repeat | None,
        found: Mapping[str, Repeat],
        search: Search,
        going_on: Sequence[str],
    ) -> None:
        left = sum(max(0, search.most - self.rounds.count(each) - (each in found)) for each in going_on)
        self.watch(
            Turn(
                arm=name,
                number=self.rounds.count(name) + 1 if repeat else 0,
                repeat=repeat,
                failure=self.failed.get(name),
                plain=None if name == search.plain else found.get(search.plain),
                seconds_left=(left + self.turns_behind) * self._seconds / self._num_turns,
            )
        )


def balanced_order(names: Sequence[str], number: int) -> list[str]:
    """The order of ``names`` in round ``number``, counted from 0: a row of a Williams design.

    Over as many rounds as there are names (twice that where they are odd) each is at every place, and directly behind
    every other, equally often: what a turn leaves behind for the next, such as heat, favours none.
    """
    num = len(names)
    sign = -1 if num % 2 and number % 2 else 1
    steps = ((at + 1) // 2 if at % 2 else -(at // 2) for at in range(num))  # 0, 1, -1, 2, -2, ...
    return [names[(number + sign * step) % num] for step in steps]


# --- what was measured of a run --------------------------------------------------------------------


def repeat_of(run: Run, known: KnownText | None = None) -> Repeat:
    """The figures of ``run``; without a ``known`` text no token is called wrong."""
    completions, requests, columns = run.completions.values(), run.requests, run.columns
    acceptance, passes = Acceptance(columns), PassSums()
    passes.add(run.passes)
    steps = passes.steps().get("decode")
    ttft, tpot = latencies(columns)
    return Repeat(
        seconds=run.seconds,
        num_tokens=sum(len(completion.token_ids) for completion in completions),
        acceptance_length=acceptance.mean_length,
        acceptance=tuple(acceptance.joint(i).rate for i in range(acceptance.num_spec_tokens)),
        ttft=ttft,
        tpot=tpot,
        itl=latency_stats(np.fromiter(inter_token_seconds(requests, run.passes), float)),
        step_seconds=steps.mean_seconds if steps else None,
        mean_sequences=steps.mean_sequences if steps else None,
        texts={completion.request.id: digest(completion.token_ids) for completion in completions},
        num_wrong=known.num_wrong(completions) if known else None,
        disturbances=tuple(_disturbances(run.passes)),
    )


def digest(token_ids: Sequence[int]) -> str:
    """Equal for equal tokens, and for no others but by a chance of 2^-64."""
    return blake2b(" ".join(map(str, token_ids)).encode(), digest_size=8).hexdigest()


def inter_token_seconds(requests: Iterable[RequestRow], passes: Iterable[EngineRow]) -> Iterator[float]:
    """Inter-token latencies (ITL): the times between consecutive steps that emit tokens of a request.

    As in vLLM's serving benchmark, a step is one gap however many tokens it emits.
    """
    times = {row.number: row.time for row in passes if isinstance(row, PassRow)}
    for request in requests:
        if request.first_token is not None:
            emitting = (times[step.number] for step in request.steps or () if step.emitted)
            yield from (after - before for before, after in pairwise((request.first_token, *emitting)))


def _disturbances(passes: Iterable[EngineRow]) -> Iterable[str]:
    late = sum(isinstance(row, Captured) for row in passes)
    if late:
        yield f"{late} CUDA graphs were captured in the measured time"
    for row in passes:
        if isinstance(row, OutOfMemory):
            yield f"out of memory, so it ran with a batch of {row.max_batch_size}"
