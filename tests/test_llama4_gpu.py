"""On an NVIDIA GPU: a Llama-4 and its EAGLE head give the CPU's texts and drafts, across the borders of chunks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.attention import LayerAttention
from specgen.attention.chunks import chunked
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.config import SamplingParams
from specgen.core.packing import PromptBlocks
from specgen.engine.choices import BACKENDS
from specgen.kv.layout import Layout
from specgen.ops.experts import Routing, choice
from tests.engines import Outputs, Pair, generate, load_pair, random_requests
from tests.marks import on_gpu
from tests.test_gpu import EXACT, FAST, MODES
from tests.tiny_llama4 import CHUNK, write_eagle_llama4, write_llama4

pytestmark = on_gpu()
PAGED = FAST | {"page_size": 16}  # so that texts cross pages, and chunks
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9)
WIDTHS = {"hidden_size": 256, "head_dim": 64, "floor_scale": 12}


@pytest.fixture(scope="module", params=[1, 2], ids=["scout", "maverick"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads are as wide as the kernels want them, and of 16 tokens some drafts are right by chance."""
    path, step = tmp_path_factory.mktemp("llama4"), request.param
    config = write_llama4(
        path / "target",
        vocab_size=16,
        std=0.1,
        interleave_moe_layer_step=step,
        use_qk_norm=step == 1,
        **WIDTHS,
    )
    write_eagle_llama4(path / "drafter", config, std=0.1)
    return path


def run(pair: Pair, sampling: SamplingParams = GREEDY, **settings: Any) -> Outputs:
    requests = random_requests(12, 16, sampling, lengths=(2, 40))
    return generate(
        pair, requests, **{"num_spec_tokens": 4, "max_batch_size": 5, "page_size": CHUNK} | settings
    )


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_drafts_equal_the_cpus_in_every_graph_mode(path: Path, batch: str) -> None:
    here = run(load_pair(path), drafter_batch=batch)
    there = load_pair(path, torch.float32, "cuda")
    assert sum(here.accepted) > 0
    for mode in MODES:
        found = run(there, drafter_batch=batch, cuda_graphs=mode, **EXACT)
        assert found.texts == here.texts, mode
        assert found.verified == here.verified, mode


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_graph_modes_agree_on_the_kernels_of_a_real_run(
    path: Path, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same rows: prompts in blocks, which captures alone have, round otherwise, as do padding rows."""
    monkeypatch.setattr(PromptBlocks, "of", lambda layout: None)
    pair = load_pair(path, torch.bfloat16, "cuda")
    runs = [run(pair, sampling, max_batch_size=1, cuda_graphs=mode, **PAGED) for mode in MODES]
    for other in runs[1:]:
        assert other.texts == runs[0].texts
        assert other.verified == runs[0].verified


def _rows(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, 40, 128, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["trtllm", "hopper", "flashinfer"])
@pytest.mark.parametrize("query_len", [1, 5])
def test_every_backend_attends_in_chunks(name: str, query_len: int) -> None:
    """Around the first two borders of Scout's chunks; ``sdpa`` is held against the definition on a CPU."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    majors = BACKENDS[name].capabilities.compute_majors
    if majors is not None and torch.cuda.get_device_capability()[0] not in majors:
        pytest.skip(f"{name} does not run on this GPU")
    starts = torch.tensor([8188, 8190, 8191, 8192, 20_000, 16_380, 3], device=device)
    pages = torch.randperm(len(starts) * 320, device=device).to(torch.int32).view(len(starts), 320)
    keys, values = (
        torch.randn(pages.numel(), 64, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    layout = Layout.uniform(pages, starts, query_len, 64)
    q, layer = _rows(layout.num_rows), LayerAttention(index=0, scale=128**-0.5)
    right = chunked(StaticSdpaBackend(device).plan, layout, 8192)(layer, q, keys, values)
    got = chunked(BACKENDS[name](device).plan, layout, 8192)(layer, q, keys, values)
    torch.testing.assert_close(got, right, atol=2e-2, rtol=0)


def test_a_captured_call_stays_right_when_a_border_is_crossed() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    starts = torch.tensor([8185, 100], device=device)
    pages = torch.randperm(2 * 160, device=device).to(torch.int32).view(2, 160)
    keys, values = (torch.randn(320, 64, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    q, layer = _rows(10), LayerAttention(index=0, scale=128**-0.5)
    backend = BACKENDS["trtllm"](device)

    def attend() -> torch.Tensor:
        return chunked(backend.plan, Layout.uniform(pages, starts, 5, 64), 8192)(layer, q, keys, values)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = attend()
    for step in range(4):
        graph.replay()
        plan: Callable[..., Any] = SdpaBackend(device).plan
        right = chunked(plan, Layout.uniform(pages, starts.clone(), 5, 64), 8192)(layer, q, keys, values)
        torch.testing.assert_close(out, right, atol=2e-2, rtol=0, msg=str(step))
        starts += 3


@pytest.mark.parametrize("parts", [1, 3])
def test_the_sigmoid_of_the_best_logit_is_chosen_as_on_a_cpu(parts: int) -> None:
    from specgen.ops.router_kernel import fused_choice

    torch.manual_seed(0)
    logits = 4 * torch.randn(parts, 64, 16, device="cuda")
    routing = Routing(num_experts=16, num_chosen=1, weighing="sigmoid")
    ids, weights = fused_choice(torch.bfloat16, routing)(logits)
    rounded = logits.sum(0).bfloat16()
    right = choice(routing)(rounded[None].cpu())
    assert torch.equal(rounded.gather(1, ids)[:, 0], rounded.amax(1))
    torch.testing.assert_close(weights.cpu(), right[1], atol=0, rtol=2**-7)
