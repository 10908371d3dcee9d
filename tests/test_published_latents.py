"""The published shapes of GLM-4.7-Flash and DeepSeek-V3: configs, names, MTP layers, what they take; no weights."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.checkpoints.checkpoint import build_head, build_target, drafter_config, mtp_part, target_config
from specgen.checkpoints.tensor_reader import Checkpoint, TensorReader
from specgen.checkpoints.weight_files import TensorInfo

META = torch.device("meta")
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
DEEPSEEK: dict[str, Any] = GLM | {  # of 61 layers here are five
    "architectures": ["DeepseekV3ForCausalLM"],
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 5,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def matrices(raw: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The linear layers of a decoder layer."""
    hidden, heads, rank = raw["hidden_size"], raw["num_attention_heads"], raw["kv_lora_rank"]
    nope, rope, value = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
    yield "self_attn.q_a_proj", (raw["q_lora_rank"], hidden)
    yield "self_attn.q_b_proj", (heads * (nope + rope), raw["q_lora_rank"])
    yield "self_attn.kv_a_proj_with_mqa", (rank + rope, hidden)
    yield "self_attn.kv_b_proj", (heads * (nope + value), rank)
    yield "self_attn.o_proj", (hidden, heads * value)
    each = [("mlp.", raw["intermediate_size"])]
    if layer >= raw["first_k_dense_replace"]:
        names = ["mlp.shared_experts.", *(f"mlp.experts.{e}." for e in range(raw["n_routed_experts"]))]
        each = [(name, raw["moe_intermediate_size"]) for name in names]
    for name, width in each:
        yield from ((f"{name}{kind}_proj", (width, hidden)) for kind in ("gate", "up"))
        yield f"{name}down_proj", (hidden, width)


def tensors(raw: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Names, dtypes and shapes as published."""
    hidden, vocab, layers = raw["hidden_size"], raw["vocab_size"], raw["num_hidden_layers"]
    fp8 = "quantization_config" in raw
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", "bfloat16", (vocab, hidden)
    yield "model.norm.weight", "bfloat16", (hidden,)
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}."
        for name, (num_out, num_in) in matrices(raw, layer):
            yield f"{prefix}{name}.weight", "float8_e4m3fn" if fp8 else "bfloat16", (num_out, num_in)
            if fp8:
                shape = -(-num_out // 128), -(-num_in // 128)
                yield f"{prefix}{name}.weight_scale_inv", "float32", shape
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        norms |= {
            "self_attn.q_a_layernorm": raw["q_lora_rank"],
            "self_attn.kv_a_layernorm": raw["kv_lora_rank"],
        }
        norms |= dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), hidden) if layer == layers else {}
        yield from ((f"{prefix}{name}.weight", "bfloat16", (size,)) for name, size in norms.items())
        if layer >= raw["first_k_dense_replace"]:
            yield f"{prefix}mlp.gate.weight", "bfloat16", (raw["n_routed_experts"], hidden)
            yield f"{prefix}mlp.gate.e_score_correction_bias", "float32", (raw["n_routed_experts"],)
    yield f"model.layers.{layers}.eh_proj.weight", "bfloat16", (hidden, 2 * hidden)
    for name in ("embed_tokens", "shared_head.head"):
        yield f"model.layers.{layers}.{name}.weight", "bfloat16", (vocab, hidden)


@pytest.mark.parametrize(
    ("raw", "billions", "kv_bytes"),
    [(GLM, 29.9, 47 * 1152), (DEEPSEEK, 26.6, 5 * 1152)],
    ids=["glm-4.7-flash", "deepseek-v3"],
)
def test_published_checkpoints_are_complete(raw: dict[str, Any], billions: float, kv_bytes: int) -> None:
    infos = {name: TensorInfo(file=Path("x"), shape=s, dtype=d) for name, d, s in tensors(raw)}
    checkpoint = Checkpoint(name="published", path=Path(), config=raw, generation={}, tensors=infos)
    readers = [
        TensorReader(checkpoint=each, dtype=torch.bfloat16, device=META)
        for each in (checkpoint, mtp_part(checkpoint))
    ]
    target = build_target(target_config(checkpoint), readers[0])
    config = drafter_config(readers[1].checkpoint, target.config.num_layers)
    build_head(config, readers[1], target, torch.empty(0, device=META))
    last = f"model.layers.{raw['num_hidden_layers']}."
    stored = [(name.startswith(last), prod(s) * getattr(torch, d).itemsize) for name, d, s in tensors(raw)]
    scales = {name for name, _, _ in tensors(raw) if name.endswith("_scale_inv")}
    for is_mtp, reader in enumerate(readers):
        right = sum(size for of_mtp, size in stored if of_mtp == bool(is_mtp))
        assert sum(reader.taken.values()) == right
    parameters = sum(
        prod(s) for name, _, s in tensors(raw) if name not in scales and not name.startswith(last)
    )
    assert parameters / 1e9 == pytest.approx(billions, abs=0.1)
    assert target.config.kv_spec.bytes_per_token(2) == kv_bytes
    assert config.kv_spec.bytes_per_token(2) == 1152


def test_they_are_read_as_published() -> None:
    infos = {name: TensorInfo(file=Path("x"), shape=s, dtype=d) for name, d, s in tensors(DEEPSEEK)}
    config = target_config(
        Checkpoint(name="published", path=Path(), config=DEEPSEEK, generation={}, tensors=infos)
    )
    assert config.latent is not None
    assert config.latent.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)  # 1 + 0.1 ln 40
    assert config.facts()["rotary"].endswith("cos and sin times 1")
    assert config.facts()["router"] == (
        "chooses 8 per token; the choice from 4 of 8 groups with a bias; weights by sigmoid, divided by their sum, "
        "times 2.5"
    )
