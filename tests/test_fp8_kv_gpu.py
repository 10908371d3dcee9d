"""On an NVIDIA GPU: an engine whose target keeps keys and values in FP8."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specgen.config import SamplingParams
from specgen.engine.build import prefill_logits
from specgen.experiments.audit import Judge
from tests.engines import Outputs, Pair, bundled_requests, config_of, generate, load_pair
from tests.marks import on_gpu
from tests.test_gpu import COUNT, EXACT, FAST, GREEDY, MODES, advance_without_sync, mixed, running_engine

pytestmark = on_gpu()
SCALES = (0.11, 0.07)  # of keys and of values of the first layer; those of the next are larger


def with_scales(pair: Pair) -> Pair:
    """``pair`` with a target whose layers have scales of their own."""
    target = pair.models.target
    blocks = tuple(
        replace(
            block, attention=replace(block.attention, layer=replace(layer, k_scale=k_scale, v_scale=v_scale))
        )
        for i, block in enumerate(target.blocks)
        for layer in [block.attention.layer]
        for k_scale, v_scale in [(SCALES[0] * 1.1**i, SCALES[1] * 1.2**i)]
    )
    return replace(pair, models=replace(pair.models, target=replace(target, blocks=blocks)))


@pytest.fixture(scope="module")
def bfloat16_pair(demo_path: Path) -> Pair:
    return with_scales(load_pair(demo_path, torch.bfloat16, "cuda"))


@pytest.fixture(scope="module")
def float32_pair(demo_path: Path) -> Pair:
    return with_scales(load_pair(demo_path, torch.float32, "cuda"))


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("mode", ["step", "pass"])
def test_graphs_change_no_text_and_no_step(float32_pair: Pair, mode: str, batch: str) -> None:
    settings = EXACT | {"kv_dtype": "fp8", "drafter_batch": batch, "num_spec_tokens": 4, "max_batch_size": 7}
    graphs, eager = (
        generate(float32_pair, mixed(GREEDY), cuda_graphs=each, **settings) for each in (mode, "off")
    )
    assert graphs.texts == eager.texts
    assert graphs.verified == eager.verified


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("attention", ["hopper", "trtllm", "flashinfer"])
def test_kernels_give_the_texts_of_sdpa(bfloat16_pair: Pair, attention: str, k: int, batch: str) -> None:
    settings = FAST | {"kv_dtype": "fp8", "drafter_batch": batch, "num_spec_tokens": k, "page_size": 64}
    outputs, expected = (
        generate(bfloat16_pair, mixed(GREEDY), **settings | {"attention": each})
        for each in (attention, "sdpa")
    )
    same = sum(outputs.texts[name] == text for name, text in expected.texts.items())
    assert same >= len(expected.texts) - 5  # bfloat16 rounds differently by batch and kernel


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("mode", MODES)
def test_speculation_changes_no_text_beyond_rounding(bfloat16_pair: Pair, mode: str, batch: str) -> None:
    settings = FAST | {"kv_dtype": "fp8", "drafter_batch": batch, "cuda_graphs": mode}
    plain, drafted = (generate(bfloat16_pair, mixed(GREEDY), num_spec_tokens=k, **settings) for k in (0, 4))
    judge = Judge(
        logits_after=prefill_logits(config_of(bfloat16_pair, **settings), bfloat16_pair.models),
        dtype=torch.bfloat16,
        token_text=str,
        fp8_kv=True,
    )
    for request in mixed(GREEDY):
        texts = plain.texts[request.id], drafted.texts[request.id]
        found = judge.first_divergence(request.id, request.prompt_token_ids, *texts)
        assert found is None or found.explained, found


def test_acceptance_is_that_of_the_models_format(bfloat16_pair: Pair) -> None:
    def length(outputs: Outputs) -> float:
        steps = [step for steps in outputs.verified.values() for step in steps]
        return 1 + sum(accepted for _, accepted, _ in steps) / len(steps)

    requests = bundled_requests(COUNT, GREEDY)
    fp8, plain = (
        length(generate(bfloat16_pair, requests, kv_dtype=name, num_spec_tokens=4, **FAST))
        for name in ("fp8", "model")
    )
    assert fp8 == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_a_steady_state_step_has_no_host_sync(bfloat16_pair: Pair, batch: str, mode: str) -> None:
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    settings = FAST | {"kv_dtype": "fp8", "drafter_batch": batch, "cuda_graphs": mode}
    engine = running_engine(bfloat16_pair, sampling, num_spec_tokens=4, **settings)
    advance_without_sync(engine)
