"""Heads for a Gemma 4: its assistants, DeepSpec's, with layers of its kind, and others', which take its embedding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
from tests import tiny_checkpoints
from tests.commands import refused
from tests.engines import Outputs, Pair, config_of, generate, load_pair, page_bytes, random_requests
from tests.marks import mostly_slow
from tests.planted_errors import assign
from tests.reference_gemma4 import (
    GLOBAL,
    SLIDING,
    ReferenceAssistant,
    ReferenceGemma4DSpark,
    ReferenceGemma4Eagle3,
)
from tests.reference_heads import DenseTarget, reference_head
from tests.test_heads import wrong_drafts
from tests.tiny_checkpoints import change_tensors, write_dflash_head, write_head
from tests.tiny_gemma4 import WINDOW, change_text, write_assistant, write_deepspec, write_gemma4

pytestmark = pytest.mark.xdist_group("gemma4-heads")
VOCAB, K = 8, 4  # so few tokens that random heads are often right
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
ASSISTANTS: dict[str, dict[str, Any]] = {
    "31b": {"seed": 32},
    "e2b": {"ordered": (4, 2), "seed": 20},
    "12b": {"seed": 33},
    "26b": {"seed": 29},
}
CASES: dict[str, tuple[str, Callable[..., None], Callable[..., Any]]] = {
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
    **{
        f"assistant-{size}": (size, partial(write_assistant, **settings), ReferenceAssistant)
        for size, settings in ASSISTANTS.items()
    },
}
OF_ASSISTANTS = [name for name in CASES if "assistant" in name]


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
            dense = DenseTarget(path / "target")
            again = partial(kind, path / "drafter", dense)
            made[name] = Case(pair=pair, target=dense, outputs=outputs, again=again)
        return made[name]

    return case


@pytest.mark.parametrize("name", mostly_slow(CASES, "eagle3", "dspark", "assistant-31b", "assistant-e2b"))
def test_every_draft_equals_the_reference_and_no_text_changes(
    cases: Callable[[str], Case], name: str
) -> None:
    case = cases(name)
    assert list(wrong_drafts(case.outputs, case.again())) == []
    assert case.outputs.texts == generate(case.pair, requests(), num_spec_tokens=0).texts
    assert set(case.outputs.accepted) >= {0, 1, 2}, "of all numbers of accepted drafts some"
    if name in OF_ASSISTANTS:
        assert max(case.outputs.accepted) > 2
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
    mostly_slow(
        [
            *(
                (each, how)
                for i, each in enumerate(OF_ASSISTANTS)
                for j, how in enumerate(SETTINGS)
                if (i + j) % 2
            ),
            *((name, "non-padded") for name in CASES if name not in OF_ASSISTANTS),
        ],
        *((name, "non-padded") for name in ("eagle3", "dspark", "assistant-e2b")),
        ("assistant-31b", "captured attention"),
    ),
)
def test_drafts_depend_on_no_setting(
    cases: Callable[[str], Case], device_like: Callable[..., None], name: str, setting: str
) -> None:
    device_like()  # a step is launched before the one in front of it is read
    case = cases(name)
    outputs = generate(case.pair, requests(), **{"num_spec_tokens": K} | SETTINGS[setting])
    assert outputs.texts == case.outputs.texts
    assert list(wrong_drafts(outputs, case.again())) == []


@pytest.mark.parametrize("name", mostly_slow(OF_ASSISTANTS, "assistant-31b"))
def test_preemption_changes_no_draft(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = cases(name)
    monkeypatch.setattr(PageBudget, "windowed", lambda self, pages: pages)  # those of other layers run short
    tight = generate(case.pair, requests(), num_spec_tokens=K, kv_memory=19 * page_bytes(case.pair))
    assert tight.num_preempted > 0
    assert tight.verified == case.outputs.verified


# ---- planted errors: each must change a draft of these texts


def _values_of_the_norm_of_keys(head: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def keys(x: Tensor, prefix: str, positions: Tensor, kind: str, size: int) -> tuple[Tensor, Tensor]:
        made = head.norm(head.heads(x, f"{prefix}k_proj", size), f"{prefix}k_norm")
        return head.rotated(made, positions, kind), made

    return keys


def _plain_rotation(head: Any) -> dict[str, Any]:
    whole = head.raw["rope_parameters"]["full_attention"] | {"partial_rotary_factor": 1.0}
    return head.text | {"rope_parameters": {"full_attention": whole}}


def _window(by: int) -> Callable[[Any], None]:
    return assign(text=lambda head: head.text | {"sliding_window": head.text["sliding_window"] + by})


def _earlier(changed: str) -> Callable[[Any], None]:
    """The layer of the same kind before."""

    def source(head: Any) -> Callable[[str], int]:
        real, kinds = head.source, head.target.model.config.layer_types

        def found(kind: str) -> int:
            last = int(real(kind))
            earlier = [index for index in range(last) if kinds[index] == kind]
            return earlier[-1] if kind == changed else last

        return found

    return assign(source=source)


def _other_logits(head: Any) -> Callable[[Tensor], Tensor]:
    return lambda normed: head.t["model.embed_tokens.weight"] @ normed


def _last(streams: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    return streams, streams[-1]


ERRORS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a layer too early": ("eagle3", assign(aux=lambda head: head.raw["target_layer_ids"])),
    "one too early for a block": ("dspark", assign(aux=lambda head: head.raw["target_layer_ids"])),
    "embedding as it is": ("dspark", assign(scaled=lambda head: lambda embedded: embedded)),
    "logits not capped": ("dspark", assign(capped=lambda head: lambda logits: logits)),
    "recycled behind the norm": ("eagle3", assign(recycled=lambda head: lambda x: head.norm(x, "norm"))),
    "values through the norm of keys": ("eagle3", assign(keys=_values_of_the_norm_of_keys)),
    "all pairs turned": ("eagle3", assign(text=_plain_rotation)),
    "no number of the layer": (
        "eagle3",
        assign(t=lambda head: head.t | {"layers.0.layer_scalar": torch.ones(1).double()}),
    ),
    "a position before": ("assistant-31b", assign(position=lambda head: lambda num_stored: num_stored - 1)),
    "a position behind": ("assistant-31b", assign(position=lambda head: lambda num_stored: num_stored + 1)),
    "window one shorter": ("assistant-31b", _window(-1)),
    "window one longer": ("assistant-31b", _window(1)),
    "another layer with a window": ("assistant-31b", _earlier(SLIDING)),
    "another layer without one": ("assistant-31b", _earlier(GLOBAL)),
    "the same, of those that store": ("assistant-e2b", _earlier(SLIDING)),
    "embedding of an assistant as it is": (
        "assistant-31b",
        assign(scaled=lambda head: lambda embedded: embedded.double()),
    ),
    "fed back in front of the norm": (
        "assistant-31b",
        assign(fed_back=lambda head: lambda stream, normed: stream),
    ),
    "state in front of the final norm": (
        "assistant-31b",
        assign(states=lambda head: lambda tokens: _last(ReferenceAssistant.states(head, tokens)[0])),
    ),
    "tokens of all groups": ("assistant-e2b", assign(logits=_other_logits)),
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


OF_DEEPSPEC = (
    *("dialect DeepSpec", "are layer outputs, so 1 is added", "embedding its own, times the root of 64"),
    *("4 heads, 1 KV heads, which are values too, 16 wide", "capped at 3", "Target and head fit"),
)
OF_ASSISTANT = (
    "an assistant of Gemma 4",
    "embedding the target's, scaled as there",
    "of 24 tokens: the 3 most likely of 16 groups",
    "KV cache none of its own",
    "Target and head fit; together 768 bytes of KV cache per token.",
)
SAID: dict[str, tuple[str, Callable[..., None], tuple[str, ...]]] = {
    "eagle3": ("12b", partial(write_deepspec, kind="eagle3"), OF_DEEPSPEC),
    "dspark": ("12b", partial(write_deepspec, kind="dspark", markov=4), OF_DEEPSPEC),
    "assistant": ("31b", partial(write_assistant, ordered=(16, 3)), OF_ASSISTANT),
}


@pytest.mark.parametrize("kind", SAID)
def test_inspect_says_how_a_head_is_read(tmp_path: Path, kind: str) -> None:
    size, write, parts = SAID[kind]
    write(tmp_path / "drafter", write_gemma4(tmp_path / "target", size))
    text = " ".join(describe(str(tmp_path / "target"), str(tmp_path / "drafter")).to_text().split())
    assert [part for part in (*parts, "not read") if part not in text] == ["not read"]


# ---- assistants against transformers


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
@pytest.mark.parametrize("name", ["assistant-31b", "assistant-e2b"])
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
    case = cases("assistant-e2b")
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
    layers = [block.attention.layer for block in head.layers.blocks]
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


def test_another_target_is_refused(tmp_path: Path) -> None:
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
    tiny_checkpoints.write_target(tmp_path / "llama")
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
