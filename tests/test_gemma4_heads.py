"""Other authors' heads for a Gemma 4: DeepSpec's, with layers of its kind, and others', which take its embedding."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import SamplingParams
from specgen.core.sequence import Request
from tests.commands import refused
from tests.engines import Outputs, Pair, generate, load_pair, random_requests
from tests.marks import mostly_slow
from tests.reference_gemma4 import ReferenceDeepSpec, ReferenceGemma4DSpark, ReferenceGemma4Eagle3
from tests.reference_heads import DenseTarget, reference_head
from tests.test_heads import wrong_drafts
from tests.tiny_checkpoints import write_dflash_head, write_head
from tests.tiny_gemma4 import WINDOW, write_deepspec, write_gemma4

pytestmark = pytest.mark.xdist_group("gemma4-heads")
VOCAB, K = 8, 4  # so few tokens that random heads are often right
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
CASES: dict[str, tuple[str, Callable[..., None], type[ReferenceDeepSpec]]] = {
    "eagle3": ("12b", partial(write_deepspec, kind="eagle3", seed=6), ReferenceGemma4Eagle3),
    "eagle3-values": ("e2b", partial(write_deepspec, kind="eagle3", seed=11), ReferenceGemma4Eagle3),
    "eagle3-shared": (
        "12b",
        partial(write_deepspec, kind="eagle3", own=False, seed=3),
        ReferenceGemma4Eagle3,
    ),
    "dflash": ("12b", partial(write_deepspec, kind="dspark", seed=14), ReferenceGemma4DSpark),
    "dspark": ("12b", partial(write_deepspec, kind="dspark", markov=4, seed=29), ReferenceGemma4DSpark),
    "dspark-values": (
        "e2b",
        partial(write_deepspec, kind="dspark", markov=4, own=False, seed=28),
        ReferenceGemma4DSpark,
    ),
}


def requests() -> list[Request]:
    return random_requests(4, VOCAB, GREEDY, lengths=(2, 5 * WINDOW))


@dataclass(frozen=True, kw_only=True)
class Case:
    pair: Pair
    outputs: Outputs
    again: Callable[[], Any]  # the reference


def write_target(path: Path, size: str) -> Any:
    vocabulary = {"vocab_size": VOCAB}
    if size != "12b":
        vocabulary["vocab_size_per_layer_input"] = VOCAB
    return write_gemma4(path, size, **vocabulary)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            path, (size, write, kind) = tmp_path_factory.mktemp(name), CASES[name]
            write(path / "drafter", write_target(path / "target", size))
            pair = load_pair(path)
            outputs = generate(pair, requests(), num_spec_tokens=K)
            again = partial(kind, path / "drafter", DenseTarget(path / "target"))
            made[name] = Case(pair=pair, outputs=outputs, again=again)
        return made[name]

    return case


@pytest.mark.parametrize("name", mostly_slow(CASES, "eagle3", "dspark"))
def test_every_draft_equals_the_reference_and_no_text_changes(
    cases: Callable[[str], Case], name: str
) -> None:
    case = cases(name)
    assert list(wrong_drafts(case.outputs, case.again())) == []
    ragged = {"drafter_batch": "non-padded", "max_batch_size": 3, "max_prefill_tokens": 3}
    non_padded = generate(case.pair, requests(), num_spec_tokens=K, **ragged)
    assert non_padded.verified == case.outputs.verified
    assert case.outputs.texts == generate(case.pair, requests(), num_spec_tokens=0).texts
    assert set(case.outputs.accepted) >= {0, 1, 2}, "of all numbers of accepted drafts some"


# ---- planted errors: each must change a draft of these texts


def _set(**changes: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Replace attributes of a reference by functions of it."""

    def plant(reference: Any) -> None:
        for name, value in {name: change(reference) for name, change in changes.items()}.items():
            setattr(reference, name, value)

    return plant


def _values_of_the_norm_of_keys(head: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def keys(x: Tensor, prefix: str, positions: Tensor, kind: str, size: int) -> tuple[Tensor, Tensor]:
        made = head.norm(head.heads(x, f"{prefix}k_proj", size), f"{prefix}k_norm")
        return head.rotated(made, positions, kind), made

    return keys


def _plain_rotation(head: Any) -> dict[str, Any]:
    whole = head.raw["rope_parameters"]["full_attention"] | {"partial_rotary_factor": 1.0}
    return head.text | {"rope_parameters": {"full_attention": whole}}


ERRORS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a layer too early": ("eagle3", _set(aux=lambda head: head.raw["target_layer_ids"])),
    "one too early for a block": ("dspark", _set(aux=lambda head: head.raw["target_layer_ids"])),
    "embedding as it is": ("dspark", _set(scaled=lambda head: lambda embedded: embedded)),
    "logits not capped": ("dspark", _set(capped=lambda head: lambda logits: logits)),
    "recycled behind the norm": ("eagle3", _set(recycled=lambda head: lambda x: head.norm(x, "norm"))),
    "values through the norm of keys": ("eagle3", _set(keys=_values_of_the_norm_of_keys)),
    "all pairs turned": ("eagle3", _set(text=_plain_rotation)),
    "no number of the layer": (
        "eagle3",
        _set(t=lambda head: head.t | {"layers.0.layer_scalar": torch.ones(1).double()}),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_seen(cases: Callable[[str], Case], name: str) -> None:
    kind, plant = ERRORS[name]
    case = cases(kind)
    wrong = case.again()
    plant(wrong)
    assert any(wrong_drafts(case.outputs, wrong))


# ---- the target's embedding, scaled or as it is


SHARED: dict[str, tuple[Callable[..., None], bool, str]] = {
    "z-lab": (
        partial(write_dflash_head, seed=2),
        True,
        "the target's, scaled where that scales it, as in z-lab's",
    ),
    "z-lab, said": (
        partial(write_dflash_head, seed=2, changed_config={"input_embedding_scale": 1.0}),
        False,
        "embedding the target's output",
    ),
    "speculators' DFlash": (
        partial(write_dflash_head, dialect="speculators", seed=2),
        False,
        "embedding the target's output",
    ),
}


@pytest.mark.parametrize("name", mostly_slow(SHARED, "z-lab"))
def test_a_shared_embedding_is_scaled_where_that_is_known(tmp_path: Path, name: str) -> None:
    write, is_scaled, said = SHARED[name]
    write(tmp_path / "drafter", write_target(tmp_path / "target", "12b"))
    outputs = generate(load_pair(tmp_path), requests(), num_spec_tokens=K)
    right, wrong = (reference_head(tmp_path / "drafter", DenseTarget(tmp_path / "target")) for _ in range(2))
    scaled = right.embedding * right.embedding.shape[1] ** 0.5
    (right if is_scaled else wrong).embedding = scaled
    assert list(wrong_drafts(outputs, right)) == []
    assert any(wrong_drafts(outputs, wrong))
    text = " ".join(describe(str(tmp_path / "target"), str(tmp_path / "drafter")).to_text().split())
    assert said in text


@pytest.mark.parametrize("dialect", ["eagle", "speculators"])
def test_eagle3_takes_a_shared_embedding_either_way(tmp_path: Path, dialect: str) -> None:
    """As a norm comes first."""
    write_head(tmp_path / "drafter", write_target(tmp_path / "target", "12b"), dialect, draft_vocab_size=None)
    outputs = generate(load_pair(tmp_path), requests()[:2], num_spec_tokens=K)
    reference = reference_head(tmp_path / "drafter", DenseTarget(tmp_path / "target"))
    assert list(wrong_drafts(outputs, reference)) == []


# ---- files


def test_what_is_not_built_is_refused(tmp_path: Path) -> None:
    target = write_gemma4(tmp_path / "target", "12b")
    for changes, reason in (
        (
            {"layer_types": ["sliding_attention"], "num_hidden_layers": 1},
            None,
        ),  # the last one sees all in any case
        ({"enable_moe_block": True}, "enable_moe_block is True"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu': only 'gelu_pytorch_tanh' is supported"),
        ({"target_layer_ids": []}, r"target_layer_ids is \[\]: it must be a list of ascending layer numbers"),
        ({"num_target_layers": 7}, "num_target_layers is 7, but the target has 6 layers"),
        (
            {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
            "num_hidden_layers is 2: of layers like",
        ),
    ):
        write_deepspec(tmp_path / "drafter", target, **changes)
        if reason is None:
            assert describe(str(tmp_path / "target"), str(tmp_path / "drafter")).misfits == ()
            continue
        with refused(reason):
            describe(str(tmp_path / "target"), str(tmp_path / "drafter"))
    kinds = ["sliding_attention", "full_attention"]
    write_deepspec(tmp_path / "drafter", target, "dspark", layer_types=kinds)
    with refused("heads with layers like a Gemma 4's need full_attention"):
        describe(str(tmp_path / "target"), str(tmp_path / "drafter"))


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_inspect_says_how_a_head_is_read(tmp_path: Path, kind: str) -> None:
    write_deepspec(
        tmp_path / "drafter", write_gemma4(tmp_path / "target", "12b"), kind, markov=4 * (kind != "eagle3")
    )
    text = " ".join(describe(str(tmp_path / "target"), str(tmp_path / "drafter")).to_text().split())
    for part in (
        "dialect DeepSpec",
        "are layer outputs, so 1 is added",
        "embedding its own, times the root of 64",
        "4 heads, 1 KV heads, which are values too, 16 wide",
        "capped at 3",
        "Target and head fit",
    ):
        assert part in text
    assert "not read" not in text
