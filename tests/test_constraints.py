"""Constraints are exact with speculation: every row has the tokens alone that are allowed behind the text up to it."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams, UserError
from specgen.core.sequence import Request
from specgen.text.automaton import allowing, not_first, without
from tests.engines import (
    Pair,
    bundled_requests,
    generate,
    page_bytes,
    random_requests,
)
from tests.reference_heads import DenseTarget, ReferenceHead
from tests.test_heads import MTP
from tests.test_mtp import pair_of
from tests.test_penalties import every_drafter, mixed_acceptance, texts_with

pytestmark = pytest.mark.xdist_group("constraints")  # texts of transformers for all
Texts = dict[str, tuple[int, ...]]


# --- token lists: automata against what the lists mean ---------------------------------------------


def naive_without(sequences: list[tuple[int, ...]], text: list[int], token: int) -> bool:
    """Whether ``token`` may follow ``text``, by the definition."""
    whole = [*text, token]
    return not any(whole[-len(each) :] == list(each) for each in sequences if len(each) <= len(whole))


@pytest.mark.parametrize("seed", range(20))
def test_sequences_that_overlap_are_kept_out(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [tuple(rng.choices(range(3), k=rng.randint(1, 4))) for _ in range(rng.randint(1, 4))]
    before = rng.choices(range(3), k=5)
    automaton = without(5, sequences, before)
    for _ in range(30):
        text, state = list(before), automaton.start
        for _ in range(12):
            allowed = [token for token in range(5) if automaton.after(state, token) >= 0]
            assert allowed == [token for token in range(5) if naive_without(sequences, text, token)]
            text.append(rng.choice(allowed))
            state = automaton.after(state, text[-1])


def test_a_product_allows_what_both_allow() -> None:
    rng = random.Random(3)
    first, second = without(6, [(1, 2), (2, 2, 3)]), without(6, [(2, 1), (3,)])
    both = first * second * allowing(6, [0, 1, 2, 3, 5]) * not_first(6, [0])
    for _ in range(50):
        text = rng.choices(range(6), k=rng.randint(1, 8))
        alone = first.walk(text) >= 0 and second.walk(text) >= 0 and 4 not in text and text[0] != 0
        assert (both.walk(text) >= 0) == alone


def test_a_state_that_leads_nowhere_is_left_out() -> None:
    dead = allowing(4, [0, 1, 2]) * without(
        4, [(0, 0), (0, 1), (2, 0, 2), (0, 2)]
    )  # behind 0 nothing is left
    trimmed = dead.trimmed()
    assert [trimmed.after(trimmed.start, token) >= 0 for token in range(4)] == [False, True, True, False]
    assert trimmed.walk([1, 2, 2, 0]) == -1
    assert trimmed.walk([1, 2, 2, 1]) >= 0
    with pytest.raises(UserError, match="no text fits"):
        (allowing(3, [0]) * without(3, [(0,)])).trimmed()


# --- greedy text -----------------------------------------------------------------------------------


def masked(request: Request, tokens: Tensor, logits: Tensor) -> Tensor:
    """A row's logits by the processors of ``transformers`` and by the definition of ``allowed_token_ids``."""
    from transformers import NoBadWordsLogitsProcessor, SuppressTokensAtBeginLogitsProcessor

    sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
    if sampling.bad_words_ids:
        bad = [list(each) for each in sampling.bad_words_ids]
        logits = NoBadWordsLogitsProcessor(bad)(tokens, logits)
    if sampling.begin_suppress_tokens:
        first = SuppressTokensAtBeginLogitsProcessor(list(sampling.begin_suppress_tokens), num_prompt)
        logits = first(tokens, logits)
    if sampling.allowed_token_ids is not None:
        only = torch.full_like(logits, float("-inf"))
        only[0, list(sampling.allowed_token_ids)] = logits[0, list(sampling.allowed_token_ids)]
        logits = only
    return logits


def with_constraints(requests: list[Request] | tuple[Request, ...], texts: Texts) -> list[Request]:
    """No constraint and each kind in turn, made of what the free texts say, so that it changes them."""
    found = []
    for i, request in enumerate(requests):
        text = texts[request.id]
        pairs = tuple(zip(text[1::4], text[2::4], strict=False))
        kinds: tuple[dict[str, Any], ...] = (
            {},
            {"bad_words_ids": ((text[0],), *pairs)},
            {"bad_words_ids": ((request.prompt_token_ids[-1], text[0]), (text[1],))},
            {"begin_suppress_tokens": text[:1], "bad_words_ids": (text[1:4],)},
            {"allowed_token_ids": tuple(sorted({*text[1:]}))},
            {"allowed_token_ids": tuple(sorted({*text, *request.prompt_token_ids})), "bad_words_ids": pairs},
        )
        asked = {"max_tokens": 12 + 7 * i % 20} | kinds[i % len(kinds)]
        found.append(replace(request, sampling=replace(request.sampling, **asked)))
    return found


@pytest.fixture(scope="module")
def random_asked(random_pair: Pair) -> list[Request]:
    free = random_requests(12, 128, SamplingParams(max_tokens=20), lengths=(1, 20))
    return with_constraints(free, generate(random_pair, free, num_spec_tokens=0).texts)


@pytest.fixture(scope="module")
def random_texts(random_reference: ReferenceHead, random_asked: list[Request]) -> Texts:
    return random_reference.target.texts(random_asked, masked)


@pytest.fixture(scope="module")
def demo_asked(demo_pair: Pair) -> list[Request]:
    free = bundled_requests(12, SamplingParams(max_tokens=20))
    return with_constraints(free, generate(demo_pair, free).texts)


@pytest.fixture(scope="module")
def demo_texts(demo_reference: ReferenceHead, demo_asked: list[Request]) -> Texts:
    return demo_reference.target.texts(demo_asked, masked)


def test_the_constraints_of_these_tests_change_texts(
    demo_pair: Pair, demo_asked: list[Request], demo_texts: Texts
) -> None:
    free = [replace(r, sampling=SamplingParams(max_tokens=r.sampling.max_tokens)) for r in demo_asked]
    texts = generate(demo_pair, free, num_spec_tokens=0).texts
    changed = [r for r in demo_asked if demo_texts[r.id] != texts[r.id]]
    assert {r.id for r in changed} == {r.id for r in demo_asked if r.sampling.constrained}


@mixed_acceptance
def test_greedy_text_with_mixed_acceptance_equals_transformers(
    demo_pair: Pair,
    device_like: Callable[..., None],
    demo_asked: list[Request],
    demo_texts: Texts,
    k: int,
    batch: str,
    ahead: bool,
) -> None:
    device_like(ahead)
    outputs = generate(demo_pair, demo_asked, num_spec_tokens=k, drafter_batch=batch, max_batch_size=4)
    assert outputs.texts == demo_texts
    assert set(outputs.accepted) >= set(range(min(k, 3) + 1))


@every_drafter
def test_greedy_text_with_every_kind_of_drafter(
    random_pair: Pair,
    tmp_path: Path,
    random_asked: list[Request],
    random_texts: Texts,
    drafter: str,
    batch: str,
) -> None:
    assert texts_with(random_pair, tmp_path, random_asked, drafter, batch) == random_texts


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_greedy_text_with_mtp(tmp_path: Path, batch: str) -> None:
    pair = pair_of(tmp_path, MTP["mtp-glm"])
    free = random_requests(
        6, pair.models.target.config.vocab_size, SamplingParams(max_tokens=20), lengths=(3, 12)
    )
    asked = with_constraints(free, generate(pair, free, num_spec_tokens=0).texts)
    outputs = generate(pair, asked, num_spec_tokens=4, drafter_batch=batch)
    assert outputs.texts == DenseTarget(tmp_path / "target").texts(asked, masked)


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_preemption_and_chunks_change_no_text(
    demo_pair: Pair, demo_asked: list[Request], demo_texts: Texts, batch: str
) -> None:
    memory = 26 * page_bytes(demo_pair)
    tight = generate(demo_pair, demo_asked, num_spec_tokens=4, drafter_batch=batch, kv_memory=memory)
    assert tight.num_preempted > 2
    assert {*tight.begun.values()} == {1}  # none failed and was tried again
    chunks = generate(demo_pair, demo_asked, num_spec_tokens=4, drafter_batch=batch, max_prefill_tokens=7)
    assert tight.texts == chunks.texts == demo_texts
