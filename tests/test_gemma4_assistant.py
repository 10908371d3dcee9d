"""Gemma 4's assistants: drafts equal a dense reference, whose errors would be seen; what is refused; what is drawn."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from bound import StepBytes
from packaging import version
from torch import Tensor

from specgen.checkpoints.checkpoint import open_checkpoint, target_config
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.engine.build import page_budget
from specgen.engine.choices import attention_uses, kv_note
from specgen.engine.memory_plan import memory_plans
from specgen.engine.page_budget import PageBudget
from specgen.models.gemma4_assistant import TOKEN_ORDERING
from tests.commands import refused
from tests.engines import Outputs, Pair, config_of, generate, load_pair, page_bytes, random_requests
from tests.marks import mostly_slow
from tests.reference_gemma4 import GLOBAL, SLIDING, ReferenceAssistant
from tests.reference_heads import DenseTarget
from tests.test_heads import wrong_drafts
from tests.tiny_checkpoints import change_tensors, write_target
from tests.tiny_gemma4 import WINDOW, change_text, write_assistant, write_gemma4

pytestmark = pytest.mark.xdist_group("gemma4-assistant")
VOCAB, K = 8, 4  # so few tokens that random heads are often right
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "31b": ("31b", {"seed": 32}),
    "e2b": ("e2b", {"ordered": (4, 2), "seed": 20}),
    "12b": ("12b", {"seed": 33}),
    "26b": ("26b", {"seed": 29}),
}


def requests() -> list[Request]:
    """Some of which are shorter than a window, and some much longer."""
    found = random_requests(4, VOCAB, GREEDY, lengths=(2, 5 * WINDOW))
    more = random_requests(2, VOCAB, replace(GREEDY, max_tokens=10), lengths=(1, WINDOW + 1), seed=7)
    return [*found, *(replace(each, id=f"short {each.id}") for each in more)]


@dataclass(frozen=True, kw_only=True)
class Case:
    pair: Pair
    target: DenseTarget
    outputs: Outputs

    def reference(self) -> ReferenceAssistant:
        return ReferenceAssistant(self.pair.path / "drafter", self.target)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            path, (size, settings) = tmp_path_factory.mktemp(name), CASES[name]
            vocabulary = {"vocab_size": VOCAB}
            if size != "12b":
                vocabulary["vocab_size_per_layer_input"] = VOCAB
            config = write_gemma4(path / "target", size, **vocabulary)
            write_assistant(path / "drafter", config, **settings)
            pair = load_pair(path)
            outputs = generate(pair, requests(), num_spec_tokens=K)
            made[name] = Case(pair=pair, target=DenseTarget(path / "target"), outputs=outputs)
        return made[name]

    return case


@pytest.mark.parametrize("name", mostly_slow(CASES, "31b", "e2b"))
def test_every_draft_equals_the_reference_and_no_text_changes(
    cases: Callable[[str], Case], name: str
) -> None:
    case = cases(name)
    assert list(wrong_drafts(case.outputs, case.reference())) == []
    assert case.outputs.texts == generate(case.pair, requests(), num_spec_tokens=0).texts
    found = set(case.outputs.accepted)
    assert found >= {0, 1, 2}, "of all numbers of accepted drafts some"
    assert max(found) > 2
    assert sum(row.first_pass_rows for row in case.outputs.steps) == 0  # it takes nothing in


SETTINGS: dict[str, dict[str, Any]] = {
    "non-padded": {"drafter_batch": "non-padded", "max_batch_size": 3, "max_prefill_tokens": 3},
    "captured attention": {"attention": "sdpa-static", "max_batch_size": 2},
    "one draft": {"num_spec_tokens": 1},
    "wider than a window": {"num_spec_tokens": WINDOW + 2},
    "a prefix cache": {"prefix_cache": True, "max_batch_size": 1},
}


@pytest.mark.parametrize(
    ("name", "setting"),
    mostly_slow(product(CASES, SETTINGS), ("e2b", "non-padded"), ("31b", "captured attention")),
)
def test_drafts_depend_on_no_setting(
    cases: Callable[[str], Case], device_like: Callable[..., None], name: str, setting: str
) -> None:
    device_like()  # a step is launched before the one in front of it is read
    case = cases(name)
    outputs = generate(case.pair, requests(), **{"num_spec_tokens": K} | SETTINGS[setting])
    assert outputs.texts == case.outputs.texts
    assert list(wrong_drafts(outputs, case.reference())) == []


@pytest.mark.parametrize("name", mostly_slow(CASES, "31b"))
def test_preemption_changes_no_draft(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = cases(name)
    monkeypatch.setattr(PageBudget, "windowed", lambda self, pages: pages)  # those of other layers run short
    tight = generate(case.pair, requests(), num_spec_tokens=K, kv_memory=19 * page_bytes(case.pair))
    assert tight.num_preempted > 0
    assert tight.verified == case.outputs.verified


# ---- planted errors: each must change a draft of these texts


def _changed(**methods: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Replace methods of a reference by functions of it."""

    def plant(reference: Any) -> None:
        for name, value in {name: change(reference) for name, change in methods.items()}.items():
            setattr(reference, name, value)

    return plant


def _window(by: int) -> Callable[[Any], None]:
    return _changed(text=lambda head: head.text | {"sliding_window": head.text["sliding_window"] + by})


def _earlier(changed: str) -> Callable[[Any], None]:
    """The layer of the same kind before."""

    def source(head: Any) -> Callable[[str], int]:
        real, kinds = head.source, head.target.model.config.layer_types

        def found(kind: str) -> int:
            last = int(real(kind))
            earlier = [index for index in range(last) if kinds[index] == kind]
            return earlier[-1] if kind == changed else last

        return found

    return _changed(source=source)


def _other_logits(head: Any) -> Callable[[Tensor], Tensor]:
    return lambda normed: head.t["model.embed_tokens.weight"] @ normed


def _last(streams: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    return streams, streams[-1]


ERRORS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a position before": ("31b", _changed(position=lambda head: lambda num_stored: num_stored - 1)),
    "a position behind": ("31b", _changed(position=lambda head: lambda num_stored: num_stored + 1)),
    "window one shorter": ("31b", _window(-1)),
    "window one longer": ("31b", _window(1)),
    "another layer with a window": ("31b", _earlier(SLIDING)),
    "another layer without one": ("31b", _earlier(GLOBAL)),
    "the same, of those that store": ("e2b", _earlier(SLIDING)),
    "embedding as it is": ("31b", _changed(scaled=lambda head: lambda embedded: embedded.double())),
    "fed back in front of the norm": ("31b", _changed(fed_back=lambda head: lambda stream, normed: stream)),
    "state in front of the final norm": (
        "31b",
        _changed(states=lambda head: lambda tokens: _last(ReferenceAssistant.states(head, tokens)[0])),
    ),
    "tokens of all groups": ("e2b", _changed(logits=_other_logits)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_seen(cases: Callable[[str], Case], name: str) -> None:
    size, plant = ERRORS[name]
    case = cases(size)
    wrong = case.reference()
    plant(wrong)
    assert any(wrong_drafts(case.outputs, wrong))


# ---- against transformers


@torch.inference_mode()
@pytest.mark.parametrize("ordered", [(0, 0), (16, 3)])
def test_the_reference_is_transformers(tmp_path: Path, ordered: tuple[int, int]) -> None:
    """Of whose versions before 5.24 none can build an assistant."""
    import transformers

    if version.parse(transformers.__version__) < version.parse("5.24"):
        pytest.skip("transformers before 5.24 builds no assistant")
    config = write_gemma4(tmp_path / "target")
    write_assistant(tmp_path / "drafter", config, ordered=ordered)
    reference = ReferenceAssistant(tmp_path / "drafter", DenseTarget(tmp_path / "target"))
    assistant: Any = transformers.Gemma4AssistantForCausalLM.from_pretrained(
        tmp_path / "drafter", dtype=torch.float32, attn_implementation="eager"
    )
    for length in (2, WINDOW, WINDOW + 1, WINDOW + 2, 30):
        tokens = tuple(torch.randint(0, 128, (length + 1,)).tolist())
        streams, output = reference.states(tokens)
        stored = {kind: reference.stored(streams, kind) for kind in (SLIDING, GLOBAL)}
        embedded = reference.target.model.get_input_embeddings()(torch.tensor([[tokens[-1]]]))
        found = assistant(
            inputs_embeds=torch.cat((embedded, output[None, -1:].float()), -1),
            position_ids=torch.tensor([[length]]),
            shared_kv_states={
                kind: tuple(each.transpose(0, 1)[None].float() for each in both)
                for kind, both in stored.items()
            },
        )
        logits, hidden = reference.forward(tokens[-1], output[-1:], stored)
        listed = logits.isfinite()
        torch.testing.assert_close(found.logits[0, 0, listed].double(), logits[listed], atol=1e-4, rtol=0)
        torch.testing.assert_close(found.last_hidden_state[0].double(), hidden, atol=1e-4, rtol=0)
        assert found.logits[0, 0].argmax() == logits.argmax()


# ---- what is drawn, and what may not be


@torch.inference_mode()
@pytest.mark.parametrize("name", ["31b", "e2b"])
def test_drawn_drafts_leave_the_distribution_as_it_is(cases: Callable[[str], Case], name: str) -> None:
    case, count = cases(name), 1500
    prompt = requests()[0].prompt_token_ids
    drawn = SamplingParams(max_tokens=2, ignore_eos=True, temperature=1.0)
    asked = [Request(id=str(index), prompt_token_ids=prompt, sampling=drawn) for index in range(count)]
    outputs = generate(
        case.pair, asked, num_spec_tokens=1, draft_sampling="probabilistic", max_batch_size=128
    )
    logits = case.target.states(prompt)[1][-1] @ case.target.lm_head.T
    cap = case.target.model.config.final_logit_softcapping
    first = ((logits / cap).tanh() * cap).softmax(-1).double()
    chosen = int(first.argmax())
    seconds = [text[1] for text in outputs.texts.values() if text[0] == chosen]
    output = case.target.states((*prompt, chosen))[1][-1] @ case.target.lm_head.T
    expected = ((output / cap).tanh() * cap).softmax(-1)
    found = torch.bincount(torch.tensor(seconds), minlength=VOCAB) / len(seconds)
    assert 0 < sum(outputs.accepted) < count
    assert (found - expected).abs().max() < 4 * (0.25 / len(seconds)) ** 0.5


def test_tokens_that_are_never_chosen_are_never_drafted(cases: Callable[[str], Case]) -> None:
    case = cases("e2b")
    least = min(
        range(VOCAB), key=lambda token: -sum(text.count(token) for text in case.outputs.texts.values())
    )
    drafted = [token for steps in case.outputs.verified.values() for drafts, *_ in steps for token in drafts]
    assert least in drafted
    asked = [replace(each, sampling=replace(each.sampling, suppress_tokens=(least,))) for each in requests()]
    outputs = generate(case.pair, asked, num_spec_tokens=K)
    assert outputs.texts == generate(case.pair, asked, num_spec_tokens=0).texts
    for steps in outputs.verified.values():
        assert all(least not in drafts for drafts, *_ in steps)


# ---- what it reads of the target's cache


def test_scales_and_planes_are_those_of_the_layers_that_store(tmp_path: Path) -> None:
    """Of the E2B: the last three of six store none."""
    write_assistant(tmp_path / "drafter", write_gemma4(tmp_path / "target", "e2b"))
    scales = {1: 0.5, 2: 0.25, 4: 3.0, 5: 7.0}
    named = {f"model.layers.{layer}.self_attn.k_scale": torch.tensor(each) for layer, each in scales.items()}
    change_tensors(tmp_path / "target", dict(named))
    pair = load_pair(tmp_path)
    head: Any = pair.models.head
    layers = [block.attention.layer for block in head.blocks]
    assert [(each.index, each.k_scale, each.window, each.stores) for each in layers] == [
        *[(1, 0.5, WINDOW + 1, False)] * 3,
        (2, 0.25, None, False),
    ]
    config = config_of(pair, kv_dtype="fp8")
    assert {use.heads.kv_dtype for use in attention_uses(config, pair.models.checkpoints)} == {
        torch.float8_e4m3fn
    }
    assert kv_note(config, config, pair.models.checkpoints) == {"KV cache": "FP8 (e4m3), as asked"}
    asked = requests()[:2]
    plain, drafted = (generate(pair, asked, kv_dtype="fp8", num_spec_tokens=k) for k in (0, K))
    assert drafted.texts == plain.texts


def test_a_cache_has_no_bytes_of_it_and_a_step_reads_the_target_s(tmp_path: Path) -> None:
    write_assistant(tmp_path / "drafter", write_gemma4(tmp_path / "target"), ordered=(16, 4))
    pair = load_pair(tmp_path)
    config = config_of(pair)
    assert page_budget(config, pair.models).page_bytes == config.page_size * 768 * 1
    sizes = StepBytes.of(pair.models)
    assert sizes.head_fill == 0
    assert sizes.head_kv.at(100) == 2 * 4 * (3 * 2 * 8 * WINDOW + 16 * 100)
    stored = pair.models.checkpoints["drafter"].tensors
    table = prod(stored["model.embed_tokens.weight"].shape)
    weights = sum(prod(info.shape) for info in stored.values() if info.dtype == "float32")
    assert sizes.head_pass == 4 * (weights - table + table * 4 // 16)
    (*_, plan) = memory_plans(str(tmp_path / "target"), str(tmp_path / "drafter"), 16 << 30)
    assert plan.kv_bytes_per_token == 768 // 2


# ---- pairs and files


def test_another_target_is_refused(cases: Callable[[str], Case], tmp_path: Path) -> None:
    config = write_gemma4(tmp_path / "target")
    write_assistant(tmp_path / "drafter", config)
    for changes, reason in (
        (
            {"sliding_window": WINDOW - 1},
            "the window of its layer 0: 5, of the target's layer 4, which it reads: 6",
        ),
        ({"head_dim": 16}, "heads and width of keys of its layer 0"),
        ({"rope_parameters": None}, "the rotation of its layer 0"),
    ):
        change_text(tmp_path / "drafter", **changes)
        assert any(reason in each for each in misfits_of(tmp_path)), changes
        write_assistant(tmp_path / "drafter", config)
    write_assistant(tmp_path / "drafter", config, backbone_hidden_size=48)
    assert any(
        "features 48 wide, but the target's hidden size is 64" in each for each in misfits_of(tmp_path)
    )
    write_target(tmp_path / "llama")
    write_assistant(tmp_path / "drafter", config)
    found = describe(str(tmp_path / "llama"), str(tmp_path / "drafter")).misfits
    assert any(
        "it reads what layers of a Gemma 4 store, and the target is a LlamaForCausalLM" in each
        for each in found
    )
    with refused("is a draft head and no target"):
        target_config(open_checkpoint(str(tmp_path / "drafter")))


def misfits_of(path: Path) -> tuple[str, ...]:
    return describe(str(path / "target"), str(path / "drafter")).misfits


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings is false: only assistants"),
        ({"num_centroids": 3}, "num_centroids is 3, which does not divide a vocabulary of 128"),
        ({"centroid_intermediate_top_k": 17}, "centroid_intermediate_top_k is 17 of 16 centroids"),
    ],
)
def test_wrong_configs_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    write_assistant(tmp_path, write_gemma4(tmp_path / "target"), ordered=(16, 3), **changes)
    with refused(reason):
        describe(str(tmp_path))


def test_an_order_that_is_none_is_refused(tmp_path: Path) -> None:
    write_assistant(tmp_path, write_gemma4(tmp_path / "target"), ordered=(16, 3))
    change_tensors(tmp_path, {TOKEN_ORDERING: torch.arange(128) // 2})
    (problem,) = describe(str(tmp_path)).misfits
    assert f"{TOKEN_ORDERING} is wrong: it must have each of the 128 tokens once" in problem
    change_tensors(tmp_path, {TOKEN_ORDERING: None})
    (problem,) = describe(str(tmp_path)).misfits
    assert f"{TOKEN_ORDERING} is not there" in problem


def test_inspect_says_what_it_reads(tmp_path: Path) -> None:
    write_assistant(tmp_path / "drafter", write_gemma4(tmp_path / "target"), ordered=(16, 3))
    text = " ".join(describe(str(tmp_path / "target"), str(tmp_path / "drafter")).to_text().split())
    for part in (
        "an assistant of Gemma 4",
        "embedding the target's, scaled as there",
        "of 24 tokens: the 3 most likely of 16 groups",
        "KV cache none of its own",
        "Target and head fit; together 768 bytes of KV cache per token.",
    ):
        assert part in text
    assert "not read" not in text
