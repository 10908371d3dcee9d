"""Every kind of draft head, at every step of a generation, against a dense reference."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.engine.build import num_state_slots
from specgen.models.model_config import TargetConfig
from tests import planted_errors
from tests.engines import Outputs, Pair, generate, load_pair, page_bytes, random_requests
from tests.reference_heads import DenseTarget, ReferenceMtp, reference_head
from tests.tiny_checkpoints import write_dflash_head, write_eagle1_head, write_head, write_target
from tests.tiny_hybrids import write_hybrid
from tests.tiny_latents import write_latent
from tests.tiny_llama4 import write_eagle_llama4

VOCAB = 8  # so small that random heads are often right; the seeds are of heads that are also right four times running
eagle1, eagle3 = write_eagle1_head, partial(write_head, draft_vocab_size=None)
speculators = partial(eagle3, dialect="speculators")
dspark = partial(write_dflash_head, dialect="DeepSpec", own=True)
speculated = partial(write_dflash_head, dialect="speculators", layer_ids=(1, 3, 6))
deep = partial(write_head, draft_vocab_size=6, seed=3)
peagle = partial(speculators, mask_token=("mask_token_id", 6), own_embedding=True)
HEADS: dict[str, Callable[[Path, TargetConfig], None]] = {
    "eagle-1": partial(eagle1, seed=9),
    "eagle-1-biases": partial(eagle1, fc_bias=True, qkv_bias=True, binary=True, seed=14),
    "eagle-1-embedding": partial(eagle1, own_embedding=True, fc_bias=True, seed=14),
    "eagle-1-layers": partial(eagle1, num_layers=3, qkv_bias=True, seed=2),
    "eagle3": partial(write_head, draft_vocab_size=6, seed=12),
    "biases": partial(eagle3, num_layers=2, biases=True, seed=3),
    "two-layers": partial(eagle3, num_layers=2, seed=10),
    "three-layers": partial(speculators, num_layers=3, qk_norm=True, norm_before_residual=True),
    "one-feature": partial(speculators, aux_layer_ids=[4], seed=9),
    "five-features": partial(speculators, aux_layer_ids=[0, 1, 3, 4, 6], fc_norm=True, num_layers=2, seed=2),
    "nested": partial(eagle3, aux_layer_ids=[0, 3, 4], aux_at="eagle_config", norm_before_fc=True, seed=4),
    "nested-boundary": partial(eagle3, aux_layer_ids=[2, 5, 6], aux_at="eagle_config", seed=4),
    "narrower": partial(eagle3, hidden_size=48, own_embedding=True, num_layers=2, seed=6),
    "window": partial(eagle3, windows=[6], seed=10),
    "two-windows": partial(speculators, num_layers=3, windows=[5, None, 5], qk_norm=True, seed=6),
    "eagle-3.1": partial(speculators, fc_norm=True, norm_output=True, num_layers=2, seed=10),
    "no-features": partial(eagle3, reads_output=True, seed=11),
    "p-eagle": partial(peagle, num_layers=2),
    "p-eagle-deep": partial(deep, mask_token=("ptd_token_id", 1), num_layers=4, aux_layer_ids=[1, 2, 4, 5]),
    "p-eagle-window": partial(
        peagle, num_layers=2, qk_norm=True, windows=[None, 7], norm_before_residual=True
    ),
    "p-eagle-norms": partial(peagle, fc_norm=True, norm_output=True, hidden_size=48, seed=18),
    "dflash": partial(write_dflash_head, nested=True, seed=2),
    "dflash-causal": partial(write_dflash_head, windows=[None, 7], biases=True, seed=0),
    "dflash-windows-ahead": partial(
        write_dflash_head, windows=[7, None], changed_config={"is_causal": False}, seed=0
    ),
    "dflash-speculators-windows": partial(speculated, windows=[3, None, 3], num_layers=3, seed=7),
    "dflash-mask-embedding": partial(write_dflash_head, mask_embedding=True, seed=8),
    "dflash-anchors": partial(dspark, seed=0),
    "dflash-speculators": partial(speculated, draft_vocab_size=6, qk_norm=False, seed=1),
    "dflash2": partial(write_dflash_head, second=(2, 8, 3), seed=0),
    "dflash2-own": partial(
        write_dflash_head,
        nested=True,
        draft_vocab_size=6,
        second=(3, 4, 4),
        num_layers=1,
        biases=True,
        seed=0,
    ),
    "dflash2-speculators": partial(speculated, windows=[5, 5], second=(2, 8, 3), seed=7),
    "dspark": partial(dspark, markov=("vanilla", 5), seed=6),
    "dspark-gated": partial(dspark, markov=("gated", 5), confidence=True, seed=3),
    "dspark-rnn": partial(dspark, markov=("rnn", 5), num_layers=3, seed=5),
    "dspark-speculators": partial(speculated, markov=("vanilla", 4), seed=11),
    "p-eagle-pard": partial(eagle3, mask_token=("pard_token", 7), norm_before_fc=True, seed=4),
    "eagle-llama4": partial(write_eagle_llama4, seed=9),
    "eagle-llama4-own": partial(
        write_eagle_llama4, num_layers=2, own_embedding=True, own_lm_head=True, qk_norm=False, seed=6
    ),
}
QUICK = ("eagle-1-biases", "eagle3", "p-eagle-window", "dflash-windows-ahead", "dspark-gated")
# Every planted error is caught with one of these; parts of the others are in them too
BROAD = (
    *(*QUICK, "biases", "five-features", "nested", "eagle-3.1", "no-features", "p-eagle-deep"),
    *("dflash-causal", "dflash2", "eagle-llama4", "dflash-anchors", "dflash-speculators"),
    *("dflash-speculators-windows", "dspark-rnn", "eagle-llama4-own"),
)
glm = partial(write_latent, vocab_size=VOCAB, rms_norm_eps=1e-6)
MTP: dict[str, Callable[[Path], object]] = {  # parts of the first three are in other pairs and tests too
    "mtp-glm": partial(glm, num_mtp=1, seed=3),
    "mtp-glm-own": partial(glm, num_mtp=1, own=True, seed=1),
    "mtp-deepseek": partial(glm, family="deepseek", num_mtp=1, seed=3),
    "mtp-three-layers": partial(glm, num_mtp=3, own=True, seed=45),
    "mtp-qwen3.5": partial(write_hybrid, mtp=True, vocab_size=VOCAB, seed=3),
    "mtp-qwen3-next": partial(
        write_hybrid, architecture="Qwen3NextForCausalLM", mtp=True, vocab_size=VOCAB, seed=6
    ),
}
QUICK = (*QUICK, "mtp-three-layers")
PARAMS = [
    pytest.param(name, marks=[pytest.mark.xdist_group(name), *([] if name in QUICK else [pytest.mark.slow])])
    for name in (*HEADS, *MTP)
]
with_some_heads = pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in (*BROAD, *MTP)],
    indirect=True,
    scope="module",
)

BATCHES = ("padded", "non-padded")
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"num_spec_tokens": 1, "max_batch_size": 2},
    {"num_spec_tokens": 2, "max_prefill_tokens": 11, "prefix_cache": False},
    {"num_spec_tokens": 3, "max_batch_size": 1},
    {"num_spec_tokens": 5, "max_prefill_tokens": 3, "page_size": 16},
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pair, its reference, and one run of it."""

    pair: Pair
    target: DenseTarget
    reference: Any  # a ReferenceHead or ReferenceMtp
    again: Callable[[], Any]  # to be spoilt
    errors: Mapping[str, tuple[Callable[[Any], bool], Callable[[Any], None]]]  # which references they fit
    outputs: Outputs


def requests() -> list[Request]:
    """Prompts of several lengths, three of which begin alike and so share pages."""
    alone = random_requests(4, VOCAB, GREEDY, lengths=(2, 20))
    prefix = tuple(5 - i % 3 for i in range(13))
    ends = [(3,), (4, 4, 7), (7, 6, 5, 4, 3)]
    return [
        *alone,
        *(Request(id=f"s{i}", prompt_token_ids=prefix + end, sampling=GREEDY) for i, end in enumerate(ends)),
    ]


@pytest.fixture(scope="module")
def dense_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetConfig, DenseTarget]:
    path = tmp_path_factory.mktemp("heads") / "target"
    config = write_target(path, vocab_size=VOCAB)
    return path, config, DenseTarget(path)


@pytest.fixture(scope="module", params=PARAMS)
def case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    dense_target: tuple[Path, TargetConfig, DenseTarget],
) -> Case:
    target, config, dense = dense_target
    path = tmp_path_factory.mktemp("head")
    if request.param in MTP:
        MTP[request.param](path / "target")
        dense = DenseTarget(path / "target")
        pair, errors = load_pair(path, drafter="mtp"), planted_errors.MTP_ERRORS
        again: Callable[[], Any] = partial(ReferenceMtp, path / "target", dense)
    else:
        (path / "target").symlink_to(target)
        HEADS[request.param](path / "drafter", config)
        pair = load_pair(path)
        again = partial(reference_head, path / "drafter", dense)
    outputs = generate(pair, requests(), num_spec_tokens=4)
    if request.param not in MTP:
        errors = planted_errors.errors_of(again())
    return Case(pair=pair, target=dense, reference=again(), again=again, errors=errors, outputs=outputs)


def wrong_drafts(outputs: Outputs, reference: Any) -> Iterator[tuple[str, int]]:
    """The steps whose drafts differ from the reference's: request and output tokens before them."""
    for name, steps in outputs.verified.items():
        completion = outputs.completions[name]
        text, written = completion.token_ids, 1
        reference.target.states(completion.request.prompt_token_ids + text)  # one pass for all of its steps
        for drafts, _, emitted in steps:
            tokens = completion.request.prompt_token_ids + text[:written]
            if drafts != reference.drafts(tokens, len(drafts)):
                yield name, written
            written += emitted


def test_every_draft_equals_the_reference_and_no_text_changes(case: Case) -> None:
    ragged = {"drafter_batch": "non-padded", "max_batch_size": 3, "max_prefill_tokens": 3}
    non_padded = generate(case.pair, requests(), num_spec_tokens=4, **ragged)
    assert case.outputs.verified == non_padded.verified
    assert case.outputs.texts == non_padded.texts
    for r in requests():
        text = case.outputs.texts[r.id]
        assert len(text) == r.sampling.max_tokens
        assert text == case.target.chosen(r.prompt_token_ids, text)
    assert list(wrong_drafts(case.outputs, case.reference)) == []
    assert set(case.outputs.accepted) >= {0, 1, 3}, "rows of several drafts must be taken in"
    recurrent = case.pair.models.target.config.state_spec is not None
    assert case.outputs.any_cached != recurrent, "states of a prefix are not kept"


def turn_of(request: pytest.FixtureRequest) -> int:
    """The number of its head among those."""
    return [*BROAD, *MTP].index(request.node.callspec.params["case"])


@pytest.mark.slow
@with_some_heads
def test_drafts_depend_on_no_setting(case: Case, request: pytest.FixtureRequest) -> None:
    """Every head has one of the settings, and every setting heads of each kind."""
    some, turn = requests()[3:], turn_of(request)
    padded, non_padded = (
        generate(case.pair, some, drafter_batch=batch, **SETTINGS[turn % 4]) for batch in BATCHES
    )
    assert padded.verified == non_padded.verified
    assert padded.texts == non_padded.texts == {r.id: case.outputs.texts[r.id] for r in some}
    assert list(wrong_drafts(padded, case.reference)) == []


@pytest.mark.slow
@with_some_heads
def test_rows_as_on_a_device_and_preemption_change_no_draft(
    case: Case, device_like: Callable[[], None], request: pytest.FixtureRequest
) -> None:
    """Half of the heads in either batch."""
    device_like()
    some, memory = requests()[3:], 19 * page_bytes(case.pair)
    spec = case.pair.models.target.config.state_spec
    if spec is not None:  # slots of sequences, and one of padding rows
        memory += (num_state_slots(8) + 1) * spec.bytes_per_sequence(5, 4)
    batch = BATCHES[turn_of(request) % 2]
    tight = generate(case.pair, some, num_spec_tokens=4, drafter_batch=batch, kv_memory=memory)
    assert tight.num_preempted > 0
    assert tight.texts == {r.id: case.outputs.texts[r.id] for r in some}
    assert tight.verified == {r.id: case.outputs.verified[r.id] for r in some}


def test_planted_errors_are_caught(case: Case) -> None:
    """An error that changes no draft of these texts would not be seen in the engine either."""
    missed = []
    for name, (fits, plant) in case.errors.items():
        if fits(case.reference):
            wrong = case.again()
            plant(wrong)
            missed += [] if any(wrong_drafts(case.outputs, wrong)) else [name]
    assert missed == []


def test_each_planted_error_fits_a_head(
    tmp_path: Path, dense_target: tuple[Path, TargetConfig, DenseTarget]
) -> None:
    _, config, dense = dense_target
    heads = []
    for name in BROAD:
        HEADS[name](tmp_path / name, config)
        heads.append(reference_head(tmp_path / name, dense))
    fitting = {
        id(plant) for head in heads for fits, plant in planted_errors.errors_of(head).values() if fits(head)
    }
    every = planted_errors.ERRORS | planted_errors.DFLASH_ERRORS | planted_errors.LLAMA4_ERRORS
    assert [name for name, (_, plant) in every.items() if id(plant) not in fitting] == []
