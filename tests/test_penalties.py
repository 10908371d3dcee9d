"""Penalties of a row, and rows that ask for some of everything; see ``test_asked_texts`` for texts with penalties."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.decoding.sampling import SamplingBatch, SamplingForm, penalised, token_counts
from specgen.engine.build import most_demanding
from tests.engines import Pair, engine_of, generate, page_bytes, random_requests
from tests.marks import mostly_slow
from tests.reference_heads import ReferenceHead
from tests.test_sampling import penalised as naive

CPU = torch.device("cpu")
KINDS: tuple[dict[str, float], ...] = (
    {},
    {"repetition_penalty": 2.0},
    {"repetition_penalty": 1.05, "presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 0.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
)


def random_sampling(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Some of everything that a row may ask for; many rows ask for little."""

    def tokens(most: int) -> list[int]:
        return rng.sample(range(3, vocab_size), rng.choice([0, 0, 1, most]))

    return SamplingParams(
        max_tokens=(most := rng.choice([rng.randint(1, 40), 40])),
        min_tokens=rng.choice([0, 0, rng.randint(0, most)]),
        stop_token_ids=tuple(rng.sample(range(vocab_size), rng.choice([0, 0, 3, 20]))),
        prompt_logprobs=rng.choice([None, None, 0, 3]),
        ignore_eos=rng.random() < 0.9,
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        seed=rng.randint(0, 9),
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        logit_bias=tuple((token, rng.choice([-100.0, -2.0, 1.5])) for token in tokens(6)),
        suppress_tokens=tuple(tokens(3)),
        logprobs=rng.choice([None, None, 0, 2]),
        **rng.choice(KINDS),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("seed", mostly_slow(range(12), 0))
def test_heavy_preemption_changes_no_text_of_rows_that_ask_for_their_own(
    random_pair: Pair, device_like: Callable[..., None], seed: int
) -> None:
    rng = random.Random(seed)
    device_like(rng.random() < 0.7)
    vocab_size = random_pair.models.target.config.vocab_size
    plain = random_requests(12, vocab_size, SamplingParams(), lengths=(1, 16), seed=seed)
    asked = [replace(each, sampling=random_sampling(rng, vocab_size)) for each in plain]
    settings: dict[str, Any] = {
        "num_spec_tokens": rng.choice([0, 1, 3, 5]) if seed else 3,
        "drafter_batch": rng.choice(["padded", "non-padded"]),
        "draft_sampling": rng.choice(["greedy", "probabilistic"]),
        "prefix_cache": rng.random() < 0.5,
    } | rng.choice([{}, {}, {"drafter": "ngram:2"}])
    free = generate(random_pair, asked, max_batch_size=12, **settings)
    assert free.num_preempted == 0
    memory, most = 19 * page_bytes(random_pair), rng.choice([16, 2048])
    tight = generate(
        random_pair, asked, max_batch_size=12, kv_memory=memory, max_prefill_tokens=most, **settings
    )
    assert tight.texts == free.texts
    assert tight.num_preempted >= 4
    for name, completion in tight.completions.items():
        assert completion.finish_reason == free.completions[name].finish_reason
        mine, theirs = completion.prompt_logprobs, free.completions[name].prompt_logprobs
        assert (mine is None) == (theirs is None) == (completion.request.sampling.prompt_logprobs is None)
        for one, other in zip(mine or (), theirs or (), strict=True):
            assert (one and one.chosen) == pytest.approx(other and other.chosen, abs=1e-4)


# --- a row -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_counts_the_drafts_before_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(5, 4, 12, generator=generator)).to(dtype)
    params = [SamplingParams(**kind) for kind in KINDS]
    texts = [([3, 3, 5], [7, 7]), ([3, 5, 3], [7, 8, 7]), ([1], []), ([0], [0, 0, 9]), ([4, 11], [4, 2])]
    drafts = torch.tensor([[7, 7, 1], [3, 7, 3], [2, 2, 2], [9, 0, 9], [5, -1, -1]])
    batch = SamplingBatch.of(params, [0] * 5, CPU, token_counts(texts, 12, CPU))
    found = penalised(logits, drafts, batch)
    for b, i in product(range(5), range(4)):
        if b == 4 and i > 1:
            continue  # behind a missing draft nothing is chosen
        prompt, output = texts[b]
        text = [*prompt, *output, *drafts[b, :i].tolist()]
        expected = naive(logits[b, i].float(), text, params[b], len(prompt))
        assert torch.allclose(found[b, i], expected, atol=1e-6), (b, i)
    assert torch.equal(found[0], logits[0].float())


def test_without_penalties_nothing_is_counted() -> None:
    """The same tensors go through, so that a captured step has no kernel more."""
    assert SamplingForm.of([SamplingParams()]) == SamplingForm("greedy", 0, None)
    batch = SamplingBatch.of([SamplingParams()], [0], CPU)
    logits = torch.randn(1, 2, 8)
    assert penalised(logits, torch.tensor([[1]]), batch) is logits
    assert batch.counts.numel() == batch.penalties.numel() == 0
    assert not SamplingForm.of([SamplingParams(presence_penalty=0.1)]).greedy_only


def test_a_batch_without_penalties_keeps_no_counts(random_pair: Pair) -> None:
    engine = engine_of(random_pair)
    list(engine.generate(random_requests(3, 128, SamplingParams(max_tokens=4))))
    assert engine._batch._sampling.counts.numel() == 0
    list(engine.generate(random_requests(3, 128, SamplingParams(max_tokens=4, frequency_penalty=1.0))))
    assert engine._batch._sampling.counts.shape == (8, 128)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_job_with_penalties_is_prepared_for_them(name: str) -> None:
    asked = most_demanding([SamplingParams(), SamplingParams(**{name: 0.5})])
    assert SamplingForm.of([asked]) == SamplingForm("greedy", 0, None, penalised=True)


# --- suppressed tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], 0.0))
def test_suppressed_tokens_are_never_chosen(
    random_pair: Pair, random_reference: ReferenceHead, temperature: float
) -> None:
    from transformers import SuppressTokensLogitsProcessor

    free = generate(random_pair, random_requests(4, 128, SamplingParams(max_tokens=12)))
    never = tuple(sorted({token for text in free.texts.values() for token in text}))
    sampling = SamplingParams(
        max_tokens=12, temperature=temperature, suppress_tokens=never, logit_bias=((never[0], 100.0),)
    )
    outputs = generate(random_pair, random_requests(4, 128, sampling))
    assert not {token for text in outputs.texts.values() for token in text} & set(never)
    if temperature == 0:

        def suppressed(request: Request, tokens: Tensor, logits: Tensor) -> Tensor:
            return SuppressTokensLogitsProcessor(never)(tokens, logits)

        asked = random_requests(4, 128, sampling)
        assert outputs.texts == random_reference.target.texts(asked, suppressed)
