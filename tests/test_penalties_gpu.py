"""Penalties on an NVIDIA GPU: counted inside the captured step, without a sync, and the same texts as on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.decoding.sampling import SamplingBatch, penalised, token_counts
from specgen.engine.build import build_engine
from tests.engines import Pair, bundled_requests, config_of, generate
from tests.marks import on_gpu
from tests.test_asked_texts import penalties
from tests.test_penalties import KINDS

pytestmark = on_gpu()
FLOAT32 = {"device": "cuda", "dtype": "float32", "page_size": 16}
EXACT = {**FLOAT32, "attention": "sdpa-static"}  # can be captured in float32
COUNT = 20


def asked() -> list[Request]:
    requests = bundled_requests(COUNT, SamplingParams())
    return [replace(r, sampling=SamplingParams(**penalties(at, (), ()))) for at, r in enumerate(requests)]


@pytest.mark.parametrize("mode", ["step", "pass", "off"])
@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_captured_steps_give_the_texts_of_the_cpu(
    demo_pair: Pair, gpu_pair: Pair, k: int, batch: str, mode: str
) -> None:
    """Batches of several sizes are captured; rows with and without penalties join, leave and move between replays."""
    settings: dict[str, Any] = {"num_spec_tokens": k, "drafter_batch": batch, "max_batch_size": 6}
    here = generate(demo_pair, asked(), **settings)
    there = generate(gpu_pair, asked(), cuda_graphs=mode, **settings, **EXACT)
    assert there.texts == here.texts
    assert there.verified == here.verified


@pytest.mark.parametrize("drafter", ["ngram:2", "head"])
def test_preemption_and_a_second_run_of_one_engine(demo_pair: Pair, gpu_pair: Pair, drafter: str) -> None:
    """Captured steps find counts at the same addresses in a later run, and none of an earlier one in them."""
    settings: dict[str, Any] = {"num_spec_tokens": 4, "max_batch_size": 4}
    if drafter != "head":
        settings["drafter"] = drafter
    expected = generate(demo_pair, asked(), **settings).texts
    page = 16 * (12 + 1) * 2 * 2 * 64 * 4  # positions, layers of target and head, k and v, heads, dim, bytes
    config = config_of(gpu_pair, cuda_graphs="step", kv_memory=14 * page, **settings, **EXACT)
    engine = build_engine(config, gpu_pair.models, lambda event: None)
    plain = [replace(r, sampling=SamplingParams(max_tokens=9)) for r in asked()]
    for requests in (asked(), plain, asked()[::-1]):
        found = {each.request.id: each.token_ids for each in engine.generate(requests)}
        if requests is not plain:
            assert found == expected


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_a_seed_gives_the_same_penalised_text_captured_or_not(gpu_pair: Pair, draft_sampling: str) -> None:
    requests = [
        replace(r, sampling=replace(r.sampling, temperature=0.8, top_p=0.9, seed=i))
        for i, r in enumerate(asked())
    ]
    settings: dict[str, Any] = {"num_spec_tokens": 4, "draft_sampling": draft_sampling, **EXACT}
    captured, eager = (
        generate(gpu_pair, requests, cuda_graphs=mode, **settings).texts for mode in ("step", "off")
    )
    assert captured == eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_penalties_of_a_row_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """A vocabulary and a batch as in use."""
    generator = torch.Generator().manual_seed(0)
    num_rows, num_drafts, vocab_size = 64, 4, 151_936
    logits = (3 * torch.randn(num_rows, num_drafts + 1, vocab_size, generator=generator)).to(dtype)
    tokens = torch.randint(0, 500, (num_rows, 60), generator=generator)
    drafts = torch.randint(0, 500, (num_rows, num_drafts), generator=generator)
    drafts[::3, 2:] = -1
    texts = [(row[:30], row[30:]) for row in tokens.tolist()]
    params = [SamplingParams(**KINDS[n % len(KINDS)]) for n in range(num_rows)]

    def found(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        counts = token_counts(texts, vocab_size, device)
        batch = SamplingBatch.of(params, [0] * num_rows, device, counts)
        rows = penalised(logits.to(device), drafts.to(device), batch)
        batch.count(drafts.clamp(min=0).to(device), torch.full((num_rows,), 2, device=device))
        return rows.cpu(), batch.counts.cpu()

    here, there = found(torch.device("cpu")), found(torch.device("cuda"))
    assert torch.equal(here[1], there[1])
    assert torch.allclose(here[0], there[0], rtol=1e-6, atol=1e-5)


def test_without_penalties_a_step_launches_what_it_did(gpu_pair: Pair) -> None:
    """And a batch whose penalised requests have left goes back to that step."""
    from torch.profiler import ProfilerActivity, profile

    def kernels(before: Callable[[Any], None]) -> list[str]:
        config = config_of(gpu_pair, cuda_graphs="off", num_spec_tokens=2, **EXACT)
        engine = build_engine(config, gpu_pair.models, lambda event: None)
        before(engine)
        for request in bundled_requests(2, SamplingParams(max_tokens=60, ignore_eos=True)):
            engine.submit(request)
        for _ in range(3):
            engine.step()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            engine.step()
            torch.cuda.synchronize()
        return [event.name for event in seen.events()]

    def penalise(engine: Any) -> None:
        list(engine.generate(bundled_requests(2, SamplingParams(max_tokens=4, presence_penalty=1.0))))

    assert len(kernels(penalise)) == len(kernels(lambda engine: None))
