"""Python searches for garbage less while texts are generated; who reads them finds everything as it was."""

import gc
from collections.abc import Callable, Generator, Iterator
from multiprocessing import Pipe

import pytest

from specgen.config import SamplingParams
from specgen.core.engine_core import never_stop
from specgen.core.garbage import fewer_gc_passes
from specgen.engine.worker import Worker
from tests.engines import Pair, engine_of, random_requests

HOST = (600, 7, 13)  # not Python's own, and set behind the import


@pytest.fixture(autouse=True)
def _of_the_host() -> Iterator[None]:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(*HOST)
    yield
    assert gc.get_freeze_count() <= frozen
    gc.set_threshold(*before)


def generating(pair: Pair, until: Callable[[], bool] = never_stop) -> Generator[object, None, None]:
    engine = engine_of(pair)
    requests = random_requests(6, pair.models.target.config.vocab_size, SamplingParams(max_tokens=6))
    return engine.generate(requests, until=until)


def test_old_objects_are_seldom_searched_during_a_run_and_its_reader_finds_nothing_changed(
    random_pair: Pair,
) -> None:
    during: list[tuple[int, int, int]] = []
    texts = generating(random_pair, lambda: during.append(gc.get_threshold()) is not None)
    next(texts)
    assert set(during) == {(600, 7, 1000)}
    assert gc.get_threshold() == HOST, "half read"
    assert len(list(texts)) == 5
    assert gc.get_threshold() == HOST
    assert set(during) == {(600, 7, 1000)}


def test_runs_that_overlap_or_are_left_change_nothing(random_pair: Pair) -> None:
    first, second = generating(random_pair), generating(random_pair)
    next(first)
    next(second)
    assert len(list(first)) == 5
    second.close()
    assert gc.get_threshold() == HOST
    with fewer_gc_passes():
        assert len(list(generating(random_pair))) == 6
        assert gc.get_threshold() == (600, 7, 1000), "one still runs"
    assert gc.get_threshold() == HOST


def test_a_request_source_that_fails_changes_nothing(random_pair: Pair) -> None:
    engine = engine_of(random_pair)
    with pytest.raises(ZeroDivisionError):
        list(engine.generate(1 // 0 for _ in range(1)))
    assert gc.get_threshold() == HOST


def end_with_threshold(worker: Worker) -> None:
    """What rank 0 asks, sent by its name."""
    raise SystemExit(gc.get_threshold())


def test_old_objects_of_another_rank_are_seldom_searched() -> None:
    ours, theirs = Pipe()
    ours.send((0, end_with_threshold, ()))
    with ours, theirs, pytest.raises(SystemExit) as ended:
        Worker(theirs, 1).run()
    assert ended.value.code == (600, 7, 1000)


def test_what_others_froze_stays_frozen(random_pair: Pair) -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert len(list(generating(random_pair))) == 6
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def test_what_others_set_meanwhile_stays_and_a_search_that_is_off_stays_off() -> None:
    with fewer_gc_passes():
        gc.set_threshold(900, 20, 3000)
    assert gc.get_threshold() == (900, 20, 3000)
    gc.set_threshold(0, 10, 2000)
    with fewer_gc_passes():
        assert gc.get_threshold() == (0, 10, 2000)
    assert gc.get_threshold() == (0, 10, 2000)
