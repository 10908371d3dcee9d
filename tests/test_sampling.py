"""Sampling is exact with speculation, and a seed gives the same text in any batch."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams
from specgen.core import step as step_module
from specgen.core.sequence import Request
from specgen.decoding import drafting
from specgen.decoding.outcome import NO_DRAFT
from specgen.decoding.sampling import (
    ACCEPT,
    DRAFT,
    EMIT,
    SamplingBatch,
    _keep_top,
    _keep_top_on_gpu,
    draft_places,
    draft_probs,
    draw,
    request_seed,
    target_probs,
    uniform,
)
from specgen.decoding.verify import accept_block, accept_drawn, accept_sampled
from specgen.models.model_config import TargetConfig
from tests.engines import Pair, generate, load_pair, random_requests
from tests.marks import mostly_slow
from tests.tiny_checkpoints import write_dflash_head, write_eagle1_head, write_head, write_target

VOCAB, LENGTH, SAMPLES = 10, 4, 4000
PROMPT = (3, 7, 4)
FILTERS = {
    "plain": SamplingParams(temperature=0.9),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "top-k": SamplingParams(temperature=1.1, top_k=4),
    "min-p": SamplingParams(temperature=1.0, min_p=0.15),
    "all": SamplingParams(temperature=1.2, top_p=0.9, top_k=6, min_p=0.05),
    "biased": SamplingParams(temperature=1.1, min_p=0.05, logit_bias=((2, -0.5), (5, -100.0), (8, 0.7))),
    "penalised": SamplingParams(
        temperature=0.6, repetition_penalty=2.5, presence_penalty=-0.5, frequency_penalty=0.9
    ),
    "constrained": SamplingParams(
        temperature=1.1,
        top_p=0.95,
        presence_penalty=0.3,
        allowed_token_ids=(0, 2, 3, 4, 5, 8),
        bad_words_ids=((4, 2), (2, 5, 2), (8, 8)),  # the prompt may begin the first
        begin_suppress_tokens=(3,),
    ),
}


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random pair with a vocabulary of ten, so that every text of four tokens can be enumerated."""
    path = tmp_path_factory.mktemp("small_pair")
    target = write_target(path / "target", vocab_size=VOCAB, std=0.1)
    write_head(path / "drafter", target, draft_vocab_size=7, std=0.1)
    return load_pair(path)


def text_probabilities(path: Path, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> Tensor:
    """The probability of each text of plain sampling, an axis of ``VOCAB`` for each of its ``LENGTH`` tokens."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path / "target", dtype=torch.float32)
    texts, weights = torch.tensor([prompt]), torch.ones(1)
    for _ in range(LENGTH):
        with torch.inference_mode():
            logits = model(texts).logits[:, -1].double()
        rows = [
            masked(penalised(row, text.tolist(), sampling, len(prompt)), text.tolist(), sampling, len(prompt))
            for row, text in zip(logits, texts, strict=True)
        ]
        weights = (weights[:, None] * torch.stack([filtered(row, sampling) for row in rows])).flatten()
        texts = torch.cat(
            [texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1
        )
    return weights.view([VOCAB] * LENGTH)


def penalised(logits: Tensor, text: list[int], sampling: SamplingParams, num_prompt: int) -> Tensor:
    """The penalties, one token at a time."""
    logits, output = logits.clone(), text[num_prompt:]
    for token in set(text):
        by = sampling.repetition_penalty
        logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
        logits[token] -= sampling.frequency_penalty * output.count(token)
        logits[token] -= sampling.presence_penalty * (token in output)
    return logits


def masked(logits: Tensor, text: list[int], sampling: SamplingParams, num_prompt: int) -> Tensor:
    """The constraints, one token at a time."""
    logits = logits.clone()
    for token in range(VOCAB):
        whole = [*text, token]
        is_bad = any(whole[-len(each) :] == list(each) for each in sampling.bad_words_ids)
        is_first = len(text) == num_prompt and token in sampling.begin_suppress_tokens
        if is_bad or is_first or token not in (sampling.allowed_token_ids or range(VOCAB)):
            logits[token] = -torch.inf
    return logits


def filtered(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The filters, one token at a time."""
    logits = logits.clone()
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    probs = (logits / sampling.temperature).softmax(-1)
    probs = torch.where(probs < sampling.min_p * probs.max(), 0, probs)
    kept, share, total = torch.zeros_like(probs), 0.0, 0.0
    order = probs.argsort(descending=True)[: sampling.top_k or None]
    total = float(probs[order].sum())
    for index in order:
        if share >= sampling.top_p * total:
            break
        kept[index] = probs[index]
        share += float(probs[index])
    return kept / kept.sum()


def p_values(
    pair: Pair, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT, **drafting: str
) -> tuple[list[float], set[tuple[int, int]]]:
    """Chi-square p-value of each two positions of the text, and the numbers of drafts and accepted ones that occurred.

    Tokens that depend on each other in a wrong way may be distributed rightly one by one.
    """
    from scipy.stats import chisquare

    sampling = replace(sampling, max_tokens=LENGTH, ignore_eos=True)
    requests = [Request(id=f"s{i}", prompt_token_ids=prompt, sampling=sampling) for i in range(SAMPLES)]
    outputs = generate(pair, requests, max_batch_size=1000, **drafting)
    expected = SAMPLES * text_probabilities(pair.path, sampling, prompt)
    observed = torch.zeros_like(expected)
    observed.index_put_(torch.tensor([*outputs.texts.values()]).unbind(1), torch.ones(()).double(), True)
    assert not observed[expected == 0].any()
    result = []
    for two in combinations(range(LENGTH), 2):
        others = [position for position in range(LENGTH) if position not in two]
        cells = torch.stack((observed.sum(others).flatten(), expected.sum(others).flatten()))
        rare = cells[1] < 5
        cells = torch.cat((cells[:, ~rare], cells[:, rare].sum(1, keepdim=True)), 1)
        result.append(float(chisquare(*cells[:, cells[1] > 0]).pvalue))
    return result, {(len(step[0]), step[1]) for steps in outputs.verified.values() for step in steps}


@pytest.mark.parametrize(
    ("name", "draft_sampling", "verification"),
    mostly_slow(
        [
            *product(FILTERS, ["probabilistic"], ["token"]),
            *product(("plain", "biased", "penalised", "constrained"), ["greedy"], ["token"]),
            *product(("all", "penalised", "constrained"), ["probabilistic"], ["block"]),
            ("plain", "greedy", "block"),
        ],
        ("all", "probabilistic", "token"),
    ),
)
def test_every_position_has_the_distribution_of_plain_sampling(
    small_pair: Pair, name: str, draft_sampling: str, verification: str
) -> None:
    values, accepted = p_values(
        small_pair, FILTERS[name], draft_sampling=draft_sampling, verification=verification
    )
    assert min(values) > 1e-4, values
    assert accepted == {(3, 0), (3, 1), (3, 2), (3, 3)}


def write_model(path: Path, target: TargetConfig, **shape: Any) -> None:
    write_target(path, **shape)


OTHER_HEADS: dict[str, Callable[[Path, TargetConfig], None]] = {
    "p-eagle": partial(write_head, num_layers=2, mask_token=("ptd_token_id", 4), draft_vocab_size=7, std=0.1),
    "two-layers": partial(write_head, num_layers=2, windows=[None, 3], draft_vocab_size=7, std=0.1),
    "eagle-1": partial(write_eagle1_head, qkv_bias=True, std=0.1),
    "dflash": partial(write_dflash_head, draft_vocab_size=7, std=0.1),
    "dflash2": partial(write_dflash_head, second=(2, 8, 5), std=0.1),
    "draft model": partial(write_model, vocab_size=VOCAB, num_layers=2, std=0.1, seed=1),
    "dspark": partial(write_dflash_head, dialect="DeepSpec", markov=("vanilla", 4), own=True, std=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "draft_sampling"),
    [
        *(("p-eagle", "probabilistic"), ("two-layers", "greedy"), ("eagle-1", "probabilistic")),
        *(("dflash", "probabilistic"), ("dflash2", "probabilistic"), ("dspark", "probabilistic")),
        *(("draft model", "probabilistic"), ("draft model", "greedy")),
    ],
)
def test_every_kind_of_head_leaves_the_distribution_of_plain_sampling(
    small_pair: Pair, tmp_path: Path, name: str, draft_sampling: str
) -> None:
    (tmp_path / "target").symlink_to(small_pair.path / "target")
    OTHER_HEADS[name](tmp_path / "drafter", small_pair.models.target.config)
    values, accepted = p_values(load_pair(tmp_path), FILTERS["plain"], draft_sampling=draft_sampling)
    assert min(values) > 1e-4, values
    assert accepted == {(3, 0), (3, 1), (3, 2), (3, 3)}


@pytest.mark.slow
def test_drafts_of_an_output_layer_in_fp8_leave_the_distribution_of_plain_sampling(small_pair: Pair) -> None:
    pair = load_pair(small_pair.path, fp8_output=True)
    values, accepted = p_values(pair, FILTERS["plain"], draft_sampling="probabilistic")
    assert min(values) > 1e-4, values
    assert accepted == {(3, 0), (3, 1), (3, 2), (3, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "all", "penalised", "constrained"])
def test_ngram_drafts_leave_the_distribution_of_plain_sampling(small_pair: Pair, name: str) -> None:
    """Steps with drafts, up to the end of a text, and steps without, where the bonus token is the first."""
    values, accepted = p_values(small_pair, FILTERS[name], (7, 2, 0, 4), drafter="ngram")  # likely tokens
    assert min(values) > 1e-4, values
    assert accepted == {(drafts, accepted) for drafts in range(4) for accepted in range(drafts + 1)}


Accept = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def judged(accept: Accept, lengths: Sequence[int], number: int = 120_000) -> tuple[float, float]:
    """The p-value of texts of four tokens, and the mean of a step's accepted drafts, which have ``lengths`` in turn.

    Drafts are of a Markov chain of four tokens, texts of another; random numbers are those of an engine's steps.
    """
    from scipy.stats import chisquare

    random = torch.Generator().manual_seed(3)
    p, q = (torch.randn(4, 4, generator=random).softmax(-1) for _ in range(2))
    seeds = torch.randint(2**62, (number,), generator=random)
    missing = torch.tensor(lengths).repeat(number // len(lengths))
    texts, newest, means = torch.zeros(number, 21, dtype=torch.int64), torch.zeros_like(seeds), []
    while newest.min() < 4:
        last, drafts, of_q, of_p = texts.gather(1, newest[:, None])[:, 0], [], [], []
        for index in range(3):
            there = index < missing
            of_p.append(p[last])
            of_q.append(q[last] * there[:, None])
            drawn = draw(q[last], uniform(seeds, draft_places(newest, index, 1), DRAFT)[:, 0])
            last = torch.where(there, drawn, last)
            drafts.append(torch.where(there, last, NO_DRAFT))
        of_p.append(p[last])
        behind = newest[:, None] + torch.arange(1, 5)
        dice, u_emit = uniform(seeds, draft_places(newest, 0, 3), ACCEPT), uniform(seeds, behind, EMIT)
        stacked = (torch.stack(each, 1) for each in (drafts, of_q, of_p))
        accepted, tokens = accept(*stacked, dice, u_emit)
        texts.scatter_(1, behind, tokens)
        newest += accepted + 1
        means.append(float(accepted.double().mean()))
    counts = (texts[:, 1:5] @ torch.tensor([64, 16, 4, 1])).bincount(minlength=256).double()
    expected = torch.einsum("a,ab,bc,cd->abcd", p[0], p, p, p).flatten().double()
    return float(chisquare(counts, expected / expected.sum() * number).pvalue), sum(means) / len(means)


@pytest.mark.parametrize("lengths", [(3,), (0, 1, 2, 3)])
def test_drafts_judged_as_a_block_leave_the_distribution_and_more_are_accepted(
    lengths: Sequence[int],
) -> None:
    (value, by_token), (of_block, by_block) = (
        judged(each, lengths) for each in (accept_sampled, accept_block)
    )
    assert min(value, of_block) > 1e-4
    assert by_block > 1.03 * by_token


@pytest.mark.parametrize(
    "wrong",
    [
        lambda drafts, q, *others: accept_block(drafts, q.roll(1, 1), *others),
        lambda drafts, q, p, u_accept, _: accept_block(drafts, q, p, u_accept, u_accept[:, [0, 1, 2, 2]]),
        lambda drafts, q, p, u_accept, u_emit: accept_block(
            drafts, q, p, u_accept[:, :1].expand(-1, 3), u_emit
        ),
    ],
    ids=["of another row", "one number for two ends", "one number for all"],
)
def test_blocks_judged_wrongly_are_seen(wrong: Accept) -> None:
    assert judged(wrong, (3,))[0] < 1e-6


@pytest.mark.slow
def test_a_residual_without_draft_probabilities_is_caught(
    small_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(
        drafts: Tensor, q: Tensor, probs: Tensor, u_accept: Tensor, u_emit: Tensor
    ) -> tuple[Tensor, Tensor]:
        accepted, tokens = accept_sampled(drafts, q, probs, u_accept, u_emit)
        bonus = draw(probs, u_emit).gather(1, accepted[:, None])
        return accepted, tokens.scatter(1, accepted[:, None], bonus)

    monkeypatch.setattr(step_module, "accept_sampled", planted)
    values, _ = p_values(small_pair, FILTERS["plain"], draft_sampling="probabilistic")
    assert min(values) < 1e-6


@pytest.mark.parametrize("draft_sampling", [pytest.param("greedy", marks=pytest.mark.slow), "probabilistic"])
def test_a_seed_gives_the_same_text_in_any_batch(random_pair: Pair, draft_sampling: str) -> None:
    sampling = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=7)
    requests = random_requests(6, 128, sampling)
    mixed = [
        replace(r, sampling=replace(sampling, temperature=0.0)) if i % 3 == 0 else r
        for i, r in enumerate(requests)
    ]
    alone = generate(random_pair, mixed, max_batch_size=1, draft_sampling=draft_sampling).texts
    together = generate(random_pair, mixed[::-1], max_batch_size=8, draft_sampling=draft_sampling).texts
    gathered = generate(random_pair, mixed, draft_sampling=draft_sampling, drafter_batch="non-padded").texts
    assert alone == together == gathered
    other = [replace(r, sampling=replace(r.sampling, seed=8)) for r in requests]
    assert generate(random_pair, other).texts != generate(random_pair, requests).texts


def test_temperature_0_in_a_sampled_batch_is_greedy(random_pair: Pair) -> None:
    greedy = random_requests(4, 128, SamplingParams(max_tokens=12))
    hot = [
        replace(r, id=f"hot{r.id}", sampling=SamplingParams(max_tokens=12, temperature=1.0)) for r in greedy
    ]
    together = generate(random_pair, [*greedy, *hot]).texts
    alone = generate(random_pair, greedy).texts
    assert {name: together[name] for name in alone} == alone


def test_uniform_numbers_are_uniform_and_differ_by_purpose() -> None:
    from scipy.stats import chisquare

    seeds = torch.tensor([request_seed(0, str(i)) for i in range(2000)])
    positions = torch.arange(10).repeat(2000, 1)
    drawn = {purpose: uniform(seeds, positions, purpose) for purpose in (1, 2, 3)}
    for numbers in drawn.values():
        assert 0 <= numbers.min() < numbers.max() < 1
        counts = torch.histc(numbers, 50, 0, 1)
        assert chisquare(counts.double().numpy()).pvalue > 1e-4
    stacked = torch.stack([numbers.flatten() for numbers in drawn.values()])
    assert (torch.corrcoef(stacked) - torch.eye(3)).abs().max() < 0.03


def test_random_numbers_equal_splitmix64() -> None:
    """Computed with Python integers: a seed gives the same text on every machine and in every version."""

    def mix(x: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> shift) * factor % 2**64
        return x ^ x >> 31

    seeds = [0, 1, 2**62 + 5, *(request_seed(7, name) for name in "abc")]
    assert seeds[3] == 0x3E5416EFC9C41D8B
    places = (0, 1, 2, 1000, 131071)
    positions = torch.tensor(places).repeat(len(seeds), 1)
    for number, purpose in ((1, ACCEPT), (2, EMIT), (3, DRAFT)):
        steps = [(4 * place + number) * 0x9E3779B97F4A7C15 for place in places]
        expected = [[(mix((mix(seed) + step) % 2**64) >> 40) / 2**24 for step in steps] for seed in seeds]
        assert uniform(torch.tensor(seeds), positions, purpose).tolist() == expected


def test_drafts_and_their_dice_have_random_numbers_that_no_other_step_has(
    small_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = Counter[tuple[int, int, int]]()

    def counted(seeds: Tensor, places: Tensor, purpose: int) -> Tensor:
        used.update((int(seeds[0]), place, purpose) for place in places[0].tolist() if purpose != EMIT)
        return uniform(seeds, places, purpose)

    monkeypatch.setattr(step_module, "uniform", counted)
    monkeypatch.setattr(drafting, "uniform", counted)
    sampling = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    requests = [Request(id=str(i), prompt_token_ids=PROMPT, sampling=sampling) for i in range(3)]
    found = generate(small_pair, requests, max_batch_size=1, draft_sampling="probabilistic")
    assert {len(step[0]) - step[1] for steps in found.verified.values() for step in steps} >= {0, 1, 2}
    assert {purpose for _, _, purpose in used} == {ACCEPT, DRAFT}
    assert set(used.values()) == {1}


def test_zero_probability_tokens_are_never_sampled() -> None:
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]).expand(4, 5)
    almost_one = 1 - 2**-24
    assert draw(weights, torch.tensor([0.0, 0.29, 0.31, almost_one])).tolist() == [1, 1, 3, 3]


def test_a_draft_without_probability_is_not_accepted_by_a_random_number_of_0() -> None:
    probs = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    drafts, zeros = torch.tensor([[0]]), torch.zeros(1, 2)
    for accepted, tokens in (
        accept_drawn(drafts, probs, zeros),
        accept_sampled(drafts, torch.tensor([[[1.0, 0.0]]]), probs, zeros[:, :1], zeros),
    ):
        assert accepted.tolist() == [0]
        assert tokens[0, 0] == 1


def test_draft_probabilities_of_greedy_and_nan_rows_are_one_hot() -> None:
    """A row that sums to more would be accepted too rarely, and no text would show it."""
    logits = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    logits[2] = torch.nan
    params = [SamplingParams(temperature=temperature) for temperature in (0.0, 0.8, 0.8)]
    greedy = logits.argmax(-1)
    probs = draft_probs(logits, greedy, SamplingBatch.of(params, [0, 0, 0], torch.device("cpu")))
    one_hot = torch.nn.functional.one_hot(greedy, 5).float()
    assert torch.equal(probs[[0, 2]], one_hot[[0, 2]])
    assert torch.allclose(probs[1], (logits[1] / 0.8).softmax(-1))


def test_filtered_probabilities() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()[None, None]

    def probs(**settings: float) -> list[float]:
        params = SamplingParams(**({"temperature": 1.0} | settings))
        batch = SamplingBatch.of([params], [0], torch.device("cpu"))
        return [round(p, 4) for p in target_probs(logits, logits.argmax(-1), batch).flatten().tolist()]

    assert probs() == [0.5, 0.25, 0.15, 0.1]
    assert probs(temperature=0) == [1, 0, 0, 0]
    assert probs(top_k=2) == [0.6667, 0.3333, 0, 0]
    assert probs(top_p=0.7) == [0.6667, 0.3333, 0, 0]
    assert probs(top_p=0.76) == [0.5556, 0.2778, 0.1667, 0]
    assert probs(top_p=1e-46) == probs(top_p=1e-300) == [1, 0, 0, 0]  # 0 in float32
    assert probs(min_p=1e-300, temperature=1e6) == [0.25] * 4
    assert probs(temperature=1e-300) == [1, 0, 0, 0]
    assert probs(min_p=0.25) == [0.5556, 0.2778, 0.1667, 0]
    logits = torch.zeros(1, 1, 4)
    assert probs(top_p=0.5) == [0.5, 0.5, 0, 0]  # two tokens make up exactly that share


@pytest.mark.parametrize("num_rows", [1, 3])  # of a prefill, and of a verify
def test_gpu_filters_equal_the_reference(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """With fakes of FlashInfer's kernels, which need a GPU: their arguments, row by row."""

    def top_k(rows: Tensor, places: Tensor) -> Tensor:
        assert places.is_contiguous(), "the kernels ignore strides"
        least = torch.stack([row.topk(int(n)).values[-1] for row, n in zip(rows, places, strict=True)])
        kept = rows.masked_fill(rows < least[:, None], 0)
        return kept / kept.sum(-1, keepdim=True)

    def top_p(rows: Tensor, share: Tensor) -> Tensor:
        assert share.is_contiguous(), "the kernels ignore strides"
        ordered, order = rows.sort(dim=-1, descending=True)
        kept = ordered.masked_fill(ordered.cumsum(-1) - ordered >= share[:, None], 0)
        kept = torch.zeros_like(rows).scatter_(-1, order, kept)
        return kept / kept.sum(-1, keepdim=True)

    kernels = SimpleNamespace(top_k_renorm_probs=top_k, top_p_renorm_probs=top_p)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(sampling=kernels))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", kernels)
    params = [SamplingParams(temperature=1, top_k=k, top_p=p) for k in (0, 1, 5, 99) for p in (0.3, 0.9, 1.0)]
    batch = SamplingBatch.of(params, list(range(len(params))), torch.device("cpu"))
    probs = torch.rand(len(params), num_rows, 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    # as min-p leaves them: less than 1
    probs = probs.masked_fill(probs < 0.6 * probs.amax(-1, keepdim=True), 0)
    expected = _keep_top(probs, batch)
    got = _keep_top_on_gpu(probs, batch)
    torch.testing.assert_close(got, expected / expected.sum(-1, keepdim=True))
