"""Engines with a Gemma 4 of each size: greedy text is that of ``transformers``, whatever is drafted across windows."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.engine import build
from specgen.engine.page_budget import PageBudget
from specgen.kv.layout import Layout
from tests.engines import generate, load_pair, page_bytes, random_requests
from tests.marks import mostly_slow
from tests.oracle import World
from tests.reference_heads import DenseTarget, reference_head
from tests.test_heads import wrong_drafts
from tests.tiny_checkpoints import write_head
from tests.tiny_gemma4 import SIZES, WINDOW, write_gemma4

pytestmark = pytest.mark.xdist_group("gemma4")  # the texts of transformers are computed once
NUM_TOKENS, VOCAB = 16, 128
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
PREFIX = tuple(
    range(3, 24)
)  # that some prompts begin with: pages, some behind a window, which a prefix cache shares


def prompts() -> list[Request]:
    """Of which some end right before, at and behind the first that a window hides."""
    found = random_requests(4, VOCAB, GREEDY, lengths=(3, 40))
    lengths = (WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW)
    found += [
        replace(random_requests(1, VOCAB, GREEDY, lengths=(each, each), seed=each)[0], id=f"w{each}")
        for each in lengths
    ]
    return [
        replace(each, prompt_token_ids=PREFIX[: 21 * (number % 2)] + each.prompt_token_ids)
        for number, each in enumerate(found)
    ]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    """One of each size, made when it is asked for."""
    made: dict[str, World] = {}

    def world(size: str) -> World:
        if size not in made:
            path = tmp_path_factory.mktemp(size)
            config = write_gemma4(path / "target", size)
            write_head(path / "eagle3", config, dialect="speculators", own_embedding=True)
            dense = DenseTarget(path / "target")
            texts = {each.id: dense.greedy(each.prompt_token_ids, NUM_TOKENS) for each in prompts()}
            pair = load_pair(path, drafter="eagle3")
            made[size] = World(pair=pair, requests=prompts(), texts=texts, vocab_size=VOCAB)
        return made[size]

    return world


def with_oracle(world: World, plant: pytest.MonkeyPatch) -> World:
    plant.setattr(build, "_drafter", lambda *_: world.oracle())
    return world


SETTINGS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_batch_size": 1},
    "a batch that drains": {"max_batch_size": 5},
    "wider than a window": {"num_spec_tokens": WINDOW + 2},
    "K = 1": {"num_spec_tokens": 1},
    "prompts in pieces": {"max_prefill_tokens": 7},
    "captured attention": {"attention": "sdpa-static", "max_batch_size": 3},
}


@pytest.mark.parametrize(
    ("size", "name"),
    mostly_slow(
        product(SIZES, SETTINGS),
        ("e2b", "a batch that drains"),
        ("12b", "wider than a window"),
        ("26b", "captured attention"),
        ("31b", "prompts in pieces"),
    ),
)
def test_text_is_that_of_transformers_whatever_is_accepted(
    worlds: Callable[[str], World],
    device_like: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    size: str,
    name: str,
) -> None:
    device_like()  # a step is launched before the one in front of it is read
    with_oracle(worlds(size), monkeypatch).check_steps(SETTINGS[name])


@pytest.mark.parametrize(
    ("size", "drafter", "batch", "k"),
    mostly_slow(
        [
            *product(SIZES, ("eagle3",), ("padded",), (0,)),
            *product(SIZES, ("eagle3", "ngram:3"), ("padded", "non-padded"), (1, 4)),
        ],
        ("e2b", "eagle3", "padded", 0),
        ("e2b", "ngram:3", "padded", 4),
        ("e2b", "ngram:3", "non-padded", 4),
        ("31b", "ngram:3", "padded", 4),
        ("31b", "eagle3", "non-padded", 4),
    ),
)
def test_text_is_that_of_transformers_with_every_drafter(
    worlds: Callable[[str], World], size: str, drafter: str, batch: str, k: int
) -> None:
    world, asked = worlds(size), {"num_spec_tokens": k, "drafter_batch": batch}
    if drafter.startswith("ngram"):
        asked["drafter"] = drafter
    assert generate(world.pair, prompts(), **asked).texts == world.texts


@pytest.mark.parametrize("size", mostly_slow(SIZES, "e2b"))
@pytest.mark.parametrize("ahead", mostly_slow([False, True], True))
def test_preemption_changes_no_text(
    worlds: Callable[[str], World],
    device_like: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    size: str,
    ahead: bool,
) -> None:
    device_like(ahead)
    # those of the other layers run short
    monkeypatch.setattr(PageBudget, "windowed", lambda self, pages: pages)
    world = with_oracle(worlds(size), monkeypatch)
    world.check_preemption(kv_memory=28 * page_bytes(world.pair))


@pytest.mark.parametrize("size", mostly_slow(SIZES, "e2b"))
def test_pages_of_a_prefix_are_shared(
    worlds: Callable[[str], World], monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    _, second = with_oracle(worlds(size), monkeypatch).cached_tokens()
    assert max(second) > 2 * WINDOW


def test_a_part_of_the_drafts_may_be_verified(
    worlds: Callable[[str], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_oracle(worlds("e2b"), monkeypatch).check_a_part()


def test_drafts_equal_the_reference_on_a_gemma4(tmp_path: Path) -> None:
    """Of so few tokens that random heads are sometimes right."""
    config = write_gemma4(tmp_path / "target", "e2b", vocab_size=8, vocab_size_per_layer_input=8)
    write_head(tmp_path / "drafter", config, "speculators", draft_vocab_size=6, own_embedding=True, seed=12)
    asked = random_requests(3, 8, replace(GREEDY, max_tokens=16), lengths=(12, 40))
    outputs = generate(load_pair(tmp_path), asked, num_spec_tokens=4)
    reference = reference_head(tmp_path / "drafter", DenseTarget(tmp_path / "target"))
    assert sum(outputs.accepted) > 0
    assert list(wrong_drafts(outputs, reference)) == []


def test_a_wrong_page_is_seen(worlds: Callable[[str], World], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that see what another layer stored as well."""
    world, real = with_oracle(worlds("e2b"), monkeypatch), Layout.slots.func  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Layout, "slots", property(lambda self: torch.where(real(self) % 7 == 0, 0, real(self)))
    )
    assert world.generated().texts != world.texts
