"""K may change at every step without changing texts; costs of steps are timed, and kept where all else is the same."""

import json
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.checkpoints.checkpoint import load_target
from specgen.config import (
    CONFIDENCE_LEVELS,
    DraftLength,
    EngineConfig,
    SamplingParams,
    TemplateKwargs,
    UserError,
)
from specgen.config.bundled import data_directory
from specgen.core.engine_core import EngineCore
from specgen.core.graphs import StepGraphs
from specgen.core.sequence import Request
from specgen.core.spec_length import BestPlan, StepCosts, StepPlan
from specgen.engine import build, choices, step_costs
from specgen.engine.build import build_engine
from specgen.engine.choices import Checkpoints, resolve
from specgen.engine.loading import Models, open_checkpoints
from specgen.engine.step_costs import KEPT, costs_for, key_of, measure
from specgen.engine.warm_engine import WarmEngine
from specgen.models.mlp import Mixture
from specgen.record.record_rows import EngineRow, PassRow
from specgen.storage import cache_directory
from tests.engines import (
    NoTokenizer,
    Outputs,
    Pair,
    bundled_requests,
    config_of,
    engine_config,
    engine_of,
    generate,
    loaded,
    random_requests,
    resolved,
)
from tests.marks import mostly_slow
from tests.test_pipeline import mixed_requests
from tests.tiny_checkpoints import change_json, write_head, write_target
from tests.tiny_mixtures import write_qwen3_moe

GREEDY = SamplingParams(max_tokens=40)


class AnyPlan:
    """Another K at every step, of which all drafts are verified, or some by chances that say nothing."""

    def __init__(self, most: int, *, partial: bool = True) -> None:
        self.most, self._draw, self._partial = most, random.Random(3), partial
        self.asked: list[tuple[int, int]] = []
        self.chosen: list[StepPlan] = []
        self.seen: list[int] = []

    def choose(self, num_sequences: int, num_positions: int) -> StepPlan:
        self.asked.append((num_sequences, num_positions))
        k = self._draw.randrange(self.most + 1)
        quarters = (
            self._draw.randrange(1, 4 * k) if k and self._partial and self._draw.random() < 0.7 else None
        )
        chances = tuple(
            tuple(self._draw.uniform(0.01, 0.99) for _ in CONFIDENCE_LEVELS) for _ in range(self.most)
        )
        self.chosen.append(StepPlan(num_drafts=k, quarters=quarters, chances=chances))
        return self.chosen[-1]

    def see(self, levels: Sequence[int], verified: int, accepted: int) -> None:
        assert accepted <= verified <= len(levels) <= self.most
        assert all(0 <= level < len(CONFIDENCE_LEVELS) for level in levels[:verified])
        self.seen.append(verified)


def run(engine: EngineCore, requests: Iterable[Request]) -> dict[str, tuple[int, ...]]:
    return {completion.request.id: completion.token_ids for completion in engine.generate(requests)}


@pytest.mark.parametrize(
    ("batch", "ahead"), mostly_slow(product(("padded", "non-padded"), (False, True)), ("non-padded", True))
)
def test_k_may_change_at_every_step_without_changing_texts(
    demo_pair: Pair, device_like: Callable[..., None], batch: str, ahead: bool
) -> None:
    plain = generate(demo_pair, mixed_requests(GREEDY), num_spec_tokens=0)
    fixed = generate(demo_pair, mixed_requests(GREEDY), num_spec_tokens=5, drafter_batch=batch)
    device_like(ahead)
    events: list[EngineRow] = []
    engine = engine_of(demo_pair, events.append, num_spec_tokens=5, drafter_batch=batch, max_batch_size=6)
    engine.spec_length = length = AnyPlan(5)
    completions = {each.request.id: each for each in engine.generate(mixed_requests(GREEDY))}
    found = Outputs(completions=completions, passes=events)
    assert found.texts == plain.texts
    every = sorted((step for row in found.requests for step in row.steps or ()), key=lambda step: step.number)
    drafted, steps = [len(step.drafts) for step in every], found.steps
    assert sorted(length.seen) == sorted(drafted)
    assert set(drafted) == set(range(6))
    for step, plan in zip(steps, length.chosen, strict=False):
        verified = plan.num_verified(step.num_sequences)
        assert step.num_spec_tokens == plan.num_drafts
        assert step.num_accepted + step.num_rejected <= step.target_rows - step.num_sequences
        assert step.target_rows >= step.num_sequences + (verified or step.num_sequences * plan.num_drafts)
    for position, each in enumerate(found.report(5).acceptance):
        assert each.drafted == sum(number > position for number in drafted)
    mixed, usual = drafts_by_position(found), drafts_by_position(fixed)
    both = mixed.keys() & usual.keys()
    assert sum(bool(mixed[position]) for position in both) > 15
    for position in both:
        assert usual[position][: len(mixed[position])] == mixed[position], (
            "a head that missed a step would draft otherwise"
        )


@pytest.mark.parametrize(
    ("draft_sampling", "settings"),
    mostly_slow(
        product(("greedy", "probabilistic"), ({"kv_memory": 2_900_000}, {"drafter": "ngram"})),
        ("probabilistic", {"kv_memory": 2_900_000}),
    ),
)
def test_a_part_is_verified_with_preemption_sampling_and_penalties(
    demo_pair: Pair, device_like: Callable[..., None], draft_sampling: str, settings: dict[str, Any]
) -> None:
    """Greedy texts are those of plain decoding, beside texts that are sampled and the same in every run."""
    device_like()
    settings = settings | {"draft_sampling": draft_sampling}
    plainly = SamplingParams(max_tokens=24)
    greedy = [replace(plainly, repetition_penalty=1.1), replace(plainly, logprobs=2), plainly]
    sampled = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=3)
    requests = [
        replace(each, sampling=[*greedy, sampled][number % 4])
        for number, each in enumerate(mixed_requests(plainly)[:8])
    ]
    plain = generate(demo_pair, requests, num_spec_tokens=0)
    found = []
    for _ in range(2):
        rows: list[EngineRow] = []
        engine = engine_of(demo_pair, rows.append, num_spec_tokens=5, max_batch_size=6, **settings)
        engine.spec_length = AnyPlan(5)
        found.append(run(engine, requests))
        preempted = sum(row.num_preempted for row in rows if isinstance(row, PassRow))
        assert (preempted > 0) == ("kv_memory" in settings)
    assert found[0] == found[1]
    for request in requests:
        if request.sampling != sampled:
            assert found[0][request.id] == plain.texts[request.id]


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
    engine = engine_of(random_pair, events.append, num_spec_tokens=2, max_batch_size=6)
    record, length = engine._record, engine.spec_length
    costs = measure(engine, 6, DraftLength(most=2, kind="auto"))
    assert set(costs.seconds) == {(size, k) for size in (1, 2, 4, 6) for k in range(3)}
    assert all(0 < seconds < 5 for seconds in costs.seconds.values())
    assert (engine._record, engine.spec_length, events) == (record, length, [])
    requests = random_requests(20, 128, GREEDY)
    fresh = generate(random_pair, requests, num_spec_tokens=2, max_batch_size=6)
    assert run(engine, requests) == fresh.texts


def test_the_choice_is_told_how_long_the_contexts_are(demo_pair: Pair) -> None:
    engine = engine_of(demo_pair, num_spec_tokens=5, max_batch_size=2)
    engine.spec_length = length = AnyPlan(5)
    requests = bundled_requests(2, SamplingParams(max_tokens=20, ignore_eos=True))
    run(engine, requests)
    prompts = sum(len(request.prompt_token_ids) for request in requests)
    both = [positions for sequences, positions in length.asked if sequences == 2]
    assert both[0] == prompts + 2, "with the first token of each"
    assert both == sorted(set(both))
    assert prompts + 20 < both[-1] <= prompts + 40


def timed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, per_position: Sequence[float], **settings: Any
) -> tuple[StepCosts, list[tuple[int, int]]]:
    """Costs where a step takes 1 s and so much more for a position, with no draft and with one; and what was timed."""
    asked = []

    def times(engine: EngineCore, size: int, plan: StepPlan, enough: int, prompt: int = 16) -> list[float]:
        asked.append((size, prompt))
        return [9.0] * 3 + [1 + per_position[plan.num_drafts] * size * prompt] * (enough - 3)

    monkeypatch.setattr(step_costs, "_step_times", times)
    engine = engine_of(pair, num_spec_tokens=1, **settings)
    return measure(engine, settings["max_batch_size"], DraftLength(most=1, kind="uniform")), asked


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({"max_batch_size": 12}, (8, 256)),
        ({"max_batch_size": 1}, (1, 2048 - 22)),
        ({"max_batch_size": 4, "max_prefill_tokens": 10}, (4, 160)),
        ({"max_batch_size": 2, "kv_memory": 600_000}, (2, 16)),
    ],
    ids=str,
)
def test_what_a_position_costs_is_told_by_as_long_contexts_as_fit(
    demo_pair: Pair, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], longest: tuple[int, int]
) -> None:
    costs, asked = timed(demo_pair, monkeypatch, (1e-3, 2e-3), **settings)
    long = [each for each in asked if each[1] > 16]
    assert set(long or asked[-1:]) == {longest}
    assert costs.of_position == pytest.approx((1e-3, 2e-3) if long else (0.0, 0.0))


@pytest.mark.parametrize(
    ("per_position", "expected"),
    [
        ((2e-3, 1e-3), (2e-3, 2e-3)),  # drafts make no position cheaper ...
        ((1e-4, 1e-3), (1e-4, 2e-4)),  # ... and a step with one has twice the rows
        ((-1e-3, 1e-3), (0.0, 0.0)),  # noise: with 0 for plain steps alone drafts would look dear
        ((1e-3, -1e-3), (0.0, 0.0)),
    ],
)
def test_what_cannot_be_true_of_positions_is_not_believed(
    demo_pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    per_position: tuple[float, float],
    expected: tuple[float, float],
) -> None:
    costs, _ = timed(demo_pair, monkeypatch, per_position, max_batch_size=1)
    assert costs.of_position == pytest.approx(expected)


def test_where_long_contexts_find_no_memory_they_are_not_counted(
    demo_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = step_costs._step_times
    monkeypatch.setattr(
        step_costs,
        "_step_times",
        lambda engine, size, plan, enough, prompt=16: (
            [] if prompt > 16 and plan.num_drafts == 0 else times(engine, size, plan, enough, prompt)
        ),
    )
    engine = engine_of(demo_pair, num_spec_tokens=1, max_batch_size=1)
    assert measure(engine, 1, DraftLength(most=1, kind="uniform")).of_position == (0.0, 0.0)


def test_long_contexts_that_are_timed_leave_no_state(demo_pair: Pair) -> None:
    requests = bundled_requests(4, GREEDY)
    engine = engine_of(demo_pair, num_spec_tokens=2, max_batch_size=4)
    costs = measure(engine, 4, DraftLength(most=2, kind="uniform"))
    none, most = costs.of_position
    assert 0 <= none <= most < 1e-2
    assert run(engine, requests) == generate(demo_pair, requests, num_spec_tokens=2).texts


@pytest.mark.slow
def test_all_graphs_are_captured_before_a_run_that_is_timed(
    random_pair: Pair, device_like: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any other run they are captured as they are needed."""
    device_like()
    keys: set[tuple[Any, ...]] = set()
    runner = choices.RUNNERS["off"]
    monkeypatch.setattr(runner, "sizes", StepGraphs.sizes)
    monkeypatch.setattr(runner, "step", lambda self, key, function: (keys.add(key), function())[1])
    length = DraftLength(most=2, kind="uniform")
    config = config_of(random_pair, num_spec_tokens=length, max_batch_size=6)
    build_engine(config, random_pair.models, lambda event: None)
    timed = set(keys)
    warm = WarmEngine(config, random_pair.models, random_requests(16, 128, GREEDY))
    before = set(keys)
    warm._engine.spec_length = AnyPlan(2, partial=False)
    warm.run()
    rows = {runner().num_rows(number) for number in range(1, 7)}
    assert {key[1:3] for key in before} == set(product(rows, range(3)))
    assert len(timed) == 3 * len({1, 2, 4, 6}), "what is not timed waits until it is needed"
    assert keys == before


@pytest.mark.parametrize("max_prefill_tokens", [64, 20])
def test_a_batch_whose_prompts_take_several_passes_is_timed(
    random_pair: Pair, device_like: Callable[..., None], max_prefill_tokens: int
) -> None:
    """The first sequences have tokens for the steps in which others still wait."""
    device_like()
    engine = engine_of(
        random_pair, num_spec_tokens=1, max_batch_size=8, max_prefill_tokens=max_prefill_tokens
    )
    costs = measure(engine, 8, DraftLength(most=1, kind="uniform"))
    assert set(costs.seconds) == {(size, k) for size in (1, 2, 4, 8) for k in range(2)}


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
    call = Mixture.__call__

    def watched(self: Mixture, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, _ = self.choice(self.router(x))
        touched.append((len(ids), len(ids.unique())))
        return call(self, x)

    monkeypatch.setattr(Mixture, "__call__", watched)
    measure(engine, 8, DraftLength(most=0))
    plain = [found for rows, found in touched if rows == 8]
    assert len(plain) > 5
    assert min(plain) > 4, "one sequence touches 2"


@pytest.mark.slow
def test_batches_that_do_not_fit_are_not_timed(random_pair: Pair) -> None:
    config = config_of(random_pair, num_spec_tokens=2, max_batch_size=8, kv_memory=300_000)
    engine = build_engine(config, random_pair.models, lambda event: None)
    sizes = {size for size, _ in measure(engine, 8, DraftLength(most=2, kind="auto")).seconds}
    assert {1, 2} <= sizes
    assert 8 not in sizes
    tight = build_engine(replace(config, kv_memory=10_000), random_pair.models, lambda event: None)
    with pytest.raises(UserError, match="too short to time 2 drafts: name a number"):
        measure(tight, 1, DraftLength(most=2, kind="auto"))


def test_auto_picks_the_k_with_the_highest_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free drafts give the largest K, expensive ones K = 0."""
    demo = data_directory() / "demo"
    config = resolved(engine_config(demo, num_spec_tokens=DraftLength(most=4, kind="auto"), max_batch_size=4))
    models, requests = loaded(config), bundled_requests(5, GREEDY)
    texts = []
    for price, expected in ((0.0, 4), (10.0, 0)):
        costs = StepCosts(seconds={(n, k): 1 + price * k for n in (1, 4) for k in range(5)})
        monkeypatch.setattr("specgen.engine.step_costs.measure", lambda *asked, costs=costs: costs)
        events: list[EngineRow] = []
        engine = build_engine(config, models, events.append)
        assert isinstance(engine.spec_length, BestPlan)
        texts.append(run(engine, requests))
        steps: list[Any] = [e for e in events if isinstance(e, PassRow) and e.kind == "decode"]
        assert sum(step.num_spec_tokens == expected for step in steps) > 0.9 * len(steps)
    assert texts[0] == texts[1]


STATE = {"driver": "580.95", "max_clock_mhz": 1980.0, "power_limit_watts": 700.0}


class Machine:
    """A GPU as the system tells of it; counts how often steps are measured on it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {**STATE, "load": 3.0, "clock_mhz": 1005.0}
        self.device: dict[str, Any] = {"name": "H100", "host": "a"}
        self.versions = {"specgen": "1", "torch": "2"}
        self.source = "abc"
        self.compiles = True
        self.measured = 0
        self.sizes = [1, 2, 3]
        self.has_room = True  # for long contexts

    def measure(self) -> StepCosts:
        self.measured += 1
        return StepCosts(
            seconds={(n, k): 0.01 * n + 0.001 * k + self.measured / 7 for n in self.sizes for k in (0, 1, 2)},
            of_position=(1e-8, self.measured * 1e-7) if self.has_room else (0.0, 0.0),
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine()
    monkeypatch.setattr(step_costs, "machine_state", lambda uuid: made.state)
    monkeypatch.setattr(step_costs, "uuid", lambda name: "GPU-1")
    monkeypatch.setattr(step_costs, "device", lambda name: made.device)
    monkeypatch.setattr(step_costs, "versions", lambda: made.versions)
    monkeypatch.setattr(step_costs, "_source", lambda: made.source)
    monkeypatch.setattr(step_costs, "runs_on", lambda device: made.compiles)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = tmp_path_factory.mktemp("pair")
    write_head(path / "drafter", write_target(path / "target"))
    return engine_config(
        path, num_spec_tokens=DraftLength(most=2, kind="auto"), max_batch_size=3, device="cuda:0"
    )


@pytest.fixture
def checkpoints(pair: EngineConfig) -> Checkpoints:
    return open_checkpoints(pair)


def test_a_later_run_uses_what_an_earlier_one_measured(
    machine: Machine, pair: EngineConfig, checkpoints: Checkpoints
) -> None:
    first = costs_for(pair, checkpoints, machine.measure)
    assert costs_for(pair, checkpoints, machine.measure) == first
    machine.state = {**STATE, "load": 0.1, "clock_mhz": 1980.0, "gpu_use_percent": 5.0}
    dated = replace(pair, chat_template_kwargs=TemplateKwargs.of({"strftime_now": "2026-01-31"}))
    assert costs_for(dated, checkpoints, machine.measure).seconds == first.seconds
    assert machine.measured == 1
    KEPT.forget()
    costs_for(pair, checkpoints, machine.measure)
    assert machine.measured == 2


CHANGES: dict[str, Callable[[Machine, pytest.MonkeyPatch], None]] = {
    "compiler": lambda machine, patch: setattr(machine, "compiles", False),
    "driver": lambda machine, patch: machine.state.update(driver="590.1"),
    "power limit": lambda machine, patch: machine.state.update(power_limit_watts=300.0),
    "GPU": lambda machine, patch: machine.device.update(name="H200"),
    "torch": lambda machine, patch: machine.versions.update(torch="3"),
    "source": lambda machine, patch: setattr(machine, "source", "abd"),
    "environment": lambda machine, patch: patch.setenv("CUDA_LAUNCH_BLOCKING", "1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_on_another_machine_they_are_measured_again(
    machine: Machine, pair: EngineConfig, checkpoints: Checkpoints, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = costs_for(pair, checkpoints, machine.measure)
    CHANGES[name](machine, monkeypatch)
    assert costs_for(pair, checkpoints, machine.measure).seconds != first.seconds
    assert machine.measured == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"num_spec_tokens": DraftLength(most=1, kind="auto")},
        {"max_batch_size": 4},
        {"dtype": "float16"},
        {"kv_dtype": "fp8"},
        {"cuda_graphs": "off"},
        {"tensor_parallel": 2},
        {"drafter_batch": "non-padded"},
    ],
    ids=str,
)
def test_with_other_settings_they_are_measured_again(
    machine: Machine, pair: EngineConfig, checkpoints: Checkpoints, changed: dict[str, Any]
) -> None:
    costs_for(pair, checkpoints, machine.measure)
    costs_for(replace(pair, **changed), checkpoints, machine.measure)
    assert machine.measured == 2


def test_other_weights_are_measured_again(machine: Machine, pair: EngineConfig) -> None:
    costs_for(pair, open_checkpoints(pair), machine.measure)
    weights = Path(pair.model) / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    costs_for(pair, open_checkpoints(pair), machine.measure)
    change_json(Path(pair.model) / "config.json", some="thing")
    costs_for(pair, open_checkpoints(pair), machine.measure)
    assert machine.measured == 3


SPOILT = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "foreign": lambda text: '["another program\'s"]',
    "other key": lambda text: text.replace("580.95", "580.96"),
    "other points": lambda text: json.dumps({**json.loads(text), "seconds": json.loads(text)["seconds"][1:]}),
    "zero": lambda text: json.dumps({**json.loads(text), "seconds": with_first(text, 0)}),
    "nan": lambda text: json.dumps({**json.loads(text), "seconds": with_first(text, float("nan"))}),
    "text": lambda text: json.dumps({**json.loads(text), "seconds": with_first(text, "fast")}),
    "no position": lambda text: json.dumps({**json.loads(text), "of_position": [1e-8]}),
    "free position": lambda text: json.dumps({**json.loads(text), "of_position": [0.0, 1e-8]}),
}


def with_first(text: str, seconds: object) -> list[list[object]]:
    (n, k, _), *others = json.loads(text)["seconds"]
    return [[n, k, seconds], *others]


@pytest.mark.parametrize("name", SPOILT)
def test_a_file_that_is_not_what_was_written_is_said_and_replaced(
    machine: Machine,
    pair: EngineConfig,
    checkpoints: Checkpoints,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    costs_for(pair, checkpoints, machine.measure)
    (file,) = cache_directory("step-costs").iterdir()
    file.write_text(SPOILT[name](file.read_text()))
    second = costs_for(pair, checkpoints, machine.measure)
    assert machine.measured == 2
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith(f"costs of steps kept in {file} not used (")
    assert costs_for(pair, checkpoints, machine.measure).seconds == second.seconds
    assert machine.measured == 2


def test_where_nothing_can_be_written_a_run_goes_on(
    machine: Machine,
    pair: EngineConfig,
    checkpoints: Checkpoints,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert costs_for(pair, checkpoints, machine.measure).seconds
    assert "cannot be kept in" in caplog.text


def test_nothing_is_left_of_a_file_that_could_not_be_written_whole(
    machine: Machine, pair: EngineConfig, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert costs_for(pair, checkpoints, machine.measure).seconds
    assert [*cache_directory("step-costs").iterdir()] == []


def test_a_user_without_a_home_goes_on_too(
    machine: Machine,
    pair: EngineConfig,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    KEPT.forget()
    assert costs_for(pair, checkpoints, machine.measure).seconds
    assert [each.getMessage().split(" in ")[0] for each in caplog.records] == [
        "costs of steps cannot be kept"
    ]


@pytest.mark.parametrize("short_of", [{"sizes": [1, 2]}, {"has_room": False}], ids=str)
def test_what_is_not_whole_is_not_kept(
    machine: Machine,
    pair: EngineConfig,
    checkpoints: Checkpoints,
    caplog: pytest.LogCaptureFixture,
    short_of: dict[str, Any],
) -> None:
    """The cache has no room for three sequences, or for long ones."""
    vars(machine).update(short_of)
    costs_for(pair, checkpoints, machine.measure)
    costs_for(pair, checkpoints, machine.measure)
    assert machine.measured == 2
    assert not caplog.records


def test_nothing_is_kept_of_a_cpu_or_where_no_driver_is_known(
    machine: Machine, pair: EngineConfig, checkpoints: Checkpoints
) -> None:
    assert key_of(pair, checkpoints) is not None
    assert key_of(replace(pair, device="cpu"), checkpoints) is None
    del machine.state["driver"]
    assert key_of(pair, checkpoints) is None


def test_the_source_of_this_package_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "files", lambda package: tmp_path)
    (tmp_path / "a").mkdir()
    seen = set()
    first = ("a/b.py", "1")
    for name, text in (
        first,
        *((f"a/{name}", "2") for name in ("b.py", "c.py", "e.cu", "e.cuh", "f.toml", "d.txt")),
    ):
        (tmp_path / name).write_text(text)
        seen.add(step_costs._source())
    assert len(seen) == 6, "and nothing else is"


def test_an_engine_takes_what_is_kept(
    random_pair: Pair, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(random_pair, num_spec_tokens=DraftLength(most=2, kind="auto"), max_batch_size=3)
    monkeypatch.setattr(step_costs, "key_of", lambda config, checkpoints: {"all": "the same"})
    monkeypatch.setattr(build.step_costs, "measure", lambda *asked: machine.measure())
    first = build_engine(config, random_pair.models, lambda event: None).spec_length
    monkeypatch.setattr(build.step_costs, "measure", lambda *asked: pytest.fail("measured again"))
    second = build_engine(config, random_pair.models, lambda event: None).spec_length
    assert isinstance(first, BestPlan)
    assert isinstance(second, BestPlan)
    assert first._costs == second._costs
    with pytest.raises(pytest.fail.Exception):  # steps with marks take longer than others, and are not kept
        build_engine(config, random_pair.models, lambda event: None, lambda: None)
