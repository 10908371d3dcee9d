"""Engines with a Llama-4: greedy text is that of ``transformers``, whatever is drafted across the borders of chunks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams, UserError
from specgen.core.sequence import Request
from specgen.engine import build
from specgen.kv.layout import Layout
from tests.engines import config_of, generate, load_pair, page_bytes, random_requests
from tests.families import Error, plant
from tests.marks import mostly_slow
from tests.oracle import World
from tests.reference_heads import DenseTarget, reference_head
from tests.test_heads import wrong_drafts
from tests.tiny_checkpoints import write_dflash_head, write_head
from tests.tiny_llama4 import CHUNK, write_eagle_llama4, write_llama4

pytestmark = pytest.mark.xdist_group("llama4")  # the texts of transformers are computed once
NUM_TOKENS, VOCAB = 16, 128
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
PREFIX = tuple(range(3, 24))  # that some prompts begin with: a chunk and a page, which a prefix cache shares


def prompts() -> list[Request]:
    """Of which some end right before, at and behind the borders of chunks."""
    found = random_requests(4, VOCAB, GREEDY, lengths=(3, 40))
    lengths = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 3, 3 * CHUNK - 2)
    found += [
        replace(random_requests(1, VOCAB, GREEDY, lengths=(each, each), seed=each)[0], id=f"b{each}")
        for each in lengths
    ]
    return [
        replace(each, prompt_token_ids=PREFIX[: 21 * (number % 2)] + each.prompt_token_ids)
        for number, each in enumerate(found)
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    path = tmp_path_factory.mktemp("llama4")
    config = write_llama4(path / "target", vocab_size=VOCAB)
    write_eagle_llama4(path / "eagle", config)
    write_head(path / "eagle3", config)
    write_dflash_head(path / "dflash", config)
    dense = DenseTarget(path / "target")
    texts = {each.id: dense.greedy(each.prompt_token_ids, NUM_TOKENS) for each in prompts()}
    return World(pair=load_pair(path, drafter="eagle"), requests=prompts(), texts=texts, vocab_size=VOCAB)


@pytest.fixture
def oracle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_drafter", lambda *_: world.oracle())


SETTINGS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_batch_size": 1},
    "a batch that drains": {"max_batch_size": 5},
    "as wide as a chunk": {"num_spec_tokens": CHUNK - 1},
    "K = 1": {"num_spec_tokens": 1},
    "pages as long as a chunk": {"page_size": CHUNK},
    "prompts in pieces": {"max_prefill_tokens": 7},
    "captured attention": {"attention": "sdpa-static", "max_batch_size": 3},
    "prompts together": {"max_prefill_tokens": 400},
}


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("name", mostly_slow(SETTINGS, "a batch that drains", "captured attention"))
def test_text_is_that_of_transformers_whatever_is_accepted(
    world: World, device_like: Callable[..., None], name: str
) -> None:
    device_like()  # a step is launched before the one in front of it is read
    world.check_steps(SETTINGS[name])


@pytest.mark.parametrize(
    ("drafter", "batch", "k"),
    mostly_slow(
        [
            ("eagle", "padded", 0),
            *product(("eagle", "eagle3", "dflash", "ngram:3"), ("padded", "non-padded"), (1, 4)),
        ],
        ("eagle", "padded", 0),
        ("eagle", "non-padded", 4),
        ("dflash", "padded", 4),
    ),
)
def test_text_is_that_of_transformers_with_every_drafter(
    world: World, drafter: str, batch: str, k: int
) -> None:
    if drafter.startswith("ngram"):
        outputs = generate(world.pair, prompts(), num_spec_tokens=k, drafter_batch=batch, drafter=drafter)
    else:
        pair = load_pair(world.pair.path, drafter=drafter)
        outputs = generate(pair, prompts(), num_spec_tokens=k, drafter_batch=batch)
    assert outputs.texts == world.texts


@pytest.mark.parametrize("drafter", ["eagle", "eagle3"])
def test_drafts_equal_the_reference_on_a_llama4(tmp_path: Path, drafter: str) -> None:
    """Of so few tokens that random heads are sometimes right."""
    config = write_llama4(tmp_path / "target", vocab_size=8)
    if drafter == "eagle":
        write_eagle_llama4(tmp_path / "drafter", config, seed=2)
    else:
        write_head(tmp_path / "drafter", config, draft_vocab_size=6, seed=12)
    asked = random_requests(3, 8, replace(GREEDY, max_tokens=16), lengths=(12, 40))
    outputs = generate(load_pair(tmp_path), asked, num_spec_tokens=4)
    reference = reference_head(tmp_path / "drafter", DenseTarget(tmp_path / "target"))
    assert sum(outputs.accepted) > 0
    assert list(wrong_drafts(outputs, reference)) == []


@pytest.mark.usefixtures("oracle")
def test_a_part_of_the_drafts_may_be_verified(world: World) -> None:
    world.check_a_part()


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("ahead", mostly_slow([False, True], True))
def test_preemption_changes_no_text(world: World, device_like: Callable[..., None], ahead: bool) -> None:
    device_like(ahead)
    world.check_preemption(kv_memory=34 * page_bytes(world.pair))


@pytest.mark.usefixtures("oracle")
def test_pages_of_a_prefix_are_shared(world: World) -> None:
    _, second = world.cached_tokens()
    assert max(second) > CHUNK


def test_pages_that_a_border_would_cut_are_refused(world: World) -> None:
    for name in ("sdpa", "auto"):
        with pytest.raises(
            UserError, match="does not cut pages of 12 positions into chunks of 16: use a --page-size"
        ):
            config_of(world.pair, page_size=12, attention=name)


def _a_page_late(real: Any) -> Any:
    def rest(layout: Layout, sequences: Tensor, first: Tensor, length: int) -> Any:
        later = torch.where(first > 0, first + layout.page_size, first)
        return real(layout, sequences, later, length)

    return rest


WRONG: dict[str, Error] = {
    "no row alone": (Layout, "row_by_row", lambda real: Layout.from_first_chunk),
    "prompts not divided": (Layout, "split_in_chunks", lambda real: lambda layout, size: layout),
    "a page late": (Layout, "_tables_from", _a_page_late),
}


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_chunks_are_seen(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(monkeypatch, WRONG[name])
    assert world.generated().texts != world.texts
