"""A closed engine holds nothing, says so when it is used, and leaves no process behind."""

import gc
import weakref
from itertools import count

import pytest
import torch

from specgen import Engine, EngineConfig, SamplingParams, UserError
from specgen.config.bundled import pair

MODEL, DRAFTER = pair()
CONFIG = EngineConfig(model=MODEL, drafter=DRAFTER, device="cpu", max_batch_size=2)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
CLOSED = "the engine is closed: make a new one"


def num_tensors() -> int:
    """All that Python refers to, weights and caches included."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def num_after_one() -> int:
    """Tensors that are left behind an engine that was opened, used and closed."""
    with Engine(CONFIG) as engine:
        weights = weakref.ref(engine.models.target.embedding)
        assert len(list(engine.generate(["Tom has", "5 bags"], SHORT))) == 2
        assert weights() is not None
        assert num_tensors() > 50
    assert weights() is None
    return num_tensors()


def test_one_engine_after_the_other_leaves_no_tensor() -> None:
    first = num_after_one()  # what is made once in a process stays
    assert num_after_one() == first


def test_a_closed_engine_says_so_and_closes_again() -> None:
    engine = Engine(CONFIG)
    engine.close()
    engine.close()
    for use in (
        lambda: engine.generate("Tom"),
        engine.capture_graphs,
        lambda: engine.models,
        lambda: engine.tokenizer,
    ):
        with pytest.raises(UserError, match=CLOSED):
            use()
    assert engine.config.model == MODEL


def test_an_engine_that_fails_within_with_is_closed() -> None:
    seen = []

    def fail() -> None:
        with Engine(CONFIG) as engine:
            seen.append(weakref.ref(engine.models.target.embedding))
            for _ in engine.generate(["Tom", "Stop", "5 bags"], SHORT):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen[0]() is None


def test_what_is_not_answered_when_it_is_closed_is_no_silent_end() -> None:
    engine = Engine(CONFIG)
    never_asked = engine.generate("Tom", SHORT)
    outputs = engine.generate((f"{number} bags" for number in count()), SHORT)
    weights = weakref.ref(engine.models.target.embedding)
    next(outputs)
    engine.close()
    assert weights() is None, "a half-read iterator holds no weights"
    for iterator in (outputs, never_asked):
        with pytest.raises(UserError, match=CLOSED):
            next(iterator)


def test_an_engine_is_not_closed_while_it_works() -> None:
    with Engine(CONFIG) as engine:

        def until() -> bool:
            engine.close()
            return False

        with pytest.raises(UserError, match="the engine is at work: close it between two outputs"):
            list(engine.generate("Tom", SHORT, until=until))
        assert len(list(engine.generate("Tom", SHORT))) == 1


def test_shared_weights_go_with_the_last_engine() -> None:
    first = Engine(CONFIG)
    second = Engine(CONFIG.plain(), models=first.models)
    weights = weakref.ref(first.models.target.embedding)
    first.close()
    assert weights() is not None
    assert len(list(second.generate("Tom", SHORT))) == 1
    second.close()
    assert weights() is None


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_the_processes_of_other_ranks_end() -> None:
    config = EngineConfig(
        model=MODEL, drafter=None, num_spec_tokens=0, device="cpu", tensor_parallel=2, max_batch_size=2
    )
    with Engine(config) as engine:
        processes = [each.process for each in engine.models.peers._workers._supervisor.workers]  # type: ignore[attr-defined]
        assert len(list(engine.generate("Tom", SHORT))) == 1
        assert [each.poll() for each in processes] == [None]
    assert [each.poll() for each in processes] != [None]
    with Engine(CONFIG) as alone:  # also where this process was a rank
        assert len(list(alone.generate("Tom", SHORT))) == 1
