"""Engines of a bench whose runs take the time that a test says, on a pair that is never computed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from calibrated_cycle import Cycle
from calibrated_shapes import SHAPES
from calibrated_weights import Source
from make_calibrated_pair import write_pair

from specgen.config import DraftLength, EngineConfig
from specgen.core.sequence import Completion, Request
from specgen.engine.warm_engine import Run
from specgen.experiments import plans, turns
from specgen.experiments.rounds import Repeat, Rounds
from specgen.experiments.tune_job import TuneJob, Workload
from tests.engines import engine_config
from tests.streams import RECORD

RUN = {  # seconds by K and drafter batch
    (0, "padded"): 3.0,
    (2, "padded"): 2.0,
    (2, "non-padded"): 2.02,
    (4, "padded"): 4.0,
    (4, "non-padded"): 4.1,
}
Seconds = Callable[[EngineConfig, int], float]  # of the n-th run of an engine, its warm-up first


def rounds_of(speeds: Sequence[Mapping[str, int | float]]) -> Rounds:
    """Rounds with these tokens per second by arm."""
    rounds = Rounds()
    for each in speeds:
        rounds.add({arm: Repeat(seconds=1.0, num_tokens=speed) for arm, speed in each.items()})
    return rounds


def write_tiny(path: Path, **changed: int) -> Path:
    """A tiny calibrated pair in ``path``."""
    shape = replace(SHAPES["tiny"], **changed)
    cycle = Cycle.draw(shape.num_plain_tokens, shape.draft_vocab_size, 0.75, seed=0)
    write_pair(path, shape, cycle, Source("cpu", 0))
    return path


class Timed:
    """What the engines of a bench did; ``clock`` goes on with their runs."""

    def __init__(self, seconds: Seconds) -> None:
        self.seconds = seconds
        self.order: list[EngineConfig] = []  # of every run, warm-ups too
        self.built: list[EngineConfig] = []
        self.clock = 0.0
        self.token_ids: Callable[[EngineConfig], tuple[int, ...]] = lambda config: (5,) * 100

    def engine(self, config: EngineConfig, models: object, requests: Sequence[Request]) -> "_Engine":
        self.built.append(config)
        return _Engine(self, config, requests)


class _Engine:
    def __init__(self, timed: Timed, config: EngineConfig, requests: Sequence[Request]) -> None:
        self._timed, self.config, self._requests = timed, config, requests
        self._runs = self._count()

    def _count(self) -> Iterator[float]:
        number = 0
        while True:
            yield self._timed.seconds(self.config, number)
            number += 1

    def run(self, until: Callable[[], bool]) -> Run:
        self._timed.order.append(self.config)
        seconds = next(self._runs)
        self._timed.clock += seconds
        completions = {
            request.id: Completion(
                request=request,
                token_ids=self._timed.token_ids(self.config),
                finish_reason="length",
                record=RECORD,
            )
            for request in self._requests
        }
        return Run(completions=completions, passes=(), seconds=seconds, num_spec_tokens=4)


def install(monkeypatch: pytest.MonkeyPatch, seconds: Seconds) -> Timed:
    """The engines of every bench of this test."""
    timed = Timed(seconds)
    monkeypatch.setattr(turns, "WarmEngine", timed.engine)
    for module in (plans, turns):
        # nothing is taken, and collecting takes long
        monkeypatch.setattr(module, "free_memory", lambda: None)
    return timed


def usual(config: EngineConfig, number: int) -> float:
    """K 2 is fastest in both modes and K 4 slower than plain decoding; noise of a percent."""
    key = config.draft_length.most, config.drafter_batch
    noise = 1 + 0.005 * ((7 * number + 3 * list(RUN).index(key)) % 5 - 2)
    return RUN[key] * noise * config.max_batch_size**0.25


def job_of(pair: Path, **changes) -> TuneJob:
    engine = engine_config(pair, page_size=4, prefix_cache=False, max_batch_size=4)
    settings = {
        "batches": (1, 4),
        "draft_lengths": (DraftLength(most=2), DraftLength(most=4)),
        "drafter_batches": ("padded", "non-padded"),
        "workload": Workload(dataset="random", prompt_tokens=5, max_new_tokens=8),
        "repeats": 8,
        "precision": 0.02,
    }
    return TuneJob(engine=engine, **settings | changes)
