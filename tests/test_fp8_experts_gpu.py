"""On an NVIDIA GPU: a whole Qwen3-MoE in FP8, its logits those of the CPU, its texts those of passes without graphs.

About a minute with an empty cache of Triton's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams
from specgen.engine.build import prefill_logits
from specgen.experiments.divergence import Judge
from tests.engines import Pair, config_of, generate, load_pair, random_requests
from tests.test_fp8_experts import write
from tests.test_gpu import EXACT
from tests.tiny_checkpoints import write_head
from tests.tiny_mixtures import read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FORMS = ("dynamic", "block", "modelopt")
# widths that kernels of dense layers take; experts are no whole blocks wide
WIDTHS = {"hidden_size": 256, "moe_intermediate_size": 160, "head_dim": 64}
HALF: dict[str, Any] = {**EXACT, "dtype": "bfloat16"}
REQUESTS = random_requests(12, 128, SamplingParams(max_tokens=24))


@pytest.fixture(scope="module", params=FORMS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    write(path / "target", request.param, eos_token_id=0, **WIDTHS)
    write_head(path / "drafter", read(path / "target"), aux_layer_ids=[0, 1, 2], qk_norm=True)
    return path


@pytest.fixture(scope="module")
def half(path: Path) -> Pair:
    return load_pair(path, torch.bfloat16, "cuda")


def logits(pair: Pair, **settings: Any) -> Tensor:
    after = prefill_logits(config_of(pair, **settings), pair.models)
    return torch.stack([after(request.prompt_token_ids).cpu() for request in REQUESTS])


@pytest.mark.parametrize("path", ["dynamic", "block"], indirect=True)
def test_logits_are_those_of_the_cpu(path: Path) -> None:
    """Those of another model would be 1.4 away. Sums of tensor cores are 1e-4 off, after which inputs round otherwise.

    On a CPU embeddings that are 1e-4 off move the logits of these models by 0.06 in the median: see test_experts_gpu.py
    for the kernels one by one.
    """
    right = logits(load_pair(path))
    got = logits(load_pair(path, torch.float32, "cuda"), **EXACT)
    assert ((got - right).norm(dim=1) / right.norm(dim=1)).median() < 0.12


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("mode", ["step", "pass"])
def test_graphs_change_no_text_and_no_step(half: Pair, mode: str, batch: str) -> None:
    settings = HALF | {"drafter_batch": batch, "num_spec_tokens": 4, "max_batch_size": 7}
    graphs, eager = (generate(half, REQUESTS, cuda_graphs=each, **settings) for each in (mode, "off"))
    assert graphs.texts == eager.texts
    assert graphs.verified == eager.verified


def test_speculation_changes_no_text_beyond_rounding(half: Pair) -> None:
    plain, drafted = (generate(half, REQUESTS, num_spec_tokens=k, **HALF) for k in (0, 4))
    judge = Judge(
        logits_after=prefill_logits(config_of(half, **HALF), half.models),
        dtype=torch.bfloat16,
        token_text=str,
        fp8=True,
    )
    for request in REQUESTS:
        texts = plain.texts[request.id], drafted.texts[request.id]
        found = judge.first_divergence(request.id, request.prompt_token_ids, *texts)
        assert found is None or found.explained, found
