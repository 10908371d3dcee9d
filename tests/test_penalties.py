"""Repetition, presence and frequency penalties are exact with speculation: every row is judged by the text up to it."""

import random
from collections.abc import Callable
from dataclasses import replace
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
from specgen.decoding.sampling import SamplingBatch, SamplingForm, penalised, token_counts
from specgen.engine.build import most_demanding
from tests.engines import (
    Pair,
    bundled_requests,
    engine_of,
    generate,
    load_pair,
    page_bytes,
    random_requests,
)
from tests.marks import mostly_slow
from tests.reference_heads import DenseTarget, ReferenceHead
from tests.test_heads import MTP
from tests.test_mtp import pair_of
from tests.test_sampling import penalised as naive
from tests.tiny_checkpoints import write_dflash_head, write_eagle1_head, write_head

pytestmark = pytest.mark.xdist_group("penalties")  # texts of transformers for all
CPU = torch.device("cpu")
KINDS: tuple[dict[str, float], ...] = (
    {},
    {"repetition_penalty": 2.0},
    {"repetition_penalty": 1.05, "presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 0.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
)


def with_penalties(requests: list[Request] | tuple[Request, ...]) -> list[Request]:
    """No penalty and each kind in turn, of texts of several lengths: rows of all kinds join, leave and move."""
    return [
        replace(r, sampling=replace(r.sampling, max_tokens=12 + 7 * i % 30, **KINDS[i % len(KINDS)]))
        for i, r in enumerate(requests)
    ]


def with_penalty(request: Request, tokens: Tensor, logits: Tensor) -> Tensor:
    """A row's logits by the repetition penalty of ``transformers``; presence and frequency one token at a time."""
    from transformers import RepetitionPenaltyLogitsProcessor

    sampling, output = request.sampling, tokens[0, len(request.prompt_token_ids) :].tolist()
    logits = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(tokens, logits)
    for token in set(output):
        logits[0, token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    return logits


Texts = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def random_asked() -> list[Request]:
    """Short prompts of a small vocabulary: texts that repeat themselves."""
    return with_penalties(random_requests(12, 128, SamplingParams(), lengths=(1, 20)))


@pytest.fixture(scope="module")
def random_texts(random_reference: ReferenceHead, random_asked: list[Request]) -> Texts:
    return random_reference.target.texts(random_asked, with_penalty)


@pytest.fixture(scope="module")
def demo_asked() -> list[Request]:
    return with_penalties(bundled_requests(10, SamplingParams()))


@pytest.fixture(scope="module")
def demo_texts(demo_reference: ReferenceHead, demo_asked: list[Request]) -> Texts:
    return demo_reference.target.texts(demo_asked, with_penalty)


def test_the_penalties_of_these_tests_change_texts(
    demo_pair: Pair, demo_asked: list[Request], demo_texts: Texts
) -> None:
    free = [replace(r, sampling=SamplingParams(max_tokens=r.sampling.max_tokens)) for r in demo_asked]
    texts = generate(demo_pair, free, num_spec_tokens=0).texts
    changed = [r.sampling for r in demo_asked if demo_texts[r.id] != texts[r.id]]
    assert all(each.penalised for each in changed)
    assert len(changed) >= 4


# --- greedy ----------------------------------------------------------------------------------------

OTHERS: dict[str, Callable[[Path, Any], None]] = {
    "eagle-1": write_eagle1_head,
    "p-eagle": partial(write_head, num_layers=2, mask_token=("ptd_token_id", 4)),
    "dspark": partial(write_dflash_head, dialect="DeepSpec", markov=("gated", 8)),
}
mixed_acceptance = pytest.mark.parametrize(
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
every_drafter = pytest.mark.parametrize(
    ("drafter", "batch"),
    mostly_slow(
        product(("eagle3", "ngram:2", *OTHERS), ("padded", "non-padded")),
        ("ngram:2", "padded"),
        ("eagle-1", "non-padded"),
    ),
)


def texts_with(pair: Pair, path: Path, asked: list[Request], drafter: str, batch: str) -> Texts:
    """Of ``asked`` with the target of ``pair`` and its own or another drafter, which is written to ``path``."""
    settings = {"drafter": drafter} if drafter.startswith("ngram") else {}
    if drafter in OTHERS:
        (path / "target").symlink_to(pair.path / "target")
        OTHERS[drafter](path / "drafter", pair.models.target.config)
        pair = load_pair(path)
    return generate(pair, asked, drafter_batch=batch, max_batch_size=6, **settings).texts


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
    vocab_size = pair.models.target.config.vocab_size
    asked = with_penalties(random_requests(5, vocab_size, SamplingParams(), lengths=(3, 12)))
    outputs = generate(pair, asked, num_spec_tokens=4, drafter_batch=batch)
    assert outputs.texts == DenseTarget(tmp_path / "target").texts(asked, with_penalty)


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_preemption_and_chunks_change_no_text(
    demo_pair: Pair, demo_asked: list[Request], demo_texts: Texts, batch: str
) -> None:
    memory = 30 * page_bytes(demo_pair)
    tight = generate(demo_pair, demo_asked, num_spec_tokens=4, drafter_batch=batch, kv_memory=memory)
    assert tight.num_preempted > 2
    chunks = generate(demo_pair, demo_asked, num_spec_tokens=4, drafter_batch=batch, max_prefill_tokens=7)
    assert tight.texts == chunks.texts == demo_texts


def random_sampling(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Some of everything that a row may ask for; many rows ask for little."""

    def tokens(most: int) -> list[int]:
        return rng.sample(range(3, vocab_size), rng.choice([0, 0, 1, most]))

    return SamplingParams(
        max_tokens=rng.choice([rng.randint(1, 40), 40]),
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


def test_tokens_of_a_cached_prefix_count(
    demo_pair: Pair, demo_asked: list[Request], demo_texts: Texts
) -> None:
    """The second time, prompts are in the prefix cache, and no pass computes them."""
    engine = engine_of(demo_pair, max_batch_size=3)
    some = demo_asked[:6]
    again = [replace(request, id=f"{request.id} again") for request in some]
    found = {each.request.id: each.token_ids for each in engine.generate([*some, *again])}
    assert found == {r.id: demo_texts[r.id.removesuffix(" again")] for r in (*some, *again)}


def test_a_step_without_memory_leaves_no_count(
    demo_pair: Pair, demo_asked: list[Request], demo_texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are computed again, from the texts that were read."""
    decode, calls = Steps.decode, []

    def failing(self: Steps, *given: Any) -> Any:
        calls.append(given)
        found = decode(self, *given)  # on the device it may have been done
        if len(calls) in (3, 9):
            raise torch.OutOfMemoryError
        return found

    monkeypatch.setattr(Steps, "decode", failing)
    outputs = generate(demo_pair, demo_asked, max_batch_size=4)
    assert outputs.texts == demo_texts
    assert outputs.num_preempted > 0


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
