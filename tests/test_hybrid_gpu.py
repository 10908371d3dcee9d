"""On an NVIDIA GPU: hybrids give the CPU's texts and drafts, in all three graph modes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.config import SamplingParams
from specgen.engine import build
from tests.engines import Outputs, Pair, config_of, generate, load_pair, random_requests
from tests.marks import on_gpu
from tests.test_gpu import EXACT, FAST, MODES
from tests.tiny_hybrids import write_hybrid

pytestmark = on_gpu()
PAGED = FAST | {"page_size": 16}  # so that texts cross pages
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9)
WIDTHS = {"hidden_size": 256, "head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 64}


@pytest.fixture(scope="module", params=["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads and states are as wide as the kernels want them, and of 16 tokens some drafts are right by chance."""
    path = tmp_path_factory.mktemp("hybrid")
    write_hybrid(path / "target", request.param, mtp=True, vocab_size=16, std=0.1, **WIDTHS)
    return path


def run(pair: Pair, sampling: SamplingParams = GREEDY, **settings: Any) -> Outputs:
    requests = random_requests(12, 16, sampling, lengths=(2, 40))
    return generate(pair, requests, **{"num_spec_tokens": 4, "max_batch_size": 5} | settings)


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_drafts_equal_the_cpus_in_every_graph_mode(path: Path, batch: str) -> None:
    here = run(load_pair(path, drafter="mtp"), drafter_batch=batch)
    there = load_pair(path, torch.float32, "cuda", drafter="mtp")
    assert sum(here.accepted) > 0
    for mode in MODES:
        found = run(there, drafter_batch=batch, cuda_graphs=mode, **EXACT)
        assert found.texts == here.texts, mode
        assert found.verified == here.verified, mode


@pytest.mark.parametrize("k", [0, 1, 7])
def test_texts_equal_plain_ones_of_the_cpu(path: Path, k: int) -> None:
    here = run(load_pair(path, drafter="mtp"), num_spec_tokens=0)
    there = load_pair(path, torch.float32, "cuda", drafter="mtp")
    pieces = {"max_prefill_tokens": 7} if k == 1 else {}
    assert run(there, num_spec_tokens=k, **EXACT | pieces).texts == here.texts


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_graph_modes_agree_on_the_kernels_of_a_real_run(path: Path, sampling: SamplingParams) -> None:
    """A batch of one row has no padding rows, which round otherwise."""
    pair = load_pair(path, torch.bfloat16, "cuda", drafter="mtp")
    runs = [run(pair, sampling, max_batch_size=1, cuda_graphs=mode, **PAGED) for mode in MODES]
    for other in runs[1:]:
        assert other.texts == runs[0].texts
        assert other.verified == runs[0].verified


def test_a_preempted_text_is_computed_again(path: Path) -> None:
    pair = load_pair(path, torch.float32, "cuda", drafter="mtp")
    config = config_of(pair, num_spec_tokens=4, max_batch_size=8, **EXACT)
    memory = (
        build.state_bytes(config, pair.models.target.config, 8)
        + 18 * build.page_budget(config, pair.models).page_bytes
    )
    roomy, tight = (run(pair, max_batch_size=8, kv_memory=each, **EXACT) for each in (None, memory))
    assert tight.num_preempted > 0
    assert tight.texts == roomy.texts
