"""Speculation changes no text: greedy output is that of ``transformers``, whatever K, batch and memory are."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from specgen.config import SamplingParams
from specgen.core.sequence import Request
from tests.engines import Pair, bundled_requests, generate, page_bytes, random_requests
from tests.marks import mostly_slow
from tests.reference_heads import ReferenceHead

pytestmark = pytest.mark.xdist_group("lossless")  # the texts of transformers are computed once

Texts = dict[str, tuple[int, ...]]
GREEDY = SamplingParams(max_tokens=24)
RANDOM = random_requests(32, 128, GREEDY, lengths=(1, 30))


def demo_requests() -> tuple[Request, ...]:
    return bundled_requests(12, SamplingParams(max_tokens=32))


@pytest.fixture(scope="module")
def random_texts(random_reference: ReferenceHead) -> Texts:
    return random_reference.target.texts(RANDOM)


@pytest.fixture(scope="module")
def demo_texts(demo_reference: ReferenceHead) -> Texts:
    return demo_reference.target.texts(demo_requests())


@pytest.mark.parametrize(
    ("k", "batch_size", "batch"),
    mostly_slow(
        [(0, 5, "padded"), (0, 32, "padded"), *product((1, 8), (1, 5, 32), ("padded", "non-padded"))],
        (0, 5, "padded"),
        (8, 5, "non-padded"),
    ),
)
def test_greedy_text_equals_transformers(
    random_pair: Pair, random_texts: Texts, k: int, batch: str, batch_size: int
) -> None:
    requests = RANDOM[: {1: 6, 5: 16, 32: 32}[batch_size]]
    outputs = generate(
        random_pair, requests, num_spec_tokens=k, drafter_batch=batch, max_batch_size=batch_size
    )
    assert outputs.texts == {r.id: random_texts[r.id] for r in requests}


@pytest.mark.parametrize("k", mostly_slow([1, 2, 4, 7], 4))
def test_greedy_text_with_mixed_acceptance(demo_pair: Pair, demo_texts: Texts, k: int) -> None:
    padded = generate(demo_pair, demo_requests(), num_spec_tokens=k, drafter_batch="padded")
    non_padded = generate(demo_pair, demo_requests(), num_spec_tokens=k, drafter_batch="non-padded")
    assert padded.texts == demo_texts
    assert padded.texts == non_padded.texts
    assert padded.verified == non_padded.verified
    assert set(padded.accepted) >= set(range(min(k, 4) + 1))


@pytest.mark.parametrize(
    ("batch", "ahead"), mostly_slow(product(("padded", "non-padded"), (False, True)), ("non-padded", False))
)
def test_preemption_changes_no_text_and_no_step(
    demo_pair: Pair, demo_texts: Texts, device_like: Callable[..., None], batch: str, ahead: bool
) -> None:
    roomy = generate(demo_pair, demo_requests(), num_spec_tokens=4, drafter_batch=batch)
    memory = 60 * page_bytes(demo_pair)
    device_like(ahead)
    tight = generate(demo_pair, demo_requests(), num_spec_tokens=4, drafter_batch=batch, kv_memory=memory)
    assert roomy.num_preempted == 0
    assert tight.num_preempted > 3
    assert tight.texts == demo_texts
    assert tight.verified == roomy.verified


@pytest.mark.parametrize("max_prefill_tokens", mostly_slow([1, 7, 64], 7))
def test_chunked_prefill_changes_no_text(
    random_pair: Pair, random_texts: Texts, max_prefill_tokens: int
) -> None:
    outputs = generate(random_pair, RANDOM[:8], max_prefill_tokens=max_prefill_tokens)
    assert outputs.texts == {r.id: random_texts[r.id] for r in RANDOM[:8]}


def test_eos_inside_accepted_drafts_ends_the_text(
    demo_pair: Pair, demo_reference: ReferenceHead, demo_texts: Texts
) -> None:
    """Each of 16 tokens of a text in turn becomes the EOS, so it falls on every position of a step."""
    request = demo_requests()[0]
    text = demo_texts[request.id]
    inside = 0
    for token in list(dict.fromkeys(text))[:16]:
        config = replace(demo_pair.models.target.config, eos_token_ids=(token,))
        target = replace(demo_pair.models.target, config=config)
        pair = replace(demo_pair, models=replace(demo_pair.models, target=target))
        outputs = generate(pair, [request], num_spec_tokens=4)
        assert outputs.texts[request.id] == text[: text.index(token) + 1]
        assert outputs.completions[request.id].finish_reason == "stop"
        inside += sum(emitted <= accepted for _, accepted, emitted in outputs.verified[request.id])
    assert inside > 0


@pytest.mark.parametrize("k", [0, 1, 4])
def test_max_tokens_is_exact(random_pair: Pair, k: int) -> None:
    asked = [
        replace(r, sampling=SamplingParams(max_tokens=1 + i % 6, ignore_eos=True))
        for i, r in enumerate(random_requests(12, 128, GREEDY))
    ]
    outputs = generate(random_pair, asked, num_spec_tokens=k)
    assert {r.id: len(outputs.texts[r.id]) for r in asked} == {r.id: r.sampling.max_tokens for r in asked}
    assert {c.finish_reason for c in outputs.completions.values()} == {"length"}


def test_a_text_ends_at_the_context_limit(random_pair: Pair) -> None:
    limit = random_pair.models.target.config.max_positions
    sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
    requests = [
        Request(id=str(length), prompt_token_ids=(5,) * length, sampling=sampling)
        for length in (limit - 9, limit - 1, limit, limit + 1)
    ]
    completions = generate(random_pair, requests, num_spec_tokens=8).completions
    assert [len(completions[r.id].token_ids) for r in requests] == [9, 1, 0, 0]
    assert completions[requests[0].id].finish_reason == "context"
    assert f"{limit + 1} tokens" in (completions[requests[3].id].error or "")
