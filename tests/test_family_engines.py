"""Engines of families whose layers see a window, a chunk or a recurrent state: texts are those of ``transformers``.

Greedy text is, whatever is drafted across borders, accepted, cut off or begun again. A drafter that knows most of
the texts drafts where nothing else is said, so that steps accept any number of drafts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.attention import gated_delta
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import SamplingParams, UserError
from specgen.core.sequence import Request, ScoreRequest
from specgen.engine import build
from specgen.engine.page_budget import PageBudget
from specgen.kv.layout import Layout
from specgen.kv.pages import PageAllocator, StateSlots
from specgen.models.model_config import TargetConfig
from tests.engines import config_of, engine_of, generate, load_pair, page_bytes, random_requests
from tests.families import Error, plant
from tests.marks import mostly_slow
from tests.oracle import World
from tests.reference_heads import DenseTarget, reference_head
from tests.test_families import mxfp4
from tests.test_heads import wrong_drafts
from tests.tiny_checkpoints import write_dflash_head, write_eagle1_head, write_head
from tests.tiny_gemma4 import SIZES, WINDOW, write_gemma4
from tests.tiny_hybrids import write_hybrid
from tests.tiny_latents import write_latent
from tests.tiny_llama4 import CHUNK, write_eagle_llama4, write_llama4
from tests.tiny_mixtures import WINDOW as OF_GPT_OSS
from tests.tiny_mixtures import write_gpt_oss, write_qwen3_moe

NUM_TOKENS, VOCAB = 16, 128
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
PREFIX = tuple(range(3, 24))  # that every second prompt begins with: pages that a prefix cache shares
speculators = partial(write_head, dialect="speculators", own_embedding=True)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A target with its heads, of which the first is loaded, and where its rows stop to see what is before them."""

    write: Callable[[Path], TargetConfig]
    heads: dict[str, Callable[[Path, TargetConfig], None] | None]  # None: layers of the target's own
    borders: tuple[int, ...] = ()  # lengths of prompts that end right before, at and behind them
    wide: int  # drafts that reach across one


FAMILIES = {
    size: Family(
        write=partial(write_gemma4, size=size),
        heads={"eagle3": speculators},
        borders=(WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW),
        wide=WINDOW + 2,
    )
    for size in SIZES
}
FAMILIES["llama4"] = Family(
    write=write_llama4,
    heads={"eagle": write_eagle_llama4, "eagle3": write_head, "dflash": write_dflash_head},
    borders=(CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 3, 3 * CHUNK - 2),
    wide=CHUNK - 1,
)
FAMILIES["hybrid"] = Family(
    write=partial(write_hybrid, mtp=True),
    heads={"mtp": None, "eagle3": write_head, "dflash": partial(write_dflash_head, layer_ids=(0, 1, 3))},
    borders=(1, 2, 13, 30, 30),
    wide=7,
)

FAMILIES["gpt-oss"] = Family(
    write=mxfp4,
    heads={"eagle3": speculators, "eagle1": write_eagle1_head},
    borders=(OF_GPT_OSS - 1, OF_GPT_OSS, OF_GPT_OSS + 1, 3 * OF_GPT_OSS),
    wide=OF_GPT_OSS + 1,
)
FAMILIES["qwen3-moe"] = Family(write=write_qwen3_moe, heads={"eagle3": write_head}, wide=7)


def prompts(family: Family) -> list[Request]:
    found = random_requests(8, VOCAB, GREEDY, lengths=(3, 40))
    found += [
        replace(random_requests(1, VOCAB, GREEDY, lengths=(each, each), seed=number)[0], id=f"b{number}")
        for number, each in enumerate(family.borders)
    ]
    return [
        replace(each, prompt_token_ids=PREFIX[: 21 * (number % 2)] + each.prompt_token_ids)
        for number, each in enumerate(found)
    ]


Worlds = Callable[[str], World]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """One of each family, made when it is asked for."""
    made: dict[str, World] = {}

    def world(name: str) -> World:
        if name not in made:
            path, family = tmp_path_factory.mktemp(name), FAMILIES[name]
            config = family.write(path / "target")
            for head, write in family.heads.items():
                if write is not None:
                    write(path / head, config)
            dense, asked = DenseTarget(path / "target"), prompts(family)
            texts = {each.id: dense.greedy(each.prompt_token_ids, NUM_TOKENS) for each in asked}
            pair = load_pair(path, drafter=next(iter(family.heads)))
            made[name] = World(pair=pair, requests=asked, texts=texts, vocab_size=VOCAB)
        return made[name]

    return world


@pytest.fixture
def knowing(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> Worlds:
    """The same, and a drafter that knows the texts of the world that was asked for last."""

    def world(name: str) -> World:
        found = worlds(name)
        monkeypatch.setattr(build, "_drafter", lambda *_: found.oracle())
        return found

    return world


def by_family(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """``cases``, of which all but ``quick`` are slow; the texts of a family are computed in one process."""
    found = [each if isinstance(each, tuple) else (each,) for each in cases]
    fast = [each if isinstance(each, tuple) else (each,) for each in quick]
    assert all(each in found for each in fast), quick
    slow = {each: [] if each in fast else [pytest.mark.slow] for each in found}
    return [pytest.param(*each, marks=[pytest.mark.xdist_group(each[0]), *slow[each]]) for each in found]


some = pytest.mark.parametrize("name", by_family(["e2b", "llama4", "hybrid"], "e2b", "llama4", "hybrid"))
SETTINGS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_batch_size": 1},
    "a batch that drains": {"max_batch_size": 5},
    "drafts across a border": {"max_batch_size": 5},
    "K = 1": {"num_spec_tokens": 1},
    "longer pages": {"page_size": CHUNK},
    "prompts in pieces": {"max_prefill_tokens": 7},
    "captured attention": {"attention": "sdpa-static", "max_batch_size": 3},
    "prompts together": {"max_prefill_tokens": 400, "max_batch_size": 14},
}


@pytest.mark.parametrize(
    ("name", "settings"),
    by_family(
        [
            *product(FAMILIES, list(SETTINGS)[1:]),
            *product(("e2b", "llama4", "gpt-oss"), ("one at a time",)),  # which takes long
            ("hybrid", "prompts token by token"),
        ],
        *product(("e2b", "llama4", "hybrid", "gpt-oss"), ("a batch that drains",)),
        ("12b", "drafts across a border"),
        ("26b", "captured attention"),
        ("llama4", "captured attention"),
        ("31b", "prompts in pieces"),
        ("hybrid", "prompts in pieces"),
    ),
)
def test_text_is_that_of_transformers_whatever_is_accepted(
    knowing: Worlds, device_like: Callable[..., None], name: str, settings: str
) -> None:
    device_like()  # a step is launched before the one in front of it is read
    asked = SETTINGS.get(settings, {"max_prefill_tokens": 1, "max_batch_size": 3})
    wide = {"num_spec_tokens": FAMILIES[name].wide} if settings == "drafts across a border" else {}
    knowing(name).check_steps(asked | wide)


@pytest.mark.parametrize(
    ("name", "drafter", "batch", "k"),
    by_family(
        [
            *((name, next(iter(each.heads)), "padded", 0) for name, each in FAMILIES.items()),
            *(
                (name, *rest)
                for name, each in FAMILIES.items()
                for rest in product((*each.heads, "ngram:3"), ("padded", "non-padded"), (4,))
            ),
            *((name, next(iter(each.heads)), "non-padded", 1) for name, each in FAMILIES.items()),
        ],
        *(("e2b", "eagle3", "padded", 0), ("llama4", "eagle", "padded", 0), ("hybrid", "mtp", "padded", 0)),
        *(("e2b", "ngram:3", "padded", 4), ("e2b", "ngram:3", "non-padded", 4)),
        *(("31b", "ngram:3", "padded", 4), ("31b", "eagle3", "non-padded", 4)),
        *(("llama4", "eagle", "non-padded", 4), ("llama4", "dflash", "padded", 4)),
        *(("hybrid", "mtp", "non-padded", 4), ("hybrid", "dflash", "padded", 4)),
    ),
)
def test_text_is_that_of_transformers_with_every_drafter(
    worlds: Worlds, name: str, drafter: str, batch: str, k: int
) -> None:
    world, asked = worlds(name), {"num_spec_tokens": k, "drafter_batch": batch}
    pair = world.pair
    if drafter.startswith("ngram"):
        asked["drafter"] = drafter
    elif drafter != pair.drafter:
        pair = load_pair(pair.path, drafter=drafter)
    assert generate(pair, world.requests, **asked).texts == world.texts


def tight(world: World) -> int:
    """Memory for the states of a batch, and few pages."""
    config = config_of(world.pair, num_spec_tokens=4)
    states = build.state_bytes(config, world.pair.models.target.config, config.max_batch_size)
    return states + 30 * page_bytes(world.pair)


@pytest.mark.parametrize(
    ("name", "ahead"),
    by_family(product(FAMILIES, (False, True)), ("e2b", True), ("llama4", True), ("hybrid", True)),
)
def test_preemption_changes_no_text(
    knowing: Worlds, device_like: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str, ahead: bool
) -> None:
    device_like(ahead)
    monkeypatch.setattr(PageBudget, "windowed", lambda self, pages: pages)  # those of other layers run short
    world = knowing(name)
    world.check_preemption(kv_memory=tight(world))


@pytest.mark.parametrize("name", by_family(FAMILIES, "e2b", "llama4", "hybrid"))
def test_pages_of_a_prefix_are_shared_but_those_of_states(knowing: Worlds, name: str) -> None:
    first, second = knowing(name).cached_tokens()
    if name == "hybrid":
        assert not any(first + second)
    else:
        assert max(second) > (CHUNK if name == "llama4" else 2 * WINDOW)


@some
def test_a_part_of_the_drafts_may_be_verified(knowing: Worlds, name: str) -> None:
    knowing(name).check_a_part()


eagle3 = partial(write_head, draft_vocab_size=None)
nested = partial(eagle3, aux_at="eagle_config", seed=2)
DRAFTING: dict[str, tuple[Callable[..., TargetConfig], Callable[[Path, TargetConfig], None]]] = {
    "e2b": (
        partial(write_gemma4, size="e2b", vocab_size_per_layer_input=8),
        partial(speculators, draft_vocab_size=6, seed=12),
    ),
    "llama4": (write_llama4, partial(write_head, draft_vocab_size=6, seed=12)),
    "llama4's own": (write_llama4, partial(write_eagle_llama4, seed=2)),
    "gpt-oss": (write_gpt_oss, partial(speculators, norm_before_residual=True, draft_vocab_size=6, seed=3)),
    "gpt-oss, behind the last layer": (
        write_gpt_oss,
        partial(nested, aux_layer_ids=[2, 5, 6], norm_before_fc=True),
    ),
    "mxfp4": (mxfp4, partial(nested, aux_layer_ids=[1, 2, 4])),
    "gpt-oss, EAGLE-1": (write_gpt_oss, partial(write_eagle1_head, seed=1)),
    "mxfp4, last state": (mxfp4, partial(eagle3, reads_output=True, seed=1)),
    "gpt-oss, windows": (write_gpt_oss, partial(eagle3, num_layers=2, windows=[5, None], seed=1)),
    "qwen3-moe": (write_qwen3_moe, partial(eagle3, qk_norm=True, seed=4)),
    "qwen3-moe, EAGLE-1": (write_qwen3_moe, partial(write_eagle1_head, seed=1)),
    "latents": (partial(write_latent, rms_norm_eps=1e-6), partial(eagle3, aux_layer_ids=[0, 1, 3])),
}


@pytest.mark.parametrize("name", mostly_slow(DRAFTING, "e2b", "llama4", "llama4's own", "mxfp4", "latents"))
def test_drafts_equal_the_reference(tmp_path: Path, name: str) -> None:
    """Of so few tokens that random heads are sometimes right."""
    write, head = DRAFTING[name]
    head(tmp_path / "drafter", write(tmp_path / "target", vocab_size=8))
    asked = random_requests(6, 8, GREEDY, lengths=(2, 40))
    pair, target = load_pair(tmp_path), DenseTarget(tmp_path / "target")
    outputs = generate(pair, asked, num_spec_tokens=4)
    assert generate(pair, asked, num_spec_tokens=4, drafter_batch="non-padded").verified == outputs.verified
    assert outputs.texts == {
        each.id: target.chosen(each.prompt_token_ids, outputs.texts[each.id]) for each in asked
    }
    assert sum(outputs.accepted) > 0
    assert list(wrong_drafts(outputs, reference_head(tmp_path / "drafter", target))) == []
    assert describe(str(tmp_path / "target"), str(tmp_path / "drafter")).misfits == ()


@pytest.mark.slow
@pytest.mark.xdist_group("hybrid")
def test_drafts_of_the_mtp_layer_do_not_depend_on_the_drafter_batch(worlds: Worlds) -> None:
    padded, packed = (worlds("hybrid").generated(drafter_batch=each) for each in ("padded", "non-padded"))
    assert padded.verified == packed.verified
    assert sum(padded.accepted) > 0


@pytest.mark.xdist_group("hybrid")
def test_every_slot_is_given_back(knowing: Worlds) -> None:
    world = knowing("hybrid")
    engine = engine_of(world.pair, num_spec_tokens=4, max_batch_size=4)
    slots = engine._scheduler._slots._free
    assert slots is not None
    before = sorted(slots)
    assert before == [1, 2, 3, 4, 5]
    list(engine.generate(world.requests))
    assert sorted(slots) == before
    unfinished = engine.generate(world.requests)
    next(unfinished)
    unfinished.close()
    assert sorted(slots) == before


@pytest.mark.xdist_group("hybrid")
def test_scores_are_those_of_a_pass_over_the_whole_text(worlds: Worlds) -> None:
    world = worlds("hybrid")
    request = world.requests[3]
    ids = request.prompt_token_ids + world.texts[request.id]
    text = ScoreRequest(id="text", token_ids=ids, num_context=1)
    whole, pieces = (
        next(iter(engine_of(world.pair, max_prefill_tokens=rows).score([text]))) for rows in (512, 5)
    )
    assert all(whole.greedy[len(request.prompt_token_ids) - 1 :])
    torch.testing.assert_close(torch.tensor(whole.log_probs), torch.tensor(pieces.log_probs))


@pytest.mark.xdist_group("llama4")
def test_pages_that_a_border_would_cut_are_refused(worlds: Worlds) -> None:
    reason = "does not cut pages of 12 positions into chunks of 16: use a --page-size"
    for name in ("sdpa", "auto"):
        with pytest.raises(UserError, match=reason):
            config_of(worlds("llama4").pair, page_size=12, attention=name)


def _some_pages_are_the_first(real: Any) -> Any:
    return property(lambda self: torch.where(real.func(self) % 7 == 0, 0, real.func(self)))


def _a_page_late(real: Any) -> Any:
    def rest(layout: Layout, sequences: Tensor, first: Tensor, length: int) -> Any:
        later = torch.where(first > 0, first + layout.page_size, first)
        return real(layout, sequences, later, length)

    return rest


def accepted(
    num: Callable[[Tensor], Tensor], states: Callable[[Tensor], Tensor] = lambda states: states
) -> Error:
    """What the states take in of the rows of the last pass."""
    return (
        *(gated_delta, "_accepted"),
        lambda real: lambda layer, state, kept, taken: real(layer, states(state), kept, num(taken)),
    )


def _sharing(real: Any) -> Any:
    def init(self: PageAllocator, *sizes: int, **more: object) -> None:
        real(self, *sizes, **more | {"prefix_cache": True})

    return init


WRONG: dict[tuple[str, str], Error] = {
    ("e2b", "rows see what another layer stored"): (Layout, "slots", _some_pages_are_the_first),
    ("llama4", "no row alone"): (Layout, "row_by_row", lambda real: Layout.from_first_chunk),
    ("llama4", "prompts not divided"): (Layout, "split_in_chunks", lambda real: lambda layout, size: layout),
    ("llama4", "a page late"): (Layout, "_tables_from", _a_page_late),
    ("hybrid", "accepted rows a step late"): accepted(lambda taken: taken - 1),
    ("hybrid", "all rows of the last pass"): accepted(lambda taken: torch.full_like(taken, 99)),
    ("hybrid", "every decode pass begins empty"): accepted(lambda taken: taken, torch.zeros_like),
    ("hybrid", "one slot for all"): (StateSlots, "take", lambda real: lambda self: 1),
    ("hybrid", "pages that begin alike, whose states are not there"): (PageAllocator, "__init__", _sharing),
}


@pytest.mark.parametrize(("name", "error"), by_family(WRONG, *WRONG))
def test_a_planted_error_is_seen(
    knowing: Worlds, monkeypatch: pytest.MonkeyPatch, name: str, error: str
) -> None:
    world = knowing(name)
    plant(monkeypatch, WRONG[name, error])
    if name == "hybrid":  # as if there were a copy of every state; where nothing is shared nobody asks
        monkeypatch.setattr(StateSlots, "num_known", lambda self, digests: len(digests))
    assert world.generated().texts != world.texts
