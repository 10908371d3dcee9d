"""Sizes of CUDA graphs: a batch that drains captures few, one that stays gets its own, and no text changes."""

from collections.abc import Callable, Hashable

import pytest
import torch

from specgen.config import EngineConfig, SamplingParams
from specgen.config.bundled import data_directory
from specgen.core.graphs import GraphSizes, Runner, StepGraphs, bucket
from specgen.core.scheduler import Limits
from specgen.engine import engine as engine_module
from specgen.engine.engine import Engine
from specgen.record.record_rows import PassRow
from tests.engines import Pair, bundled_requests, engine_of, random_requests
from tests.marks import mostly_slow

STEPS_EACH = 5


def drain(sizes: GraphSizes, what: Hashable = "K = 4") -> list[int]:
    """What the batches from 32 to 1 run in, of each a few steps."""
    return [sizes.choose(number, what) for number in range(32, 0, -1) for _ in range(STEPS_EACH)]


def test_without_a_delay_every_size_has_its_own() -> None:
    assert drain(GraphSizes()) == [bucket(number) for number in range(32, 0, -1) for _ in range(STEPS_EACH)]


def test_a_batch_that_drains_needs_few() -> None:
    sizes = GraphSizes()
    sizes.capture_delay = 64
    ran = drain(sizes)
    assert sorted(set(ran)) == [1, 4, 12, 32]  # none for more than twice its rows
    assert all(number <= size for number, size in zip(range(32, 0, -1), ran[::STEPS_EACH], strict=True))
    assert drain(sizes, "K = 2")[0] == 32
    assert sizes.choose(33, "K = 4") == 48, "there is no larger one"


def test_a_size_that_stays_gets_its_own() -> None:
    sizes = GraphSizes()
    sizes.capture_delay = 3
    assert sizes.choose(8, "plain") == 8
    other = [sizes.choose(number, "plain") for number in (6, 6, 4, 5, 6, 4, 6)]
    assert other == [8, 8, 8, 8, 6, 6, 6]  # 4 has a nearer one by then
    sizes.forget()
    assert sizes.choose(4, "plain") == 4


@pytest.mark.parametrize("delay", mostly_slow([0, 1000], 0))
def test_texts_and_steps_do_not_depend_on_it(
    demo_pair: Pair, device_like: Callable[[], None], delay: int
) -> None:
    def run(*, graphs: bool) -> tuple[dict[str, tuple[int, ...]], set[int], list[PassRow]]:
        events: list[object] = []
        engine = engine_of(demo_pair, events.append, max_batch_size=8)
        sizes, rows = GraphSizes(), set[int]()
        sizes.capture_delay = delay

        def choose(num_sequences: int, what: Hashable) -> int:
            rows.add(size := sizes.choose(num_sequences, what))
            return size

        if graphs:
            engine._runner.choose_rows = choose  # type: ignore[method-assign]
        requests = bundled_requests(10, SamplingParams(max_tokens=24))
        texts = {each.request.id: each.token_ids for each in engine.generate(requests)}
        return texts, rows, [each for each in events if isinstance(each, PassRow)]

    expected, _, _ = run(graphs=False)
    device_like()
    texts, rows, steps = run(graphs=True)
    assert texts == expected
    batches = {bucket(each.num_sequences) for each in steps if each.kind == "decode"}
    assert rows == batches if delay == 0 else rows < batches
    assert len(batches) >= 3


def test_an_engine_delays_captures_but_where_all_graphs_are_asked_for(
    random_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Runner, "delay_captures", lambda self, num_steps: asked.append(num_steps))
    engine_of(random_pair).warm_up()
    assert asked == []
    engine = Engine(
        EngineConfig(model=str(data_directory() / "demo" / "target"), drafter="ngram", device="cpu")
    )
    monkeypatch.setattr(engine_module, "capture_all", lambda *_: asked.append(-1))
    engine.capture_graphs()
    assert asked == [64, 0, -1, 64]


def test_graphs_choose_by_what_is_captured() -> None:
    graphs = StepGraphs.__new__(StepGraphs)  # without a GPU
    graphs._sizes, graphs._graphs = GraphSizes(), {}
    graphs.delay_captures(2)
    assert [graphs.choose_rows(number, (4, None)) for number in (8, 5, 6, 5, 8)] == [8, 8, 8, 6, 8]
    graphs.forget()
    assert graphs.choose_rows(6, (4, None)) == 6


class _Replayed:
    """A graph that was captured."""

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> str:
        return "replayed"


def test_a_capture_that_failed_is_tried_again_when_limits_have_risen(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[_Replayed | None] = [None, _Replayed(), _Replayed()]
    graphs = StepGraphs.__new__(StepGraphs)  # without a GPU
    graphs._graphs, graphs._captures, graphs._stream = {}, [], None  # type: ignore[assignment]
    monkeypatch.setattr("specgen.core.graphs.synchronize", lambda: None)
    monkeypatch.setattr("specgen.core.graphs._capture", lambda *_: captured.pop(0))
    monkeypatch.setattr(StepGraphs, "_pool", None)
    small, large = ("step", 4, 1, None), ("step", 8, 1, None)
    for key in (large, small):
        assert graphs.step(key, lambda: "launched") == "launched"
    assert graphs.step(small, lambda: "launched") == "replayed"
    assert graphs.step(large, lambda: "launched") == "launched"
    assert len(captured) == 1, "there is no memory for it, and nothing has changed"
    graphs.try_again()
    assert graphs.step(large, lambda: "launched") == "launched"
    assert graphs.step(large, lambda: "launched") == graphs.step(small, lambda: "launched") == "replayed"
    assert [(capture.key, capture.fits) for capture in graphs.take_captures()] == [
        (large, False),
        (small, True),
        (large, True),
    ]


def test_the_engine_tries_again_where_limits_rise(random_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(Runner, "try_again", lambda self: tried.append(1))
    monkeypatch.setattr(Limits, "see_pass", lambda self: tried.append(0) or len(tried) == 3)
    engine = engine_of(random_pair)
    vocab_size = random_pair.models.target.config.vocab_size
    assert list(engine.generate(random_requests(2, vocab_size, SamplingParams(max_tokens=6))))
    assert tried[:5] == [0, 0, 0, 1, 0]
    assert sum(tried) == 1
