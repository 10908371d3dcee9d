"""Python searches for garbage less while texts are generated, and as before when they are."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from specgen.config import SamplingParams
from specgen.engine.build import build_engine
from tests.engines import Pair, config_of, random_requests


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def generating(pair: Pair) -> Iterator[object]:
    engine = build_engine(config_of(pair), pair.models, lambda event: None)
    requests = random_requests(6, pair.models.target.config.vocab_size, SamplingParams(max_tokens=6))
    return engine.generate(requests)


def test_what_was_there_is_not_searched_during_a_run(random_pair: Pair) -> None:
    texts = generating(random_pair)
    gc.disable()  # else a search among new objects may find it before the run begins
    cycle = weakref.ref(Cycle())
    next(texts)
    gc.enable()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[2] >= 1000
    gc.collect()
    assert cycle() is not None
    assert len(list(texts)) == 5
    gc.collect()
    assert cycle() is None


def test_runs_that_overlap_or_are_left_change_nothing_for_good(random_pair: Pair) -> None:
    first, second = generating(random_pair), generating(random_pair)
    next(first)
    next(second)
    assert len(list(first)) == 5
    assert gc.get_threshold()[2] >= 1000, "one still runs"
    del second
    gc.collect()
