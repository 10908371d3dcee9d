"""The published Gemma 4s: what is read of their configs, names and shapes, what weights and a cache take."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from bound import KVBytes

from specgen.checkpoints.checkpoint import build_head, build_target, drafter_config, misfits, target_config
from specgen.checkpoints.tensor_reader import TensorReader
from specgen.config import EngineConfig
from specgen.engine.page_budget import PageBudget
from specgen.models.config_keys import unread_keys
from specgen.models.families import family_of, unread
from specgen.models.gemma4 import Gemma4Config
from specgen.models.protocols import no_target
from tests.test_published import META, Shape, checkpoint_of

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "model_type": "gemma4_text",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
    "use_cache": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}


def text(
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int, int | None],
    window: int,
    every: int,
    **more: Any,
) -> dict[str, Any]:
    num_heads, kv, global_kv = heads
    kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    return {
        **_COMMON,
        "attention_k_eq_v": global_kv is not None,
        "hidden_size": hidden,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": inner,
        "layer_types": kinds,
        "max_position_embeddings": 131072 if window == 512 else 262144,
        "num_attention_heads": num_heads,
        "num_global_key_value_heads": global_kv,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "num_kv_shared_layers": 0,
        "sliding_window": window,
        "use_bidirectional_attention": None if window == 512 else "vision",
        "use_double_wide_mlp": False,
        **more,
    }


_OF_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
TEXTS: dict[str, dict[str, Any]] = {
    "E2B": text(1536, 6144, 35, (8, 1, None), 512, 5, num_kv_shared_layers=20, use_double_wide_mlp=True)
    | {"hidden_size_per_layer_input": 256},
    "E4B": text(
        2560, 10240, 42, (8, 2, None), 512, 6, num_kv_shared_layers=18, hidden_size_per_layer_input=256
    ),
    "12B": text(3840, 15360, 48, (16, 8, 1), 1024, 6, model_type="gemma4_unified_text"),
    "26B": text(2816, 2112, 30, (16, 8, 2), 1024, 6, hidden_size_per_layer_input=None, **_OF_EXPERTS),
    "31B": text(5376, 21504, 60, (32, 16, 4), 1024, 6),
}


def published(size: str) -> dict[str, Any]:
    kind = "Gemma4Unified" if size == "12B" else "Gemma4"
    found = TEXTS[size]
    if size == "12B":
        missing = ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
        found = {name: value for name, value in found.items() if name not in missing}
    return {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "audio_config": {"model_type": "gemma4_audio"},
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "dtype": "bfloat16",
        "eoa_token_id": 258883,
        "eoi_token_id": 258882,
        "eos_token_id": [1, 106, 50],
        "image_token_id": 258880,
        "model_type": "gemma4",
        "text_config": found,
        "tie_word_embeddings": True,
        "transformers_version": "5.5.0.dev0",
        "video_token_id": 258884,
        "vision_config": {"model_type": "gemma4_vision"},
        "vision_soft_tokens_per_image": 280,
    }


def tensors(size: str) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the text part as published: the layers that see others' keys have their own as well."""
    raw, root = TEXTS[size], "model.language_model."
    hidden, layers, inputs = raw["hidden_size"], raw["num_hidden_layers"], raw["hidden_size_per_layer_input"]
    yield f"{root}embed_tokens.weight", (262144, hidden)
    yield f"{root}norm.weight", (hidden,)
    if inputs:
        yield f"{root}embed_tokens_per_layer.weight", (262144, layers * inputs)
        yield f"{root}per_layer_model_projection.weight", (layers * inputs, hidden)
        yield f"{root}per_layer_projection_norm.weight", (inputs,)
    for layer in range(layers):
        prefix, sliding = f"{root}layers.{layer}.", raw["layer_types"][layer] == "sliding_attention"
        size_of, values = (256 if sliding else 512), sliding or not raw["attention_k_eq_v"]
        kv = raw["num_key_value_heads"] if values else raw["num_global_key_value_heads"]
        shared = layer >= layers - raw["num_kv_shared_layers"]
        inner = raw["intermediate_size"] * (2 if shared and raw["use_double_wide_mlp"] else 1)
        shapes: dict[str, Shape] = {
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,)),
            **dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), (hidden,)),
            "self_attn.q_proj": (raw["num_attention_heads"] * size_of, hidden),
            "self_attn.k_proj": (kv * size_of, hidden),
            "self_attn.o_proj": (hidden, raw["num_attention_heads"] * size_of),
            "self_attn.q_norm": (size_of,),
            "self_attn.k_norm": (size_of,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        if values:
            shapes["self_attn.v_proj"] = (kv * size_of, hidden)
        if inputs:
            shapes |= {"per_layer_input_gate": (inputs, hidden), "per_layer_projection": (hidden, inputs)}
            shapes["post_per_layer_input_norm"] = (hidden,)
        if raw["enable_moe_block"]:
            names = (
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
                "pre_feedforward_layernorm_2",
            )
            shapes |= dict.fromkeys(names, (hidden,)) | {"router.proj": (128, hidden)}
            yield f"{prefix}router.scale", (hidden,)
            yield f"{prefix}router.per_expert_scale", (128,)
            yield f"{prefix}experts.gate_up_proj", (128, 1408, hidden)
            yield f"{prefix}experts.down_proj", (128, hidden, 704)
        yield f"{prefix}layer_scalar", (1,)
        yield from ((f"{prefix}{name}.weight", shape) for name, shape in shapes.items())


KIB = 1 << 10
# Tensors that a pass reads, parameters in billions, KiB of cache a token, and MiB that a row at 4,096 reads of it
EXPECTED = {
    "E2B": (540, 4.63, 12 + 6, 14 + 56),
    "E4B": (665, 7.46, 40 + 16, 35 + 112),
    "12B": (666, 11.91, 320 + 16, 320 + 64),
    "26B": (657, 25.23, 200 + 20, 200 + 80),
    "31B": (832, 30.70, 800 + 80, 800 + 320),
}


@pytest.mark.parametrize("size", TEXTS)
def test_published_gemma4s_are_complete(size: str) -> None:
    stored = [(name, "bfloat16", shape) for name, shape in tensors(size)]
    stored += [("model.vision_tower.x", "bfloat16", (3,)), ("model.embed_audio.x", "bfloat16", (3,))]
    checkpoint = checkpoint_of(published(size), stored)
    reader = TensorReader(checkpoint=checkpoint, dtype=torch.bfloat16, device=META)
    config = build_target(target_config(checkpoint), reader).config
    assert isinstance(config, Gemma4Config)
    number, billions, kib, mib = EXPECTED[size]
    assert len(reader.taken) == number
    sizes = (prod(checkpoint.tensors[name].shape) for name in reader.taken)
    assert sum(sizes) / 1e9 == pytest.approx(billions, abs=0.01)
    assert config.kv_spec.bytes_per_token(2) == kib * KIB
    assert KVBytes.of(config, 2).at(4096) == mib << 20
    engine = EngineConfig(
        model=size, drafter=None, num_spec_tokens=0, dtype="bfloat16", page_size=64, cuda_graphs="step"
    )
    budget = PageBudget(config=replace(engine, kv_dtype="model"), target=config, head=None)
    taken = budget.bytes_of(*budget.of_sequence(4096))
    storing = filter(config.stores, range(config.num_layers))
    seen = sum(4 * prod(config.kv_heads(layer)) * config.seen(layer)(4096) for layer in storing)
    assert seen == mib << 20 or size.startswith("E"), "all others store"
    assert seen < taken < 1.12 * seen, "whole pages, and what a step writes"
    assert config.eos_token_ids == (1, 106, 50)
    assert config.windows[-1] is None
    family = family_of(published(size))
    assert unread_keys(published(size), family.keys) == ()


def test_layers_of_the_small_sizes_see_the_last_that_store() -> None:
    for size, first, sources in (("E2B", 15, (13, 14)), ("E4B", 24, (22, 23))):
        checkpoint = checkpoint_of(
            published(size), [(name, "bfloat16", shape) for name, shape in tensors(size)]
        )
        config = target_config(checkpoint)
        assert isinstance(config, Gemma4Config)
        for layer in range(config.num_layers):
            expected = layer if layer < first else sources[config.window(layer) is None]
            assert config.source(layer) == config.cache_index(layer) == expected
            wide = size == "E2B" and layer >= first
            assert config.mlp_width(layer) == config.intermediate_size * (1 + wide)


# ---- heads


def assistant(size: str, width: int) -> dict[str, Any]:
    """As published; its text part is a smaller one of the target's kind."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    own: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 8 * width,
        "layer_types": kinds,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "num_attention_heads": 4 if size == "E4B" else TEXTS[size]["num_attention_heads"],
    }
    kind = "Gemma4Unified" if size == "12B" else "Gemma4"
    experts = ("num_experts", "top_k_experts", "moe_intermediate_size")
    return {
        "architectures": [f"{kind}AssistantForCausalLM"],
        "backbone_hidden_size": TEXTS[size]["hidden_size"],
        "centroid_intermediate_top_k": 32,
        "dtype": "bfloat16",
        "model_type": "gemma4_assistant",
        "num_centroids": 2048,
        "text_config": {name: value for name, value in TEXTS[size].items() if name not in experts} | own,
        "tie_word_embeddings": True,
        "transformers_version": "5.7.0",
        "use_ordered_embeddings": size[0] == "E",
    }


def assistant_tensors(raw: dict[str, Any]) -> Iterator[tuple[str, str, Shape]]:
    text, wide = raw["text_config"], raw["backbone_hidden_size"]
    width, inner = text["hidden_size"], text["intermediate_size"]
    yield "model.embed_tokens.weight", "bfloat16", (262144, width)
    yield "model.norm.weight", "bfloat16", (width,)
    yield "pre_projection.weight", "bfloat16", (width, 2 * wide)
    yield "post_projection.weight", "bfloat16", (wide, width)
    if raw["use_ordered_embeddings"]:
        yield "masked_embedding.centroids.weight", "bfloat16", (2048, width)
        yield "masked_embedding.token_ordering", "int64", (262144,)
    for layer, kind in enumerate(text["layer_types"]):
        size = 512 if kind == "full_attention" else 256
        numbers = text["num_attention_heads"] * size
        shapes: dict[str, Shape] = {
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (width,)),
            **dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), (width,)),
            "self_attn.q_proj": (numbers, width),
            "self_attn.q_norm": (size,),
            "self_attn.o_proj": (width, numbers),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        yield f"model.layers.{layer}.layer_scalar", "bfloat16", (1,)
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", "bfloat16", shape


# Parameters in millions, where they are published
ASSISTANTS = {"E4B": 78.5, "12B": 422.5, "26B": None, "31B": None}


@pytest.mark.parametrize(("size", "millions"), ASSISTANTS.items())
def test_published_assistants_are_complete(size: str, millions: float | None) -> None:
    raw = assistant(size, 256 if size == "E4B" else 1024)
    checkpoint = checkpoint_of(raw, list(assistant_tensors(raw)))
    config = drafter_config(checkpoint, None)
    reader = TensorReader(checkpoint=checkpoint, dtype=torch.bfloat16, device=META)
    build_head(config, reader, no_target(), torch.empty(0, device=META))
    assert len(checkpoint.tensors) == (50 if size == "E4B" else 48)
    floats = (prod(each.shape) for each in checkpoint.tensors.values() if each.dtype == "bfloat16")
    assert millions is None or sum(floats) / 1e6 == pytest.approx(millions, abs=0.5)
    assert config.kv_spec.bytes_per_token(2) == 0
    assert unread(raw, checkpoint.tensors.keys()) == ()
    of_target = checkpoint_of(published(size), [(name, "bfloat16", shape) for name, shape in tensors(size)])
    assert misfits(target_config(of_target), config) == ()


def deepspec(kind: str) -> tuple[dict[str, Any], list[tuple[str, str, Shape]]]:
    """DeepSpec's head for the 12B: its config, and names and shapes as its code makes them."""
    ids, num_layers = [5, 17, 29, 41, 46], 1 if kind == "Eagle3" else 5
    raw: dict[str, Any] = TEXTS["12B"] | {
        "architectures": [f"Gemma4{kind}Model"],
        "layer_types": ["full_attention"] * num_layers,
        "num_hidden_layers": num_layers,
        "num_target_layers": 48,
        "target_layer_ids": ids,
        "target_model_name_or_path": "google/gemma-4-12B-it",
        "target_model_type": "gemma4_unified",
        "target_text_model_type": "gemma4_unified_text",
        "tie_word_embeddings": False,
    }
    shapes: dict[str, Shape] = {
        **dict.fromkeys(("embed_tokens", "lm_head"), (262144, 3840)),
        "fc": (3840, 5 * 3840),
        "norm": (3840,),
        "hidden_norm" if kind == "DSpark" else "layers.0.hidden_norm": (3840,),
    }
    read = 3840 * (2 if kind == "Eagle3" else 1)
    for layer in range(num_layers):
        own: dict[str, Shape] = {
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (3840,)),
            **dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), (3840,)),
            "self_attn.q_proj": (16 * 512, read),
            "self_attn.k_proj": (512, read),
            "self_attn.o_proj": (3840, 16 * 512),
            **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (512,)),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (15360, 3840)),
            "mlp.down_proj": (3840, 15360),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    stored = [(f"{name}.weight", "bfloat16", shape) for name, shape in shapes.items()]
    stored += [(f"layers.{layer}.layer_scalar", "bfloat16", (1,)) for layer in range(num_layers)]
    if kind == "Eagle3":
        raw |= {"ttt_length": 7, "step_loss_decay": 1.0, "draft_num_hidden_layers": 1}
        return raw, stored
    raw |= {"block_size": 7, "mask_token_id": 4, "num_anchors": 512, "markov_rank": 256}
    raw |= {
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    stored += [(f"markov_head.markov_w{n}.weight", "bfloat16", (262144, 256)) for n in (1, 2)]
    stored += [
        ("confidence_head.proj.weight", "bfloat16", (1, 4096)),
        ("confidence_head.proj.bias", "bfloat16", (1,)),
    ]
    return raw, stored


@pytest.mark.parametrize("kind", ["Eagle3", "DSpark"])
def test_published_heads_of_layers_like_the_target_are_complete(kind: str) -> None:
    raw, stored = deepspec(kind)
    checkpoint = checkpoint_of(raw, stored)
    config = drafter_config(checkpoint, 48)
    reader = TensorReader(checkpoint=checkpoint, dtype=torch.bfloat16, device=META)
    build_head(config, reader, no_target(), torch.empty(0, device=META))
    assert config.aux_layers == (6, 18, 30, 42, 47)
    assert config.kv_spec.layers == ((1, 512),) * config.num_layers
    assert unread(raw, checkpoint.tensors.keys()) == ()
    of_target = checkpoint_of(published("12B"), [(name, "bfloat16", shape) for name, shape in tensors("12B")])
    assert misfits(target_config(of_target), config) == ()
