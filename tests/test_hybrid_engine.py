"""Engines with recurrent states: greedy text is that of ``transformers``, whatever is accepted, cut off or begun again.

A drafter that knows most of the texts drafts here, so that steps accept any number of drafts.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.attention import gated_delta
from specgen.config import SamplingParams
from specgen.core.sequence import Request, ScoreRequest
from specgen.engine import build
from specgen.kv.pages import PageAllocator, StateSlots
from tests.engines import config_of, engine_of, generate, load_pair, page_bytes, random_requests
from tests.families import Error, plant
from tests.marks import mostly_slow
from tests.oracle import World
from tests.tiny_checkpoints import write_dflash_head, write_head
from tests.tiny_hybrids import write_hybrid

pytestmark = pytest.mark.xdist_group("hybrid")  # the texts of transformers are computed once
NUM_TOKENS, VOCAB = 24, 128
GREEDY = SamplingParams(max_tokens=NUM_TOKENS)
PREFIX = tuple(range(3, 20))  # that all prompts begin with: two pages that a prefix cache would share


def prompts() -> list[Request]:
    return [
        replace(each, prompt_token_ids=PREFIX[: 17 * (number % 2)] + each.prompt_token_ids)
        for number, each in enumerate(random_requests(14, VOCAB, GREEDY, lengths=(1, 30)))
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A hybrid with an MTP layer, and its texts by ``transformers``."""
    import transformers

    path = tmp_path_factory.mktemp("hybrid")
    config = write_hybrid(path / "target", mtp=True, vocab_size=VOCAB)
    write_head(path / "eagle3", config)
    write_dflash_head(path / "dflash", config, layer_ids=(0, 1, 3))
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "target").eval()
    texts = {}
    for each in prompts():
        ids = torch.tensor([each.prompt_token_ids])
        out = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
        texts[each.id] = tuple(out[0, ids.shape[1] :].tolist())
    return World(pair=load_pair(path, drafter="mtp"), requests=prompts(), texts=texts, vocab_size=VOCAB)


@pytest.fixture
def oracle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_drafter", lambda *_: world.oracle())


SETTINGS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_batch_size": 1},
    "a batch that drains": {"max_batch_size": 5},
    "all at once": {"max_batch_size": 14},
    "K = 1": {"num_spec_tokens": 1},
    "K = 7": {"num_spec_tokens": 7, "max_batch_size": 5},
    "prompts in pieces": {"max_prefill_tokens": 7},
    "prompts token by token": {"max_prefill_tokens": 1, "max_batch_size": 3},
}


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("name", mostly_slow(SETTINGS, "a batch that drains", "prompts in pieces"))
def test_text_is_that_of_transformers_whatever_is_accepted(
    world: World, device_like: Callable[..., None], name: str
) -> None:
    device_like()  # a step is launched before the one in front of it is read
    world.check_steps(SETTINGS[name])


@pytest.mark.parametrize(
    ("drafter", "batch", "k"),
    mostly_slow(
        [("mtp", "padded", 0), *product(("mtp", "eagle3", "dflash"), ("padded", "non-padded"), (1, 4))],
        ("mtp", "padded", 0),
        ("mtp", "non-padded", 4),
        ("dflash", "padded", 4),
    ),
)
def test_text_is_that_of_transformers_with_every_drafter(
    world: World, drafter: str, batch: str, k: int
) -> None:
    pair = load_pair(world.pair.path, drafter=drafter)
    outputs = generate(pair, prompts(), num_spec_tokens=k, drafter_batch=batch)
    assert outputs.texts == world.texts


@pytest.mark.slow
def test_drafts_of_the_mtp_layer_do_not_depend_on_the_drafter_batch(world: World) -> None:
    padded, packed = (world.generated(drafter_batch=batch) for batch in ("padded", "non-padded"))
    assert padded.verified == packed.verified
    assert sum(padded.accepted) > 0


@pytest.mark.usefixtures("oracle")
def test_a_part_of_the_drafts_may_be_verified(world: World) -> None:
    world.check_a_part()


def tight(world: World) -> dict[str, int]:
    """Memory for the states of a batch, and few pages."""
    config = config_of(world.pair, num_spec_tokens=4)
    states = build.state_bytes(config, world.pair.models.target.config, config.max_batch_size)
    return {"kv_memory": states + 34 * page_bytes(world.pair)}


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("ahead", mostly_slow([False, True], True))
def test_preemption_changes_no_text(world: World, device_like: Callable[..., None], ahead: bool) -> None:
    device_like(ahead)
    world.check_preemption(**tight(world))


@pytest.mark.usefixtures("oracle")
def test_prompts_that_begin_alike_share_no_page(world: World) -> None:
    first, second = world.cached_tokens()
    assert not any(first + second)


@pytest.mark.usefixtures("oracle")
def test_every_slot_is_given_back(world: World) -> None:
    engine = engine_of(world.pair, num_spec_tokens=4, max_batch_size=4)
    slots = engine._scheduler._slots._free
    assert slots is not None
    before = sorted(slots)
    assert before == [1, 2, 3, 4, 5]
    list(engine.generate(prompts()))
    assert sorted(slots) == before
    unfinished = engine.generate(prompts())
    next(unfinished)
    unfinished.close()
    assert sorted(slots) == before


def test_scores_are_those_of_a_pass_over_the_whole_text(world: World) -> None:
    request = prompts()[3]
    ids = request.prompt_token_ids + world.texts[request.id]
    text = ScoreRequest(id="text", token_ids=ids, num_context=1)
    whole, pieces = (
        next(iter(engine_of(world.pair, max_prefill_tokens=rows).score([text]))) for rows in (512, 5)
    )
    assert all(whole.greedy[len(request.prompt_token_ids) - 1 :])
    torch.testing.assert_close(torch.tensor(whole.log_probs), torch.tensor(pieces.log_probs))


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


WRONG: dict[str, Error] = {
    "accepted rows a step late": accepted(lambda taken: taken - 1),
    "all rows of the last pass": accepted(lambda taken: torch.full_like(taken, 99)),
    "every decode pass begins with an empty state": accepted(lambda taken: taken, torch.zeros_like),
    "one slot for all": (StateSlots, "take", lambda real: lambda self: 1),
    "pages of texts that begin alike, whose states are not there": (PageAllocator, "__init__", _sharing),
}


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_state_is_seen(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(monkeypatch, WRONG[name])
    # as if there were a copy of every state; where nothing is shared nobody asks
    monkeypatch.setattr(StateSlots, "num_known", lambda self, digests: len(digests))
    assert world.generated().texts != world.texts
