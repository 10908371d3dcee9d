"""K may change at every step without changing texts; timing steps before the run leaves no state."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.checkpoints.checkpoint import load_target
from specgen.config import DraftLength, EngineConfig, SamplingParams, UserError
from specgen.config.bundled import data_directory
from specgen.core.engine_core import EngineCore
from specgen.core.graphs import StepGraphs
from specgen.core.sequence import Request
from specgen.core.spec_length import CheapestLength, StepCosts
from specgen.engine.build import build_engine
from specgen.engine.choices import resolve
from specgen.engine.loading import Models, open_checkpoints
from specgen.engine.step_costs import capture_all, measure
from specgen.record.record_rows import EngineRow, PassRow
from tests.engines import (
    NoTokenizer,
    Outputs,
    Pair,
    bundled_requests,
    config_of,
    generate,
    loaded,
    random_requests,
    resolved,
)
from tests.marks import mostly_slow
from tests.test_pipeline import mixed_requests
from tests.tiny_mixtures import write_qwen3_moe

GREEDY = SamplingParams(max_tokens=40)


class AnyLength:
    """A different K at every step."""

    def __init__(self, most: int) -> None:
        self.most, self._draw = most, random.Random(3)
        self.chosen: list[int] = []
        self.seen: list[int] = []

    def choose(self, num_sequences: int) -> int:
        self.chosen.append(self._draw.randrange(self.most + 1))
        return self.chosen[-1]

    def see(self, drafted: int, accepted: int) -> None:
        self.seen.append(drafted)


def run(engine: EngineCore, requests: Iterable[Request]) -> dict[str, tuple[int, ...]]:
    return {completion.request.id: completion.token_ids for completion in engine.generate(requests)}


@pytest.mark.parametrize(
    ("batch", "ahead"), mostly_slow(product(("padded", "non-padded"), (False, True)), ("non-padded", True))
)
def test_k_may_change_at_every_step_without_changing_texts(
    demo_pair: Pair, device_like: Callable[[], None], batch: str, ahead: bool
) -> None:
    plain = generate(demo_pair, mixed_requests(GREEDY), num_spec_tokens=0)
    fixed = generate(demo_pair, mixed_requests(GREEDY), num_spec_tokens=5, drafter_batch=batch)
    if ahead:
        device_like()
    events: list[EngineRow] = []
    config = config_of(demo_pair, num_spec_tokens=5, drafter_batch=batch, max_batch_size=6)
    engine = build_engine(config, demo_pair.models, events.append)
    engine.spec_length = length = AnyLength(5)
    completions = {each.request.id: each for each in engine.generate(mixed_requests(GREEDY))}
    found = Outputs(completions=completions, passes=events)
    assert found.texts == plain.texts
    every = sorted((step for row in found.requests for step in row.steps or ()), key=lambda step: step.number)
    drafted, steps = [len(step.drafts) for step in every], found.steps
    assert length.seen == drafted
    assert set(drafted) == set(range(6))
    assert [step.num_spec_tokens for step in steps] == length.chosen[: len(steps)]
    assert all(step.target_rows >= step.num_sequences * (step.num_spec_tokens + 1) for step in steps)
    for position, each in enumerate(found.report(5).acceptance):
        assert each.drafted == sum(number > position for number in drafted)
    mixed, usual = drafts_by_position(found), drafts_by_position(fixed)
    both = mixed.keys() & usual.keys()
    assert sum(bool(mixed[position]) for position in both) > 25
    for position in both:
        assert usual[position][: len(mixed[position])] == mixed[position], (
            "a head that missed a step would draft otherwise"
        )


def drafts_by_position(outputs: Outputs) -> dict[tuple[str, int], tuple[int, ...]]:
    """The drafts of a sequence by the number of tokens before them."""
    found = {}
    for name, steps in outputs.verified.items():
        length = 0
        for drafts, _, emitted in steps:
            found[name, length] = drafts
            length += emitted
    return found


@pytest.mark.slow
def test_timing_steps_leaves_no_state(random_pair: Pair) -> None:
    events: list[EngineRow] = []
    config = config_of(random_pair, num_spec_tokens=2, max_batch_size=6)
    engine = build_engine(config, random_pair.models, events.append)
    record, length = engine._record, engine.spec_length
    costs = measure(engine, 6, 2)
    assert set(costs.seconds) == {(size, k) for size in (1, 2, 4, 6) for k in range(3)}
    assert all(0 < seconds < 5 for seconds in costs.seconds.values())
    assert (engine._record, engine.spec_length, events) == (record, length, [])
    requests = random_requests(20, 128, GREEDY)
    fresh = generate(random_pair, requests, num_spec_tokens=2, max_batch_size=6)
    assert run(engine, requests) == fresh.texts


@pytest.mark.slow
def test_all_graphs_are_captured_before_a_run_that_is_timed(
    random_pair: Pair, device_like: Callable[[], None]
) -> None:
    device_like()
    config = config_of(random_pair, num_spec_tokens=2, max_batch_size=6)
    engine = build_engine(config, random_pair.models, lambda event: None)
    keys: set[tuple[Any, ...]] = set()
    runner = engine._runner
    runner.sizes = StepGraphs.sizes.__get__(runner)  # type: ignore[method-assign]
    runner.step = lambda key, function: (keys.add(key), function())[1]  # type: ignore[method-assign]
    measure(engine, 6, 2)
    timed = set(keys)
    capture_all(engine, 6, range(3))
    before = set(keys)
    engine.spec_length = AnyLength(2)
    run(engine, random_requests(16, 128, GREEDY))
    assert len(before) >= 3 * len(StepGraphs.sizes(runner, 6))  # type: ignore[arg-type]
    assert len(timed) == 3 * len({1, 2, 4, 6}), "what is not timed waits until it is needed"
    assert keys == before


def test_sequences_that_are_timed_touch_experts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every size would cost what one sequence does."""
    write_qwen3_moe(tmp_path, num_experts=32, vocab_size=128)
    asked = EngineConfig(
        model=str(tmp_path), drafter="ngram", device="cpu", num_spec_tokens=1, max_batch_size=8
    )
    checkpoints = open_checkpoints(asked)
    target = load_target(checkpoints["model"], torch.float32, torch.device("cpu"))
    no_tokenizer: Any = NoTokenizer()
    models = Models(target=target, head=None, tokenizer=no_tokenizer, checkpoints=checkpoints)
    engine = build_engine(resolve(asked, checkpoints), models, lambda event: None)
    touched: list[tuple[int, int]] = []
    forward = type(target).forward

    def watched(self: Any, token_ids: Any, attend: Any, layers: Any = (), chosen: Any = None) -> Any:
        found = forward(self, token_ids, attend, layers, chosen)
        touched.extend((len(ids), len(ids.unique())) for ids in (chosen or ())[:1])
        return found

    monkeypatch.setattr(type(target), "forward", watched)
    measure(engine, 8, 0)
    plain = [found for rows, found in touched if rows == 8]
    assert len(plain) > 5
    assert min(plain) > 4, "one sequence touches 2"


@pytest.mark.slow
def test_batches_that_do_not_fit_are_not_timed(random_pair: Pair) -> None:
    config = config_of(random_pair, num_spec_tokens=2, max_batch_size=8, kv_memory=480_000)
    engine = build_engine(config, random_pair.models, lambda event: None)
    sizes = {size for size, _ in measure(engine, 8, 2).seconds}
    assert {1, 2} <= sizes
    assert 8 not in sizes
    tight = build_engine(replace(config, kv_memory=10_000), random_pair.models, lambda event: None)
    with pytest.raises(UserError, match="too short to time 2 drafts: name a number"):
        measure(tight, 1, 2)


def test_auto_picks_the_k_with_the_highest_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free drafts give the largest K, expensive ones K = 0."""
    demo = data_directory() / "demo"
    config = resolved(
        EngineConfig(
            model=str(demo / "target"),
            drafter=str(demo / "drafter"),
            num_spec_tokens=DraftLength(most=4, auto=True),
            max_batch_size=4,
            device="cpu",
        )
    )
    models, requests = loaded(config), bundled_requests(5, GREEDY)
    texts = []
    for price, expected in ((0.0, 4), (10.0, 0)):
        costs = StepCosts(seconds={(n, k): 1 + price * k for n in (1, 4) for k in range(5)})
        monkeypatch.setattr("specgen.engine.step_costs.measure", lambda *asked, costs=costs: costs)
        events: list[EngineRow] = []
        engine = build_engine(config, models, events.append)
        assert isinstance(engine.spec_length, CheapestLength)
        texts.append(run(engine, requests))
        steps: list[Any] = [e for e in events if isinstance(e, PassRow) and e.kind == "decode"]
        assert sum(step.num_spec_tokens == expected for step in steps) > 0.9 * len(steps)
    assert texts[0] == texts[1]
