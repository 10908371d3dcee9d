"""On an NVIDIA GPU: every kind of drafter gives the CPU's texts and drafts, in all three graph modes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.config import SamplingParams
from specgen.core.graphs import Runner, bucket
from specgen.core.packing import PromptBlocks
from specgen.models.gemma4 import Gemma4Config
from specgen.models.model_config import TargetConfig
from tests.engines import Outputs, Pair, generate, load_pair, random_requests
from tests.marks import on_gpu
from tests.test_gpu import EXACT, FAST, MODES
from tests.tiny_checkpoints import write_dflash_head, write_eagle1_head, write_head, write_target
from tests.tiny_gemma4 import write_assistant, write_deepspec, write_gemma4

pytestmark = on_gpu()
PAGED = FAST | {"page_size": 16}  # so that texts cross pages
GREEDY, SAMPLED = SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.9)


def _layers(path: Path, target: TargetConfig, **settings: Any) -> None:
    write_head(path, target, "speculators", num_layers=2, windows=[None, 7], **settings)


HEADS: dict[str, Callable[[Path, TargetConfig], None]] = {
    "EAGLE-1": lambda path, target: write_eagle1_head(path, target, fc_bias=True, qkv_bias=True),
    "two-layers": _layers,
    "last-state": lambda path, target: write_head(path, target, reads_output=True, norm_output=True),
    "P-EAGLE": lambda path, target: _layers(path, target, mask_token=("ptd_token_id", 5)),
    "DFlash": lambda path, target: write_dflash_head(path, target, windows=[None, 7], biases=True),
    "DFlash-windows-ahead": lambda path, target: write_dflash_head(
        path, target, windows=[None, 7], changed_config={"is_causal": False}
    ),
    "DSpark": lambda path, target: write_dflash_head(
        path, target, "DeepSpec", own=True, markov=("gated", 64), confidence=True
    ),
    "DFlash2": lambda path, target: write_dflash_head(path, target, second=(2, 8, 3)),
}

OF_GEMMA4: dict[str, Callable[[Path, Gemma4Config], None]] = {
    "assistant": write_assistant,
    "assistant-centroids": lambda path, target: write_assistant(path, target, ordered=(16, 5)),
    "EAGLE3-Gemma-4": write_deepspec,
    "DSpark-Gemma-4": lambda path, target: write_deepspec(path, target, "dspark", markov=8),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetConfig]:
    """Its heads are as wide as the kernels want them."""
    path = tmp_path_factory.mktemp("target")
    return path, write_target(path, hidden_size=256, head_dim=64)  # an EAGLE-1 config has no head_dim


@pytest.fixture(params=[*HEADS, *OF_GEMMA4])
def pair_on(
    request: pytest.FixtureRequest, target: tuple[Path, TargetConfig], tmp_path: Path
) -> Callable[..., Pair]:
    """Loads the target and a head of that kind in a dtype to a device."""
    if request.param in OF_GEMMA4:
        widths = {"head_dim": 64, "global_head_dim": 128}
        size = "e2b" if request.param == "assistant-centroids" else "12b"
        OF_GEMMA4[request.param](tmp_path / "drafter", write_gemma4(tmp_path / "target", size, **widths))
    else:
        path, config = target
        (tmp_path / "target").symlink_to(path)
        HEADS[request.param](tmp_path / "drafter", config)
    return lambda dtype, device: load_pair(tmp_path, dtype, device)


def run(pair: Pair, sampling: SamplingParams, batch: str, **settings: Any) -> Outputs:
    requests = random_requests(12, 128, sampling, lengths=(2, 40))
    changes = {"num_spec_tokens": 4, "drafter_batch": batch, "max_batch_size": 5} | settings
    return generate(pair, requests, **changes)


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_drafts_equal_the_cpus_in_every_graph_mode(pair_on: Callable[..., Pair], batch: str) -> None:
    here = run(pair_on(torch.float32, "cpu"), GREEDY, batch)
    there = pair_on(torch.float32, "cuda")
    for mode in MODES:
        found = run(there, GREEDY, batch, cuda_graphs=mode, **EXACT)
        assert found.texts == here.texts, mode
        assert found.verified == here.verified, mode


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_graph_modes_agree_on_the_kernels_of_a_real_run(
    pair_on: Callable[..., Pair], batch: str, draft_sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same rows: prompts in blocks and more padding rows, which captures alone have, round otherwise."""
    monkeypatch.setattr(PromptBlocks, "of", lambda layout: None)
    monkeypatch.setattr(Runner, "num_rows", lambda self, num_sequences: bucket(num_sequences))
    pair = pair_on(torch.bfloat16, "cuda")
    sampling = GREEDY if draft_sampling == "greedy" else SAMPLED
    runs = [
        run(pair, sampling, batch, cuda_graphs=mode, draft_sampling=draft_sampling, **PAGED) for mode in MODES
    ]
    assert sum(map(len, runs[0].verified.values())) > 100
    for other in runs[1:]:
        assert other.texts == runs[0].texts
        assert other.verified == runs[0].verified


@pytest.mark.parametrize("attention", ["trtllm", "flashinfer", "hopper"])
@pytest.mark.parametrize("pair_on", ["DFlash", "DFlash-windows-ahead"], indirect=True)
def test_blocks_that_look_ahead_on_every_backend(pair_on: Callable[..., Pair], attention: str) -> None:
    """Rounding to bfloat16 changes a few drafts."""
    pair, settings = pair_on(torch.bfloat16, "cuda"), FAST | {"page_size": 16}
    exact = run(pair, GREEDY, "padded", **settings | {"attention": "sdpa"}).verified
    found = run(pair, GREEDY, "padded", **settings | {"attention": attention}).verified
    first = [(exact[name][0][0], found[name][0][0]) for name in exact if exact[name] and found[name]]
    same = [a == b for mine, theirs in first for a, b in zip(mine, theirs, strict=True)]
    assert len(same) > 20
    assert sum(same) > 0.8 * len(same)


# the others' drafts depend on rounding: on a CPU, bfloat16 changes half of their first ones
@pytest.mark.parametrize("pair_on", ["two-layers", "P-EAGLE", "DFlash"], indirect=True)
def test_most_drafts_equal_the_references_on_the_kernels_of_a_real_run(pair_on: Callable[..., Pair]) -> None:
    """Rounding to bfloat16 changes a few."""
    pair = pair_on(torch.bfloat16, "cuda")
    exact = run(pair, GREEDY, "padded", **PAGED | {"attention": "sdpa-static"}).verified
    found = run(pair, GREEDY, "padded", **PAGED).verified
    first = [(exact[name][0][0], found[name][0][0]) for name in exact if exact[name] and found[name]]
    same = [a == b for mine, theirs in first for a, b in zip(mine, theirs, strict=True)]
    assert len(same) > 20
    assert sum(same) > 0.8 * len(same)
