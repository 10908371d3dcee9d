"""``specgen inspect --gpu``: the memory plan against what an engine allocates."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.checkpoints.checkpoint import build_target, mtp_part, target_config
from specgen.checkpoints.tensor_reader import TensorReader
from specgen.config import LARGEST_AUTOMATON, EngineConfig, UserError
from specgen.decoding.automaton_tables import Tables
from specgen.engine.build import new_cache, num_pages, num_state_slots
from specgen.engine.loading import load_models, open_checkpoints
from specgen.engine.memory_plan import MemoryPlan, memory_plans
from specgen.engine.page_budget import PageBudget
from specgen.kv.kv_cache import StateCache
from specgen.kv.pages import PageAllocator
from specgen.models.model_config import LayerConfig
from specgen.ops.reference import torch_ops
from tests.commands import specgen
from tests.published import GLM, GPT_OSS_20B, published
from tests.tiny_hybrids import write_hybrid

GIB = 1 << 30


def plans(demo_path: Path, drafter: str | None, total: int = GIB) -> tuple[MemoryPlan, ...]:
    return memory_plans(str(demo_path / "target"), drafter, total)


def cache_bytes(model: LayerConfig, pages: PageAllocator, config: EngineConfig) -> int:
    """What an engine allocates for the cache of ``model``."""
    cache = new_cache(model, (pages,), torch.bfloat16, torch.device("cpu"))
    return sum(plane.nbytes for layer in range(model.num_layers) for plane in cache.pages(layer))


@pytest.mark.parametrize("drafter", ["drafter", "drafter-two-layers", "ngram", None])
def test_an_engine_has_the_planned_pages(demo_path: Path, drafter: str | None) -> None:
    name = drafter if drafter in ("ngram", None) else str(demo_path / drafter)
    every = plans(demo_path, name)
    for plan in {0: every[0], 1: every[-1]}.values():
        settings = {"device": "cpu", "cuda_graphs": "off", "max_batch_size": 10_000}
        config = replace(plan.config, kv_memory=plan.kv_cache, **settings)
        models = load_models(config, open_checkpoints(config))
        assert num_pages(config, models) == plan.num_pages
        pages = PageAllocator(plan.num_pages, config.page_size)
        stored = models.target.config, *([models.head.config] if models.head else [])
        texts = 4 * (config.lookup is not None) * config.page_size  # n-grams look up ids
        page = config.page_size * plan.kv_bytes_per_token
        taken = sum(cache_bytes(each, pages, config) for each in stored) + texts * (plan.num_pages + 1)
        assert taken == (plan.num_pages + 1) * page, "one page more, for padding rows"
        assert plan.kv_cache - page < plan.num_pages * page <= plan.kv_cache
        held: list[list[int]] = [[] for _ in range(plan.num_sequences)]
        assert all(pages.grow(each, plan.length + config.draft_length.most + 1) for each in held)
        assert plan.num_sequences > 10


def test_weights_are_those_that_are_loaded(demo_path: Path) -> None:
    plain, drafting = (
        plan for plan in plans(demo_path, str(demo_path / "drafter")) if plan.config.draft_length.most < 2
    )
    models = load_models(replace(drafting.config, device="cpu"), open_checkpoints(drafting.config))
    readers = [
        TensorReader(checkpoint=each, dtype=torch.bfloat16, device=torch.device("cpu"))
        for each in models.checkpoints.values()
    ]
    build_target(models.target.config, readers[0])
    assert plain.weights == sum(readers[0].taken.values())
    assert drafting.weights - plain.weights == 2 * sum(
        prod(info.shape)
        for info in models.checkpoints["drafter"].tensors.values()
        if info.dtype == "bfloat16"
    )


def test_more_drafts_leave_less_and_the_parts_are_the_whole(demo_path: Path) -> None:
    every = plans(demo_path, str(demo_path / "drafter"))
    assert [plan.config.draft_length.most for plan in every] == [*range(8)]
    assert all(
        plan.weights + plan.workspace + plan.passes + plan.kv_cache == int(0.9 * GIB) for plan in every
    )
    sequences = [plan.num_sequences for plan in every]
    assert sequences == sorted(sequences, reverse=True)
    assert every[0].kv_bytes_per_token < every[1].kv_bytes_per_token


@pytest.mark.parametrize("plan_of", [0, 7])
def test_one_sequence_more_does_not_fit(demo_path: Path, plan_of: int) -> None:
    plan = plans(demo_path, str(demo_path / "drafter"))[plan_of]
    assert plan._room(plan.num_sequences) >= plan.num_sequences
    assert plan._room(plan.num_sequences + 1) < plan.num_sequences + 1


def test_gpt_oss_on_a_gpu_of_80_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published shape: 13.76 GB of weights in MXFP4, 48 KiB a token, half of it behind a window of 128 positions.

    For 2,048 tokens and what a pass writes behind them that are 33 pages, and 4 windowed ones.
    """
    parts = {"model": published(GPT_OSS_20B)}
    monkeypatch.setattr("specgen.engine.memory_plan.open_checkpoints", lambda config: parts)
    (plan,) = memory_plans("published", None, 80 * GIB)
    assert plan.weights / 1e9 == pytest.approx(13.76, abs=0.01)
    assert plan.kv_bytes_per_token == 49_152
    assert plan.length == 2048
    kept = plan.kv_cache // (49_152 * 64) // 33  # where all keep all
    assert 1.7 * kept < plan.num_sequences <= plan.kv_cache // (24_576 * 64 * 37)
    assert plan.num_sequences == min(plan.num_pages // 33, plan.windowed_pages // 4)
    assert plan.kv_cache - 49_152 * 64 < 24_576 * 64 * (plan.num_pages + plan.windowed_pages) <= plan.kv_cache
    (half,) = memory_plans("published", None, 80 * GIB, tensor_parallel=2)
    table = 201_088 * 2880 * 2  # the embedding, which both have whole
    assert 2 * half.weights - plan.weights == pytest.approx(table, rel=0.01)
    assert 2 * half.kv_bytes_per_token == plan.kv_bytes_per_token
    with pytest.raises(UserError, match=r"tensor-parallel is 4, which .* use one of 1, 2$"):
        memory_plans("published", None, 80 * GIB, tensor_parallel=4)


def test_a_short_context_has_room_for_as_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,048 tokens, whether that is the whole context or a part: layers with a window need not keep all."""
    found = []
    for context in (2048, 4096):
        parts = {"model": published(GPT_OSS_20B | {"max_position_embeddings": context})}
        monkeypatch.setattr("specgen.engine.memory_plan.open_checkpoints", lambda config, parts=parts: parts)
        (plan,) = memory_plans("published", None, 40 * GIB)
        assert plan._room(plan.num_sequences) == plan.num_sequences
        found.append(plan.num_sequences)
    assert found == [383, 383]


def test_a_published_glm_fits_one_h100_with_its_mtp_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more than 8 GB for latents."""
    glm = published(GLM)
    parts = {"model": glm, "drafter": mtp_part(glm)}
    monkeypatch.setattr("specgen.engine.memory_plan.open_checkpoints", lambda config: parts)
    three = memory_plans("published", "mtp", 79 * GIB)[3]
    assert three.weights / 1e9 == pytest.approx(62.5, abs=0.5)
    assert three.kv_bytes_per_token == 48 * 1152
    assert three.kv_cache > 8e9
    assert three.num_sequences > 64


def inspected(*arguments: str) -> tuple[int, str]:
    result = specgen("inspect", *arguments, columns=80)
    return result.exit_code, result.output if result.exception is None else str(result.exception)


def test_inspect_prints_the_plan(demo_path: Path) -> None:
    pair = [str(demo_path / name) for name in ("drafter", "target")]  # in either order
    code, text = inspected(*pair, "--gpu=1GiB")
    assert code == 0
    assert "Target and head fit" in text
    assert "Memory plan for 0.9 of 1.0 GiB" in text
    assert max(map(len, text[text.index("Memory plan") :].splitlines())) <= 80
    plan = json.loads(inspected(*pair, "--gpu=1GiB", "--json")[1])["memory_plan"]
    assert plan == [each.to_json() for each in plans(demo_path, pair[0])]
    assert "memory_plan" not in json.loads(inspected(*pair, "--json")[1])


def test_states_of_a_hybrid_are_counted(tmp_path: Path) -> None:
    config = write_hybrid(tmp_path, mtp=True)
    spec = config.state_spec
    assert spec is not None
    for plan in memory_plans(str(tmp_path), "mtp", GIB):
        states = StateCache(
            spec=spec,
            num_slots=num_state_slots(plan.num_sequences) + 1,
            step_rows=plan.config.draft_length.most + 1,
            dtype=torch.bfloat16,
            device=torch.device("meta"),
        )
        assert plan.states == sum(each.nbytes for each in vars(states).values())
        assert plan.states > plan.num_sequences * spec.num_bytes
    code, text = inspected(str(tmp_path), "mtp", "--gpu=1GiB")
    assert code == 0, text
    assert "states" in text


def test_tables_of_constraints_are_said(demo_path: Path) -> None:
    plan = plans(demo_path, None)[0]
    most = num_state_slots(plan.num_sequences)
    ops = torch_ops()
    meta = torch.device("meta")
    tables = Tables(most, LARGEST_AUTOMATON, plan.target.vocab_size, meta, walk=ops.walk, mask=ops.mask)
    assert plan.constraints == tables.classes.nbytes + tables.successors.nbytes
    _, text = inspected(str(demo_path / "target"), "--gpu=1GiB")
    assert f"take {plan.constraints / GIB:.2f} GiB more" in " ".join(text.split())


def test_what_does_not_fit_is_said(demo_path: Path) -> None:
    code, text = inspected(str(demo_path / "target"), "--gpu=512MiB")
    assert code == 0
    assert "Not one sequence of" in text


def test_wrong_plans_are_refused(demo_path: Path) -> None:
    target, head = str(demo_path / "target"), str(demo_path / "drafter")
    assert "gpu is 'many': write a size such as 512MiB" in inspected(target, "--gpu=many")[1]
    assert "gpu is 80 bytes: add the unit, such as --gpu 80GiB" in inspected(target, "--gpu=80")[1]
    assert "is no target: a memory plan is of a target" in inspected(head, "--gpu=1GiB")[1]
    code, text = inspected(head, head, "--gpu=1GiB")
    assert (code, "Memory plan" in text) == (1, False)
    assert "Memory plan" in inspected(target, target, "--gpu=1GiB")[1], "the second is a draft model"


def test_short_and_long_texts_lose_the_same_by_a_split() -> None:
    """Of gpt-oss, against splits of their own; and pages for given sequences are enough for them, and no fewer are."""
    target = target_config(published(GPT_OSS_20B))
    settings: dict[str, Any] = {"page_size": 64, "cuda_graphs": "step", "max_batch_size": 100_000}
    config = EngineConfig(
        model="published", drafter=None, num_spec_tokens=0, dtype="bfloat16", kv_dtype="model", **settings
    )
    budget, memory = PageBudget(config=config, target=target, head=None), 8 * GIB

    def kept(num_tokens: int) -> float:
        each, windowed = budget.of_sequence(num_tokens)
        pages = budget.within(memory)
        room = min(pages / each, budget.windowed(pages) / windowed)
        return room / (memory / budget.bytes_of(each, windowed))

    assert kept(1024) == pytest.approx(kept(8192), rel=0.01)
    assert 0.8 < kept(1024) < kept(2048) < 1
    assert kept(500) < kept(1024)
    for lengths in ([100] * 30, [5000, 70], [9000] * 40):
        pages = budget.for_sequences(lengths)
        needed = [sum(each) for each in zip(*map(budget.of_sequence, lengths), strict=True)]
        assert pages >= needed[0]
        assert budget.windowed(pages) >= needed[1]
        assert budget.within(budget.bytes_with(pages)) >= pages
