"""Lookahead, padding rows and out-of-memory errors change no text and no step."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from specgen.config import SamplingParams, UserError
from specgen.core.engine_core import EngineCore
from specgen.core.graphs import bucket
from specgen.core.sequence import Request, Sequence
from specgen.core.step import Steps
from specgen.record.record_rows import OutOfMemory, PassRow
from tests.engines import Outputs, Pair, bundled_requests, engine_of, generate, random_requests
from tests.marks import mostly_slow

GREEDY = SamplingParams(max_tokens=30)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9)


def mixed_requests(sampling: SamplingParams) -> list[Request]:
    """Texts of 1 to 40 tokens, so that sequences leave and join at nearly every step."""
    requests = bundled_requests(12, sampling)
    return [
        Request(
            id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=SamplingParams(
                max_tokens=1 + 7 * index % sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
            ),
        )
        for index, request in enumerate(requests)
    ]


@pytest.mark.parametrize(
    ("max_batch_size", "k", "batch", "sampling"),
    mostly_slow(
        [
            *product((6,), (4,), ("padded", "non-padded"), (GREEDY, SAMPLED)),
            *[(1, k, "padded", sampling) for k, sampling in ((0, SAMPLED), (1, GREEDY), (4, SAMPLED))],
            *[(6, 0, "padded", GREEDY), (6, 1, "non-padded", SAMPLED)],
        ],
        (6, 4, "padded", SAMPLED),
        (6, 4, "non-padded", GREEDY),
    ),
    ids={GREEDY: "greedy", SAMPLED: "sampled"}.get,
)
def test_lookahead_changes_no_text_and_no_step(
    demo_pair: Pair,
    device_like: Callable[..., None],
    sampling: SamplingParams,
    batch: str,
    k: int,
    max_batch_size: int,
) -> None:
    def run() -> Outputs:
        return generate(
            demo_pair,
            mixed_requests(sampling),
            num_spec_tokens=k,
            drafter_batch=batch,
            max_batch_size=max_batch_size,
        )

    plain = run()
    device_like()
    ahead = run()
    assert ahead.texts == plain.texts
    assert ahead.verified == plain.verified
    if sampling is SAMPLED and k:
        assert set(plain.accepted) >= {0, 1}


def decoded_sequences(outputs: Outputs) -> int:
    """Sequences in decode steps, of all steps."""
    return sum(row.num_sequences for row in outputs.steps)


@pytest.mark.parametrize("ahead", [False, True])
def test_no_step_is_spent_on_a_text_that_reaches_its_length(
    random_pair: Pair, device_like: Callable[..., None], ahead: bool
) -> None:
    device_like(ahead)
    lengths = [1, 2, 3, 4, 7, 9]
    requests = [
        Request(id=str(n), prompt_token_ids=(5, n), sampling=SamplingParams(max_tokens=n, ignore_eos=True))
        for n in lengths
    ]
    outputs = generate(random_pair, requests, num_spec_tokens=0, max_batch_size=4)
    assert decoded_sequences(outputs) == sum(lengths) - len(lengths)  # first tokens are of prefills


@pytest.mark.parametrize("max_batch_size", [1, 4])
def test_the_next_prompts_are_launched_before_texts_that_end_together_are_handed_out(
    random_pair: Pair, device_like: Callable[..., None], max_batch_size: int
) -> None:
    device_like()
    engine = engine_of(random_pair, num_spec_tokens=0, max_batch_size=max_batch_size)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    requests = [Request(id=str(n), prompt_token_ids=(5, n), sampling=sampling) for n in range(8)]
    launched: dict[str, int] = {}
    for completion in engine.generate(requests):
        launched[completion.request.id] = len(engine._in_flight)
        assert len(completion.token_ids) == 5
    last = [str(n) for n in range(8 - max_batch_size, 8)]
    assert {name: number for name, number in launched.items() if name not in last} == dict.fromkeys(
        [str(n) for n in range(8 - max_batch_size)], 2
    )
    assert [launched[name] for name in last] == [0] * max_batch_size


def test_texts_that_have_ended_are_handed_out_before_the_source_fails(
    random_pair: Pair, device_like: Callable[..., None]
) -> None:
    device_like()
    engine = engine_of(random_pair, num_spec_tokens=0, max_batch_size=2)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)

    def source() -> Iterator[Request]:
        for n in range(4):
            yield Request(id=str(n), prompt_token_ids=(5, n), sampling=sampling)
        raise UserError("row 5 is no prompt")

    found: list[str] = []
    with pytest.raises(UserError, match="row 5"):
        found.extend(completion.request.id for completion in engine.generate(source()))
    assert found == ["0", "1"]


def test_no_step_is_spent_on_a_text_that_its_first_token_ended(demo_pair: Pair) -> None:
    (eos, *_) = demo_pair.models.target.config.eos_token_ids
    ends = SamplingParams(max_tokens=40, logit_bias=((eos, 100.0),))
    outputs = generate(demo_pair, bundled_requests(6, ends), num_spec_tokens=4, max_batch_size=3)
    assert set(map(len, outputs.texts.values())) == {1}
    assert decoded_sequences(outputs) == 0


def test_no_page_leaks_and_page_0_holds_padding_rows(
    random_pair: Pair, device_like: Callable[..., None]
) -> None:
    device_like()
    engine = engine_of(random_pair, max_batch_size=7, kv_memory=60_000 * 16)
    list(engine.generate(random_requests(16, 128, SamplingParams(max_tokens=30), lengths=(1, 40))))
    (allocator,) = engine._scheduler._allocators
    assert allocator.num_free == allocator.num_pages
    taken: list[int] = []
    allocator.grow(taken, allocator.num_pages * allocator.page_size)
    assert sorted(taken) == list(range(1, allocator.num_pages + 1))


def test_texts_reach_the_context_limit_with_lookahead(
    random_pair: Pair, device_like: Callable[..., None]
) -> None:
    limit = random_pair.models.target.config.max_positions
    requests = [
        Request(id=f"r{n}", prompt_token_ids=(5,) * (limit - n), sampling=SamplingParams(max_tokens=99))
        for n in (1, 2, 3, 9)
    ]
    plain = generate(random_pair, requests, num_spec_tokens=4)
    device_like()
    ahead = generate(random_pair, requests, num_spec_tokens=4)
    assert ahead.texts == plain.texts
    assert [len(text) for text in ahead.texts.values()] == [1, 2, 3, 9]


@pytest.mark.parametrize(
    ("where", "ahead"), mostly_slow(product(("prefill", "decode"), (False, True)), ("decode", True))
)
def test_out_of_memory_lowers_the_limits_and_changes_no_text(
    demo_pair: Pair,
    device_like: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    ahead: bool,
) -> None:
    requests = bundled_requests(8, GREEDY)
    plain = generate(demo_pair, requests, num_spec_tokens=4, max_batch_size=8)
    device_like(ahead)
    work = getattr(Steps, where)

    def too_large(self: Steps, first: Any, *rest: Any) -> Any:
        size = first.num_rows  # of a prefill's layout, or of a step's columns
        if size > (60 if where == "prefill" else 4):
            raise torch.OutOfMemoryError("planted")
        return work(self, first, *rest)

    monkeypatch.setattr(Steps, where, too_large)
    short = generate(demo_pair, requests, num_spec_tokens=4, max_batch_size=8, max_prefill_tokens=256)
    assert short.texts == plain.texts
    lowered = [event for event in short.passes if isinstance(event, OutOfMemory)]
    assert lowered
    assert lowered[-1].max_batch_size == (8 if where == "prefill" else 4 if not ahead else 2)
    assert lowered[-1].max_prefill_tokens == (32 if where == "prefill" else 256)


def test_out_of_memory_at_the_last_step(
    demo_pair: Pair, device_like: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = bundled_requests(1, SamplingParams(max_tokens=40))[0]
    text = generate(demo_pair, [request], num_spec_tokens=0).texts[request.id]
    eos = frozenset([text[5]])
    end = len(request.prompt_token_ids) + text.index(text[5])  # position of the surplus step
    new_sequence, decode = EngineCore._new_sequence, Steps.decode

    def ends_early(self: EngineCore, request: Request) -> Sequence:
        sequence = new_sequence(self, request)
        sequence.eos_token_ids = eos
        return sequence

    def fails_after_the_end(self: Steps, columns: Any, num_drafts: int) -> Any:
        if int(columns.state.positions.max()) >= end:
            raise torch.OutOfMemoryError("planted")
        return decode(self, columns, num_drafts)

    monkeypatch.setattr(EngineCore, "_new_sequence", ends_early)
    monkeypatch.setattr(Steps, "decode", fails_after_the_end)
    device_like()
    requests = [replace(request, id=name) for name in "ab"]
    outputs = generate(demo_pair, requests, num_spec_tokens=0, max_batch_size=1)
    assert outputs.texts == dict.fromkeys("ab", text[: text.index(text[5]) + 1])
    assert any(isinstance(event, OutOfMemory) for event in outputs.passes)


def test_pass_times_add_up_to_the_run_time(demo_pair: Pair, device_like: Callable[..., None]) -> None:
    device_like()
    passes = [e for e in generate(demo_pair, bundled_requests(6, GREEDY)).passes if isinstance(e, PassRow)]
    assert sum(e.seconds for e in passes) <= passes[-1].time * 1.001


def test_batch_size_buckets_pad_at_most_a_third() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 65, 128)] == [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 80, 128,
    ]  # fmt: skip
    assert all(n <= bucket(n) < 1.5 * n for n in range(2, 1000))
