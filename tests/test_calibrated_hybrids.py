"""Calibrated hybrids have the known text in ``transformers`` and in the engine, and their MTP layer drafts as asked."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_codes import Codes
from calibrated_cycle import Cycle
from calibrated_hybrids import hybrid_mtp_tensors
from calibrated_shapes import SHAPES, HybridShape
from calibrated_weights import RESIDUAL, Named, Source, target_tensors
from make_calibrated_pair import HeadKind, chosen_cycle, chosen_layer, chosen_shape, write_pair
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.report.intervals import wilson
from tests.engines import Pair, generate, load_pair
from tests.marks import mostly_slow
from tests.test_calibrated_pair import check_drafts

pytestmark = [
    pytest.mark.scripts,
    pytest.mark.xdist_group("calibrated_hybrids"),
]  # pairs that several of them use

TINY = ("tiny-qwen3.5", "tiny-qwen3.5-moe")
WEIGHTS = ("bf16", "fp8-block")
K = 4


@dataclass(frozen=True, kw_only=True)
class Written:
    """A pair on disk."""

    path: Path
    cycle: Cycle
    shape: HybridShape

    def load(self, drafter: str = "mtp", dtype: torch.dtype = torch.float32) -> Pair:
        return load_pair(self.path, dtype, drafter=drafter)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def written(name: str, weights: str = "bf16", accept: float = 0.75) -> Written:
        path = tmp_path_factory.mktemp("hybrid")
        shape = chosen_shape(name, None, None)
        assert isinstance(shape, HybridShape)
        cycle = chosen_cycle(shape, accept, 3)
        heads = [HeadKind.find("eagle3"), HeadKind.find("peagle-2")]
        write_pair(path, shape, cycle, Source("cpu", 3), heads, chosen_layer(shape, None, weights))
        return Written(path=path, cycle=cycle, shape=shape)

    return written


def tensors_of(name: str, weights: str) -> tuple[list[Named], list[Named]]:
    """The target's, and those of its MTP layer."""
    shape, source = SHAPES[name], Source("cpu", 0)
    assert isinstance(shape, HybridShape)
    layer, cycle = chosen_layer(shape, None, weights), Cycle(tokens=(1, 2), unknown=(), accept=1.0)
    assert layer is not None
    nothing = Codes(embedding=torch.empty(0), turns=torch.zeros(0))
    own = list(target_tensors(shape, nothing.embedding, cycle, source, layer))
    return own, [*layer("mtp.layers.0.", source), *hybrid_mtp_tensors(shape, nothing, source)]


@pytest.mark.parametrize(
    ("name", "weights", "own", "mtp"),
    [
        ("qwen3.6-27b", "bf16", 53.79, 0.85),
        ("qwen3.6-27b", "fp8-block", 29.47, 0.48),
        ("qwen3.6-35b-a3b", "bf16", 69.32, 1.69),
        ("qwen3.6-35b-a3b", "fp8-block", 35.71, 0.85),
    ],
)
def test_full_size_pairs_take_the_bytes_of_the_published_models(
    name: str, weights: str, own: float, mtp: float
) -> None:
    def gigabytes(tensors: list[Named]) -> float:
        return sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in tensors) / 1e9

    found = tensors_of(name, weights)
    assert [gigabytes(part) for part in found] == pytest.approx([own, mtp], abs=0.01)
    if (name, weights) == ("qwen3.6-27b", "bf16"):
        assert len(found[0]) == 851  # as transformers counts them without the vision part's


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", TINY)
def test_tensors_have_the_shapes_and_dtypes_that_were_said(name: str, weights: str) -> None:
    for named in (each for part in tensors_of(name, weights) for each in part):
        if "lm_head" not in named.name and "embed" not in named.name and "mtp.fc" not in named.name:
            made = named.make()
            assert (made.shape, made.dtype) == (named.shape, named.dtype), named.name


@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3.6-35b-a3b"])
def test_the_config_is_that_of_the_published_model(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(shape.target_config()))
    config: Any = AutoConfig.from_pretrained(tmp_path)
    moe = "a3b" in name
    assert type(config).__name__ == ("Qwen3_5MoeTextConfig" if moe else "Qwen3_5TextConfig")
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * (10 if moe else 16)
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert config.rope_parameters == rope | {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert heads == ((16, 2, 256) if moe else (24, 4, 256))
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (16, 32 if moe else 48)
    widths = (config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim)
    assert widths == (128, 128, 4)
    assert (config.vocab_size, config.hidden_size) == (248320, 2048 if moe else 5120)
    if moe:
        experts = (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
        assert (*experts, config.shared_expert_intermediate_size) == (256, 8, 512, 512)
    else:
        assert config.intermediate_size == 17408


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(
        [(name, dtype) for name in TINY for dtype in (torch.float32, torch.bfloat16)],
        ("tiny-qwen3.5", torch.float32),
        ("tiny-qwen3.5-moe", torch.float32),
    ),
)
def test_transformers_finds_every_tensor_and_generates_the_known_text(
    write, name: str, dtype: torch.dtype
) -> None:
    pair = write(name)
    model, found = AutoModelForCausalLM.from_pretrained(
        pair.path / "target", dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(found.values()), found
    with torch.no_grad():
        out = model(torch.tensor([pair.cycle.tokens]), use_cache=True, output_hidden_states=True)
    assert out.logits[0].argmax(-1).tolist() == list(pair.cycle.succ.values())
    first, last = out.hidden_states[0][0], out.hidden_states[-1][0]
    rms = (last - first).float().square().mean(0).sqrt()
    assert RESIDUAL < rms.mean() < 8 * RESIDUAL  # two blocks a layer
    states = out.past_key_values.layers[0].recurrent_states[0]
    assert 0.01 < states.float().std() < 1


@pytest.mark.parametrize("weights", mostly_slow(WEIGHTS, "bf16"))
@pytest.mark.parametrize("name", TINY)
def test_files_are_as_qwen_publishes_them(write, name: str, weights: str) -> None:
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


def requests(cycle: Cycle, count: int = 8, max_tokens: int = 40) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(id=str(i), prompt_token_ids=cycle.slice(61 * i, 4 + i), sampling=sampling)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("name", "weights", "batch"),
    mostly_slow(
        [
            (name, weights, batch)
            for name in TINY
            for weights in WEIGHTS
            for batch in ("padded", "non-padded")
        ],
        ("tiny-qwen3.5", "bf16", "padded"),
        ("tiny-qwen3.5-moe", "fp8-block", "non-padded"),
    ),
)
def test_the_mtp_layer_drafts_the_guesses_in_the_known_text(
    write, name: str, weights: str, batch: str
) -> None:
    pair = write(name, weights)
    asked = requests(pair.cycle)
    texts = {each.id: pair.cycle.after(each.prompt_token_ids[-1], 40) for each in asked}
    outputs = generate(pair.load(), asked, num_spec_tokens=K, drafter_batch=batch)
    assert outputs.texts == texts
    check_drafts("mtp", asked, outputs, pair.cycle)
    assert set(outputs.accepted) == set(range(K + 1))


@pytest.mark.parametrize(
    ("name", "weights"),
    mostly_slow([(name, weights) for name in TINY for weights in WEIGHTS], ("tiny-qwen3.5", "bf16")),
)
def test_plain_decoding_writes_the_known_text(write, name: str, weights: str) -> None:
    pair = write(name, weights)
    asked = requests(pair.cycle)
    plain = generate(pair.load(), asked, num_spec_tokens=0)
    assert plain.texts == {each.id: pair.cycle.after(each.prompt_token_ids[-1], 40) for each in asked}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accept", "dtype"), [(0.9, torch.float32), (0.5, torch.float32), (0.9, torch.bfloat16)]
)
@pytest.mark.parametrize("name", TINY)
def test_acceptance_is_a_power_of_the_asked_share(
    write, name: str, accept: float, dtype: torch.dtype
) -> None:
    pair = write(name, "bf16", accept)
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    asked = [
        Request(id=str(place), prompt_token_ids=pair.cycle.slice(place, 3), sampling=sampling)
        for place in range(0, len(pair.cycle.tokens), 64)  # every token of the cycle once
    ]
    settings = {"num_spec_tokens": K, "max_batch_size": 16, "dtype": str(dtype).removeprefix("torch.")}
    outputs = generate(pair.load(dtype=dtype), asked, **settings)
    assert outputs.texts == {each.id: pair.cycle.after(each.prompt_token_ids[-1], 64) for each in asked}
    check_drafts("mtp", asked, outputs, pair.cycle)
    for position in range(K):
        share = sum(count > position for count in outputs.accepted) / len(outputs.accepted)
        low, high = wilson(share, len(outputs.accepted))
        assert low <= accept ** (position + 1) <= high


@pytest.mark.slow
@pytest.mark.parametrize("head", ["eagle3", "peagle-2"])
@pytest.mark.parametrize("name", TINY)
def test_heads_draft_the_guesses(write, name: str, head: str) -> None:
    """The numbers that tell unknown tokens from others leave heads alone."""
    pair = write(name)
    asked = requests(pair.cycle)
    outputs = generate(pair.load(head), asked, num_spec_tokens=K)
    assert outputs.texts == {each.id: pair.cycle.after(each.prompt_token_ids[-1], 40) for each in asked}
    check_drafts(head, asked, outputs, pair.cycle)


@pytest.mark.slow
def test_all_drafts_are_right_where_no_token_is_unknown(write) -> None:
    pair = write("tiny-qwen3.5", "bf16", 1.0)
    outputs = generate(pair.load(), requests(pair.cycle, 2), num_spec_tokens=K)
    assert min(outputs.accepted[:-1]) == K


def test_layers_come_in_fours() -> None:
    assert chosen_shape("qwen3.6-27b", 8, None).target_config()["layer_types"][-1] == "full_attention"
    with pytest.raises(ValueError, match="use a multiple of 4"):
        chosen_shape("qwen3.6-27b", 10, None)
