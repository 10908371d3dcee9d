"""On an NVIDIA GPU: the reference backend gives there what it gives on the CPU."""

from pathlib import Path

import pytest
import torch

from specgen.config import SamplingParams
from tests.engines import Pair, generate, load_pair, random_requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
REQUESTS = random_requests(12, 4096, SamplingParams(max_tokens=48), lengths=(3, 200))
SAMPLED = random_requests(12, 4096, SamplingParams(max_tokens=32, temperature=0.8), lengths=(3, 60))


@pytest.fixture(scope="module")
def gpu_pair(demo_path: Path) -> Pair:
    return load_pair(demo_path, device="cuda")


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_texts_and_steps_are_those_of_the_cpu(demo_pair: Pair, gpu_pair: Pair, k: int, batch: str) -> None:
    here = generate(demo_pair, REQUESTS, num_spec_tokens=k, drafter_batch=batch)
    there = generate(gpu_pair, REQUESTS, num_spec_tokens=k, drafter_batch=batch, device="cuda")
    assert there.texts == here.texts
    assert there.verified == here.verified


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_one_seed_is_one_text_on_every_device(demo_pair: Pair, gpu_pair: Pair, draft_sampling: str) -> None:
    here = generate(demo_pair, SAMPLED, draft_sampling=draft_sampling)
    there = generate(gpu_pair, SAMPLED, draft_sampling=draft_sampling, device="cuda")
    same = sum(here.texts[name] == there.texts[name] for name in here.texts)
    # a draw may fall on the other side of a border that two summations round differently
    assert same >= len(SAMPLED) - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_drafts_as_well(demo_path: Path, gpu_pair: Pair, dtype: torch.dtype) -> None:
    half = load_pair(demo_path, dtype, "cuda")
    name = str(dtype).removeprefix("torch.")

    def length(pair: Pair, **changes: str) -> float:
        steps = [s for v in generate(pair, REQUESTS, device="cuda", **changes).verified.values() for s in v]
        return 1 + sum(step[1] for step in steps) / len(steps)

    assert length(half, dtype=name) == pytest.approx(length(gpu_pair), rel=0.1)
