"""The drafts themselves, against an independent reference: equal text only proves the verifier."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams
from specgen.decoding.outcome import DraftInput, Outcome, PaddedBatch
from specgen.models.eagle import Eagle3Head
from specgen.record.record_rows import PassRow
from tests.engines import Pair, bundled_requests, engine_of, generate, random_requests
from tests.reference_heads import ReferenceHead
from tests.test_heads import wrong_drafts

K = 3
REQUESTS = random_requests(3, 128, SamplingParams(max_tokens=5), lengths=(2, 12))


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("max_prefill_tokens", [2048, 5])
def test_drafts_equal_the_reference(
    random_pair: Pair, random_reference: ReferenceHead, batch: str, max_prefill_tokens: int
) -> None:
    outputs = generate(
        random_pair, REQUESTS, num_spec_tokens=K, drafter_batch=batch, max_prefill_tokens=max_prefill_tokens
    )
    assert sum(map(len, outputs.verified.values())) >= 10
    assert list(wrong_drafts(outputs, random_reference)) == []


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_drafts_equal_the_reference_with_mixed_acceptance(
    demo_pair: Pair, demo_reference: ReferenceHead, batch: str
) -> None:
    requests = bundled_requests(6, SamplingParams(max_tokens=32))
    outputs = generate(demo_pair, requests, num_spec_tokens=4, drafter_batch=batch)
    assert set(outputs.accepted) == {0, 1, 2, 3, 4}
    assert list(wrong_drafts(outputs, demo_reference)) == []


def test_k_0_runs_no_head_pass(random_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a step that drafts runs the head, K times."""
    forward, rows = Eagle3Head.forward, list[int]()

    def counted(self: Eagle3Head, ids: Tensor, *rest: Any) -> Any:
        rows.append(len(ids))
        return forward(self, ids, *rest)

    monkeypatch.setattr(Eagle3Head, "forward", counted)
    run = generate(random_pair, REQUESTS, num_spec_tokens=3)
    assert len(rows) == 3 * len(run.steps)
    assert sum(rows) == sum(e.loop_rows for e in run.passes if isinstance(e, PassRow))


def test_spoilt_pages_are_cleared_in_both_caches(random_pair: Pair) -> None:
    """A masked position contributes 0 times its value, which is NaN for NaN."""
    steps: Any = engine_of(random_pair)._steps
    for cache in (steps._cache, steps._drafter._cache):
        for stored in cache._storage.values():
            stored.fill_(float("nan"))
    steps.clear([2])
    steps._clear_spoilt()
    for cache in (steps._cache, steps._drafter._cache):
        keys, values = cache.pages(0)
        assert keys[1].isnan().all()
        assert not keys[2].any()
        assert not values[2].any()


def test_rejected_rows_do_not_affect_later_drafts(random_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows write KV beyond the sequence's end; poison there must not reach a draft."""
    prepare = PaddedBatch.prepare
    clean = generate(random_pair, REQUESTS)

    def poisoned(self: PaddedBatch, outcome: Outcome) -> DraftInput:
        given = prepare(self, outcome)
        rejected = torch.ones(given.layout.num_rows, dtype=torch.bool)
        rejected[outcome.layout.leading(outcome.keep, int(outcome.keep.sum()))[0]] = False
        return replace(given, features=given.features.masked_fill(rejected[:, None], 1e4))

    monkeypatch.setattr(PaddedBatch, "prepare", poisoned)
    assert generate(random_pair, REQUESTS).verified == clean.verified


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("k", [0, 3])
def test_passes_record_the_rows_each_step_computed(demo_pair: Pair, k: int, batch: str) -> None:
    requests = bundled_requests(6, SamplingParams(max_tokens=16))
    outputs = generate(demo_pair, requests, num_spec_tokens=k, drafter_batch=batch)
    kept: dict[int, list[int]] = {}  # rows of accepted tokens by pass, of each sequence in it
    for row in outputs.requests:
        for step in row.steps or ():
            kept.setdefault(step.number, []).append(step.accepted + 1)
    prompts = sum(row.num_prompt_tokens - row.num_cached_tokens for row in outputs.requests)
    passes = [row for row in outputs.passes if isinstance(row, PassRow)]
    assert sum(row.target_rows for row in passes if row.kind == "prefill") == prompts
    for row in passes:
        accepted = sum(kept.get(row.number, ()))
        if row.kind == "prefill":
            assert row.first_pass_rows == row.first_pass_kept == (row.target_rows if k else 0)
            assert row.loop_rows == row.num_rejected == 0
            continue
        size = len(kept[row.number])
        assert (row.num_sequences, row.target_rows) == (size, size * (k + 1))
        assert row.first_pass_rows == ((row.target_rows if batch == "padded" else accepted) if k else 0)
        assert row.first_pass_kept == (accepted if k else 0)
        assert row.loop_rows == size * k
        assert (row.num_tokens <= accepted, row.num_accepted) == (True, accepted - size)
        assert row.num_rejected == size * (k + 1) - accepted
    assert sum(row.num_tokens for row in passes) == sum(map(len, outputs.texts.values()))
