"""The engine room of ``specgen bench throughput`` and ``specgen tune``: arms that take turns, round after round.

Not in the times: loading, compilation, CUDA graph capture and one warm-up run of the workload by every engine. In the
times: prefill, without a prefix cache. Every repeat has the same prompts, so repeats differ in time only.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from specgen.bench.environment import free_memory
from specgen.core.endings import DeviceLost
from specgen.engine.loading import Models
from specgen.engine.warm_engine import WarmEngine
from specgen.experiments.plans import Plan
from specgen.experiments.repeat import Repeat, Yardstick
from specgen.experiments.rounds import Rounds

_Done = TypeVar("_Done")
# Of the arms that can take part, those that are to in the next round; none: it is over
Takers = Callable[[Sequence[str], Rounds], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What an arm has just done, for whoever watches."""

    arm: str
    number: int  # of the arm's repeats; 0 is its warm-up
    repeat: Repeat | None  # None for a warm-up, and for an arm that failed
    failed: bool
    plain: Repeat | None  # of plain decoding in the same round, where it took part before
    seconds_left: float  # of the whole bench, by the turns so far: at most, where arms may end early


Watch = Callable[[Turn], None]


def nobody(turn: Turn) -> None:
    """Watches without a word."""


class Turns:
    """Runs rounds and keeps them. An arm that fails is a note in ``failed``, and costs the others nothing."""

    def __init__(self, models: Models, yardstick: Yardstick, rounds: Rounds, watch: Watch = nobody) -> None:
        self.models, self.yardstick, self.rounds, self.watch = models, yardstick, rounds, watch
        self.failed: dict[str, str] = {}  # by arm
        self.turns_behind = 0  # at most, of the arms that come after those at hand
        self._num_turns, self._seconds = 0, 0.0
        self._took: dict[
            str, float
        ] = {}  # seconds of the last run by arm; its warm-up is about as long as a repeat

    def run(
        self,
        plans: Sequence[Plan],
        takers: Takers,
        *,
        most: int,
        plain: str | None = None,
        deadline: float = math.inf,
    ) -> Iterator[None]:
        """Yield after each round of ``plans``, of which each comes to at most ``most`` repeats.

        An engine is built when its arm takes part for the first time: what was measured earlier costs nothing. No
        engine is built and no round begins that would not end before the ``deadline``, a time of ``time.monotonic``, by
        what the runs before took; of the first engine, and of compilation, nothing is known.
        """
        engines: dict[str, WarmEngine] = {}
        waiting = {plan.arm.name: plan for plan in plans}  # without an engine
        while asked := takers(
            [plan.arm.name for plan in plans if plan.arm.name in {*engines, *waiting}], self.rounds
        ):
            # those without repeats first: a deadline must not leave the same ones out every time
            for name in sorted((name for name in waiting if name in asked), key=self.rounds.count):
                if not self._fits([name, name, *engines], deadline):  # its warm-up, then a round
                    continue
                plan = waiting.pop(name)
                engine = self._attempt(name, partial(self._warm, plan))
                if engine is not None:
                    engines[name] = engine
                self._tell(name, None, {}, plain, most, [*engines, *waiting])
            found: dict[str, Repeat] = {}
            names = [plan.arm.name for plan in plans if plan.arm.name in {*asked} & engines.keys()]
            names = self._in_time(names, plain, deadline)
            if not names:
                break
            # another begins in every round, those of earlier commands too: no arm is always behind the same other
            at = len(self.rounds) % len(names)
            for name in names[at:] + names[:at]:
                repeat = self._attempt(name, partial(self._repeat, name, engines[name]))
                if repeat is not None:
                    found[name] = repeat
                else:
                    del engines[name]
                self._tell(name, repeat, found, plain, most, [*engines, *waiting])
            if found:
                self.rounds.add(found)
                yield
        engines.clear()
        free_memory()

    def _in_time(self, names: Sequence[str], plain: str | None, deadline: float) -> list[str]:
        """Those of ``names`` of which a round would end in time: ``plain``, then those with the fewest repeats.

        None of several where only one would: a round of one compares nothing.
        """
        kept = sorted(names, key=lambda name: (name != plain, self.rounds.count(name)))
        while kept and not self._fits(kept, deadline):
            kept.pop()
        return [name for name in names if name in kept and len(kept) >= min(2, len(names))]

    def _fits(self, names: Sequence[str], deadline: float) -> bool:
        """Whether a run of each of ``names`` would end in time; one that has not run may take as long as any."""
        longest = max(self._took.values(), default=0.0)
        return time.monotonic() + sum(self._took.get(name, longest) for name in names) <= deadline

    def _warm(self, plan: Plan) -> WarmEngine:
        engine = WarmEngine(plan.config, self.models, plan.requests)
        self._took[plan.arm.name] = engine.run().whole().seconds
        return engine

    def _repeat(self, name: str, engine: WarmEngine) -> Repeat:
        run = engine.run().whole()
        self._took[name] = run.seconds
        return Repeat.of(run, self.yardstick)

    def _attempt(self, name: str, work: Callable[[], _Done]) -> _Done | None:
        """The result of ``work``; None where it fails: one arm must not cost the others."""
        began = time.monotonic()
        try:
            return work()
        except DeviceLost:  # no other arm can run
            raise
        except Exception as error:
            self.failed[name] = f"failed: {name}: {type(error).__name__}: {error}"
            return None
        finally:
            self._num_turns += 1
            self._seconds += time.monotonic() - began

    def _tell(
        self,
        name: str,
        repeat: Repeat | None,
        found: Mapping[str, Repeat],
        plain: str | None,
        most: int,
        going_on: Sequence[str],
    ) -> None:
        left = sum(max(0, most - self.rounds.count(each) - (each in found)) for each in going_on)
        self.watch(
            Turn(
                arm=name,
                number=self.rounds.count(name) + 1 if repeat else 0,
                repeat=repeat,
                failed=name in self.failed,
                plain=None if plain is None or plain == name else found.get(plain),
                seconds_left=(left + self.turns_behind) * self._seconds / self._num_turns,
            )
        )
