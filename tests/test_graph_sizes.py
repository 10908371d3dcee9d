"""Sizes of CUDA graphs: a batch that drains captures few, one that stays gets its own, and no text changes."""

from collections.abc import Callable, Hashable
from itertools import count
from typing import TypeVar

import pytest
import torch

from specgen.config import EngineConfig, SamplingParams
from specgen.config.bundled import data_directory
from specgen.core.graphs import GraphSizes, PassGraphs, Runner, StepGraphs, bucket
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


class _Replayed:
    """A graph that was captured."""

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> str:
        return "replayed"


Graphs = TypeVar("Graphs", bound=StepGraphs)


def graphs_of(
    patch: pytest.MonkeyPatch,
    short: Callable[[int], bool] = lambda number: False,
    kind: type[Graphs] = StepGraphs,  # type: ignore[assignment]
) -> Graphs:
    """Without a GPU, which has no memory for the captures whose number ``short`` says."""
    numbers = count()
    patch.setattr("specgen.core.graphs._capture_stream", lambda device: None)
    patch.setattr("specgen.core.graphs.synchronize", lambda: None)
    patch.setattr("specgen.core.graphs._capture", lambda *_: None if short(next(numbers)) else _Replayed())
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(StepGraphs, "_pool", None)
    return kind()


def decode(graphs: StepGraphs, num_sequences: int) -> tuple[int, str]:
    """The rows that a step ran in, and how."""
    rows = graphs.choose_rows(num_sequences, (1, None))
    return rows, graphs.step(("step", rows, 1, None), lambda: "launched")


def test_graphs_choose_by_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of(monkeypatch)
    graphs.delay_captures(2)
    assert [graphs.choose_rows(number, (4, None)) for number in (8, 5, 6, 5, 8)] == [8, 8, 8, 6, 8]
    graphs.forget()
    assert graphs.choose_rows(6, (4, None)) == 6


def test_a_capture_without_memory_is_tried_again_and_a_larger_graph_is_used_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = graphs_of(monkeypatch, lambda number: number in (1, 2))
    assert [decode(graphs, 32), decode(graphs, 32)] == [(32, "launched"), (32, "replayed")]
    assert decode(graphs, 4) == (4, "launched"), "no memory"
    assert {decode(graphs, 4) for _ in range(255)} == {(32, "replayed")}
    assert decode(graphs, 4) == (4, "launched"), "nor now"
    assert {decode(graphs, 4) for _ in range(511)} == {(32, "replayed")}, "twice as long"
    assert [decode(graphs, 4), decode(graphs, 4)] == [(4, "launched"), (4, "replayed")]
    assert [(capture.key[1], capture.fits) for capture in graphs.take_captures()] == [
        (32, True),
        (4, False),
        (4, False),
        (4, True),
    ]


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_the_pieces_of_a_step_are_captured_in_the_order_in_which_they_run(
    monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    """Else what a piece gives may lie where one that was captured before it, and runs after it, computes."""
    graphs = graphs_of(monkeypatch, lambda number: number == failed, PassGraphs)

    def step() -> list[str]:
        rows = graphs.choose_rows(4, (1, None))
        return [graphs.piece((name, rows, 1, None), lambda: "launched") for name in "abc"]

    assert {piece for _ in range(257) for piece in step()} == {"launched"}
    assert step() == ["replayed"] * 3
    captured = [(capture.key[0], capture.fits) for capture in graphs.take_captures()]
    assert captured == [(name, name != "abc"[failed]) for name in "abc"[: failed + 1]] + [
        (name, True) for name in "abc"
    ]


def test_without_a_larger_graph_steps_are_launched_until_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = graphs_of(monkeypatch, lambda number: number == 0)
    assert {decode(graphs, 4) for _ in range(257)} == {(4, "launched")}
    assert decode(graphs, 4) == (4, "replayed")


def test_a_rank_with_peers_keeps_to_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of(monkeypatch, lambda number: number == 1)
    graphs.has_peers = True
    assert decode(graphs, 32) == (32, "launched")
    assert {decode(graphs, 4) for _ in range(600)} == {(4, "launched")}


def test_a_capture_that_failed_is_tried_again_when_limits_have_risen(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of(monkeypatch, lambda number: number == 0)
    small, large = ("step", 4, 1, None), ("step", 8, 1, None)
    for key in (large, small):
        assert graphs.step(key, lambda: "launched") == "launched"
    assert graphs.step(small, lambda: "launched") == "replayed"
    assert graphs.step(large, lambda: "launched") == "launched"
    assert len(graphs.take_captures()) == 2, "there is no memory for it, and nothing has changed"
    graphs.try_again()
    assert graphs.step(large, lambda: "launched") == "launched"
    assert graphs.step(large, lambda: "launched") == graphs.step(small, lambda: "launched") == "replayed"


def test_the_engine_tries_again_where_limits_rise(random_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(Runner, "try_again", lambda self: tried.append(1))
    monkeypatch.setattr(Limits, "record_pass", lambda self: tried.append(0) or len(tried) == 3)
    engine = engine_of(random_pair)
    vocab_size = random_pair.models.target.config.vocab_size
    assert list(engine.generate(random_requests(2, vocab_size, SamplingParams(max_tokens=6))))
    assert tried[:5] == [0, 0, 0, 1, 0]
    assert sum(tried) == 1
