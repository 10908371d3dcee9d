"""Calibrated pairs of every family have the known text in ``transformers`` and in the engine.

Their heads and MTP layers draft as asked, and tokens choose their experts as asked.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_codes import Codes
from calibrated_cycle import Cycle
from calibrated_gemma4 import assistant_tensors, layer_inputs
from calibrated_hybrids import hybrid_mtp_tensors
from calibrated_mixtures import common_share
from calibrated_shapes import MIXTURES, SHAPES, Gemma4Shape, HybridShape
from calibrated_weights import RESIDUAL, Named, Source, target_tensors
from make_calibrated_pair import HeadKind, chosen_cycle, chosen_layer, chosen_shape, main, write_pair
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.report.intervals import wilson
from tests.engines import Pair, generate, load_pair
from tests.marks import mostly_slow
from tests.reference_heads import DenseTarget, reference_head
from tests.test_calibrated_pair import LENGTHS, check_drafts, expected

pytestmark = [pytest.mark.scripts, pytest.mark.xdist_group("calibrated")]  # pairs that several of them use

HYBRIDS = ("tiny-qwen3.5", "tiny-qwen3.5-moe")
LLAMA4, GPT_OSS, GLM = "tiny-llama4", "tiny-gpt-oss", "tiny-glm"
GEMMA4, GEMMA4_E, GEMMA4_MOE = GEMMAS = ("tiny-gemma4", "tiny-gemma4-e", "tiny-gemma4-moe")
OF_GEMMAS = ("eagle3", "peagle-2", "dflash-4", "assistant")
LLAMA = "tiny"
HEADS = {LLAMA: tuple(LENGTHS), LLAMA4: ("eagle3", "eagle-llama4")} | dict.fromkeys(GEMMAS, OF_GEMMAS)
TINY = (GPT_OSS, "tiny-qwen3-moe", GLM, "tiny-qwen3.5-moe", GEMMA4_MOE)  # whose neighbours choose alike
BATCHES = ("padded", "non-padded")
K = 4


@dataclass(frozen=True, kw_only=True)
class Written:
    """A pair on disk."""

    path: Path
    cycle: Cycle
    shape: Any

    def load(self, drafter: str, dtype: torch.dtype = torch.float32) -> Pair:
        return load_pair(self.path, dtype, drafter=drafter)

    def model(self, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
        """Of ``transformers``, and the tensors that it misses or does not expect."""
        return AutoModelForCausalLM.from_pretrained(
            self.path / "target", dtype=dtype, attn_implementation="eager", output_loading_info=True
        )

    def requests(self, count: int = 8) -> list[Request]:
        """Prompts within a chunk and behind one."""
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        return [
            Request(id=str(i), prompt_token_ids=self.cycle.slice(61 * i, 4 + 9 * i), sampling=sampling)
            for i in range(count)
        ]

    def check_texts(self, drafter: str, asked: list[Request], k: int = K, **settings: Any) -> list[int]:
        """The known ones, with the known drafts; how many of those were accepted."""
        dtype = getattr(torch, settings.get("dtype", "float32"))
        outputs = generate(self.load(drafter, dtype), asked, num_spec_tokens=k, **settings)
        for each in asked:
            known = self.cycle.after(each.prompt_token_ids[-1], each.sampling.max_tokens)
            assert outputs.texts[each.id] == known
        if k:
            check_drafts(drafter, asked, outputs, self.cycle)
        return outputs.accepted


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Written]:
    @cache
    def written(
        name: str,
        weights: str = "bf16",
        accept: float = 0.75,
        overlap: float | None = None,
        experts: str | None = None,
    ) -> Written:
        path, shape = tmp_path_factory.mktemp("calibrated"), chosen_shape(name, None, experts)
        cycle = chosen_cycle(shape, accept, 3)
        heads = [HeadKind.find(each) for each in HEADS.get(name, ("eagle3", "peagle-2"))]
        write_pair(path, shape, cycle, Source("cpu", 3), heads, chosen_layer(shape, overlap, weights))
        return Written(path=path, cycle=cycle, shape=shape)

    return written


def tensors_of(shape: Any, weights: str, overlap: float | None = None) -> tuple[list[Named], list[Named]]:
    """The target's, and those of a hybrid's MTP layer."""
    source, cycle = Source("cpu", 0), Cycle(tokens=(1, 2), unknown=(), accept=1.0)
    nothing = Codes(embedding=torch.empty(0, shape.hidden_size), turns=torch.zeros(0))
    layer = chosen_layer(shape, overlap, weights)
    own = list(target_tensors(shape, nothing.embedding, cycle.succ, source, layer))
    own += layer_inputs(shape, source) if isinstance(shape, Gemma4Shape) else ()
    if not isinstance(shape, HybridShape):
        return own, []
    assert layer is not None
    return own, [*layer("mtp.layers.0.", source), *hybrid_mtp_tensors(shape, nothing, source)]


# layers, or all; GB of the target and of its MTP layer; tensors as transformers counts them without a vision part's
FULL_SIZE = [
    ("qwen3.6-27b", None, "bf16", 53.79, 0.85, 851),
    ("qwen3.6-27b", None, "fp8-block", 29.47, 0.48, None),
    ("qwen3.6-35b-a3b", None, "bf16", 69.32, 1.69, None),
    ("qwen3.6-35b-a3b", None, "fp8-block", 35.71, 0.85, None),
    ("llama-4-scout", 48, "bf16", 215.5, 0, 579),
    ("llama-4-scout", 8, "bf16", 39.4, 0, None),
    ("llama-4-scout", 8, "fp8-block", 21.8, 0, None),
    ("gpt-oss-20b", None, "bf16", 13.8, 0, None),
    ("qwen3-30b-a3b", None, "bf16", 61.1, 0, None),
    ("glm-4.7-flash", None, "bf16", 59.9, 0, None),
    ("gemma-4-12b", None, "bf16", 25.8, 0, 667),  # with output weights, which published ones have not
    ("gemma-4-12b", None, "fp8-block", 15.0, 0, None),
    ("gemma-4-31b", None, "bf16", 64.2, 0, 833),
    ("gemma-4-26b-a4b", None, "bf16", 51.9, 0, 658),
    ("gemma-4-e4b", None, "bf16", 16.3, 0, 666),
    ("gemma-4-e2b", None, "bf16", 10.1, 0, 541),
]


@pytest.mark.parametrize(("name", "layers", "weights", "own", "mtp", "number"), FULL_SIZE)
def test_full_size_pairs_take_the_bytes_of_the_published_models(
    name: str, layers: int | None, weights: str, own: float, mtp: float, number: int | None
) -> None:
    found = tensors_of(chosen_shape(name, layers, None), weights)
    sizes = [sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in part) / 1e9 for part in found]
    assert sizes == pytest.approx([own, mtp], abs=0.01 if mtp else 0.1)
    assert number in (None, len(found[0]))


def test_an_assistant_has_the_tensors_and_bytes_of_the_published_one() -> None:
    codes = Codes(embedding=torch.empty(0, 1), turns=torch.zeros(0))
    cycle = Cycle(tokens=(1, 2), unknown=(), accept=1.0)
    for name, number, size in (("gemma-4-12b", 48, 422.5), ("gemma-4-e4b", 50, 78.8)):
        found = list(assistant_tensors(SHAPES[name], codes, cycle, Source("cpu", 0)))
        assert len(found) == number
        assert sum(torch.Size(each.shape).numel() for each in found) / 1e6 == pytest.approx(size, abs=0.5)


@pytest.mark.parametrize(
    ("name", "weights"),
    mostly_slow(
        [
            *product(HYBRIDS, ("bf16", "fp8-block")),
            *((name, "bf16") for name in SHAPES if name not in HYBRIDS),
        ],
        *product(HYBRIDS, ("bf16", "fp8-block")),
        *((name, "bf16") for name in SHAPES if name not in MIXTURES),
    ),
)
def test_tensors_have_the_shapes_and_dtypes_that_were_said(name: str, weights: str) -> None:
    shape = SHAPES[name]
    cycle = Cycle.draw(shape.num_plain_tokens, shape.draft_vocab_size, 0.75, seed=0)
    assert not set(cycle.tokens) & {shape.bos_token_id, *shape.eos_token_ids}
    if name in MIXTURES:
        shape = replace(shape, num_layers=shape.interval if isinstance(shape, HybridShape) else 2)
        heads = ()
    else:
        nothing = Codes(embedding=torch.empty(0, shape.hidden_size), turns=torch.zeros(shape.kv_size // 2))
        kinds = map(HeadKind.find, ("eagle3", "eagle3-2", "eagle1", "peagle-2"))
        heads = tuple(list(kind.tensors(shape, nothing, cycle, Source("cpu", 0))) for kind in kinds)
    of_target = tensors_of(shape, weights, 0.5 if name in MIXTURES else None)
    for named in (each for part in (*of_target, *heads) for each in part):
        small = torch.Size(named.shape).numel() <= 1 << (21 if name in MIXTURES else 20)
        if small and not any(each in named.name for each in ("lm_head", "embed", "mtp.fc")):
            made = named.make()
            assert made.shape == named.shape, named.name
            assert made.dtype == named.dtype or name not in MIXTURES, named.name


ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
QWEN: dict[str, Any] = {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 16}
QWEN |= {"rope_parameters": ROPE | {"mrope_section": [11, 11, 10], "mrope_interleaved": True}}
QWEN |= {"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320}
QWEN |= {"linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_conv_kernel_dim": 4}
QWEN |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
SCOUT = {"layer_types": [*["chunked_attention"] * 3, "full_attention"] * 12, "moe_layers": [*range(48)]}
SCOUT |= {
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "vocab_size": 202048,
}
SCOUT |= {"hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384}
SCOUT |= {"use_qk_norm": True, "floor_scale": 8192}
GEMMA: dict[str, Any] = {"layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10}
GEMMA |= {
    "num_attention_heads": 32,
    "attention_k_eq_v": True,
    "vocab_size": 262144,
    "num_kv_shared_layers": 0,
}
GEMMA |= {"hidden_size": 5376, "intermediate_size": 21504, "sliding_window": 1024, "enable_moe_block": False}
GEMMA |= {"final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0}
GEMMA_E2B = GEMMA | {
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "num_attention_heads": 8,
}
GEMMA_E2B |= {"attention_k_eq_v": False, "num_kv_shared_layers": 20, "use_double_wide_mlp": True}
GEMMA_E2B |= {"hidden_size": 1536, "intermediate_size": 6144, "sliding_window": 512}
GEMMA_E2B |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
PUBLISHED = {
    "qwen3.6-27b": ("Qwen3_5TextConfig", QWEN | {"hidden_size": 5120, "intermediate_size": 17408}),
    "qwen3.6-35b-a3b": (
        "Qwen3_5MoeTextConfig",
        QWEN
        | {"layer_types": QWEN["layer_types"][:40], "num_attention_heads": 16, "num_key_value_heads": 2}
        | {"linear_num_value_heads": 32, "hidden_size": 2048, "num_experts": 256, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    ),
    "llama-4-scout": ("Llama4TextConfig", SCOUT),
    "gemma-4-31b": ("Gemma4TextConfig", GEMMA),
    "gemma-4-e2b": ("Gemma4TextConfig", GEMMA_E2B),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_is_that_of_the_published_model(name: str, tmp_path: Path) -> None:
    kind, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name].target_config()))
    config: Any = AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__ == kind
    assert {each: getattr(config, each) for each in expected} == expected


@pytest.mark.parametrize(
    ("name", "how", "dtype"),
    mostly_slow(
        [
            *((name, {}, torch.float32) for name in (*HYBRIDS, GEMMA4, GEMMA4_E)),
            *((name, {"overlap": 0.5}, torch.float32) for name in (LLAMA4, GPT_OSS)),
            *((name, {}, torch.bfloat16) for name in (LLAMA, *HYBRIDS, GEMMA4)),
            *((name, {"overlap": 0.5}, torch.bfloat16) for name in TINY),
            (GPT_OSS, {"overlap": 0.5, "experts": "bf16"}, torch.bfloat16),
        ],
        *((name, {}, torch.float32) for name in (*HYBRIDS, GEMMA4, GEMMA4_E)),
        *((name, {"overlap": 0.5}, torch.float32) for name in (LLAMA4, GPT_OSS)),
    ),
)
def test_transformers_finds_every_tensor_and_generates_the_known_text(
    write: Callable[..., Written], name: str, how: dict[str, Any], dtype: torch.dtype
) -> None:
    pair = write(name, **how)
    model, found = pair.model(dtype)
    of_mtp = f"model.layers.{pair.shape.num_layers}."  # of GLM's, which transformers leaves out
    assert not [each for names in found.values() for each in names if not str(each).startswith(of_mtp)]
    with torch.no_grad():
        out = model(torch.tensor([pair.cycle.tokens]), use_cache=True, output_hidden_states=True)
    assert out.logits[0].argmax(-1).tolist() == list(pair.cycle.succ.values())
    if isinstance(pair.shape, HybridShape | Gemma4Shape):
        first, last = out.hidden_states[0][0], out.hidden_states[-1][0]
        rms = (last - first).float().square().mean(0).sqrt()
        assert RESIDUAL < rms.mean() < 8 * RESIDUAL  # two blocks a layer
        assert first.float().square().mean().item() == pytest.approx(1, abs=0.01)
    if isinstance(pair.shape, HybridShape):
        states = out.past_key_values.layers[0].recurrent_states[0]
        assert 0.01 < states.float().std() < 1


@pytest.mark.parametrize("weights", mostly_slow(("bf16", "fp8-block"), "bf16"))
@pytest.mark.parametrize("name", HYBRIDS)
def test_files_are_as_qwen_publishes_them(write: Callable[..., Written], name: str, weights: str) -> None:
    """In FP8 experts are one by one, and what is no large matrix is plain."""
    pair = write(name, weights)
    tensors = load_file(pair.path / "target" / "model.safetensors")
    quantized = {each for each, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    scales = {each for each in tensors if each.endswith("weight_scale_inv")}
    assert scales == {f"{each}_scale_inv" for each in quantized}
    fp8, moe = weights != "bf16", "moe" in name
    assert ("mtp.layers.0.mlp.experts.gate_up_proj" in tensors) == (moe and not fp8)
    config = json.loads((pair.path / "target" / "config.json").read_text())
    plain = config.get("quantization_config", {}).get("modules_to_not_convert", [])
    matrices = {
        each.removesuffix(".weight")
        for each, tensor in tensors.items()
        if each.endswith(".weight") and tensor.ndim > 1 and "embed" not in each
    }
    assert {each.removesuffix(".weight") for each in quantized} == (matrices - set(plain) if fp8 else set())
    assert set(plain) <= matrices
    assert not fp8 or {"lm_head", "mtp.fc", "model.layers.4.linear_attn.in_proj_a"} <= set(plain)


HOW = {name: {} for name in (*HYBRIDS, GEMMA4, GEMMA4_E)} | {
    name: {"overlap": 0.5} for name in (LLAMA4, GLM, GEMMA4_MOE)
}
DRAFTING = [
    *((name, "mtp", *how) for name in HYBRIDS for how in zip(("bf16", "fp8-block"), BATCHES, strict=True)),
    *((name, head, "bf16", "padded") for name in HYBRIDS for head in ("eagle3", "peagle-2")),
    *((LLAMA4, "eagle3", *how) for how in (("fp8", "non-padded"), ("fp8-block", "padded"))),
    *((LLAMA4, "eagle-llama4", *how) for how in (("bf16", "padded"), ("fp8-block", "non-padded"))),
    *((GLM, "mtp", weights, "padded") for weights in ("bf16", "fp8-block")),
    *((GEMMA4, head, "bf16", batch) for head, batch in zip(OF_GEMMAS, BATCHES * 2, strict=True)),
    *((GEMMA4, head, "fp8", batch) for head, batch in zip(OF_GEMMAS[::2], BATCHES, strict=True)),
    *((GEMMA4, head, "fp8-block", batch) for head, batch in zip(OF_GEMMAS[1::2], BATCHES, strict=True)),
    *((GEMMA4_MOE, head, "bf16", batch) for head, batch in zip(OF_GEMMAS, BATCHES[::-1] * 2, strict=True)),
    *(
        (GEMMA4_E, *how, "padded")
        for how in (("assistant", "bf16"), ("assistant", "fp8-block"), ("dflash-4", "bf16"))
    ),
    (GEMMA4_E, "eagle3", "bf16", "non-padded"),
]


@pytest.mark.parametrize(
    ("name", "head", "weights", "batch"),
    mostly_slow(
        DRAFTING,
        ("tiny-qwen3.5", "mtp", "bf16", "padded"),
        ("tiny-qwen3.5-moe", "mtp", "fp8-block", "non-padded"),
        (LLAMA4, "eagle-llama4", "bf16", "padded"),
        (LLAMA4, "eagle3", "fp8", "non-padded"),
        (GEMMA4, "dflash-4", "bf16", "padded"),
        (GEMMA4, "assistant", "bf16", "non-padded"),
        (GEMMA4_E, "assistant", "bf16", "padded"),
        (GEMMA4_MOE, "eagle3", "bf16", "non-padded"),
    ),
)
def test_heads_draft_the_guesses_in_the_known_text(
    write: Callable[..., Written], name: str, head: str, weights: str, batch: str
) -> None:
    pair = write(name, weights, **HOW[name])
    accepted = pair.check_texts(head, pair.requests(), drafter_batch=batch)
    assert set(accepted) == set(range(K + 1)) or head == "peagle-2"


@pytest.mark.parametrize(
    ("name", "weights"),
    mostly_slow([(LLAMA, "bf16"), *product(HYBRIDS, ("bf16", "fp8-block"))], ("tiny-qwen3.5", "bf16")),
)
def test_plain_decoding_writes_the_known_text(write: Callable[..., Written], name: str, weights: str) -> None:
    pair = write(name, weights)
    for dtype in ("float32", "bfloat16") if name == LLAMA else ("float32",):
        pair.check_texts("eagle3" if name == LLAMA else "mtp", pair.requests(), 0, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "accept", "dtype"),
    [
        *((LLAMA, head, 0.75, "float32") for head in ("eagle1", "peagle-2")),
        *((LLAMA, head, 0.5, "float32") for head in ("eagle3-3", "tiny-draft")),
        *((name, "mtp", *how) for name in HYBRIDS for how in ((0.5, "float32"), (0.9, "bfloat16"))),
        *((GEMMA4, *how) for how in (("assistant", 0.9, "bfloat16"), ("dflash-4", 0.5, "float32"))),
    ],
)
def test_acceptance_is_a_power_of_the_asked_share(
    write: Callable[..., Written], name: str, head: str, accept: float, dtype: str
) -> None:
    pair = write(name, "bf16", accept)
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    asked = [
        Request(id=str(place), prompt_token_ids=pair.cycle.slice(place, 3), sampling=sampling)
        for place in range(0, len(pair.cycle.tokens), 64)  # every token of the cycle once
    ]
    accepted = pair.check_texts(head, asked, max_batch_size=16, dtype=dtype)
    for position in range(K):
        share = sum(count > position for count in accepted) / len(accepted)
        low, high = wilson(share, len(accepted))
        assert low <= accept ** (position + 1) <= high


@pytest.mark.slow
def test_all_drafts_are_right_where_no_token_is_unknown(write: Callable[..., Written]) -> None:
    pair = write("tiny-qwen3.5", "bf16", 1.0)
    assert min(pair.check_texts("mtp", pair.requests(2))[:-1]) == K


# ---- experts


@torch.no_grad()
def choices_of(model: Any, text: tuple[int, ...]) -> list[Tensor]:
    """The experts that each token chooses in every layer, [n, k] each."""
    chosen: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    for router in routers:
        router.register_forward_hook(lambda _module, _inputs, outputs: chosen.append(outputs[2]))
    model(torch.tensor([text]))
    return chosen


def in_common(chosen: Tensor, num_experts: int, distance: int) -> Tensor:
    """The share of each token's experts that the token ``distance`` places further chooses too."""
    marks = torch.zeros(len(chosen), num_experts).scatter_(1, chosen, 1.0)
    return (marks[:-distance] * marks[distance:]).sum(1) / chosen.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overlap"), [*product(TINY, (0.5,)), *product(TINY[::2], (0.0,)), *product(TINY[1::2], (1.0,))]
)
def test_tokens_of_a_passage_choose_alike_as_asked(
    write: Callable[..., Written], name: str, overlap: float
) -> None:
    """Layers independently of each other, and all experts equally often."""
    pair = write(name, overlap=overlap)
    shape = pair.shape
    chosen = choices_of(pair.model()[0], pair.cycle.tokens)
    by_chance = shape.num_chosen / shape.num_experts
    inside = torch.arange(len(pair.cycle.tokens) - 1) % shape.passage_size != shape.passage_size - 1
    assert len(chosen) == shape.num_layers - getattr(shape, "num_dense", 0)
    far = [in_common(ids, shape.num_experts, 5 * shape.passage_size).mean() for ids in chosen]
    assert torch.stack(far).mean() == pytest.approx(by_chance, abs=0.03)  # few passages: 0.03 in each layer
    for ids in chosen:
        near = in_common(ids, shape.num_experts, 1)[inside].mean()
        assert near == pytest.approx(overlap + (1 - overlap) * by_chance, abs=0.04)
        counts = torch.bincount(ids.flatten(), minlength=shape.num_experts).float()
        if overlap == 0:  # drawing alone gives 0.06 and 0.08
            assert counts.std() / counts.mean() < 0.15
            assert 0.6 < counts.min() / counts.mean() < counts.max() / counts.mean() < 1.5
    first, second = (torch.zeros(len(ids), shape.num_experts).scatter_(1, ids, 1.0) for ids in chosen[:2])
    same = (first * second).sum(1).mean() / shape.num_chosen
    assert overlap < 1 or same == pytest.approx(by_chance, abs=0.08)


@pytest.mark.parametrize(
    ("name", "head"),
    mostly_slow(
        [
            *((LLAMA, head) for head in LENGTHS if head != "tiny-draft"),
            *zip(TINY, ("eagle3", "peagle-2", "eagle3", "peagle-2", "eagle3"), strict=True),
        ],
        (LLAMA, "peagle-2"),
        (GPT_OSS, "eagle3"),
    ),
)
def test_a_dense_evaluation_of_heads_drafts_the_guesses(
    write: Callable[..., Written], name: str, head: str
) -> None:
    pair = write(name, overlap=None if name == LLAMA else 0.5)
    texts = [pair.cycle.slice(97 * i, 24) for i in range(16)]
    newest = [pair.cycle.succ[text[-1]] for text in texts]
    dense = reference_head(pair.path / head, DenseTarget(pair.path / "target"))
    k = dense.depth = LENGTHS[head] if name == LLAMA else K
    drafts = [dense.drafts((*text, token), k) for text, token in zip(texts, newest, strict=True)]
    assert drafts == [expected(head, token, k, pair.cycle) for token in newest]


def test_sinks_biases_and_windows_are_there(write: Callable[..., Written]) -> None:
    pair = write(GPT_OSS, overlap=0.5)
    tensors = load_file(pair.path / "target" / "model.safetensors")
    config = json.loads((pair.path / "target" / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 4
    for name in ("self_attn.sinks", "self_attn.q_proj.bias", "mlp.router.bias", "mlp.experts.down_proj_bias"):
        assert tensors[f"model.layers.3.{name}"].float().std() > 0
    scales = tensors["model.layers.3.mlp.experts.gate_up_proj_scales"]
    blocks = tensors["model.layers.3.mlp.experts.gate_up_proj_blocks"]
    assert blocks.shape == (*scales.shape, 16)
    assert len(scales.unique()) == 2
    assert len(blocks.unique()) == 256


def check_experts(down: Tensor, shape: Any) -> None:
    """They add little to the stream; ``down`` [..., H, I]."""
    heard, quiet = down.split((shape.hidden_size - shape.head_dim, shape.head_dim), -2)
    assert 0.6 < heard.std() * shape.expert_size**0.5 / RESIDUAL < 1.6
    assert 0 < quiet.std() < heard.std() / 30


@pytest.mark.parametrize(
    ("name", "experts"), mostly_slow([*((name, None) for name in TINY), (GPT_OSS, "bf16")], (GPT_OSS, None))
)
def test_experts_add_little_to_the_stream(
    write: Callable[..., Written], name: str, experts: str | None
) -> None:
    pair = write(name, overlap=0.5, experts=experts)
    layer = pair.model()[0].model.layers[3]
    block = layer.experts if name == GEMMA4_MOE else layer.mlp.experts
    assert 0.6 < block.gate_up_proj.std() * pair.shape.hidden_size**0.5 < 1.6
    check_experts(block.down_proj.mT if name == GPT_OSS else block.down_proj, pair.shape)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "scale"), [("fp8", "weight_scale"), ("fp8-block", "weight_scale_inv")])
def test_a_mixture_in_fp8_generates_the_known_text(
    write: Callable[..., Written], weights: str, scale: str
) -> None:
    """And chooses its experts as it would in bfloat16: what experts leave alone stays so."""
    pair = write("tiny-qwen3-moe", weights, overlap=0.5)
    tensors = load_file(pair.path / "target" / "model.safetensors")
    name = "model.layers.3.mlp.experts.2.down_proj"
    check_experts(tensors[f"{name}.weight"].float() * tensors[f"{name}.{scale}"].flatten()[0], pair.shape)
    pair.check_texts("eagle3", pair.requests(2))


def test_the_rows_of_a_verify_step_choose_alike_where_drafts_are_wrong_too(
    write: Callable[..., Written],
) -> None:
    pair = write("tiny-qwen3-moe", overlap=1.0)
    places = {token: place for place, token in enumerate(pair.cycle.tokens)}
    size, wrong = len(places), 0
    ahead = []
    for token in pair.cycle.tokens:
        drafts = pair.cycle.guesses(token, K)
        if pair.cycle.accepted(token, drafts) < K:
            wrong += 1
            ahead.append((places[drafts[-1]] - places[token]) % size)
    assert wrong / size == pytest.approx(1 - 0.75**K, abs=0.05)
    assert sum(distance <= pair.shape.passage_size for distance in ahead) / len(ahead) > 0.9


def test_fewer_layers_and_bf16_experts_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--shape", GPT_OSS, "--layers", "7", "--experts", "bf16", "--expert-overlap", "1"]
    monkeypatch.setattr(sys, "argv", ["make", str(tmp_path / "pair"), "--device", "cpu", *options])
    main()
    target = tmp_path / "pair" / "target"
    config = json.loads((target / "config.json").read_text())
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 7
    assert "quantization_config" not in config
    tensors = load_file(target / "model.safetensors")
    assert tensors["model.layers.6.mlp.experts.down_proj"].dtype == torch.bfloat16
    assert "model.layers.7.self_attn.sinks" not in tensors


@pytest.mark.slow
def test_the_common_share_grows_with_the_overlap() -> None:
    shares = [common_share(128, 8, overlap) for overlap in (0, 0.25, 0.5, 0.75, 1)]
    assert (shares[0], shares[-1]) == (0, 1)
    assert shares == sorted(set(shares))


def test_a_model_with_an_mtp_layer_of_its_own_may_have_no_other_head(tmp_path: Path) -> None:
    shape = chosen_shape(GLM, None, None)
    write_pair(tmp_path, shape, chosen_cycle(shape, 0.75, 3), Source("cpu", 3), [], chosen_layer(shape, 0.5))
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["target"]


def test_layers_come_in_fours() -> None:
    assert chosen_shape("qwen3.6-27b", 8, None).target_config()["layer_types"][-1] == "full_attention"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: common_share(32, 4, 1.5), "from 0 to 1"),
        (lambda: chosen_shape("gpt-oss-20b", 3, None), "at least 7"),
        (lambda: chosen_shape("qwen3.6-27b", 10, None), "use a multiple of 4"),
        (lambda: chosen_shape("qwen3-30b-a3b", None, "mxfp4"), "none in that format"),
        (lambda: chosen_layer(chosen_shape("tiny", None, None), 0.5), "is dense"),
        (lambda: chosen_layer(MIXTURES["gpt-oss-20b"], 0.5, "fp8-block"), "of gpt_oss are not in FP8"),
        (lambda: chosen_layer(MIXTURES["gemma-4-26b-a4b"], 0.5, "fp8"), "of gemma4_text are not in FP8"),
        (lambda: chosen_shape("gemma-4-12b", 8, None), "use a multiple of 6"),
        (
            lambda: chosen_shape("gemma-4-e4b", 18, None),
            "use at least 24 with gemma-4-e4b, whose last 18 see",
        ),
        (lambda: HeadKind.find("assistant").config(SHAPES["tiny"]), "the shape no Gemma 4"),
        (
            lambda: HeadKind.find("eagle-llama4").config(SHAPES["tiny"]),
            "the shape no Llama-4: use --shape llama-4-scout",
        ),
        (
            lambda: HeadKind.find("llama-3.2-1b").config(SHAPES["qwen3-8b"]),
            "use a shape of the same vocabulary",
        ),
        (lambda: HeadKind.find("tiny-qwen3-moe").config(SHAPES["tiny"]), "use a dense Llama or Qwen"),
    ],
)
def test_what_is_impossible_is_refused(call: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call()
