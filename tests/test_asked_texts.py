"""Greedy texts of rows that ask for penalties, constraints or ends of their own equal those of transformers.

Whatever is drafted and accepted: every row of a pass is judged by the text up to it. Rows of a kind come together, so
that passes have rows of one kind, of two, and of none.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.core.step import Steps
from tests.engines import Pair, bundled_requests, engine_of, generate, load_pair, page_bytes, random_requests
from tests.marks import mostly_slow
from tests.reference_heads import DenseTarget, ReferenceHead
from tests.test_heads import MTP
from tests.test_mtp import pair_of
from tests.test_penalties import KINDS
from tests.tiny_checkpoints import write_dflash_head, write_eagle1_head, write_head

pytestmark = pytest.mark.xdist_group("asked texts")  # texts of transformers for all
Text = tuple[int, ...]
FREE = SamplingParams(max_tokens=26)


# --- what rows ask for, made of what they say without it, so that it changes them --------------------


def penalties(at: int, text: Text, prompt: Text) -> dict[str, Any]:
    """None and each kind in turn, of texts of several lengths: rows of all kinds join, leave and move."""
    return {"max_tokens": 12 + 7 * at % 30, **KINDS[at % len(KINDS)]}


def constraints(at: int, text: Text, prompt: Text) -> dict[str, Any]:
    pairs = tuple(zip(text[1:20:4], text[2:20:4], strict=False))
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"bad_words_ids": ((text[0],), *pairs)},
        {"bad_words_ids": ((prompt[-1], text[0]), (text[1],))},
        {"begin_suppress_tokens": text[:1], "bad_words_ids": (text[1:4],)},
        {"allowed_token_ids": tuple(sorted({*text[1:]}))},
        {"allowed_token_ids": tuple(sorted({*text, *prompt})), "bad_words_ids": pairs},
    )
    return {"max_tokens": 12 + 7 * at % 20} | kinds[at % len(kinds)]


def ends(at: int, text: Text, prompt: Text) -> dict[str, Any]:
    """Tokens of each own text end it, of which several come before its ``min_tokens``; some rows ask for less."""
    own = {text[1 % len(text)], text[5 % len(text)], text[len(text) * 2 // 3]}
    return {
        "max_tokens": len(text),
        "stop_token_ids": () if at % 5 == 4 else tuple(sorted(own)),
        "min_tokens": min((0, 3, 9, 12, 7)[at % 5], len(text)),
    }


# --- the same by transformers ----------------------------------------------------------------------


def changed(eos: Text, request: Request, tokens: Tensor, logits: Tensor) -> Tensor:
    """A row's logits by its processors; ``min_new_tokens`` has the EOS ids and the request's."""
    from transformers import MinNewTokensLengthLogitsProcessor

    sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
    if sampling.min_tokens:
        held = MinNewTokensLengthLogitsProcessor(
            num_prompt, sampling.min_tokens, [*eos, *sampling.stop_token_ids]
        )
        logits = held(tokens, logits)
    return masked(request, tokens, with_penalty(request, tokens, logits))


def with_penalty(request: Request, tokens: Tensor, logits: Tensor) -> Tensor:
    """A row's logits by the repetition penalty of ``transformers``; presence and frequency one token at a time."""
    from transformers import RepetitionPenaltyLogitsProcessor

    sampling, output = request.sampling, tokens[0, len(request.prompt_token_ids) :].tolist()
    logits = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(tokens, logits)
    for token in set(output):
        logits[0, token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    return logits


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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Rows of all three kinds, and their texts by ``transformers``."""

    requests: list[Request]
    texts: dict[str, Text]

    @classmethod
    def of(cls, pair: Pair, target: DenseTarget, free: list[Request]) -> "Asked":
        texts = generate(pair, free, num_spec_tokens=0).texts
        asked = [
            replace(
                r,
                id=f"{kind.__name__} {r.id}",
                sampling=replace(FREE, **kind(at, texts[r.id], r.prompt_token_ids)),
            )
            for kind in (penalties, constraints, ends)
            for at, r in enumerate(free)
        ]
        found = target.texts(asked, partial(changed, pair.models.target.config.eos_token_ids))
        for request in asked:  # up to the first token that ends it
            text, own = found[request.id], request.sampling.stop_token_ids
            found[request.id] = text[: next((at + 1 for at, token in enumerate(text) if token in own), None)]
        return cls(requests=asked, texts=found)


@pytest.fixture(scope="module")
def demo(demo_pair: Pair, demo_reference: ReferenceHead) -> Asked:
    return Asked.of(demo_pair, demo_reference.target, list(bundled_requests(12, FREE)))


@pytest.fixture(scope="module")
def random(random_pair: Pair, random_reference: ReferenceHead) -> Asked:
    """Short prompts of a small vocabulary: texts that repeat themselves."""
    free = random_requests(12, 128, FREE, lengths=(1, 20))
    return Asked.of(random_pair, random_reference.target, free)


def test_what_is_asked_for_here_changes_texts(demo_pair: Pair, demo: Asked) -> None:
    free = [replace(r, sampling=replace(FREE, max_tokens=r.sampling.max_tokens)) for r in demo.requests]
    texts = generate(demo_pair, free, num_spec_tokens=0).texts
    changed = [r for r in demo.requests if demo.texts[r.id] != texts[r.id]]
    constrained = {r.id for r in demo.requests if r.sampling.constrained}
    assert {r.id for r in changed if "constraints" in r.id} == constrained
    penalised = [r for r in changed if "penalties" in r.id]
    assert all(r.sampling.penalised for r in penalised)
    assert len(penalised) >= 4
    ended = [r for r in demo.requests if "ends" in r.id and len(demo.texts[r.id]) < r.sampling.max_tokens]
    assert any(r.sampling.min_tokens > 0 for r in ended)
    assert all(r.sampling.min_tokens <= len(demo.texts[r.id]) for r in demo.requests if "ends" in r.id)


# --- exact with speculation ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "batch", "ahead"),
    mostly_slow(
        [
            *product((1, 4), ("padded", "non-padded"), (False, True)),
            *[(0, "padded", True), (2, "non-padded", True), (5, "padded", True)],
        ],
        (4, "padded", True),
        (4, "non-padded", False),
    ),
)
def test_with_mixed_acceptance(
    demo_pair: Pair, device_like: Callable[..., None], demo: Asked, k: int, batch: str, ahead: bool
) -> None:
    device_like(ahead)
    outputs = generate(demo_pair, demo.requests, num_spec_tokens=k, drafter_batch=batch)
    assert outputs.texts == demo.texts
    assert set(outputs.accepted) >= set(range(min(k, 3) + 1))
    eos = demo_pair.models.target.config.eos_token_ids
    for found in outputs.completions.values():
        ends = {*eos, *found.request.sampling.stop_token_ids}
        assert found.finish_reason == ("stop" if found.token_ids[-1] in ends else "length")


OTHERS: dict[str, Callable[[Path, Any], None]] = {
    "eagle-1": write_eagle1_head,
    "p-eagle": partial(write_head, num_layers=2, mask_token=("ptd_token_id", 4)),
    "dspark": partial(write_dflash_head, dialect="DeepSpec", markov=("gated", 8)),
}


@pytest.mark.parametrize(
    ("drafter", "batch"),
    mostly_slow(
        product(("eagle3", "ngram:2", *OTHERS), ("padded", "non-padded")),
        ("ngram:2", "padded"),
        ("eagle-1", "non-padded"),
    ),
)
def test_with_every_kind_of_drafter(
    random_pair: Pair, tmp_path: Path, random: Asked, drafter: str, batch: str
) -> None:
    settings = {"drafter": drafter} if drafter.startswith("ngram") else {}
    pair = random_pair
    if drafter in OTHERS:
        (tmp_path / "target").symlink_to(pair.path / "target")
        OTHERS[drafter](tmp_path / "drafter", pair.models.target.config)
        pair = load_pair(tmp_path)
    assert generate(pair, random.requests, drafter_batch=batch, **settings).texts == random.texts


@pytest.mark.slow
def test_with_mtp(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, MTP["mtp-glm"])
    free = random_requests(6, pair.models.target.config.vocab_size, FREE, lengths=(3, 12))
    asked = Asked.of(pair, DenseTarget(tmp_path / "target"), free)
    for batch in ("padded", "non-padded"):
        assert generate(pair, asked.requests, num_spec_tokens=4, drafter_batch=batch).texts == asked.texts


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_preemption_and_chunks_change_no_text(demo_pair: Pair, demo: Asked, batch: str) -> None:
    how = {"num_spec_tokens": 4, "drafter_batch": batch}
    tight = generate(demo_pair, demo.requests, kv_memory=30 * page_bytes(demo_pair), **how)
    assert tight.num_preempted > 2
    assert {*tight.begun.values()} == {1}  # none failed and was tried again
    chunks = generate(demo_pair, demo.requests, max_prefill_tokens=7, **how)
    assert tight.texts == chunks.texts == demo.texts


def test_tokens_of_a_cached_prefix_count(demo_pair: Pair, demo: Asked) -> None:
    """The second time, prompts are in the prefix cache, and no pass computes them."""
    engine = engine_of(demo_pair, max_batch_size=3)
    some = demo.requests[:6]
    again = [replace(request, id=f"{request.id} again") for request in some]
    found = {each.request.id: each.token_ids for each in engine.generate([*some, *again])}
    assert found == {r.id: demo.texts[r.id.removesuffix(" again")] for r in (*some, *again)}


def test_a_step_without_memory_leaves_nothing(
    demo_pair: Pair, demo: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts and states are computed again, from the texts that were read."""
    decode, calls = Steps.decode, []

    def failing(self: Steps, *given: Any) -> Any:
        calls.append(given)
        found = decode(self, *given)  # on the device it may have been done
        if len(calls) in (3, 9, 15):
            raise torch.OutOfMemoryError
        return found

    monkeypatch.setattr(Steps, "decode", failing)
    some = demo.requests[::2]
    outputs = generate(demo_pair, some)
    assert outputs.texts == {r.id: demo.texts[r.id] for r in some}
    assert outputs.num_preempted > 0
