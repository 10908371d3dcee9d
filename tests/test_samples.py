"""Samples of a prompt: requests of their own that share its prefill, and whose texts are those of separate requests."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.engine import build
from specgen.kv.kv_cache import StateCache
from specgen.kv.pages import StateSlots
from specgen.record.files import sample_id
from specgen.record.record_rows import PassRow
from tests.engines import (
    Outputs,
    Pair,
    config_of,
    engine_of,
    generate,
    load_pair,
    nan_at,
    page_bytes,
    random_requests,
)
from tests.marks import mostly_slow
from tests.tiny_hybrids import write_hybrid
from tests.tiny_latents import write_latent

pytestmark = pytest.mark.xdist_group("samples")
VOCAB, N = 128, 3
SAMPLED = SamplingParams(max_tokens=10, temperature=1.0, seed=0)


def samples(
    n: int = N, sampling: SamplingParams = SAMPLED, lengths: tuple[int, int] = (14, 30)
) -> list[Request]:
    """Of four prompts; one is shorter than a page, and one ends with a page."""
    prompts = random_requests(3, VOCAB, sampling, lengths=lengths, seed=2)
    prompts += [replace(prompts[0], id="short", prompt_token_ids=(7, 8, 9))]
    prompts[1] = replace(prompts[1], prompt_token_ids=prompts[1].prompt_token_ids[:12])
    return [
        replace(prompt, id=sample_id(prompt.id, sample), share=prompt.id)
        for prompt in prompts
        for sample in range(n)
    ]


def apart(requests: list[Request]) -> list[Request]:
    return [replace(each, share="") for each in requests]


def rows_of(outputs: Outputs) -> int:
    """Rows that prefills computed."""
    return sum(
        row.target_rows for row in outputs.passes if isinstance(row, PassRow) and row.kind == "prefill"
    )


def least_rows(requests: list[Request], page_size: int = 4) -> int:
    """Each prompt once, and for its other samples what is behind its last page border."""
    prompts = {each.share: len(each.prompt_token_ids) for each in requests}
    behind = sum((len(each.prompt_token_ids) - 1) % page_size + 1 for each in requests)
    return sum((length - 1) // page_size * page_size for length in prompts.values()) + behind


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, random_pair: Pair) -> dict[str, Pair]:
    hybrid, latent = (tmp_path_factory.mktemp(name) for name in ("hybrid", "latent"))
    write_hybrid(hybrid / "target", mtp=True, vocab_size=VOCAB)
    write_latent(latent / "target", num_mtp=1)
    return {
        "dense": random_pair,
        "hybrid": load_pair(hybrid, drafter="mtp"),
        "latent": load_pair(latent, drafter="mtp"),
    }


def little(pair: Pair) -> int:
    """Memory for the states of a batch, and few pages."""
    config = config_of(pair)
    states = build.state_bytes(config, pair.models.target.config, config.max_batch_size)
    return states + 22 * page_bytes(pair)


KINDS = ("dense", "hybrid", "latent")
SETTINGS: dict[str, dict[str, Any]] = {
    "no prefix cache": {"prefix_cache": False},
    "a prefix cache": {"prefix_cache": True},
    "non-padded drafts": {"drafter_batch": "non-padded", "prefix_cache": False},
    "plain decoding": {"num_spec_tokens": 0, "prefix_cache": False},
    "one at a time": {"max_batch_size": 1, "prefix_cache": False},
    "a batch that holds no whole prompt": {"max_batch_size": 2, "prefix_cache": False},
    "prompts in pieces": {"max_prefill_tokens": 7, "prefix_cache": False},
}


@pytest.mark.parametrize(
    ("kind", "name", "ahead"),
    mostly_slow(
        [(kind, name, (i + j) % 2 > 0) for i, kind in enumerate(KINDS) for j, name in enumerate(SETTINGS)],
        ("hybrid", "no prefix cache", True),
        *((kind, "a prefix cache", True) for kind in ("dense", "latent")),
    ),
)
def test_texts_are_those_of_separate_requests(
    pairs: dict[str, Pair], device_like: Callable[..., None], kind: str, name: str, ahead: bool
) -> None:
    device_like(ahead)
    shared = generate(pairs[kind], samples(), **SETTINGS[name])
    alone = generate(pairs[kind], apart(samples()), **SETTINGS[name] | {"prefix_cache": False})
    assert shared.texts == alone.texts
    assert shared.verified == alone.verified
    assert len({*shared.texts.values()}) == len(shared.texts), "no two samples have one text"
    assert sum(shared.accepted) > 0 or name == "plain decoding"
    assert rows_of(alone) == sum(len(each.prompt_token_ids) for each in samples())
    if kind != "hybrid" or SETTINGS[name].get("max_batch_size") is None:
        assert rows_of(shared) == least_rows(samples())
    assert rows_of(shared) < 0.6 * rows_of(alone)


@pytest.mark.parametrize("batch", mostly_slow(["padded", "non-padded"], "padded"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_is_preempted_has_the_same_text(
    pairs: dict[str, Pair], device_like: Callable[..., None], kind: str, batch: str
) -> None:
    device_like()
    pair, settings = pairs[kind], {"prefix_cache": False, "drafter_batch": batch}
    config = config_of(pair, **settings)
    memory = build.state_bytes(config, pair.models.target.config, config.max_batch_size) + 26 * page_bytes(
        pair
    )
    tight = generate(pair, samples(), **settings, kv_memory=memory)
    assert tight.num_preempted >= 3
    assert tight.texts == generate(pair, apart(samples()), **settings).texts


def test_nothing_is_shared_with_a_later_run_or_another_prompt(random_pair: Pair) -> None:
    """Without a prefix cache, as whoever switches it off measures how long prefills take."""
    engine = engine_of(random_pair, prefix_cache=False)
    same = [replace(each, share=share) for each in samples(1) for share in ("x", "y")]
    same = [replace(each, id=f"{number}") for number, each in enumerate(same)]
    for _ in range(2):
        assert not any(each.record.num_cached_tokens for each in engine.generate(same))
    assert sum(each.record.num_cached_tokens > 0 for each in engine.generate(samples())) == 3 * (N - 1)


def test_every_slot_of_a_state_is_given_back(pairs: dict[str, Pair]) -> None:
    engine = engine_of(pairs["hybrid"], max_batch_size=3)
    slots = engine._scheduler._slots
    unfinished = engine.generate(samples())
    next(unfinished)
    assert slots._copies
    engine._scheduler.discard(engine._new_sequence(samples()[0]))
    assert not slots._copies, "what a failure may have spoilt is copied no more"
    unfinished.close()
    list(engine.generate(samples()))
    assert (sorted(slots._free or ()), slots._copies, slots._expected) == ([1, 2, 3, 4], {}, {})


@pytest.mark.parametrize("kind", mostly_slow(["dense", "hybrid"], "hybrid"))
def test_a_sample_that_fails_spoils_no_other(pairs: dict[str, Pair], kind: str) -> None:
    """Its logits are not finite behind one token: what shares its prompt goes on, and what it left is not used."""
    requests, settings = samples(), {"prefix_cache": False, "num_spec_tokens": 0}
    plain = generate(pairs[kind], apart(requests), **settings).texts
    asked = {token for each in requests for token in each.prompt_token_ids}
    token = next(token for token in plain["r0/sample-1"][2:] if token not in asked)
    found = generate(nan_at(pairs[kind], token), requests, **settings).completions
    failed = {name for name, each in found.items() if each.error is not None}
    assert failed == {name for name, text in plain.items() if token in text[:-1]}
    assert 0 < len(failed) < len(found)
    assert all(each.token_ids == plain[name] for name, each in found.items() if name not in failed)


def _of_the_end(plant: pytest.MonkeyPatch) -> None:
    """What is copied is a state with a row too many or too few: that of slot 0."""
    copy = StateCache.copy
    plant.setattr(StateCache, "copy", lambda self, source, to: copy(self, 0 * source, to))


def _no_look_back(plant: pytest.MonkeyPatch) -> None:
    """The convolution's look-back is not copied."""

    def copy(self: StateCache, source: Tensor, to: Tensor) -> None:
        self.states[:, to], self.positions[:, to] = self.states[:, source], self.positions[:, source]

    plant.setattr(StateCache, "copy", copy)


def _anywhere(plant: pytest.MonkeyPatch) -> None:
    """A sequence begins behind pages whose state there is no copy of."""
    plant.setattr(StateSlots, "num_known", lambda self, digests: len(digests))


@pytest.mark.parametrize("plant", [_of_the_end, _no_look_back, _anywhere])
def test_a_wrong_copy_of_a_state_is_seen(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    alone = generate(pairs["hybrid"], apart(samples())).texts
    plant(monkeypatch)
    assert generate(pairs["hybrid"], samples(), kv_memory=little(pairs["hybrid"])).texts != alone
