"""K may change at every step without changing texts; costs of steps are timed, and kept where all else is the same."""

import json
import os
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from specgen.config import CONFIDENCE_LEVELS, DraftLength, SamplingParams, TemplateKwargs, UserError
from specgen.core.graphs import StepGraphs
from specgen.core.spec_length import StepCosts, StepPlan
from specgen.engine import choices, step_costs
from specgen.engine.build import build_engine
from specgen.engine.loading import open_checkpoints
from specgen.engine.step_costs import KEPT, costs_for, key_of, measure
from specgen.engine.warm_engine import WarmEngine
from specgen.record.record_rows import PassRow
from specgen.storage import cache_directory
from tests.engines import (
    Outputs,
    bundled_requests,
    config_of,
    engine_config,
    engine_of,
    generate,
    random_requests,
)
from tests.marks import mostly_slow
from tests.test_pipeline import mixed_requests
from tests.tiny_checkpoints import change_json, write_head, write_target

GREEDY = SamplingParams(max_tokens=40)


class AnyPlan:
    """Another K at every step, of which all drafts are verified, or some by chances that say nothing."""

    def __init__(self, most, *, partial=True):
        self.most, self._draw, self._partial = most, random.Random(3), partial
        self.asked, self.chosen, self.seen = [], [], []

    def choose(self, num_sequences, num_positions):
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

    def update(self, levels, verified, accepted):
        assert accepted <= verified <= len(levels) <= self.most
        assert all(0 <= level < len(CONFIDENCE_LEVELS) for level in levels[:verified])
        self.seen.append(verified)


def run(engine, requests):
    return {completion.request.id: completion.token_ids for completion in engine.generate(requests)}


@pytest.mark.parametrize(
    ("batch", "ahead"), mostly_slow(product(("padded", "non-padded"), (False, True)), ("non-padded", True))
)
def test_k_may_change_at_every_step_without_changing_texts(demo_pair, device_like, batch, ahead):
    plain = generate(demo_pair, mixed_requests(GREEDY), num_spec_tokens=0)
    fixed = generate(demo_pair, mixed_requests(GREEDY), num_spec_tokens=5, drafter_batch=batch)
    device_like(ahead)
    events = []
    engine = engine_of(demo_pair, events.append, num_spec_tokens=5, drafter_batch=batch, max_batch_size=6)
    engine.spec_length = length = AnyPlan(5)
    completions = {each.request.id: each for each in engine.generate(mixed_requests(GREEDY))}
    found = Outputs(completions=completions, passes=events)
    assert found.texts == plain.texts
    drafted = [len(step.drafts) for row in found.requests for step in row.steps or ()]
    assert sorted(length.seen) == sorted(drafted)
    assert set(drafted) == set(range(6))
    for step, plan in zip(found.steps, length.chosen, strict=False):
        verified = plan.num_verified(step.num_sequences)
        assert step.num_spec_tokens == plan.num_drafts
        assert step.num_accepted + step.num_rejected <= step.target_rows - step.num_sequences
        assert step.target_rows >= step.num_sequences + (verified or step.num_sequences * plan.num_drafts)
    for position, each in enumerate(found.report(5).acceptance):
        assert each.drafted == sum(number > position for number in drafted)
    mixed, usual = drafts_by_position(found), drafts_by_position(fixed)
    both = mixed.keys() & usual.keys()
    assert sum(bool(mixed[position]) for position in both) > 15
    for position in both:  # a head that missed a step would draft otherwise
        assert usual[position][: len(mixed[position])] == mixed[position]


def drafts_by_position(outputs):
    """The drafts of a sequence by the number of tokens before them."""
    found = {}
    for name, steps in outputs.verified.items():
        length = 0
        for drafts, _, emitted in steps:
            found[name, length] = drafts
            length += emitted
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft_sampling", "settings"),
    [("probabilistic", {"kv_memory": 2_900_000}), ("greedy", {"drafter": "ngram"})],
)
def test_a_part_is_verified_with_preemption_sampling_and_penalties(
    demo_pair, device_like, draft_sampling, settings
):
    """Greedy texts are those of plain decoding, beside texts that are sampled and the same in every run."""
    device_like()
    plainly = SamplingParams(max_tokens=24)
    greedy = [replace(plainly, repetition_penalty=1.1), replace(plainly, logprobs=2), plainly]
    sampled = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=3)
    requests = [
        replace(each, sampling=[*greedy, sampled][number % 4])
        for number, each in enumerate(mixed_requests(plainly)[:8])
    ]
    plain = generate(demo_pair, requests, num_spec_tokens=0)
    settings, found = {**settings, "draft_sampling": draft_sampling}, []
    for _ in range(2):
        rows = []
        engine = engine_of(demo_pair, rows.append, num_spec_tokens=5, max_batch_size=6, **settings)
        engine.spec_length = AnyPlan(5)
        found.append(run(engine, requests))
        preempted = sum(row.num_preempted for row in rows if isinstance(row, PassRow))
        assert (preempted > 0) == ("kv_memory" in settings)
    assert found[0] == found[1]
    for request in requests:
        assert request.sampling == sampled or found[0][request.id] == plain.texts[request.id]


def test_the_choice_is_told_how_long_the_contexts_are(demo_pair):
    engine = engine_of(demo_pair, num_spec_tokens=5, max_batch_size=2)
    engine.spec_length = length = AnyPlan(5)
    requests = bundled_requests(2, SamplingParams(max_tokens=20, ignore_eos=True))
    run(engine, requests)
    prompts = sum(len(request.prompt_token_ids) for request in requests)
    both = [positions for sequences, positions in length.asked if sequences == 2]
    assert both[0] == prompts + 2, "with the first token of each"
    assert both == sorted(set(both))
    assert prompts + 20 < both[-1] <= prompts + 40


def test_auto_picks_the_k_with_the_highest_throughput(demo_pair, monkeypatch):
    """Free drafts give the largest K, expensive ones K = 0."""
    config = config_of(demo_pair, num_spec_tokens=DraftLength(most=4, kind="auto"), max_batch_size=4)
    texts = []
    for price, expected in ((0.0, 4), (10.0, 0)):
        costs = StepCosts(seconds={(n, k): 1 + price * k for n in (1, 4) for k in range(5)})
        monkeypatch.setattr(step_costs, "measure", lambda *asked, costs=costs: costs)
        events = []
        engine = build_engine(config, demo_pair.models, events.append)
        texts.append(run(engine, bundled_requests(5, GREEDY)))
        chosen = [e.num_spec_tokens for e in events if isinstance(e, PassRow) and e.kind == "decode"]
        assert chosen.count(expected) > 0.9 * len(chosen)
    assert texts[0] == texts[1]


# --- timing ---------------------------------------------------------------------------------------


def test_timing_steps_leaves_no_state(demo_pair):
    events = []
    engine = engine_of(demo_pair, events.append, num_spec_tokens=1, max_batch_size=3)
    length = engine.spec_length
    costs = measure(engine, 3, DraftLength(most=1, kind="uniform"))
    assert set(costs.seconds) == set(product((1, 3), range(2)))
    assert all(0 < seconds < 5 for seconds in costs.seconds.values())
    none, most = costs.of_position
    assert 0 <= none <= most < 1e-2
    assert (engine.spec_length, events) == (length, [])
    requests = bundled_requests(3, GREEDY)
    assert run(engine, requests) == generate(demo_pair, requests, num_spec_tokens=1).texts
    assert events


def test_sequences_that_are_timed_are_different(random_pair, monkeypatch):
    """Else every size would touch the experts of one sequence."""
    engine, prompts = engine_of(random_pair, num_spec_tokens=1, max_batch_size=8), []
    submit = engine.submit
    monkeypatch.setattr(
        engine, "submit", lambda each: (prompts.append(each.prompt_token_ids), submit(each))[1]
    )
    measure(engine, 8, DraftLength(most=0))
    assert len({*prompts[-8:]}) == 8


@pytest.mark.slow
def test_a_batch_whose_prompts_take_several_passes_is_timed(random_pair, device_like):
    """The first sequences have tokens for the steps in which others still wait."""
    device_like()
    for most in (64, 20):
        engine = engine_of(random_pair, num_spec_tokens=1, max_batch_size=8, max_prefill_tokens=most)
        costs = measure(engine, 8, DraftLength(most=1, kind="uniform"))
        assert set(costs.seconds) == set(product((1, 8), range(2)))


def timed(pair, monkeypatch, per_position, **settings):
    """Costs where a step takes 1 s and so much more for a position, with no draft and with one; and what was timed.

    None: there is no memory for long contexts.
    """
    asked = []

    def times(engine, size, plan, enough, prompt=4):
        asked.append((size, prompt))
        more = per_position[plan.num_drafts]
        if more is None:
            return [] if prompt > 4 else [1.0] * enough
        return [9.0] * 2 + [1 + more * size * prompt] * (enough - 2)

    monkeypatch.setattr(step_costs, "_step_times", times)
    engine = engine_of(pair, num_spec_tokens=1, **settings)
    return measure(engine, settings["max_batch_size"], DraftLength(most=1, kind="uniform")), asked


def test_what_a_position_costs_is_told_by_as_long_contexts_as_fit(demo_pair, monkeypatch):
    for settings, longest in (
        ({"max_batch_size": 12}, (8, 256)),
        ({"max_batch_size": 1}, (1, 2048 - 18)),
        ({"max_batch_size": 4, "max_prefill_tokens": 10}, (4, 160)),
        ({"max_batch_size": 2, "kv_memory": 600_000}, (1, 4)),
    ):
        costs, asked = timed(demo_pair, monkeypatch, (1e-3, 2e-3), **settings)
        long = [each for each in asked if each[1] > 4]
        assert set(long or asked[-1:]) == {longest}
        assert costs.of_position == pytest.approx((1e-3, 2e-3) if long else (0.0, 0.0))


def test_what_cannot_be_true_of_positions_is_not_believed(demo_pair, monkeypatch):
    for per_position, expected in (
        ((2e-3, 1e-3), (2e-3, 2e-3)),  # drafts make no position cheaper ...
        ((1e-4, 1e-3), (1e-4, 2e-4)),  # ... and a step with one has twice the rows
        ((-1e-3, 1e-3), (0.0, 0.0)),  # noise: with 0 for plain steps alone drafts would look dear
        ((1e-3, -1e-3), (0.0, 0.0)),
        ((None, 1e-3), (0.0, 0.0)),
    ):
        costs, _ = timed(demo_pair, monkeypatch, per_position, max_batch_size=1)
        assert costs.of_position == pytest.approx(expected), per_position


@pytest.mark.slow
def test_all_graphs_are_captured_before_a_run_that_is_timed(random_pair, device_like, monkeypatch):
    """In any other run they are captured as they are needed."""
    device_like()
    keys, runner = set(), choices.RUNNERS["off"]
    monkeypatch.setattr(runner, "sizes", StepGraphs.sizes)
    monkeypatch.setattr(runner, "step", lambda self, key, function: (keys.add(key), function())[1])
    config = config_of(random_pair, num_spec_tokens=DraftLength(most=2, kind="uniform"), max_batch_size=6)
    build_engine(config, random_pair.models, lambda event: None)
    assert len(keys) == 3 * len({1, 6}), "what is not timed waits until it is needed"
    warm = WarmEngine(config, random_pair.models, random_requests(16, 128, GREEDY))
    before = set(keys)
    assert {key[1:3] for key in before} == set(product({runner().num_rows(n) for n in range(1, 7)}, range(3)))
    warm._engine.spec_length = AnyPlan(2, partial=False)
    warm.run()
    assert keys == before


@pytest.mark.slow
def test_batches_that_do_not_fit_are_not_timed(random_pair):
    config = config_of(random_pair, num_spec_tokens=2, max_batch_size=8, kv_memory=300_000)
    engine = build_engine(config, random_pair.models, lambda event: None)
    smallest, largest = sorted({size for size, _ in measure(engine, 8, DraftLength(most=2)).seconds})
    assert smallest == 1 < largest < 8, "the largest that fits is timed in place of the batch"
    tight = build_engine(replace(config, kv_memory=10_000), random_pair.models, lambda event: None)
    with pytest.raises(UserError, match="too short to time 2 drafts: name a number"):
        measure(tight, 1, DraftLength(most=2, kind="auto"))


# --- what is kept ---------------------------------------------------------------------------------

STATE = {"driver": "580.95", "max_clock_mhz": 1980.0, "power_limit_watts": 700.0}


class Machine(SimpleNamespace):
    """A pair on a GPU, of which the system tells what is in ``told``; every measurement gives other costs."""

    def measure(self):
        self.measured += 1
        seconds = {(n, k): 0.01 * n + 0.001 * k + self.measured / 7 for n in self.sizes for k in (0, 1, 2)}
        return StepCosts(
            seconds=seconds, of_position=(1e-8, self.measured * 1e-7) if self.has_room else (0.0, 0.0)
        )

    def costs(self, **changes):
        config = replace(self.config, **changes)
        return costs_for(config, open_checkpoints(config), self.measure)

    def is_kept(self, **changes):
        """Whether a run takes what an earlier one has left."""
        before = self.measured
        assert self.costs(**changes).seconds
        return self.measured == before


@pytest.fixture
def machine(monkeypatch, tmp_path):
    pair, source, auto = tmp_path / "pair", tmp_path / "source", DraftLength(most=2, kind="auto")
    write_head(pair / "drafter", write_target(pair / "target"))
    (source / "a").mkdir(parents=True)
    told = {"machine_state": {**STATE, "load": 3.0, "clock_mhz": 1005.0}, "device": {"name": "H100"}}
    told |= {"versions": {"torch": "2"}, "uuid": "GPU-1", "files": source, "runs_on": True}
    for name in told:
        monkeypatch.setattr(step_costs, name, lambda *_, name=name: told[name])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = engine_config(pair, num_spec_tokens=auto, max_batch_size=3, device="cuda:0")
    return Machine(config=config, told=told, source=source, sizes=[1, 3], has_room=True, measured=0)


def test_a_later_run_uses_what_an_earlier_one_measured(machine):
    first = machine.costs()
    assert machine.costs() == first
    machine.told["machine_state"] = {**STATE, "load": 0.1, "clock_mhz": 1980.0, "gpu_use_percent": 5.0}
    (machine.source / "a" / "d.txt").touch()
    dated = TemplateKwargs.of({"strftime_now": "2026-01-31"})
    assert machine.costs(chat_template_kwargs=dated) == first
    KEPT.forget()
    assert not machine.is_kept()


def test_where_anything_else_changes_they_are_measured_again(machine, monkeypatch):
    told, weights = machine.told, Path(machine.config.model) / "model.safetensors"
    for name, change in {
        "nothing before": lambda: None,
        "compiler": lambda: told.update(runs_on=False),
        "driver": lambda: told["machine_state"].update(driver="590.1"),
        "power limit": lambda: told["machine_state"].update(power_limit_watts=300.0),
        "GPU": lambda: told["device"].update(name="H200"),
        "torch": lambda: told["versions"].update(torch="3"),
        **{
            f"source {name}": lambda name=name: (machine.source / name).touch()
            for name in ("a/b.py", "a/b.cu", "a/b.cuh", "f.toml")
        },
        "source": lambda: (machine.source / "a" / "b.py").write_text("2"),
        "environment": lambda: monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1"),
        "weights": lambda: os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1)),
        "configuration": lambda: change_json(Path(machine.config.model) / "config.json", some="thing"),
    }.items():
        change()
        assert not machine.is_kept(), name
        assert machine.is_kept(), name
    for changed in (
        {"num_spec_tokens": DraftLength(most=1, kind="auto")},
        {"max_batch_size": 4},
        {"dtype": "float16"},
        {"kv_dtype": "fp8"},
        {"cuda_graphs": "off"},
        {"tensor_parallel": 2},
        {"drafter_batch": "non-padded"},
    ):
        assert not machine.is_kept(**changed), changed


def with_first(found, seconds):
    (n, k, _), *others = found["seconds"]
    return [[n, k, seconds], *others]


def test_a_file_that_is_not_what_was_written_is_said_and_replaced(machine, caplog):
    machine.costs()
    (file,) = cache_directory("step-costs").iterdir()
    text = file.read_text()
    found = json.loads(text)
    for spoilt in (
        text[: len(text) // 2],
        "",
        '["another program\'s"]',
        text.replace("580.95", "580.96"),
        json.dumps({**found, "seconds": found["seconds"][1:]}),
        *(json.dumps({**found, "seconds": with_first(found, each)}) for each in (0, float("nan"), "fast")),
        json.dumps({**found, "of_position": [1e-8]}),
        json.dumps({**found, "of_position": [0.0, 1e-8]}),
    ):
        caplog.clear()
        file.write_text(spoilt)
        assert not machine.is_kept(), spoilt
        (line,) = [each.getMessage() for each in caplog.records]
        assert line.startswith(f"costs of steps kept in {file} not used (")
        assert machine.is_kept()


def test_where_nothing_can_be_written_a_run_goes_on(machine, tmp_path, monkeypatch, caplog):
    def fails(error):
        def failing(*given):
            raise error

        return failing

    with monkeypatch.context() as full:
        full.setattr(os, "replace", fails(OSError(28, "No space left on device")))
        assert not machine.is_kept()
        assert [*cache_directory("step-costs").iterdir()] == [], "nor half a file"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not machine.is_kept()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", fails(RuntimeError("Could not determine home directory.")))
    KEPT.forget()
    assert not machine.is_kept()
    assert [each.getMessage().split(" in ")[0] for each in caplog.records] == [
        "costs of steps cannot be kept"
    ] * 3


def test_what_is_not_whole_is_not_kept(machine, caplog):
    """The cache has no room for three sequences, or for long ones."""
    for short_of in ({"sizes": [1, 2]}, {"sizes": [1, 3], "has_room": False}):
        vars(machine).update(short_of)
        assert not machine.is_kept()
        assert not machine.is_kept()
    assert not caplog.records


def test_nothing_is_kept_of_a_cpu_or_where_no_driver_is_known(machine):
    checkpoints = open_checkpoints(machine.config)
    assert key_of(machine.config, checkpoints) is not None
    assert key_of(replace(machine.config, device="cpu"), checkpoints) is None
    del machine.told["machine_state"]["driver"]
    assert key_of(machine.config, checkpoints) is None


def test_an_engine_takes_what_is_kept(random_pair, machine, monkeypatch):
    config = config_of(random_pair, num_spec_tokens=DraftLength(most=2, kind="auto"), max_batch_size=3)
    monkeypatch.setattr(step_costs, "key_of", lambda config, checkpoints: {"all": "the same"})
    monkeypatch.setattr(step_costs, "measure", lambda *asked: machine.measure())
    first, second = (
        build_engine(config, random_pair.models, lambda event: None).spec_length for _ in range(2)
    )
    assert first._costs == second._costs
    assert machine.measured == 1
    # steps with marks take longer than others, and are not kept
    build_engine(config, random_pair.models, lambda event: None, lambda: None)
    assert machine.measured == 2
