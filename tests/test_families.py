"""What every family of targets does alike, against ``transformers``: logits, rounding, features, and refusals."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.attention.sdpa import SdpaBackend
from specgen.models.model_config import TargetConfig
from tests.commands import refused
from tests.dense import DenseAttend
from tests.families import (
    check_in_pieces,
    dense_logits,
    ids_of,
    loaded,
    of_transformers,
    paged_logits,
    right_logits,
)
from tests.marks import mostly_slow
from tests.tiny_checkpoints import LLAMA3_SCALING, change_json, read, write_target
from tests.tiny_gemma4 import SIZES, write_gemma4
from tests.tiny_hybrids import CONFIGS, write_hybrid
from tests.tiny_latents import YARN as YARN_OF_LATENTS
from tests.tiny_latents import write_latent
from tests.tiny_llama4 import one_by_one, write_llama4
from tests.tiny_mixtures import WINDOW, YARN, in_one_tensor, packed_in_mxfp4, write_gpt_oss, write_qwen3_moe

# of the passes behind a prefill some cross a border of chunks or the window; the last is cut
CHUNKED = [10, 5, 9, 1, 7, 2, 38, 30]
WINDOWED = [40, 1, 5, 3 * WINDOW, 1, 1, 12 * WINDOW]
RAGGED = [40, 1, 5, 24, 1, 30]
ROW_BY_ROW = [30, *[1] * 20, 96]
SCOUT = {"rope_parameters": LLAMA3_SCALING | {"factor": 16.0, "high_freq_factor": 1.0}}  # one step, no blend
TEXT, WRAPPED = "Llama4ForCausalLM", "Llama4ForConditionalGeneration"
QWEN, NEXT, MIXTURE = "Qwen3_5ForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"
FULL, LINEAR = "full_attention", "linear_attention"
deepseek = partial(write_latent, family="deepseek")
qwen2 = partial(write_target, family="qwen2", head_dim=None)


def mxfp4(path: Path, **changes: Any) -> TargetConfig:
    write_gpt_oss(path, **changes)
    return packed_in_mxfp4(path)


Write = Callable[[Path], TargetConfig]
GEMMA4S: dict[str, dict[str, Any]] = {
    **{size: {"size": size} for size in SIZES},
    "12b-wrapped": {"size": "12b", "wrapped": True},
    "e4b-wrapped": {"size": "e2b", "wrapped": True, "use_double_wide_mlp": False},
    "own-values": {"size": "31b", "attention_k_eq_v": False, "attention_bias": True},
    "no-cap": {"size": "31b", "final_logit_softcapping": None, "tie_word_embeddings": False},
    "by-default": {
        "size": "e2b",
        "std": 0.12,
        "layer_types": None,
        "rope_parameters": None,
        "num_kv_shared_layers": 0,
    },
}
LLAMA4S: dict[str, dict[str, Any]] = {
    "scout": SCOUT,
    "maverick": {"interleave_moe_layer_step": 2, "use_qk_norm": False, "num_local_experts": 16},
    "with-vision": {"architecture": WRAPPED, "num_hidden_layers": 4},
    "named-layers": {"no_rope_layers": [0, 1, 1, 0, 0, 1], "moe_layers": [0, 4], "attention_chunk_size": 8},
    "no-temperature": {"attn_temperature_tuning": False, "attention_bias": True},
    "no-experts": {"moe_layers": [], "tie_word_embeddings": True, "no_rope_layer_interval": 2},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    **{name: {"architecture": name} for name in CONFIGS},
    "by-interval": {"layer_types": None, "num_hidden_layers": 5},
    "other-order": {
        "layer_types": [FULL, LINEAR, FULL, LINEAR],
        "attention_bias": True,
        "linear_conv_kernel_dim": 3,
        "linear_num_key_heads": 1,
    },
    "as-many-key-heads": {
        "architecture": NEXT,
        "linear_num_key_heads": 4,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    "other-share": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    },
    "shared-beside": {"architecture": NEXT, "shared_expert_intermediate_size": 24},
    "two-shared": {"architecture": MIXTURE, "shared_expert_intermediate_size": 64},
    "no-recurrence": {"architecture": NEXT, "layer_types": [FULL] * 4},
    "tied": {"tie_word_embeddings": True},
    "tied-with-vision": {"architecture": "Qwen3_5ForConditionalGeneration", "tie_word_embeddings": True},
}
MIXTURES: dict[str, Write] = {
    "qwen3-moe": write_qwen3_moe,
    "weights-not-normalized": partial(write_qwen3_moe, norm_topk_prob=False, num_experts_per_tok=3),
    "some-layers-dense": partial(write_qwen3_moe, mlp_only_layers=[3], decoder_sparse_step=2),
    "qwen3-moe-tied": partial(write_qwen3_moe, tie_word_embeddings=True, num_experts_per_tok=6),
    "gpt-oss": write_gpt_oss,
    "truncated": partial(write_gpt_oss, rope_parameters=YARN | {"truncate": True}),
    "other-windows": partial(
        write_gpt_oss,
        layer_types=[FULL, *["sliding_attention"] * 5],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        num_experts_per_tok=1,
        swiglu_limit=1.5,
    ),
    "mxfp4": mxfp4,
}
LATENTS: dict[str, Write] = {
    "glm": write_latent,
    "deepseek": deepseek,
    "no-query-latent": partial(deepseek, q_lora_rank=None, rope_interleave=False, norm_topk_prob=False),
    "two-shared-latents": partial(
        write_latent, n_shared_experts=2, tie_word_embeddings=True, rope_parameters=YARN_OF_LATENTS
    ),
}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied-llama": {"tied": True},
    "llama3-rope": {"rope": LLAMA3_SCALING},
    "sharded": {"max_shard_size": "40KB"},
    "no-gqa": {"num_kv_heads": 4},
    "llama-biases": {"biases": True},
    "qwen2": {"family": "qwen2", "head_dim": None},
    "qwen3": {"family": "qwen3"},
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "wide-heads": {"family": "qwen3", "head_dim": 32},
}
TARGETS: dict[str, tuple[Write, list[list[int]]]] = {
    **{name: (partial(write_target, **each), [RAGGED]) for name, each in DENSE.items()},
    **{name: (partial(write_llama4, **each), [CHUNKED, ROW_BY_ROW]) for name, each in LLAMA4S.items()},
    **{
        name: (partial(write_hybrid, **each), [] if "tied" in name else [RAGGED, ROW_BY_ROW])
        for name, each in HYBRIDS.items()
    },
    **{name: (write, [WINDOWED]) for name, write in MIXTURES.items()},
    **{name: (write, [RAGGED]) for name, write in LATENTS.items()},
    **{name: (partial(write_gemma4, **each), [CHUNKED, ROW_BY_ROW]) for name, each in GEMMA4S.items()},
}
QUICK = [
    *("scout", "maverick", "with-vision", "named-layers", QWEN, NEXT, "Qwen3_5MoeForConditionalGeneration"),
    *("shared-beside", "tied", "tied-with-vision", "qwen3-moe", "some-layers-dense", "gpt-oss", "mxfp4"),
    *(*SIZES, "12b-wrapped"),
]


@pytest.mark.parametrize("name", mostly_slow(TARGETS, *QUICK, *LATENTS, *DENSE))
def test_logits_equal_transformers_whole_in_pieces_and_row_by_row(tmp_path: Path, name: str) -> None:
    write, pieces = TARGETS[name]
    ids = ids_of(write(tmp_path))
    # of a Gemma 4 with embeddings by layer, transformers' own float32 is 1.1e-4 off on some processors
    dtype = torch.float64 if name.startswith(("e2b", "e4b")) else torch.float32
    expected, model = right_logits(tmp_path, ids, dtype).float(), loaded(tmp_path)
    tied = ("no-experts", "two-shared-latents", *GEMMA4S)
    assert model.config.tied_embeddings == ("tied" in name or (name in tied and name != "no-cap"))
    check_in_pieces(model, ids, expected, *pieces)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["scout", MIXTURE, "e2b"])
def test_the_dense_reference_gives_the_same(tmp_path: Path, name: str) -> None:
    ids = ids_of(TARGETS[name][0](tmp_path))
    model = loaded(tmp_path)
    whole = paged_logits(model, ids, SdpaBackend, [len(ids)])
    torch.testing.assert_close(dense_logits(model, ids), whole, atol=1e-4, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize(
    "name", mostly_slow(["scout", "maverick", QWEN, MIXTURE, *SIZES], "scout", QWEN, MIXTURE, "e2b")
)
def test_in_bfloat16_rounding_costs_as_much_as_in_transformers(tmp_path: Path, name: str) -> None:
    ids = ids_of(TARGETS[name][0](tmp_path))
    theirs = of_transformers(tmp_path)
    right = theirs(ids[None]).logits[0]
    lost = (theirs.bfloat16()(ids[None]).logits[0].float() - right).abs().median()
    got = paged_logits(loaded(tmp_path, torch.bfloat16), ids, SdpaBackend, [len(ids)])
    assert got.dtype == torch.bfloat16
    # the median: in a few rows another expert is chosen
    assert 0 < (got.float() - right).abs().median() < 1.5 * lost


@torch.inference_mode()
@pytest.mark.parametrize(("name", "layers"), [("scout", (1, 4)), (QWEN, (1, 3)), ("e2b", (5, 1))])
def test_features_are_streams_between_layers_of_either_kind(
    tmp_path: Path, name: str, layers: tuple[int, ...]
) -> None:
    ids = ids_of(TARGETS[name][0](tmp_path))
    states = of_transformers(tmp_path)(ids[None], output_hidden_states=True).hidden_states
    model = loaded(tmp_path)
    _, features = model.forward(ids, DenseAttend(model), layers)
    right = torch.cat([states[layer][0] for layer in layers], -1)
    torch.testing.assert_close(features, right, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("name", "move"), [("with-vision", one_by_one), (MIXTURE, in_one_tensor)])
def test_experts_may_lie_in_one_tensor_or_one_by_one(
    tmp_path: Path, name: str, move: Callable[[Path], object]
) -> None:
    ids = ids_of(TARGETS[name][0](tmp_path))
    right = paged_logits(loaded(tmp_path), ids, SdpaBackend, [len(ids)])
    move(tmp_path)
    assert torch.equal(paged_logits(loaded(tmp_path), ids, SdpaBackend, [len(ids)]), right)


REFUSED: dict[Write, list[tuple[dict[str, Any], str]]] = {
    write_llama4: [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2: experts whose inputs are weighed"),
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]: it must have a 1 or a 0 for each of 6"),
        ({"no_rope_layers": [2] * 6}, "no_rope_layers is"),
        ({"layer_types": [FULL] * 6}, "layer_types is .* rotated layers with chunked_attention"),
        ({"moe_layers": [6]}, r"moe_layers is \[6\]: it must be a list of the numbers of 6 layers"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0: it must be a whole number above 0"),
        ({"floor_scale": 0}, "floor_scale is 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
    write_hybrid: [
        ({"layer_types": [LINEAR] * 4}, "no layer has full attention"),
        ({"layer_types": [LINEAR] * 3}, "layer_types names 3 layers, num_hidden_layers 4"),
        ({"layer_types": ["mamba"] * 4}, "layer_types has 'mamba': only full_attention and linear_attention"),
        ({"attn_output_gate": False}, "attn_output_gate is False: only True is supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid': only 'swish' or 'silu'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16': only 'float32'"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True: only False"),
        ({"linear_num_value_heads": 3}, "3 linear value heads cannot share 2 key heads"),
        ({"sliding_window": 8}, "sliding_window is 8 and in use"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.07}}, "need an even number"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "only fully rotary heads"),
    ],
    write_latent: [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax': only 'sigmoid' is supported"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"n_group": 3}, "n_group is 3 and topk_group 1 for 2 of 8 experts"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7"),
        ({"kv_lora_rank": None}, "config.json has no kv_lora_rank"),
        ({"head_dim": 20}, "qk_rope_head_dim is 8 and head_dim 20, which are two"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types names 2 layers, num_hidden_layers 3"),
        ({"mlp_layer_types": ["dense", "moe", "moe"]}, "mlp_layer_types has 'moe'"),
        ({"mlp_layer_types": None, "first_k_dense_replace": "1"}, "first_k_dense_replace is '1'"),
    ],
    deepseek: [
        ({"topk_method": "greedy"}, "topk_method is 'greedy': only 'noaux_tc'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2 of 4 heads"),
    ],
    write_gpt_oss: [
        ({"experts_per_token": 3}, "num_experts_per_tok is 2 and experts_per_token 3"),
        ({"sliding_window": None}, "has no sliding_window"),
        ({"compression_config": {"quant_method": "fp8"}}, "has the method 'fp8'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has the method 'fp8'"),
        ({"swiglu_limit": -1}, "swiglu_limit is -1"),
        ({"layer_types": ["sliding_attention"]}, "layer_types names 1 layers"),
        ({"layer_types": [LINEAR] * 6}, "layer_types has 'linear_attention'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"num_local_experts": 1 << 30}, "num_local_experts is"),
    ],
    write_qwen3_moe: [
        ({"num_experts": 7}, "num_experts is 7 and num_local_experts 6"),
        ({"num_local_experts": None}, "has no num_experts"),
        ({"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 of 6 experts"),
        ({"moe_intermediate_size": None}, "has no moe_intermediate_size"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers is"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method is 'mxfp4'"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window is 8 and in use"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL] * 6},
            "sliding_window is 8 and in use",
        ),
    ],
    qwen2: [
        (
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": None},
            "sliding_window is 4 and in",
        )
    ],
    write_gemma4: [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all': a row sees none"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu': only 'gelu_pytorch_tanh'"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
            "vocab_size_per_layer_input is 96 of 128 tokens",
        ),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6: it must be a whole number, at most 5"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4: no layer with full_attention is left"),
        (
            {"per_layer_config": {"2": {"head_dim": 16}}},
            "per_layer_config has layers with full_attention of several shapes",
        ),
        ({"per_layer_config": {"2": {"hidden_size": 16}}}, "per_layer_config has 'hidden_size': only"),
        ({"per_layer_config": {"7": {"head_dim": 16}}}, "per_layer_config names layer '7' of 6"),
        (
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters is .* must have sliding_attention and",
        ),
        ({"rope_theta": 7.0}, "rope_theta is 7.0: only .* rotations are of kinds of layers"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0: it must be a number above 0"),
        (
            {"per_layer_config": {str(i): {"num_key_value_heads": 3} for i in (2, 5)}},
            "cannot share 3 KV heads",
        ),
    ],
}


@pytest.mark.parametrize("write", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, write: Write) -> None:
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, message in REFUSED[write]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        change_json(tmp_path / "config.json", **changes)
        with refused(message):
            read(tmp_path)
