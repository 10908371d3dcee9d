"""Pages behind a window go back: texts are those of a cache that keeps all, whatever is freed or shared."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams
from specgen.core import running_batch
from specgen.core.engine_core import EngineCore
from specgen.core.scheduler import Limits, Scheduler
from specgen.core.sequence import Completion, Request, ScoreRequest
from specgen.engine import build, choices
from specgen.engine.page_budget import PageBudget, rows_behind
from specgen.kv.layout import Layout
from specgen.kv.pages import PageAllocator, Places, StateSlots, extend_digests, window_pages
from specgen.models.gemma4_assistant import AssistantConfig
from tests.engines import (
    Pair,
    config_of,
    engine_of,
    load_pair,
    nan_at,
    no_page_leaked,
    page_bytes,
    random_requests,
)
from tests.marks import mostly_slow
from tests.oracle import Oracle
from tests.test_prompt_blocks import Capturing
from tests.test_scheduler import prefill, sequence
from tests.tiny_checkpoints import write_head
from tests.tiny_gemma4 import write_assistant, write_gemma4
from tests.tiny_mixtures import write_gpt_oss

pytestmark = pytest.mark.xdist_group("windowed pages")
VOCAB, NUM_TOKENS = 128, 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
KINDS = ("gemma 31b", "gemma e2b", "gpt-oss")


def requests() -> list[Request]:
    """Some begin alike, at and behind borders of pages and windows; some are samples of one prompt."""
    found = random_requests(6, VOCAB, GREEDY, lengths=(1, 50), seed=4)
    begun = random_requests(1, VOCAB, GREEDY, lengths=(40, 40), seed=5)[0].prompt_token_ids
    asked = [
        begun[:cut] + each.prompt_token_ids for cut, each in zip((0, 9, 16, 23, 40, 40), found, strict=True)
    ]
    asked += [begun, (*begun, 7), begun[:17]]
    texts = [Request(id=f"r{n}", prompt_token_ids=ids, sampling=GREEDY) for n, ids in enumerate(asked)]
    samples = (replace(GREEDY, logit_bias=((token, 2.0),)) for token in (11, 12, 13))
    return texts + [
        Request(id=f"s{n}", prompt_token_ids=(*begun[:30], 5), sampling=each, share="samples")
        for n, each in enumerate(samples)
    ]


Found = dict[str, tuple[tuple[int, ...], list[float]]]


def found_of(completions: list[Completion]) -> Found:
    """Texts, and the log-probabilities of their tokens."""
    assert all(each.error is None for each in completions), [each.error for each in completions]
    return {
        each.request.id: (each.token_ids, [one.chosen for one in each.logprobs or ()]) for each in completions
    }


def wrong(found: Found, right: Found) -> list[str]:
    """Whose text, or whose logits, are others."""
    assert found.keys() == right.keys()
    return [
        name
        for name, (text, logprobs) in found.items()
        if text != right[name][0] or logprobs != pytest.approx(right[name][1], abs=1e-4)
    ]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Pair, Found]]:
    """A pair of each kind, and what it finds with a cache that keeps all pages."""
    made: dict[str, tuple[Pair, Found]] = {}

    def world(kind: str) -> tuple[Pair, Found]:
        if kind not in made:
            path = tmp_path_factory.mktemp("world")
            target = path / "target"
            config = write_gpt_oss(target) if kind == "gpt-oss" else write_gemma4(target, kind.split()[1])
            write_head(path / "drafter", config, dialect="speculators", own_embedding=True)
            pair = load_pair(path)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PageBudget, "window", None)
                engine = engine_of(pair, num_spec_tokens=0, prefix_cache=False)
                assert len(engine._scheduler._allocators) == 1
                made[kind] = pair, found_of(list(engine.generate(requests())))
        return made[kind]

    return world


@dataclass
class Poison:
    """Makes every page that is free, and known by nothing, NaN, so that no row may look at it: not even masked."""

    engine: EngineCore

    def __post_init__(self) -> None:
        for number, allocator in enumerate(self.engine._scheduler._allocators):
            self._watch(allocator, [number == 1])

    def _watch(self, allocator: PageAllocator, apart: list[bool]) -> None:
        cache: Any = self.engine._steps._cache
        give_back, take = allocator._give_back, allocator._take

        def fill(page: int, value: float) -> None:
            for (windowed, _), layers in cache._storage.items():
                if windowed in apart:
                    layers[:, :, page] = value

        def given_back(page: int) -> bool:
            unused = give_back(page)
            if unused and page not in allocator._digest_of:
                fill(page, float("nan"))
            return unused

        def taken() -> int:
            page = take()
            fill(page, 0.0)  # as it is when an engine begins, and after what was not finite
            return page

        allocator._give_back, allocator._take = given_back, taken  # type: ignore[method-assign]


@dataclass(frozen=True)
class Case:
    """What one seed stands for."""

    kind: str
    drafter: str
    ahead: bool
    blocks: bool
    spare: int  # windowed pages beyond those of one sequence
    pages: int
    settings: dict[str, Any]

    @classmethod
    def of(cls, seed: int) -> "Case":
        rng = random.Random(seed)
        drafter = rng.choice(("oracle", "oracle", "head", "ngram:3"))
        settings = {
            "num_spec_tokens": rng.choice((0, 1, 4, 9)) if drafter == "oracle" else rng.choice((1, 4)),
            "max_batch_size": rng.choice((1, 3, 8)),
            "max_prefill_tokens": rng.choice((3, 7, 13, 40, 2048)),
            "prefix_cache": rng.random() < 0.7,
            "drafter_batch": rng.choice(("padded", "non-padded")),
        }
        if drafter.startswith("ngram"):
            settings["drafter"] = drafter
        return cls(
            kind=KINDS[seed % 3],
            drafter=drafter,
            ahead=rng.random() < 0.5,
            blocks=rng.random() < 0.3,
            spare=rng.choice((0, 2, 5, 12, 100)),
            pages=rng.choice((40, 60, 400)),
            settings=settings,
        )


def check(
    case: Case,
    worlds: Callable[[str], tuple[Pair, Found]],
    device_like: Callable[..., None],
    patch: pytest.MonkeyPatch,
) -> None:
    pair, right = worlds(case.kind)
    device_like(case.ahead)
    engine = engine_for(case, pair, right, patch)
    Poison(engine)
    for _ in range(2):  # of which the second finds pages of the first
        assert wrong(found_of(list(engine.generate(requests()))), right) == []
        assert no_page_leaked(engine)


def engine_for(case: Case, pair: Pair, right: Found, patch: pytest.MonkeyPatch) -> EngineCore:
    if case.blocks:
        patch.setitem(choices.RUNNERS, "off", Capturing)
    if case.drafter == "oracle":
        texts = {name: text for name, (text, _) in right.items()}
        patch.setattr(build, "_drafter", lambda *_: Oracle(requests(), texts, VOCAB))
    config = config_of(pair, **case.settings)
    window = pair.models.target.config.kv_spec.window
    assert window is not None
    least = window_pages(window, rows_behind(config) + 1, config.page_size)
    patch.setattr(PageBudget, "windowed", lambda self, pages: least + case.spare)
    memory = (case.pages + least + case.spare) * page_bytes(pair)
    patch.setattr(PageBudget, "within", lambda self, _: case.pages)
    return engine_of(pair, **case.settings, kv_memory=memory)


@pytest.mark.parametrize("seed", mostly_slow([*range(0, 60, 2), 39, 47], 12, 28, 39, 47))
def test_nothing_changes_that_a_cache_finds_which_keeps_all(
    worlds: Callable[[str], tuple[Pair, Found]],
    device_like: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """The seeds of the quick set preempt, find prefixes, accept any number of drafts, prefill blocks, and share."""
    check(Case.of(seed), worlds, device_like, monkeypatch)


def _filtered(real: Any) -> Any:
    """Zeros of four numbers a row go to the last column of a table, where there are zeros."""

    def on_device(values: Any, *rest: Any) -> Tensor:
        if values and isinstance(values[0], tuple) and len(values[0]) == 4:
            values = [each if each[3] else (*each[:2], -1, 0) for each in values]
        return real(values, *rest)  # type: ignore[no-any-return]

    return on_device


def _early(rows: int) -> Callable[[Any], Any]:
    return lambda real: lambda self, pages, position: real(self, pages, position + rows)


PLANTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a page goes back one too early": (PageAllocator, "slide", _early(4)),
    "the next step begins a row later": (PageAllocator, "slide", _early(1)),
    "tables keep pages that went back": (running_batch, "on_device", _filtered),
    "a prefix of which pages are gone": (
        PageAllocator,
        "num_known",
        lambda real: lambda self, digests, *rest: len(digests) if self.window else real(self, digests, *rest),
    ),
    "one table for all layers": (Layout, "windowed", lambda real: property(lambda self: self)),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_page_that_is_missed_is_seen(
    worlds: Callable[[str], tuple[Pair, Found]],
    device_like: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    plant: str,
) -> None:
    (place, name, change), case = PLANTS[plant], Case.of(3)
    worlds(case.kind)
    monkeypatch.setattr(place, name, change(getattr(place, name)))
    with pytest.raises((AssertionError, IndexError)):
        check(case, worlds, device_like, monkeypatch)


def engine_with(pair: Pair, patch: pytest.MonkeyPatch, spare: int, **settings: Any) -> EngineCore:
    """With so many windowed pages beyond those of one sequence, and four drafts of a head."""
    case = replace(Case.of(0), drafter="head", blocks=False, spare=spare, pages=120)
    return engine_for(replace(case, settings={"num_spec_tokens": 4} | settings), pair, {}, patch)


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "gemma e2b"))
def test_what_is_no_number_reaches_no_other_request(
    worlds: Callable[[str], tuple[Pair, Found]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also from pages that went back before anybody had read of it."""
    pair, right = worlds(kind)
    used = {token for each in requests() for token in (*each.prompt_token_ids, *right[each.id][0])}
    spoilt = min({*range(VOCAB)} - used)
    bad = Request(id="bad", prompt_token_ids=(spoilt, *range(3, 50)), sampling=GREEDY)
    settings = {"max_prefill_tokens": 16, "num_spec_tokens": 0}
    engine = engine_with(nan_at(pair, spoilt), monkeypatch, 6, **settings)
    stored: Any = engine._steps._cache._storage
    (failed,) = engine.generate([bad])
    assert "again when tried alone" in (failed.error or "")
    engine._steps._clear_spoilt()
    assert all(layers.isfinite().all() for layers in stored.values())
    found = {each.request.id: each for each in engine.generate([*requests()[:4], bad, *requests()[4:]])}
    assert found.pop("bad").error == failed.error
    assert wrong(found_of([*found.values()]), right) == []
    assert no_page_leaked(engine)


@pytest.mark.parametrize(
    ("seed", "error"),
    mostly_slow(
        [(seed, (torch.OutOfMemoryError, RuntimeError)[seed // 2 % 2]) for seed in range(8)],
        (1, torch.OutOfMemoryError),
        (2, RuntimeError),
    ),
)
def test_a_pass_that_fails_keeps_no_page(
    worlds: Callable[[str], tuple[Pair, Found]],
    device_like: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    error: type[RuntimeError],
) -> None:
    pair, right = worlds(KINDS[seed % 3])
    device_like(bool(seed % 2))
    engine = engine_with(pair, monkeypatch, 8, max_prefill_tokens=13, prefix_cache=True)
    Poison(engine)
    rng, forward, calls = random.Random(seed), engine._steps._forward, count()
    # of a device error only one, as the second ends a request
    failing = {rng.randrange(60) for _ in range(3 if error is torch.OutOfMemoryError else 1)}

    def sometimes(*args: Any) -> Any:
        found = forward(*args)
        if next(calls) in failing:
            raise error("planted")
        return found

    monkeypatch.setattr(engine._steps, "_forward", sometimes)
    completions = list(engine.generate(requests()))
    assert next(calls) > max(failing)
    assert wrong(found_of(completions), right) == []
    assert no_page_leaked(engine)


def test_a_prefix_is_used_up_to_the_last_border_whose_window_is_known() -> None:
    """As by a search among all borders; what is taken is what a row there sees."""
    found = set[int]()
    for seed in range(300):
        rng = random.Random(seed)
        window, size, number = rng.randint(1, 20), rng.choice((1, 4)), rng.randint(1, 20)
        allocator = PageAllocator(40, size, prefix_cache=True, window=window)
        digests, pages = list[bytes](), list[int]()
        extend_digests(digests, range(number * size + 1), size, b"")
        allocator.grow(pages, number * size)
        known = [page if rng.random() < 0.8 else 0 for page in pages]
        allocator.keep(known, digests)
        allocator.release(pages)
        seen = [range(max(border * size - window + 1, 0) // size, border) for border in range(number + 1)]
        expected = max(border for border in range(number + 1) if all(known[page] for page in seen[border]))
        assert allocator.num_known(digests) == expected
        allocator.reuse(pages, digests[:expected])
        assert pages == [known[page] if page in seen[expected] else 0 for page in range(expected)]
        assert allocator.num_free == 40 - len(seen[expected])
        allocator.slide(pages, expected * size)
        assert pages.count(0) == expected - len(seen[expected]), "nothing is held that no row sees"
        allocator.release(pages)
        assert allocator.num_free == 40
        found.add(expected - number)
    assert len(found) > 5


def test_a_window_takes_no_more_pages_than_planned() -> None:
    """Wherever its rows begin, and in some places as many."""
    for window, rows, size in product((1, 2, 7, 16, 33), (1, 5, 17), (1, 4, 16)):
        counts = [
            (row + rows - 1) // size - max(row - window + 1, 0) // size + 1
            for row in range(window, window + 2 * size)
        ]
        assert max(counts) == window_pages(window, rows, size)


def test_a_long_prompt_waits_for_pages_that_are_worth_a_pass() -> None:
    """A piece of less than 512 rows waits while another runs; what is alone goes on with what there is."""
    windowed = PageAllocator(80, 16, window=100)
    sched = Scheduler(
        allocators=(PageAllocator(1000, 16), windowed),
        slots=StateSlots(None),
        places=Places(8, 64),
        limits=Limits(max_batch_size=4, max_prefill_tokens=4096),
        step_rows=4,
    )
    sched.submit(sequence("long", 3000))
    pieces = []
    while not sched.running:
        pieces += prefill(sched)
        assert sum(map(bool, sched.prefilling[0].page_lists[1] if sched.prefilling else ())) <= 8
    assert [start for _, start, _ in pieces] == [0, *accumulate(rows for _, _, rows in pieces[:-1])]
    assert sum(rows for _, _, rows in pieces) == 3000
    assert max(rows for _, _, rows in pieces) == 80 * 16 - 4
    held = sched.running[0].page_lists[1]
    taken = list[int]()
    assert windowed.grow(taken, (windowed.num_free - 30) * 16)
    sched.submit(sequence("second", 3000))
    assert prefill(sched) == [], "30 pages are no 512 rows"
    windowed.release(taken)
    assert prefill(sched)[0][2] >= 512
    assert sum(map(bool, held)) <= 8


def scores(pair: Pair, **settings: Any) -> dict[str, tuple[float, ...]]:
    engine = engine_of(pair, **settings)
    asked = (
        ScoreRequest(id=each.id, token_ids=(*each.prompt_token_ids, 5, 6), num_context=1)
        for each in requests()
    )
    found = {each.request.id: each.log_probs for each in engine.score(asked)}
    assert no_page_leaked(engine)
    return found


@pytest.mark.parametrize("most", mostly_slow([5, 13, 2048], 13))
def test_scores_of_texts_are_those_of_a_cache_that_keeps_all(
    worlds: Callable[[str], tuple[Pair, Found]], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    pair, _ = worlds("gemma e2b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageBudget, "window", None)
        right = scores(pair, num_spec_tokens=0)
    monkeypatch.setattr(PageBudget, "windowed", lambda self, pages: 6)
    found = scores(pair, max_prefill_tokens=most, max_batch_size=4)
    assert {name: pytest.approx(each, abs=1e-4) for name, each in right.items()} == found


@pytest.mark.slow
def test_a_target_may_have_windows_in_all_layers(tmp_path: Path) -> None:
    """Then all other pages take no memory of the target."""
    config = write_gpt_oss(tmp_path / "target", layer_types=["sliding_attention"] * 6)
    write_head(tmp_path / "drafter", config, dialect="speculators", own_embedding=True)
    pair = load_pair(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageBudget, "window", None)
        right = found_of(list(engine_of(pair, num_spec_tokens=0).generate(requests())))
    for settings in (
        {"num_spec_tokens": 0},
        {"num_spec_tokens": 4},
        {"num_spec_tokens": 4, "drafter": "ngram:3"},
    ):
        engine = engine_of(pair, kv_memory=400_000, **settings)
        assert wrong(found_of(list(engine.generate(requests()))), right) == []
        assert no_page_leaked(engine)


def drafts_of(engine: EngineCore) -> dict[str, list[tuple[Any, ...]]]:
    Poison(engine)
    found = {each.request.id: each.record.steps or () for each in engine.generate(requests())}
    assert no_page_leaked(engine)
    return {name: [(tuple(step.drafts), step.accepted) for step in steps] for name, steps in found.items()}


@pytest.mark.parametrize(
    ("size", "missing"), mostly_slow(product(("31b", "e2b"), range(3)), ("31b", 0), ("e2b", 1))
)
def test_an_assistant_sees_what_it_would_of_a_cache_that_keeps_all(
    tmp_path: Path, device_like: Callable[..., None], monkeypatch: pytest.MonkeyPatch, size: str, missing: int
) -> None:
    """Whose window is longer than the target's, and begins earlier: with a position less drafts are others."""
    config = write_gemma4(tmp_path / "target", size)
    write_assistant(tmp_path / "drafter", config)
    pair = load_pair(tmp_path)
    device_like()
    with monkeypatch.context() as patch:
        patch.setattr(PageBudget, "window", None)
        right = drafts_of(engine_of(pair, num_spec_tokens=4))
    monkeypatch.setattr(PageBudget, "windowed", lambda self, pages: 14)
    monkeypatch.setattr(AssistantConfig, "sees_behind", AssistantConfig.sees_behind - missing)
    found = drafts_of(engine_of(pair, num_spec_tokens=4, max_prefill_tokens=13))
    assert (found == right) == (missing == 0)
