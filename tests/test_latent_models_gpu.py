"""On an H100 or H200: whole models with latent attention and MTP layers, at the widths that the kernels are built for.

Their logits are those of the CPU, their texts those of passes without graphs and without drafts. Two minutes, compiled.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams
from specgen.engine.build import prefill_logits
from specgen.experiments.audit import Judge
from tests.engines import Outputs, Pair, config_of, generate, load_pair, random_requests
from tests.marks import on_gpu
from tests.tiny_latents import GLM, write_latent

CUDA = torch.device("cuda")
pytestmark = on_gpu(hopper=True)
VOCAB = 12  # few, so that drafts are accepted
WIDE = GLM | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "std": 0.05,
    "vocab_size": VOCAB,
}
PAIRS: dict[str, Callable[[Path], object]] = {
    "glm": partial(write_latent, num_mtp=1, num_attention_heads=20, num_key_value_heads=20, **WIDE),
    "deepseek": partial(
        write_latent,
        family="deepseek",
        num_mtp=1,
        own=True,
        **WIDE
        | {"qk_nope_head_dim": 128, "v_head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 16},
    ),
    "three-layers": partial(write_latent, num_mtp=3, own=True, seed=1, **WIDE),
}
FAST = {"device": "cuda", "dtype": "bfloat16", "attention": "hopper", "page_size": 64}
REQUESTS = random_requests(12, VOCAB, SamplingParams(max_tokens=32))


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path: Path = tmp_path_factory.mktemp(request.param)
    PAIRS[request.param](path / "target")
    return load_pair(path, torch.bfloat16, "cuda", drafter="mtp")


def run(pair: Pair, **changes: object) -> Outputs:
    return generate(pair, REQUESTS, **FAST | {"num_spec_tokens": 4} | changes)


def logits(pair: Pair, **settings: object) -> Tensor:
    after = prefill_logits(config_of(pair, **settings), pair.models)
    return torch.stack([after(request.prompt_token_ids).cpu().float() for request in REQUESTS])


def assert_rounding_alone(pair: Pair, reference: Outputs, other: Outputs) -> None:
    """Where texts diverge, either token was as good."""
    after = prefill_logits(config_of(pair, **FAST), pair.models)
    judge = Judge(logits_after=after, dtype=torch.bfloat16, token_text=str)
    for request in REQUESTS:
        texts = reference.texts[request.id], other.texts[request.id]
        found = judge.first_divergence(request.id, request.prompt_token_ids, *texts)
        assert found is None or found.explained, found


@pytest.mark.parametrize("attention", ["hopper", "sdpa"])
def test_logits_are_those_of_the_cpu(pair: Pair, attention: str) -> None:
    right = logits(load_pair(pair.path, drafter="mtp"), page_size=16)
    got = logits(pair, **FAST | {"attention": attention})
    assert right.std() > 0.3  # a flat model would hide mistakes
    assert ((got - right).norm(dim=1) / right.norm(dim=1)).median() < 0.03


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_graphs_change_no_text_and_no_step(pair: Pair, batch: str) -> None:
    """Seven run in a graph of eight, in which GEMMs may round otherwise; two in one of two."""
    settings: dict[str, object] = {"drafter_batch": batch, "num_spec_tokens": 3}
    for most in (2, 7):
        step, each_pass, eager = (
            run(pair, cuda_graphs=mode, max_batch_size=most, **settings) for mode in ("step", "pass", "off")
        )
        assert step.texts == each_pass.texts
        assert step.verified == each_pass.verified
        if most == 2:
            assert step.verified == eager.verified
        assert_rounding_alone(pair, eager, step)


def test_torch_gives_the_same_text_up_to_rounding(pair: Pair) -> None:
    fast, other = (run(pair, num_spec_tokens=3, attention=each) for each in ("hopper", "sdpa"))
    assert_rounding_alone(pair, fast, other)


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("k", range(1, 8))
def test_drafts_change_no_text_beyond_rounding(pair: Pair, k: int, batch: str) -> None:
    """Batches shrink as texts end."""
    plain = run(pair, num_spec_tokens=0)
    assert_rounding_alone(pair, plain, run(pair, num_spec_tokens=k, drafter_batch=batch))


def test_some_drafts_are_accepted_and_prompts_in_pieces_change_no_text(pair: Pair) -> None:
    """Beyond rounding: a piece with more positions before it than rows is not expanded."""
    whole, pieces = (run(pair, num_spec_tokens=3, max_prefill_tokens=most) for most in (2048, 5))
    assert any(step[1] for steps in whole.verified.values() for step in steps)
    assert_rounding_alone(pair, whole, pieces)
