"""The published Llama-4s and heads for them: what is read of their configs, names and shapes, what weights take."""

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from bound import ExpertSize

from specgen.attention import Temperature
from specgen.checkpoints.checkpoint import (
    _by_usual_names,
    build_head,
    build_target,
    drafter_config,
    misfits,
    target_config,
)
from specgen.checkpoints.tensor_reader import Checkpoint, TensorReader
from specgen.models.config_keys import unread_keys
from specgen.models.eagle import Eagle3Config
from specgen.models.families import family_of
from specgen.models.llama4 import EagleLlama4Config, Llama4Config
from tests.test_published import META, Shape, checkpoint_of

SCOUT: dict[str, Any] = json.loads("""{
  "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
  "image_token_index": 200092, "model_type": "llama4",
  "text_config": {
    "_attn_implementation_autoset": true, "attention_bias": false, "attention_chunk_size": 8192,
    "attention_dropout": 0.0, "attn_scale": 0.1, "attn_temperature_tuning": true, "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008], "floor_scale": 8192, "for_llm_compressor": false, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "interleave_moe_layer_step": 1,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
    "model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1,
    "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": false,
    "pad_token_id": 200018, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
      "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16",
    "use_cache": true, "use_qk_norm": true, "vocab_size": 202048
  },
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0.dev0",
  "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model", "num_hidden_layers": 34}
}""")
_TEXT = {name: value for name, value in SCOUT["text_config"].items() if name != "no_rope_layers"}
MAVERICK = SCOUT | {
    "text_config": _TEXT
    | {"interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": False, "rope_scaling": None}
    | {"max_position_embeddings": 1048576, "moe_layers": list(range(1, 48, 2))}
}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_FLOAT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_FLOAT8, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": [
        "re:.*lm_head",
        "re:.*self_attn",
        "re:.*router",
        "re:.*vision_model",
        "re:.*multi_modal_projector",
    ],
}


def _linear(name: str, shape: Shape, fp8: bool) -> Iterator[tuple[str, str, Shape]]:
    yield f"{name}.weight", "float8_e4m3fn" if fp8 else "bfloat16", shape
    if fp8:
        yield f"{name}.weight_scale", "bfloat16", (shape[0], 1)


def _mlp(prefix: str, hidden: int, width: int, fp8: bool) -> Iterator[tuple[str, str, Shape]]:
    for name in ("gate", "up", "down"):
        yield from _linear(
            f"{prefix}{name}_proj", (hidden, width) if name == "down" else (width, hidden), fp8
        )


def llama4_tensors(raw: dict[str, Any], *, fp8: bool = False) -> Iterator[tuple[str, str, Shape]]:
    """Names, dtypes and shapes as published: in FP8 experts are one by one; and two of the vision part."""
    text = raw["text_config"]
    hidden, width, experts = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    root, vocab = "language_model.model.", text["vocab_size"]
    yield f"{root}embed_tokens.weight", "bfloat16", (vocab, hidden)
    yield "language_model.lm_head.weight", "bfloat16", (vocab, hidden)
    yield f"{root}norm.weight", "bfloat16", (hidden,)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"{root}layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", "bfloat16", (hidden,)
        for name, rows in (("q", 40), ("k", 8), ("v", 8)):
            yield f"{prefix}self_attn.{name}_proj.weight", "bfloat16", (rows * 128, hidden)
        yield f"{prefix}self_attn.o_proj.weight", "bfloat16", (hidden, 5120)
        prefix += "feed_forward."
        if (layer + 1) % text["interleave_moe_layer_step"]:
            yield from _mlp(prefix, hidden, text["intermediate_size_mlp"], fp8)
            continue
        yield f"{prefix}router.weight", "bfloat16", (experts, hidden)
        yield from _mlp(f"{prefix}shared_expert.", hidden, width, fp8)
        for expert in range(experts if fp8 else 0):
            yield from _mlp(f"{prefix}experts.{expert}.", hidden, width, fp8)
        if not fp8:
            yield f"{prefix}experts.gate_up_proj", "bfloat16", (experts, hidden, 2 * width)
            yield f"{prefix}experts.down_proj", "bfloat16", (experts, width, hidden)
    yield "vision_model.class_embedding", "bfloat16", (1408,)
    yield "multi_modal_projector.linear_1.weight", "bfloat16", (5120, 4096)


def opened(raw: dict[str, Any], tensors: Iterator[tuple[str, str, Shape]]) -> Checkpoint:
    found = checkpoint_of(raw, tensors)
    return replace(found, tensors=_by_usual_names(dict(found.tensors), "published"))


@pytest.mark.parametrize(
    ("raw", "fp8", "number", "billions"),
    [
        (SCOUT, False, 579, 107.77),
        (SCOUT, True, 579 + 48 * (3 + 16 * 6 - 2), 107.8),
        (MAVERICK, False, 507, 400.71),
        (MAVERICK, True, 507 + 24 * (3 + 128 * 6 - 2) + 24 * 3, 400.78),
    ],
    ids=["scout", "scout-fp8", "maverick", "maverick-fp8"],
)
def test_published_llama4s_are_complete(raw: dict[str, Any], fp8: bool, number: int, billions: float) -> None:
    raw = raw | ({"quantization_config": FP8} if fp8 else {})
    checkpoint = opened(raw, llama4_tensors(raw, fp8=fp8))
    reader = TensorReader(checkpoint=checkpoint, dtype=torch.bfloat16, device=META)
    target = build_target(target_config(checkpoint), reader)
    config = target.config
    assert isinstance(config, Llama4Config)
    assert len(reader.taken) == number
    sizes = (prod(checkpoint.tensors[name].shape) for name in reader.taken)
    assert sum(sizes) / 1e9 == pytest.approx(billions, abs=0.02)
    assert config.kv_spec.bytes_per_token(2) == 192 << 10
    assert config.rotated == (True, True, True, False) * 12
    assert (config.chunk, config.temperature) == (8192, Temperature(floor=8192, scale=0.1))
    assert config.eos_token_ids == (200001, 200007, 200008)
    assert config.mixture is not None
    assert sum(config.mixture.layers) == (48 if raw["text_config"]["interleave_moe_layer_step"] == 1 else 24)
    size = ExpertSize.of(config, 2)
    assert size is not None
    values = 3 * 5120 * 8192
    assert size.num_bytes == (values + 4 * (2 * 8192 + 5120) if fp8 else 2 * values)
    assert unread_keys(raw, family_of(raw).keys) == ()
    assert [count for count in (1, 2, 4, 8, 16) if config._can_share(count)] == [1, 2, 4, 8]


# Of the published head, whose config is a Llama-4's with another number of layers and no experts
EAGLE = {
    **{name: value for name, value in SCOUT["text_config"].items() if name != "rope_scaling"},
    "architectures": ["Llama4ForCausalLM"],
    "interleave_moe_layer_step": 0,
    "moe_layers": [],
    "no_rope_layers": [1],
    "num_hidden_layers": 1,
}


def eagle_tensors(*, own: bool) -> Iterator[tuple[str, str, Shape]]:
    hidden = 5120
    yield from _linear("fc", (hidden, 2 * hidden), False)
    yield "norm.weight", "bfloat16", (hidden,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"layers.0.{name}.weight", "bfloat16", (hidden,)
    for name, rows in (("q", 5120), ("k", 1024), ("v", 1024), ("o", 5120)):
        yield f"layers.0.self_attn.{name}_proj.weight", "bfloat16", (rows, hidden)
    yield from _mlp("layers.0.feed_forward.", hidden, 16384, False)
    if own:
        yield "embed_tokens.weight", "bfloat16", (202048, hidden)
        yield "lm_head.weight", "bfloat16", (202048, hidden)


@pytest.mark.parametrize("own", [False, True])
def test_the_published_eagle_head_fits(own: bool) -> None:
    target = opened(SCOUT, llama4_tensors(SCOUT))
    head = opened(EAGLE, eagle_tensors(own=own))
    reader = TensorReader(checkpoint=head, dtype=torch.bfloat16, device=META)
    config = drafter_config(head, 48)
    assert isinstance(config, EagleLlama4Config)
    built = build_target(target_config(target), replace(reader, checkpoint=target, taken={}))
    build_head(config, reader, built, torch.empty(0, device=META))
    assert misfits(built.config, config) == ()
    assert len(reader.taken) == len(head.tensors)
    assert (config.chunk, config.own_embedding, config.own_lm_head) == (8192, own, own)
    assert [config.seen(0)(context) for context in (1, 8192, 8193)] == [1, 8192, 1]
    assert config.fc_each_pass
    assert unread_keys(EAGLE, family_of(EAGLE).keys) == ()


def test_specforges_eagle3_head_of_scout_fits() -> None:
    """An ordinary EAGLE3 head, of which only the sizes are Scout's."""
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 32000,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 40,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "target_hidden_size": 5120,
        "torch_dtype": "bfloat16",
        "vocab_size": 202048,
    }
    head = drafter_config(checkpoint_of(raw, [("midlayer.hidden_norm.weight", "bfloat16", (5120,))]), 48)
    assert isinstance(head, Eagle3Config)
    assert (
        misfits(target_config(opened(SCOUT, llama4_tensors(SCOUT))), replace(head, own_embedding=False)) == ()
    )
    assert head.aux_layers == (2, 24, 45)
