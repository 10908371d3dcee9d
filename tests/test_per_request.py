"""Per-request parameters, exact with speculation: logit bias, log-probabilities, sampling."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specgen.config import SamplingParams
from specgen.core.sequence import Completion, Request, TokenLogprobs
from specgen.decoding.sampling import SamplingForm, token_logprobs
from specgen.text.tokenizer import load_tokenizer
from tests.engines import Outputs, Pair, bundled_requests, engine_of, generate, page_bytes, random_requests
from tests.marks import mostly_slow
from tests.reference_heads import ReferenceHead

LENGTH = 20


def bias_of(count: int, seed: int, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Biases of ``count`` tokens, some of which ban a token and some of which change little."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(vocab_size, generator=generator)[:count].tolist()
    biases = (3 * torch.randn(count, generator=generator)).tolist()
    return tuple(
        (token, -100.0 if i % 5 == 4 else bias)
        for i, (token, bias) in enumerate(zip(ids, biases, strict=True))
    )


def with_biases(requests: Iterable[Request], vocab_size: int) -> list[Request]:
    """No, few, many biases in turn: rows of all widths join, leave and are compacted."""
    counts = (0, 3, 40, 16, 300)
    return [
        replace(
            request,
            sampling=replace(
                request.sampling,
                max_tokens=4 + 7 * i % LENGTH,
                logit_bias=bias_of(counts[i % len(counts)], i, vocab_size),
            ),
        )
        for i, request in enumerate(requests)
    ]


def biased(request: Request, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The logits of a row with the biases of its request added."""
    for token, bias in request.sampling.logit_bias:
        logits[0, token] += bias
    return logits


def test_logit_bias_with_mixed_acceptance(demo_pair: Pair, demo_reference: ReferenceHead) -> None:
    vocab_size = len(demo_pair.models.target.embedding)
    requests = with_biases(bundled_requests(10, SamplingParams()), vocab_size)
    expected = demo_reference.target.texts(requests, biased)
    for batch in ("padded", "non-padded"):
        outputs = generate(demo_pair, requests, num_spec_tokens=4, drafter_batch=batch, max_batch_size=4)
        assert outputs.texts == expected, batch
        assert set(outputs.accepted) >= {0, 1, 2}


@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], 1.0))
def test_the_largest_bias_forces_a_token_and_the_smallest_bans_it(
    random_pair: Pair, temperature: float
) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True)
    requests = random_requests(6, 128, sampling)
    free = generate(random_pair, requests).texts
    forced = [replace(r, sampling=replace(sampling, logit_bias=((9, 100.0),))) for r in requests]
    assert set(generate(random_pair, forced).texts.values()) == {(9,) * 12}
    banned = [
        replace(r, sampling=replace(sampling, logit_bias=tuple((t, -100.0) for t in set(free[r.id]))))
        for r in requests
    ]
    without = generate(random_pair, banned).texts
    assert not any(set(without[r.id]) & set(free[r.id]) for r in requests)


# --- log-probabilities ----------------------------------------------------------------------------


def expected_logprobs(reference: ReferenceHead, request: Request, text: tuple[int, ...]) -> torch.Tensor:
    """``[len(text), V]`` from one pass of ``transformers`` over the whole text."""
    num_prompt = len(request.prompt_token_ids)
    with torch.inference_mode():
        logits = reference.target.model(torch.tensor([(*request.prompt_token_ids, *text)])).logits[0]
    return logits[num_prompt - 1 : -1].log_softmax(-1)


def check_logprobs(reference: ReferenceHead, completion: Completion) -> None:
    request, found = completion.request, completion.logprobs
    asked = request.sampling.logprobs
    if asked is None:
        assert found is None
        return
    assert found is not None
    assert len(found) == len(completion.token_ids)
    expected = expected_logprobs(reference, request, completion.token_ids)
    for token, each, row in zip(completion.token_ids, found, expected, strict=True):
        assert each.chosen == pytest.approx(float(row[token]), abs=1e-4)
        assert len(each.top) == asked
        assert [value for _, value in each.top] == pytest.approx(row.topk(asked).values.tolist(), abs=1e-4)
        assert [value for _, value in each.top] == pytest.approx(
            [float(row[token]) for token, _ in each.top], abs=1e-4
        )


def asking(requests: Iterable[Request], sampling: SamplingParams) -> list[Request]:
    """Requests for no, 0, 1, 5 and 20 log-probabilities in turn, of texts of several lengths."""
    asked = (None, 0, 1, 5, 20)
    return [
        replace(
            request, sampling=replace(sampling, max_tokens=1 + 5 * i % 24, logprobs=asked[i % len(asked)])
        )
        for i, request in enumerate(requests)
    ]


KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_k=20),
    "biased": SamplingParams(logit_bias=((40, 5.0), (41, -100.0))),
}


@pytest.mark.parametrize(
    ("k", "batch", "ahead", "kind"),
    mostly_slow(
        [
            (0, "padded", True, "biased"),
            (1, "non-padded", False, "sampled"),
            (4, "padded", True, "sampled"),
            (4, "padded", False, "greedy"),
            (4, "non-padded", True, "greedy"),
            (4, "non-padded", True, "biased"),
        ],
        (4, "padded", True, "sampled"),
        (4, "non-padded", True, "greedy"),
    ),
)
def test_logprobs_equal_the_reference(
    demo_pair: Pair,
    demo_reference: ReferenceHead,
    device_like: Callable[..., None],
    k: int,
    batch: str,
    ahead: bool,
    kind: str,
) -> None:
    requests = asking(bundled_requests(12, SamplingParams()), KINDS[kind])
    device_like(ahead)
    outputs = generate(demo_pair, requests, num_spec_tokens=k, drafter_batch=batch, max_batch_size=5)
    for completion in outputs.completions.values():
        check_logprobs(demo_reference, completion)
    if k == 4 and kind != "sampled":
        assert set(outputs.accepted) >= {1, 2, 3}


@pytest.mark.slow
def test_logprobs_after_preemption(demo_pair: Pair, demo_reference: ReferenceHead) -> None:
    requests = bundled_requests(12, SamplingParams(max_tokens=48, logprobs=2))
    outputs = generate(demo_pair, requests, num_spec_tokens=4, kv_memory=60 * page_bytes(demo_pair))
    assert outputs.num_preempted > 3
    for completion in outputs.completions.values():
        check_logprobs(demo_reference, completion)


def test_logprobs_end_with_the_text(demo_pair: Pair, demo_reference: ReferenceHead) -> None:
    """A stop string inside accepted drafts."""
    models = replace(
        demo_pair.models, tokenizer=load_tokenizer(str(demo_pair.models.checkpoints["model"].path))
    )
    pair, inside = replace(demo_pair, models=models), 0
    requests = bundled_requests(8, SamplingParams(max_tokens=40, logprobs=3, stop=("e", "\n")))
    outputs = generate(pair, requests, num_spec_tokens=4)
    for name, completion in outputs.completions.items():
        check_logprobs(demo_reference, completion)
        inside += any(emitted <= accepted for _, accepted, emitted in outputs.verified[name])
    assert inside > 0


def test_logprobs_of_one_row() -> None:
    logits = torch.tensor([[[0.5, 0.25, 0.15, 0.1]]]).log()
    (row,) = token_logprobs(logits, torch.tensor([[2]]), 20)[0].exp().tolist()
    assert row[0] == pytest.approx(0.15)
    found = TokenLogprobs.of(token_logprobs(logits, torch.tensor([[2]]), 20)[0, 0].tolist(), 2)
    assert [token for token, _ in found.top] == [0, 1]
    assert found.top[1][1] == pytest.approx(float(logits[0, 0, 1]))


# --- mixed batches ---------------------------------------------------------------------------------


def all_different(requests: Iterable[Request]) -> list[Request]:
    """Requests that all differ in their parameters."""
    asked = []
    for i, request in enumerate(requests):
        sampling = SamplingParams(
            max_tokens=6 + 5 * i % 17,
            temperature=(0.0, 0.7, 1.2)[i % 3],
            top_p=(1.0, 0.8)[i % 2],
            top_k=(0, 0, 12, 3)[i % 4],
            min_p=(0.0, 0.05, 0.2)[i // 2 % 3],
            repetition_penalty=(1.0, 1.0, 1.2)[i // 2 % 3],
            frequency_penalty=(0.0, 0.0, 0.0, 0.7)[i % 4],
            seed=i,
            stop=((), ("a",), ("the", "\n"))[i // 3 % 3],
            ignore_eos=i % 2 == 1,
            logit_bias=bias_of((0, 5, 60)[i // 2 % 3], i, 3072),
            logprobs=(None, 0, 4)[i % 3],
        )
        asked.append(replace(request, sampling=sampling))
    return asked


def answers(outputs: Outputs) -> dict[str, Any]:
    """Text, finish reason and rounded log-probabilities of every request."""
    return {
        name: (c.token_ids, c.finish_reason, c.logprobs and [round(each.chosen, 3) for each in c.logprobs])
        for name, c in outputs.completions.items()
    }


@pytest.mark.parametrize("k", mostly_slow([0, 4], 4))
def test_each_request_gets_the_same_output_in_a_batch_as_alone(
    demo_pair: Pair, device_like: Callable[..., None], k: int
) -> None:
    tokenizer = load_tokenizer(str(demo_pair.models.checkpoints["model"].path))
    pair = replace(demo_pair, models=replace(demo_pair.models, tokenizer=tokenizer))
    requests = all_different(bundled_requests(12, SamplingParams()))
    alone: dict[str, Any] = {}
    for request in requests:
        alone |= answers(generate(pair, [request], num_spec_tokens=k, max_batch_size=1))
    for ahead in (False, True):
        device_like(ahead)
        together = answers(generate(pair, requests, num_spec_tokens=k, max_batch_size=7))
        assert together == alone, ahead
    assert {end for _, end, _ in alone.values()} == {"stop", "length"}


def test_unused_features_cost_nothing() -> None:
    assert SamplingForm.of([]) == SamplingForm("greedy", 0, None)
    assert SamplingForm.of([SamplingParams(min_p=0.5)]) == SamplingForm("greedy", 0, None)
    few = SamplingParams(temperature=1.0, logit_bias=bias_of(3, 0, 99), logprobs=0)
    assert SamplingForm.of([SamplingParams(), few]) == SamplingForm("plain", 16, 0)
    many = SamplingParams(logit_bias=bias_of(17, 0, 99), logprobs=2)
    assert SamplingForm.of([many, few]) == SamplingForm("plain", 128, 20)


def test_tokens_outside_the_vocabulary_refuse_their_request(random_pair: Pair) -> None:
    engine = engine_of(random_pair)
    wrong: list[tuple[tuple[int, ...], SamplingParams, str]] = []
    for token in (-1, 128):
        biased = SamplingParams(logit_bias=((5, 1.0), (token, 1.0)))
        wrong.append(((5, token), SamplingParams(), f"token id {token} is not"))
        wrong.append(((5,), biased, f"logit-bias names token {token}, which is not"))
    wrong.append(((5,), SamplingParams(suppress_tokens=(5, 128)), "suppress-tokens names 128, which is not"))
    for prompt, sampling, words in wrong:
        refused = engine.submit(Request(id="a", prompt_token_ids=prompt, sampling=sampling))
        assert refused.error == f"{words} in the vocabulary of 128"
