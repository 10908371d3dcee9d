"""Several ranks of one model on a CPU: texts, drafts and passes are those of one process, whatever the engine does."""

import gc
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_cycle import Cycle
from calibrated_weights import Source
from make_calibrated_pair import HeadKind, chosen_cycle, chosen_layer, chosen_shape, write_pair

from specgen.config import DraftLength, EngineConfig, SamplingParams, StructuredOutputs, UserError
from specgen.config.bundled import data_directory
from specgen.core.engine_core import EngineCore
from specgen.core.sequence import Request, ScoreRequest
from specgen.core.spec_length import StepCosts
from specgen.engine import build, worker_group
from specgen.engine.build import build_engine, page_budget, prefill_logits
from specgen.engine.choices import require_devices, resolve
from specgen.engine.engine import Engine
from specgen.engine.loading import Models, OneTarget, load_models, open_checkpoints, over_target
from specgen.prompts import Prompt
from specgen.record.record_rows import EngineRow
from specgen.text.tokenizer import Message
from tests.commands import refused
from tests.engines import Outputs, bundled_requests, engine_config, ranks_config
from tests.marks import mostly_slow
from tests.rank_forks import launch
from tests.rank_plants import compare_every_pass, prefill_and_compare, together

pytestmark = pytest.mark.xdist_group("ranks")  # processes that all of them use
GREEDY = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module", params=[2])
def shared(request: pytest.FixtureRequest) -> Iterator[Models]:
    """The bundled pair in several ranks, which compare their inputs in every pass."""
    asked = ranks_config(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_group, "TIMEOUT", 20.0)
        patch.setattr(worker_group, "launch", launch)
        models = load_models(asked, open_checkpoints(asked))
        together(models, compare_every_pass, asked)
        compare_every_pass(None, models, patch.setattr)
        yield models


@pytest.fixture(scope="module")
def alone() -> Models:
    """The same pair in this process."""
    asked = ranks_config(1)
    return load_models(asked, open_checkpoints(asked))


def run(models: Models, sampling: SamplingParams, **changes: Any) -> Outputs:
    events: list[EngineRow] = []
    pages = changes.pop("num_pages", None)
    asked = ranks_config(models.peers.ranks.size, **changes)
    if pages is not None:  # of a rank's share of the heads
        asked = replace(asked, kv_memory=pages * page_budget(asked, models).page_bytes)
    engine = build_engine(asked, models, events.append)
    engine.warm_up()
    events.clear()
    found = {each.request.id: each for each in engine.generate(bundled_requests(8, sampling))}
    return Outputs(completions=found, passes=events)


def as_rows(events: list[EngineRow]) -> list[dict[str, Any]]:
    """``events`` without what the clock says."""
    return [
        {"kind": type(each).__name__} | vars(replace(each, time=0.0, **_timeless(each))) for each in events
    ]


def _timeless(event: EngineRow) -> dict[str, float]:
    return dict.fromkeys({"seconds", "idle", "idle_outside"} & vars(event).keys(), 0.0)


WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "non-padded": {"drafter_batch": "non-padded"},
    "plain": {"num_spec_tokens": 0},
    "ngram": {"drafter": "ngram:2"},
    "suffix": {"drafter": "suffix:3"},
    "no prefix cache": {"prefix_cache": False},
    "chunks": {"max_prefill_tokens": 16},
    "preemption": {"num_pages": 30},
}


@pytest.mark.parametrize(
    ("shared", "way"),
    mostly_slow([*product([2], WAYS), (4, "padded"), (4, "preemption")], (2, "padded")),
    indirect=["shared"],
    scope="module",
)
def test_texts_drafts_and_passes_are_those_of_one_process(shared: Models, alone: Models, way: str) -> None:
    several, one = run(shared, GREEDY, **WAYS[way]), run(alone, GREEDY, **WAYS[way])
    assert several.texts == one.texts
    assert (several.verified, as_rows(several.passes)) == (one.verified, as_rows(one.passes))
    assert way != "preemption" or several.num_preempted


@pytest.mark.slow
@pytest.mark.parametrize("draft_sampling", ["probabilistic", "greedy"])
def test_sampled_texts_are_those_of_one_process(shared: Models, alone: Models, draft_sampling: str) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=3, logprobs=2, stop=(" the",))
    sampling = replace(sampling, repetition_penalty=1.1, presence_penalty=0.2)
    several, one = (run(each, sampling, draft_sampling=draft_sampling) for each in (shared, alone))
    assert several.texts == one.texts
    assert (several.verified, as_rows(several.passes)) == (one.verified, as_rows(one.passes))
    assert {each.finish_reason for each in one.completions.values()} >= {"stop"}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_constrained_texts_are_those_of_one_process(
    shared: Models, alone: Models, temperature: float
) -> None:
    asked = StructuredOutputs(choice=("The answer is 12.", "The answer is unknown.", "yes", "12 apples"))
    sampling = SamplingParams(
        max_tokens=24, temperature=temperature, bad_words_ids=((7, 8),), structured_outputs=asked
    )
    run(alone, sampling)  # has compiled it: else the requests would wait for that
    several, one = (run(each, sampling) for each in (shared, alone))
    assert several.texts == one.texts
    assert (several.verified, as_rows(several.passes)) == (one.verified, as_rows(one.passes))
    assert {each.finish_reason for each in one.completions.values()} == {"stop"}


@pytest.mark.slow
def test_samples_of_rows_with_their_own_constraints_are_those_of_one_process(
    shared: Models, alone: Models
) -> None:
    """Rank 0 decides which of them go first, as their constraints are compiled, and which are refused."""
    kinds = [
        {"choice": ["yes, it is", "no", "12"]},
        {"regex": "The [a-z]{2,9}[.]"},
        {"json": {"type": "strin"}},
    ]
    prompts = [
        Prompt(id=f"q{n}", text=f"Tom has {n} apples.", sampling={"structured_outputs": kinds[n % 3]})
        for n in range(9)
    ]
    sampling, found = SamplingParams(max_tokens=16, temperature=0.9, n=2, seed=3), []
    for models in (shared, alone):
        engine = Engine(ranks_config(models.peers.ranks.size, max_batch_size=4), models=models)
        outputs = list(engine.generate(prompts, sampling))
        found.append({(each.id, each.sample): (each.text, each.error) for each in outputs})
    assert found[0] == found[1]
    assert len(found[0]) == 18
    assert sum(error is not None for _, error in found[0].values()) == 6


@pytest.mark.slow
def test_k_auto_is_decided_by_rank_0(shared: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its costs are measured; another rank would measure others. That all have the same K is compared in each pass."""
    costs = StepCosts(
        seconds={(size, k): 1.0 + 0.2 * k * size for size in (1, 2) for k in range(4)},
        partial={(2, k, part): 1.0 + 0.1 * part for k, part in ((1, 1), (3, 1), (3, 4), (3, 8), (3, 12))},
    )
    measured = build.step_costs.measure

    def measure(*asked: Any) -> StepCosts:
        assert measured(*asked).lengths == costs.lengths
        return costs

    monkeypatch.setattr(build.step_costs, "measure", measure)
    outputs = run(shared, GREEDY, num_spec_tokens=DraftLength(most=3, kind="auto"), max_batch_size=2)
    assert outputs.texts == run(shared, GREEDY).texts
    assert len({len(drafts) for steps in outputs.verified.values() for drafts, *_ in steps}) > 1


@pytest.mark.slow
def test_conversations_and_a_run_that_ends_early(shared: Models, alone: Models) -> None:
    prompts = [
        Prompt(
            id=f"q{n}", messages=(Message(role="user", content=f"Tom has {n} apples."),), follow_ups=("Why?",)
        )
        for n in range(3)
    ]
    short, texts = SamplingParams(max_tokens=8), []
    for models in (shared, alone):
        engine = Engine(ranks_config(models.peers.ranks.size), models=models)
        seen = iter(engine.generate(prompts, short))
        next(seen)
        seen.close()  # what is in flight is dropped on every rank
        texts.append({each.id: each.text for each in engine.generate(prompts, short)})
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_scores_are_those_of_one_process(shared: Models, alone: Models) -> None:
    requests = [
        ScoreRequest(id=each.id, token_ids=each.prompt_token_ids, num_context=3)
        for each in bundled_requests(10, GREEDY)
    ]
    found = []
    for models in (shared, alone):
        engine = build_engine(
            ranks_config(models.peers.ranks.size, max_prefill_tokens=64), models, lambda event: None
        )
        with pytest.raises(UserError, match="not in the vocabulary"):
            list(engine.score([ScoreRequest(id="bad", token_ids=(1, 10**6), num_context=1)]))
        some = engine.score(requests)
        next(iter(some))
        some.close()  # type: ignore[attr-defined]  # what is not scored yet is dropped on every rank
        found.append({each.request.id: each for each in engine.score(requests)})
    assert found[0].keys() == found[1].keys()
    for name, scored in found[0].items():
        assert scored.log_probs == pytest.approx(found[1][name].log_probs, abs=1e-4)
        assert scored.greedy == found[1][name].greedy


@pytest.mark.slow
def test_logits_for_a_verdict_are_computed_by_all_ranks(
    shared: Models, alone: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_prefill", prefill_and_compare)
    logits = [
        prefill_logits(ranks_config(models.peers.ranks.size), models)([5, 6, 7]) for models in (shared, alone)
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_request_that_is_refused_and_one_that_fails(shared: Models, alone: Models) -> None:
    found = []
    for models in (shared, alone):
        engine = Engine(ranks_config(models.peers.ranks.size), models=models)
        outputs = engine.generate(["Tom has", Prompt(id="long", text="x " * 3000)], GREEDY)
        found.append({each.id: (each.text, each.error) for each in outputs})
    assert found[0] == found[1]
    assert found[0]["long"][1] is not None


@pytest.mark.slow
def test_another_head_is_loaded_by_every_rank(shared: Models, alone: Models) -> None:
    asked = ranks_config(shared.peers.ranks.size)
    target = OneTarget(lambda *_: replace(shared, head=None))
    plain = replace(asked, num_spec_tokens=0, drafter=None)
    target.load(plain, open_checkpoints(plain))
    models = target.load(asked, open_checkpoints(asked))
    assert run(models, GREEDY).texts == run(shared, GREEDY).texts
    other = str(data_directory() / "demo" / "drafter-two-layers")
    several, one = (
        run(over_target(each, config, open_checkpoints(config)), GREEDY, drafter=other)
        for each in (shared, alone)
        for config in (ranks_config(each.peers.ranks.size, drafter=other),)
    )
    assert several.verified == one.verified != run(shared, GREEDY).verified


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_devices(torch.device("cuda", 0), 2)
    with refused("tensor-parallel is 2 and from cuda:1 on there is 1 of this machine's GPUs"):
        require_devices(torch.device("cuda", 1), 2)
    with pytest.raises(UserError, match="tensor-parallel is 0"):
        EngineConfig(model="m", drafter=None, num_spec_tokens=0, tensor_parallel=0)


def test_multicast_is_switched_off(shared: Models, tmp_path: Path) -> None:
    names = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
    assert [os.environ[name] for name in names] == ["0", "1", "1"]
    together(shared, _write_environment, ranks_config(shared.peers.ranks.size), str(tmp_path / "environment"))
    others = json.loads((tmp_path / "environment").read_text())
    assert [others[name] for name in names] == ["0", "1", "1"]


def _write_environment(config: EngineConfig, models: Models, path: str) -> None:
    Path(path).write_text(json.dumps(dict(os.environ)))


@pytest.mark.slow
def test_all_have_the_pages_of_the_smallest_rank(
    shared: Models, alone: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = run(alone, GREEDY, **WAYS["preemption"])
    monkeypatch.setattr(build, "num_pages", lambda *asked: 10_000)  # of rank 0
    assert as_rows(run(shared, GREEDY, **WAYS["preemption"]).passes) == as_rows(small.passes)


def test_engines_and_models_end_on_all_ranks(shared: Models, tmp_path: Path) -> None:
    asked = ranks_config(shared.peers.ranks.size)
    path = str(tmp_path / "engines")
    gc.collect()
    engine = build_engine(asked, shared, lambda event: None)
    together(shared, _count_engines, asked, path)
    before = int(Path(path).read_text())
    del engine
    gc.collect()
    together(shared, _count_engines, asked, path)
    assert int(Path(path).read_text()) == before - 1


def _count_engines(config: EngineConfig, models: Models, path: str) -> None:
    gc.collect()
    Path(path).write_text(str(sum(isinstance(each, EngineCore) for each in gc.get_objects())))


def test_models_of_another_number_of_ranks_are_refused(alone: Models) -> None:
    with pytest.raises(UserError, match="tensor-parallel is 2 and the models were loaded with 1"):
        build_engine(ranks_config(2), alone, lambda event: None)


# --- other families and heads ---


PAIRS = {
    "tiny-gpt-oss": ("bf16", "eagle3"),
    "tiny-qwen3-moe": ("bf16", "eagle3-2"),
    "tiny": ("fp8", "eagle3-2"),
    "own vocabulary": ("fp8", "eagle1"),
    "one pass": ("bf16", "peagle-2"),
    "a block": ("bf16", "dspark-2"),
}


def written(path: Path, name: str) -> Cycle:
    weights, head = PAIRS[name]
    shape = chosen_shape(name if name.startswith("tiny") else "tiny", None, None)
    cycle, layer = chosen_cycle(shape, 0.75, 0), chosen_layer(shape, None, weights)
    write_pair(path, shape, cycle, Source("cpu", 3), [HeadKind.find(head)], layer)
    return cycle


def found(path: Path, cycle: Cycle, num_ranks: int) -> list[tuple[Any, ...]]:
    """Texts, passes and steps with padded and non-padded batches."""
    asked = engine_config(path, num_spec_tokens=3, max_batch_size=4, page_size=16, tensor_parallel=num_ranks)
    checkpoints = open_checkpoints(asked)
    config = resolve(asked, checkpoints)
    models, params = load_models(config, checkpoints), SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [
        Request(id=str(n), prompt_token_ids=cycle.slice(7 * n, 5 + n), sampling=params) for n in range(6)
    ]
    runs: list[tuple[Any, ...]] = []
    for batch in ("padded", "non-padded"):
        events: list[EngineRow] = []
        engine = build_engine(replace(config, drafter_batch=batch), models, events.append)
        completions = {each.request.id: each for each in engine.generate(prompts)}
        steps = {name: each.record.steps for name, each in completions.items()}
        runs.append(({name: each.token_ids for name, each in completions.items()}, as_rows(events), steps))
    return runs


@pytest.mark.slow
@pytest.mark.usefixtures("shared")  # else that of other tests may be there, with processes of another number
@pytest.mark.parametrize("name", PAIRS)
def test_texts_drafts_and_passes_of_other_families_are_those_of_one_process(
    tmp_path: Path, name: str
) -> None:
    cycle = written(tmp_path, name)
    one, two = (found(tmp_path, cycle, num_ranks) for num_ranks in (1, 2))
    assert two == one
    known = {str(n): cycle.slice(7 * n + 5 + n, 24) for n in range(6)}
    assert [texts for texts, *_ in one] == [known, known]
