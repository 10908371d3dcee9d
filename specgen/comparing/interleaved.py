"""Engines over one target that take turns on the same prompts, so that a busy machine slows all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from specgen.comparing.speed_rounds import Round
from specgen.config import EngineConfig, SamplingParams
from specgen.decoding.sampling import most_demanding
from specgen.device import settle
from specgen.engine.choices import resolve
from specgen.engine.engine import Engine
from specgen.engine.loading import OneTarget, open_checkpoints
from specgen.engine.memory import room_for_turns
from specgen.events import Event
from specgen.prompts import Prompt, Rejected
from specgen.rundir.interrupt import StoppedError
from specgen.rundir.progress import Progress
from specgen.rundir.tally import Tally

_WARM_UP = 8  # tokens per prompt


class _Arm:
    """A warm engine and who follows its events."""

    def __init__(self, config: EngineConfig, target: OneTarget, expected: SamplingParams) -> None:
        checkpoints = open_checkpoints(config)
        models = target.load(resolve(config, checkpoints), checkpoints)
        self.see: Callable[[Event], None] = lambda event: None
        self.engine = Engine(config, record=lambda event: self.see(event), models=models, expected=expected)


class Turns:
    """The engines of ``arms``, warm and each with its part of the memory, for rounds over ``prompts``.

    There is no prefix cache, which the second round would find filled. ``until`` is asked between steps.
    """

    def __init__(
        self,
        arms: Mapping[str, EngineConfig],
        prompts: Sequence[Prompt | Rejected],
        sampling: SamplingParams,
        target: OneTarget,
        until: Callable[[], bool],
    ) -> None:
        self._prompts = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
        self._sampling, self._until, self._num_rounds = sampling, until, 0
        own = (replace(sampling, **prompt.sampling) for prompt in self._prompts if prompt.sampling)
        expected = most_demanding([sampling, *own])
        first = next(iter(arms.values()))
        memory = _kv_memory(first, len(arms), target)
        self._arms = {
            name: _Arm(replace(config, kv_memory=memory, prefix_cache=False), target, expected)
            for name, config in arms.items()
        }
        few = [
            replace(prompt, sampling={}, follow_ups=()) for prompt in self._prompts[: first.max_batch_size]
        ]
        for arm in self._arms.values():
            for _ in arm.engine.generate(few, replace(sampling, max_tokens=_WARM_UP), until=until):
                pass

    def round(self, progress: Progress) -> Round:
        """Output tokens per second of every arm, each of which answers all prompts once.

        Another arm begins in every round. ``StoppedError`` once ``until`` is true.
        """
        tally, names = Tally(), list(self._arms)
        at = self._num_rounds % len(names)
        self._num_rounds += 1
        requests = sum(len(prompt.turn_ids) for prompt in self._prompts)
        progress.start(f"round {self._num_rounds}", tally, requests * len(names))
        found: dict[str, float] = {}
        try:
            for name in names[at:] + names[:at]:
                found[name] = self._speed(self._arms[name], tally, progress)
        finally:
            progress.finish()
        return {name: found[name] for name in names}

    def _speed(self, arm: _Arm, tally: Tally, progress: Progress) -> float:
        def see(event: Event) -> None:
            tally.see(event)
            progress.see(event)

        arm.see, num_tokens = see, 0
        settle()
        began = time.perf_counter()
        for output in arm.engine.generate(self._prompts, self._sampling, until=self._until):
            num_tokens += len(output.token_ids)
            progress.advance()
        settle()
        seconds = time.perf_counter() - began
        if self._until():
            raise StoppedError("interrupted while speeds were measured")
        return num_tokens / seconds


def _kv_memory(config: EngineConfig, num_engines: int, target: OneTarget) -> int:
    """Bytes of KV cache for each of the engines: half of what the weights leave, as the rest is for passes."""
    if config.kv_memory is not None:
        return config.kv_memory
    checkpoints = open_checkpoints(config)
    resolved = resolve(config, checkpoints)
    return room_for_turns(resolved, target.load(resolved, checkpoints)) // num_engines
