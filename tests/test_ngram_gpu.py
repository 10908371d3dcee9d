"""N-gram drafts on an NVIDIA GPU: drafts and texts equal the CPU's in all graph modes, and a step waits for nobody."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specgen.config import DraftLength, SamplingParams
from specgen.core.sequence import Request
from specgen.decoding.answer_pool import table_of
from specgen.decoding.ngram import lookup
from specgen.engine.warm_engine import WarmEngine
from specgen.record.record_rows import Captured, PassRow
from tests.engines import Pair, config_of, generate
from tests.marks import on_gpu
from tests.test_faults import Setting, require_no_change, run_without_fault
from tests.test_gpu import CAPTURED, EXACT, FAST, GREEDY, MODES, SAMPLED, captured, mixed
from tests.test_ngram import checked, naive

pytestmark = on_gpu()


def repeating(sampling: SamplingParams) -> list[Request]:
    """Texts of many lengths behind prompts that hold themselves twice."""
    return [replace(r, prompt_token_ids=r.prompt_token_ids * 2) for r in mixed(sampling)]


@pytest.mark.parametrize(("size", "longest"), [(8, 1), (300, 3), (70_000, 5)])
def test_a_search_equals_the_naive_one(size: int, longest: int) -> None:
    generator = torch.Generator().manual_seed(size)
    texts = torch.randint(0, 3 + size // 100, (5, size), generator=generator, dtype=torch.int32)
    lengths = torch.randint(1, size + 1, (5,), generator=generator)
    found = lookup(texts.cuda(), lengths.cuda(), longest, 8)[0].tolist()
    for row, text, length in zip(found, texts.tolist(), lengths.tolist(), strict=True):
        assert row == (list(naive(text[:length], longest, 8)) or [-1] * 8)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SamplingParams(temperature=0.9, top_k=20, top_p=0.9)])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_cuda_graphs_change_no_text_and_no_step(gpu_pair: Pair, k: int, sampling: SamplingParams) -> None:
    runs = {
        mode: generate(
            gpu_pair,
            repeating(sampling),
            drafter="ngram",
            num_spec_tokens=k,
            max_batch_size=7,
            cuda_graphs=mode,
            **EXACT,
        )
        for mode in MODES
    }
    assert {mode: captured(run) for mode, run in runs.items()} == CAPTURED
    for run in runs.values():
        assert set(checked(run, 3, k, end=1)) >= {0, k}
        assert run.texts == runs["off"].texts
        assert run.verified == runs["off"].verified
    assert {step[1] for steps in runs["off"].verified.values() for step in steps} >= {0, 1}


@pytest.mark.parametrize("mode", MODES)
def test_texts_and_steps_equal_the_cpus(demo_pair: Pair, gpu_pair: Pair, mode: str) -> None:
    asked: dict[str, Any] = {"drafter": "ngram:2", "num_spec_tokens": 4}
    here = generate(demo_pair, repeating(GREEDY), **asked)
    there = generate(gpu_pair, repeating(GREEDY), cuda_graphs=mode, **asked, **EXACT)
    plain = generate(gpu_pair, repeating(GREEDY), num_spec_tokens=0, cuda_graphs=mode, **EXACT)
    assert there.texts == here.texts == plain.texts
    assert there.verified == here.verified


def test_a_table_of_answers_equals_the_cpus() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(-1, 40, (50_000,), generator=generator)
    for here, there in zip(table_of(tokens, 8), table_of(tokens.cuda(), 8), strict=True):
        assert torch.equal(here, there.cpu())


def test_drafts_from_answers_change_no_text_and_are_the_same_in_all_modes(gpu_pair: Pair) -> None:
    """The table is replaced between replays of the graph that reads it."""
    asked: dict[str, Any] = {"num_spec_tokens": 4, "max_batch_size": 3}
    runs = {
        mode: generate(gpu_pair, repeating(GREEDY), drafter="suffix:3", cuda_graphs=mode, **asked, **EXACT)
        for mode in MODES
    }
    assert {mode: captured(run) for mode, run in runs.items()} == CAPTURED
    plain = generate(gpu_pair, repeating(GREEDY), num_spec_tokens=0, **EXACT)
    own = generate(gpu_pair, repeating(GREEDY), drafter="ngram:3", **asked, **EXACT)
    for run in runs.values():
        assert run.texts == plain.texts
        assert run.verified == runs["off"].verified != own.verified


@pytest.mark.parametrize("mode", MODES)
def test_captured_kernels_give_the_reference_texts(bfloat16_pair: Pair, mode: str) -> None:
    asked: dict[str, Any] = {"drafter": "ngram", "num_spec_tokens": 4, "max_batch_size": 7}
    reference = generate(bfloat16_pair, repeating(GREEDY), **asked, **FAST | {"attention": "sdpa"})
    outputs = generate(bfloat16_pair, repeating(GREEDY), cuda_graphs=mode, **asked, **FAST)
    assert set(checked(outputs, 3, 4, end=1)) >= {0, 4}  # drafts may end at an end token
    same = sum(outputs.texts[name] == text for name, text in reference.texts.items())
    assert same >= len(reference.texts) - 4  # bfloat16 rounds differently by batch and kernel


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("mode", ["step", "off"])
def test_an_error_at_any_launch_point_changes_no_result(
    gpu_pair: Pair, mode: str, kind: str, error: type[RuntimeError]
) -> None:
    """Also where a graph is captured, and where one is replayed."""
    setting = Setting(gpu_pair, kind, 4, True, settings=EXACT | {"cuda_graphs": mode, "drafter": "ngram"})
    require_no_change(setting, run_without_fault(setting), error)


def test_a_warm_engine_of_uniform_captures_no_step_during_a_run(gpu_pair: Pair) -> None:
    """K changes by the measured cost; texts stay those of plain decoding. Prompts are captured as they come.

    Of any other engine, sizes that were not timed are captured as a run comes to them, and all if costs were kept.
    """
    length = DraftLength(most=4, kind="uniform")
    config = config_of(gpu_pair, drafter="ngram", num_spec_tokens=length, max_batch_size=7, **EXACT)
    run = WarmEngine(config, gpu_pair.models, repeating(GREEDY)).run()
    texts = {name: completion.token_ids for name, completion in run.completions.items()}
    assert texts == generate(gpu_pair, repeating(GREEDY), num_spec_tokens=0, max_batch_size=7, **EXACT).texts
    assert {row.what for row in run.passes if isinstance(row, Captured)} <= {"prompts"}
    assert any(isinstance(row, PassRow) and row.num_spec_tokens for row in run.passes)
