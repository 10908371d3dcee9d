"""Engines over one target that take turns on the same requests, so that a busy machine slows all of them alike."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from specgen.config import EngineConfig, SamplingParams
from specgen.core.sequence import Completion, Request
from specgen.engine.choices import resolve
from specgen.engine.loading import OneTarget, open_checkpoints
from specgen.engine.memory import room_for_turns
from specgen.engine.warm_engine import WarmEngine
from specgen.events import Event
from specgen.experiments.speed_rounds import Round
from specgen.prompts import Prompt, Rejected, prompt_ids
from specgen.rundir.interrupt import StoppedError
from specgen.rundir.progress import Progress
from specgen.rundir.tally import Tally
from specgen.text.tokenizer import Tokenizer


def all_turns(
    prompts: Sequence[Prompt | Rejected],
    answers: Mapping[str, str],
    sampling: SamplingParams,
    tokenizer: Tokenizer,
) -> Iterator[Request]:
    """A request for every turn with an answer in a run, by id, whose answers are the context of the turns behind.

    So every arm is asked the same, all at once, and nothing is left to tokenize where it is timed.
    """
    for prompt in prompts:
        if isinstance(prompt, Rejected):
            continue
        earlier: list[str] = []
        for turn, name in enumerate(prompt.turn_ids, start=1):
            if name not in answers:
                break
            yield Request(
                id=name,
                prompt_token_ids=tuple(prompt_ids(prompt, tokenizer, earlier)[1]),
                sampling=replace(sampling, **prompt.sampling),
                category=prompt.category,
                turn=turn,
                num_turns=len(prompt.turn_ids),
            )
            earlier.append(answers[name])


class Turns:
    """The engines of ``arms``, each with its part of the memory, for rounds over ``requests``.

    Not in the times, as in ``bench``: loading, compilation, CUDA graph capture and one warm-up run of all requests by
    every engine. There is no prefix cache, which the second round would find filled. ``until`` is asked between steps;
    once it is true, what runs ends with ``StoppedError``.
    """

    def __init__(
        self,
        arms: Mapping[str, EngineConfig],
        requests: Sequence[Request],
        target: OneTarget,
        until: Callable[[], bool],
    ) -> None:
        self._num_requests, self._until = len(requests), until
        memory = _kv_memory(next(iter(arms.values())), len(arms), target)
        self._arms: dict[str, WarmEngine] = {}
        for name, config in arms.items():
            own = replace(config, kv_memory=memory, prefix_cache=False)
            checkpoints = open_checkpoints(own)
            resolved = resolve(own, checkpoints)
            self._arms[name] = WarmEngine(resolved, target.load(resolved, checkpoints), requests)
            self._run(self._arms[name])

    def round(self, number: int, progress: Progress) -> Round:
        """Output tokens per second of every arm, each of which answers all requests once.

        ``number`` counts rounds from 0, those of earlier commands too: another arm begins in every round.
        """
        tally, names = Tally(), list(self._arms)
        at = number % len(names)
        progress.start(f"round {number + 1}", tally, self._num_requests * len(names))

        def see(event: Event) -> None:
            tally.see(event)
            progress.see(event)

        found: dict[str, float] = {}
        try:
            for name in names[at:] + names[:at]:
                found[name] = self._run(self._arms[name], see, lambda _: progress.advance())
        finally:
            progress.finish()
        return {name: found[name] for name in names}

    def _run(
        self,
        engine: WarmEngine,
        see: Callable[[Event], None] = lambda event: None,
        answered: Callable[[Completion], None] = lambda completion: None,
    ) -> float:
        run = engine.run(see, answered, self._until)
        if self._until():
            raise StoppedError("interrupted while speeds were measured")
        return run.whole().tokens_per_second


def _kv_memory(config: EngineConfig, num_engines: int, target: OneTarget) -> int:
    """Bytes of KV cache for each of the engines: half of what the weights leave, as the rest is for passes."""
    if config.kv_memory is not None:
        return config.kv_memory
    checkpoints = open_checkpoints(config)
    resolved = resolve(config, checkpoints)
    return room_for_turns(resolved, target.load(resolved, checkpoints)) // num_engines
