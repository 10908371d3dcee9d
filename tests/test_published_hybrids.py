"""The published shapes of hybrids and their MTP layers: what is read of their configs, what weights and states take."""

import json
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch

from specgen.checkpoints.checkpoint import (
    build_head,
    build_target,
    drafter_config,
    misfits,
    mtp_part,
    target_config,
)
from specgen.checkpoints.tensor_reader import TensorReader
from specgen.models.config_keys import unread_keys
from specgen.models.families import family_of
from tests.test_published import META, Shape, checkpoint_of

QWEN3_8: dict[str, Any] = json.loads("""{
  "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
  "text_config": {
    "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype": "bfloat16",
    "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 17408, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false,
    "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4, "output_gate_type": "swish",
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
    "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
      "rope_theta": 10000000, "rope_type": "default"},
    "tie_word_embeddings": false, "use_cache": true, "vocab_size": 248320
  },
  "tie_word_embeddings": false, "video_token_id": 248057,
  "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5", "num_heads": 16},
  "vision_end_token_id": 248054, "vision_start_token_id": 248053
}""")
_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
QWEN3_5_35B = QWEN3_8 | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        name: value for name, value in QWEN3_8["text_config"].items() if name != "intermediate_size"
    }
    | _EXPERTS
    | {"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2}
    | {"linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8},
}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    **{
        name: value
        for name, value in QWEN3_5_35B["text_config"].items()
        if name.startswith(("linear", "head", "hidden", "rms", "full")) or name in _EXPERTS
    },
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "max_position_embeddings": 262144,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}


def _delta_shapes(text: dict[str, Any], by_key_head: bool) -> dict[str, Shape]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys, values = text["linear_num_key_heads"] * 128, heads * 128
    if by_key_head:
        shapes: dict[str, Shape] = {
            "in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
            "in_proj_ba.weight": (2 * heads, hidden),
        }
    else:
        shapes = {"in_proj_qkv.weight": (2 * keys + values, hidden), "in_proj_z.weight": (values, hidden)}
        shapes |= {"in_proj_a.weight": (heads, hidden), "in_proj_b.weight": (heads, hidden)}
    shapes |= {"conv1d.weight": (2 * keys + values, 1, 4), "A_log": (heads,), "dt_bias": (heads,)}
    shapes |= {"norm.weight": (128,), "out_proj.weight": (hidden, values)}
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _gated_shapes(text: dict[str, Any]) -> dict[str, Shape]:
    hidden, rows, kv_rows = (
        text["hidden_size"],
        text["num_attention_heads"] * 256,
        text["num_key_value_heads"] * 256,
    )
    shapes: dict[str, Shape] = {"q_proj.weight": (2 * rows, hidden), "o_proj.weight": (hidden, rows)}
    shapes |= {f"{name}_proj.weight": (kv_rows, hidden) for name in "kv"}
    shapes |= {f"{name}_norm.weight": (256,) for name in "qk"}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{prefix}{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
    return shapes | {f"{prefix}down_proj.weight": (hidden, width)}


def hybrid_tensors(raw: dict[str, Any], *, fused: bool) -> Iterator[tuple[str, str, Shape]]:
    """Names and shapes as published, of the target and its MTP layer, and one of the vision part."""
    text = raw.get("text_config", raw)
    root = "model.language_model." if "text_config" in raw else "model."
    hidden, layers, experts = text["hidden_size"], text["num_hidden_layers"], text.get("num_experts", 0)
    found: dict[str, Shape] = {f"{root}embed_tokens.weight": (text["vocab_size"], hidden)}
    found |= {"lm_head.weight": (text["vocab_size"], hidden), f"{root}norm.weight": (hidden,)}
    for prefix, attends in (
        *((f"{root}layers.{layer}.", layer % 4 == 3) for layer in range(layers)),
        ("mtp.layers.0.", True),
    ):
        shapes = _gated_shapes(text) if attends else _delta_shapes(text, "text_config" not in raw)
        shapes |= dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (hidden,))
        if not experts:
            shapes |= _mlp_shapes("mlp.", hidden, text["intermediate_size"])
        else:
            shapes |= {"mlp.gate.weight": (experts, hidden), "mlp.shared_expert_gate.weight": (1, hidden)}
            shapes |= _mlp_shapes("mlp.shared_expert.", hidden, 512)
            if fused:
                shapes["mlp.experts.gate_up_proj"] = (experts, 1024, hidden)
                shapes["mlp.experts.down_proj"] = (experts, hidden, 512)
            for expert in range(0 if fused else experts):
                shapes |= _mlp_shapes(f"mlp.experts.{expert}.", hidden, 512)
        found |= {prefix + name: shape for name, shape in shapes.items()}
    found |= dict.fromkeys(("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"), (hidden,))
    found |= {"mtp.pre_fc_norm_hidden.weight": (hidden,), "mtp.fc.weight": (hidden, 2 * hidden)}
    if "text_config" in raw:
        found["model.visual.pos_embed.weight"] = (2304, 1152)
    for name, shape in found.items():
        yield name, "bfloat16", shape


@pytest.mark.parametrize(
    ("raw", "fused", "number", "billions", "kv_bytes", "state_mib"),
    [
        (QWEN3_8, False, 851, 26.9, 64 << 10, 144),
        (QWEN3_5_35B, True, 693, 34.7, 20 << 10, 60),
        pytest.param(QWEN3_NEXT, False, 74_391, 79.7, 24 << 10, 72, marks=pytest.mark.slow),
    ],
    ids=["qwen3.8-27b", "qwen3.5-35b-a3b", "qwen3-next-80b"],
)
def test_published_hybrids_are_complete(
    raw: dict[str, Any], fused: bool, number: int, billions: float, kv_bytes: int, state_mib: int
) -> None:
    checkpoint = checkpoint_of(raw, hybrid_tensors(raw, fused=fused))
    target_of, head_of = (
        TensorReader(checkpoint=each, dtype=torch.bfloat16, device=META)
        for each in (checkpoint, mtp_part(checkpoint))
    )
    target = build_target(target_config(checkpoint), target_of)
    head = drafter_config(head_of.checkpoint, target.config.num_layers)
    build_head(head, head_of, target, torch.empty(0, device=META))
    assert misfits(target.config, head) == ()
    assert len(target_of.taken) == number
    assert len(head_of.taken) == len(head_of.checkpoint.tensors)
    sizes = {name: prod(shape) for name, _, shape in hybrid_tensors(raw, fused=fused)}
    assert sum(sizes[name] for name in target_of.taken) / 1e9 == pytest.approx(billions, abs=0.1)
    assert target.config.kv_spec.bytes_per_token(2) == kv_bytes
    spec = target.config.state_spec
    assert spec.num_layers * spec.num_heads * spec.key_dim * spec.value_dim * 4 == state_mib << 20
    assert target.config.rotary_dim == head.rotary_dim == 64
    assert unread_keys(raw, family_of(raw).keys) == ()
    assert [count for count in (1, 2, 4, 8, 16) if target.config._can_share(count)] == (
        [1, 2, 4, 8] if raw is QWEN3_8 else [1, 2, 4, 8, 16]
    )
