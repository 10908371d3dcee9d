"""Shared prefixes are computed once, and nothing else about a run changes."""

import random
from collections.abc import Iterable
from typing import Any

import pytest

from specgen.config import SamplingParams
from specgen.core import scheduler
from specgen.core.scheduler import Limits, Scheduler
from specgen.core.sequence import Request, ScoreRequest, Sequence
from specgen.kv import pages
from specgen.kv.pages import PageAllocator, Places, StateSlots, common_digests, extend_digests
from specgen.record.record_rows import EngineRow, PassRow
from tests.engines import Outputs, Pair, bundled_requests, engine_of, generate, random_requests
from tests.marks import mostly_slow

GREEDY = SamplingParams(max_tokens=20)
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=5)


def digests(tokens: Iterable[int], page_size: int = 4, root: bytes = b"") -> list[bytes]:
    found: list[bytes] = []
    extend_digests(found, list(tokens), page_size, root)
    return found


def few_shot_requests(pair: Pair, count: int, sampling: SamplingParams, prefix: int = 50) -> list[Request]:
    """Requests that share at least ``prefix`` tokens, some of them all but the last tokens."""
    prompts = [r.prompt_token_ids for r in random_requests(count, 128, sampling, lengths=(1, 30), seed=3)]
    (start,) = random_requests(1, 128, sampling, lengths=(prefix, prefix), seed=9)
    prompts += [(*prompts[0], 7), (*prompts[0][:9], 8, 9), prompts[1]]
    return [
        Request(id=f"s{i}", prompt_token_ids=(*start.prompt_token_ids, *prompt), sampling=sampling)
        for i, prompt in enumerate(prompts)
    ]


def rows_of(outputs: Outputs) -> int:
    """Rows that prefills computed."""
    steps = (event for event in outputs.passes if isinstance(event, PassRow))
    return sum(event.target_rows for event in steps if event.kind == "prefill")


def num_cached(outputs: Outputs) -> int:
    return sum(row.num_cached_tokens for row in outputs.requests)


def test_a_page_digest_covers_all_tokens_up_to_the_one_after_the_page() -> None:
    whole = digests(range(13))
    assert len(whole) == len(set(whole)) == 3
    assert len(digests(range(12))) == 2, "the token after the third page is not known"
    for at in range(13):
        changed = digests([*range(at), 99, *range(at + 1, 13)])
        same = [page for page in range(3) if changed[page] == whole[page]]
        assert same == [page for page in range(3) if 4 * (page + 1) < at]
    assert not set(digests(range(13), root=b"other")) & set(whole)
    grown = digests(range(6))
    extend_digests(grown, list(range(13)), 4, b"")
    assert grown == whole


def test_pages_of_one_text_are_named_as_those_of_another_that_begins_alike() -> None:
    known = [*range(13)]
    for length in range(1, 18):
        for at in range(length + 1):  # where the texts part, if within both
            text = [token if place < at else 90 + place for place, token in enumerate(range(length))]
            same = common_digests(digests(known), known, text, 4)
            both = zip(digests(known), digests(text), strict=False)
            assert same == [one for one, other in both if one == other]
    assert common_digests([], known, known, 4) == []


def waiting_behind(
    prefix: int, shares: list[str], *, num_pages: int, prefix_cache: bool = True
) -> tuple[Scheduler, list[Sequence]]:
    """A scheduler with a prompt for each of ``shares``: a prefix of so many tokens, and nine of its own."""
    made = Scheduler(
        allocators=(PageAllocator(num_pages, 4, prefix_cache=prefix_cache),),
        slots=StateSlots(None),
        places=Places(0, 0),
        limits=Limits(max_batch_size=300, max_prefill_tokens=100_000),
        step_rows=4,
    )
    for number, share in enumerate(shares):
        prompt = [*range(prefix), *([number] * 9)]
        request = Request(id=str(number), prompt_token_ids=tuple(prompt), sampling=GREEDY, share=share)
        most = len(prompt) + 21
        made.submit(
            Sequence(request=request, tokens=prompt, max_length=most, seed=0, eos_token_ids=frozenset())
        )
    return made, [*made.waiting]


def test_a_prompt_waits_for_the_pages_alone_that_it_does_not_share() -> None:
    made, (first, second, third) = waiting_behind(40, [""] * 3, num_pages=14 + 5 + 2)
    made.launched(made.next_chunks())
    # 53 positions take 14 pages, of which all but 9 tokens' and what a step writes are there for the second
    assert made.running == [first, second]
    assert len(set(first.pages) & set(second.pages)) == 10 - 1, (
        "the last page is named with a token of its own"
    )
    assert not made.next_chunks()
    made.retire(second)
    made.launched(made.next_chunks())
    assert made.running == [first, third]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_prompts_share_is_hashed_once(monkeypatch: pytest.MonkeyPatch, prefix_cache: bool) -> None:
    """Of hundreds of waiting prompts behind one prefix each page is, and every prompt has its own behind it."""
    hashed, blake2b = [], pages.hashlib.blake2b

    def counted(content: bytes, **how: int) -> Any:
        hashed.append(content)
        return blake2b(content, **how)

    monkeypatch.setattr(pages.hashlib, "blake2b", counted)
    shares = [""] * 300 if prefix_cache else ["a", "b"] * 2
    made, sequences = waiting_behind(400, shares, num_pages=5000, prefix_cache=prefix_cache)
    made.launched(made.next_chunks())
    assert len(made.running) == len(sequences)
    # the last page of the prefix is named with the token behind it, and two more are a prompt's own; what shares
    # something else is named alike with none
    of_one, num = 102, len(sequences)
    assert len(hashed) == (99 + 3 * num if prefix_cache else of_one * num)
    monkeypatch.undo()
    for each in sequences:
        assert each.digests == digests(each.tokens, root=each.request.share.encode())


def test_page_sharing_and_eviction_equal_a_simple_model() -> None:
    """Against a model that tracks every page's content; a page in use is never reassigned."""
    for seed in range(20):
        draw, cache = random.Random(seed), PageAllocator(12, 4, prefix_cache=True)
        content: dict[int, bytes] = {}
        held: list[tuple[list[int], list[bytes]]] = []
        for _ in range(400):
            if draw.random() < 0.05:
                cache.forget()
                assert cache.num_known(digests(range(13))) == 0
            if held and draw.random() < 0.5:
                pages, _ = held.pop(draw.randrange(len(held)))
                cache.release(pages)
                continue
            names = digests([draw.randrange(2) for _ in range(draw.randrange(1, 30))])
            pages: list[int] = []
            reused = cache.reuse(pages, names)
            assert [content[page] for page in pages] == names[:reused]
            in_use = {page for other, _ in held for page in other} | set(pages)
            if not cache.grow(pages, 4 * (len(names) + 1)):
                cache.release(pages)
                continue
            assert not in_use & set(pages[reused:])
            content.update(zip(pages[reused:], [*names[reused:], b""], strict=True))
            cache.keep(pages, names)
            held.append((pages, names))
            assert cache.num_free == 12 - len({page for other, _ in held for page in other})


def test_eviction_is_lru_and_from_the_end_of_a_text() -> None:
    cache, names = (
        PageAllocator(4, 4, prefix_cache=True),
        [digests(range(start, start + 9)) for start in (0, 100)],
    )
    for text in names:
        pages: list[int] = []
        cache.grow(pages, 8)
        cache.keep(pages, text)
        cache.release(pages)
    taken: list[int] = []
    assert cache.grow(taken, 4)
    assert [cache.num_known(text) for text in names] == [1, 2]
    cache.release(taken)
    cache.reuse(taken, names[0])
    cache.release(taken)
    assert cache.grow(taken, 8)
    assert [cache.num_known(text) for text in names] == [1, 1]


def test_of_a_prompt_that_was_there_the_last_position_alone_is_computed(random_pair: Pair) -> None:
    requests = [Request(id=name, prompt_token_ids=tuple(range(3, 16)), sampling=GREEDY) for name in "ab"]
    outputs = generate(random_pair, requests, max_batch_size=1)
    assert num_cached(outputs) == 12
    assert outputs.texts["a"] == outputs.texts["b"]


@pytest.mark.parametrize(
    ("max_prefill_tokens", "num_spec_tokens", "drafter_batch", "sampling"),
    mostly_slow(
        [
            (33, 3, "padded", GREEDY),
            (33, 3, "non-padded", SAMPLED),
            (33, 0, "padded", SAMPLED),
            (2048, 3, "padded", SAMPLED),
            (2048, 3, "non-padded", GREEDY),
        ],
        (33, 3, "padded", GREEDY),
        (33, 3, "non-padded", SAMPLED),
    ),
    ids={GREEDY: "greedy", SAMPLED: "sampled"}.get,
)
def test_the_prefix_cache_changes_no_text_draft_or_acceptance(
    random_pair: Pair,
    num_spec_tokens: int,
    drafter_batch: str,
    sampling: SamplingParams,
    max_prefill_tokens: int,
) -> None:
    settings: dict[str, Any] = {
        "num_spec_tokens": num_spec_tokens,
        "drafter_batch": drafter_batch,
        "max_prefill_tokens": max_prefill_tokens,
    }
    requests = few_shot_requests(random_pair, 8, sampling)
    plain = generate(random_pair, requests, **settings, prefix_cache=False)
    shared = generate(random_pair, requests, **settings)
    assert shared.texts == plain.texts
    assert shared.verified == plain.verified
    assert num_cached(plain) == 0
    assert num_cached(shared) >= 10 * 48
    assert rows_of(plain) - rows_of(shared) == num_cached(shared)


@pytest.mark.slow
def test_shared_pages_keep_the_acceptance_of_the_trained_pair(demo_pair: Pair) -> None:
    """Acceptance would fall if the head's KV at the page boundary were not that of the text."""
    some = bundled_requests(8, GREEDY)
    prompts = [(*some[0].prompt_token_ids * 3, *request.prompt_token_ids) for request in some]
    requests = [Request(id=f"r{i}", prompt_token_ids=ids, sampling=GREEDY) for i, ids in enumerate(prompts)]
    plain = generate(demo_pair, requests, num_spec_tokens=4, prefix_cache=False)
    shared = generate(demo_pair, requests, num_spec_tokens=4)
    assert num_cached(shared) > 100
    assert shared.verified == plain.verified


@pytest.mark.slow
def test_pages_of_preempted_and_finished_texts_are_reused(random_pair: Pair) -> None:
    requests = few_shot_requests(random_pair, 30, GREEDY)
    plain = generate(random_pair, requests, prefix_cache=False)
    for kv_memory in (60_000 * 16, 30_000 * 16):
        tight = generate(random_pair, requests, kv_memory=kv_memory)
        assert tight.texts == plain.texts, kv_memory
        assert tight.verified == plain.verified, kv_memory


def test_the_next_turn_reuses_the_pages_of_the_answer(random_pair: Pair) -> None:
    (first,) = random_requests(1, 128, GREEDY, lengths=(30, 30))

    def next_turn(completion: Any) -> Request | None:
        if completion.request.turn == 2:
            return None
        prompt = (*completion.request.prompt_token_ids, *completion.token_ids, 5, 6, 7)
        return Request(id="next", prompt_token_ids=prompt, sampling=GREEDY, turn=2)

    found = []
    for prefix_cache in (False, True):
        events: list[EngineRow] = []
        engine = engine_of(random_pair, events.append, prefix_cache=prefix_cache)
        completions = {c.request.id: c for c in engine.generate([first], next_turn)}
        outputs = Outputs(completions=completions, passes=events)
        found.append((outputs.texts, outputs))
    (plain, _), (shared, outputs) = found
    assert shared == plain
    assert num_cached(outputs) >= (30 + len(shared[first.id]) - 1) // 4 * 4


@pytest.mark.slow
def test_scoring_shares_context_pages_and_changes_no_text(random_pair: Pair) -> None:
    """Pages computed by scoring hold no KV of the head, so generation must not share them."""
    requests = few_shot_requests(random_pair, 8, GREEDY)
    scored = [
        ScoreRequest(
            id=f"{r.id} {n}", token_ids=(*r.prompt_token_ids, 3, n), num_context=len(r.prompt_token_ids)
        )
        for r in requests
        for n in range(4)
    ]
    passes: list[int] = []
    answers = []
    for prefix_cache in (False, True):
        events: list[EngineRow] = []
        engine = engine_of(random_pair, events.append, prefix_cache=prefix_cache)
        steps, score = engine._steps, engine._steps.score
        steps.score = lambda layout, *rest, score=score: (
            passes.append(layout.num_rows),
            score(layout, *rest),
        )[1]  # type: ignore[method-assign]
        found = {each.request.id: each for each in engine.score(scored)}
        outputs = Outputs(completions={c.request.id: c for c in engine.generate(requests)}, passes=events)
        answers.append((found, outputs.texts, sum(passes), num_cached(outputs)))
        passes.clear()
    (plain, plain_texts, plain_rows, _), (shared, shared_texts, shared_rows, cached) = answers
    for name, one in plain.items():
        assert shared[name].log_probs == pytest.approx(one.log_probs, abs=1e-4)
        assert shared[name].greedy == one.greedy
    assert shared_texts == plain_texts
    assert shared_rows < plain_rows / 5
    assert cached == num_cached(generate(random_pair, requests))


@pytest.mark.slow
def test_digests_without_the_next_token_are_caught(
    random_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a page includes the next token: without it the head would use KV of another text."""

    def without_the_next(digests: list[bytes], tokens: list[int], page_size: int, root: bytes) -> None:
        ends = range(page_size, len(tokens), page_size)
        digests[:] = [repr((root, tokens[:end])).encode() for end in ends]

    requests = few_shot_requests(random_pair, 40, GREEDY, prefix=48)
    plain = generate(random_pair, requests, prefix_cache=False)
    monkeypatch.setattr(scheduler, "extend_digests", without_the_next)
    assert generate(random_pair, requests).verified != plain.verified
