"""On an NVIDIA GPU: the reference backend gives there what it gives on the CPU."""

from pathlib import Path

import pytest
import torch

from specgen.config import SamplingParams
from tests.engines import Pair, bundled_requests, generate, load_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GREEDY = SamplingParams(max_tokens=48)
SAMPLED = SamplingParams(max_tokens=32, temperature=0.8)
COUNT = 20
FLOAT32 = {"device": "cuda", "dtype": "float32"}


@pytest.fixture(scope="module")
def gpu_pair(demo_path: Path) -> Pair:
    return load_pair(demo_path, device="cuda")


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_texts_and_steps_are_those_of_the_cpu(demo_pair: Pair, gpu_pair: Pair, k: int, batch: str) -> None:
    here = generate(demo_pair, bundled_requests(COUNT, GREEDY), num_spec_tokens=k, drafter_batch=batch)
    there = generate(
        gpu_pair, bundled_requests(COUNT, GREEDY), num_spec_tokens=k, drafter_batch=batch, **FLOAT32
    )
    assert sum(map(len, here.texts.values())) > 300
    assert there.texts == here.texts
    assert there.verified == here.verified


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_one_seed_is_one_text_on_every_device(demo_pair: Pair, gpu_pair: Pair, draft_sampling: str) -> None:
    here = generate(demo_pair, bundled_requests(COUNT, SAMPLED), draft_sampling=draft_sampling)
    there = generate(gpu_pair, bundled_requests(COUNT, SAMPLED), draft_sampling=draft_sampling, **FLOAT32)
    assert sum(map(len, here.texts.values())) > 300
    same = sum(here.texts[name] == there.texts[name] for name in here.texts)
    # a draw may fall on the other side of a border that two summations round differently
    assert same >= COUNT - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_drafts_as_well(demo_path: Path, gpu_pair: Pair, dtype: torch.dtype) -> None:
    half = load_pair(demo_path, dtype, "cuda")
    name = str(dtype).removeprefix("torch.")

    def length(pair: Pair, dtype_name: str) -> float:
        outputs = generate(pair, bundled_requests(COUNT, GREEDY), device="cuda", dtype=dtype_name)
        steps = [step for steps in outputs.verified.values() for step in steps]
        return 1 + sum(accepted for _, accepted, _ in steps) / len(steps)

    assert length(half, name) == pytest.approx(length(gpu_pair, "float32"), rel=0.1)
