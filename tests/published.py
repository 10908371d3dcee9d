"""Published checkpoints without their weights: configs as on the hub, and names, dtypes and shapes of tensors."""

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from specgen.checkpoints.checkpoint import _by_usual_names
from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.checkpoints.weight_files import TensorInfo
from specgen.models.families import family_of

Shape = tuple[int, ...]
Tensors = Iterable[tuple[str, str, Shape]]  # name, dtype, shape
META = torch.device("meta")


def checkpoint_of(raw: dict[str, Any], tensors: Tensors) -> Checkpoint:
    """One with that config and headers of ``tensors``, and no weights."""
    infos = {name: TensorInfo(file=Path("x"), shape=shape, dtype=dtype) for name, dtype, shape in tensors}
    infos = _by_usual_names(infos, "published")
    return Checkpoint(name="published", path=Path(), config=raw, generation={}, tensors=infos)


def published(raw: dict[str, Any]) -> Checkpoint:
    """A target with that config and all of its tensors, MTP layer included."""
    method, shapes = raw.get("quantization_config", {}).get("quant_method"), saved(raw)
    if method == "mxfp4":
        return checkpoint_of(raw, _in_mxfp4(shapes))
    stored = [*_in_fp8(raw, shapes)] if method else [(name, _dtype(name), shapes[name]) for name in shapes]
    return checkpoint_of(raw, [*_with_mtp(raw.get("text_config", raw), stored)])


def _dtype(name: str) -> str:
    return "float32" if name.endswith("e_score_correction_bias") else "bfloat16"


def saved(raw: dict[str, Any]) -> dict[str, Shape]:
    """Names and shapes of a model as ``transformers`` saves it, which are those on the hub."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    model_class = getattr(transformers, raw["architectures"][0])
    apart = ("quantization_config", "vision_config", "audio_config")
    rest = deepcopy({name: raw[name] for name in raw if name not in apart})  # it changes what it is given
    config = model_class.config_class.from_dict(rest)
    with META:
        model = model_class(config)
    found = revert_weight_conversion(model, model.state_dict())
    if config.tie_word_embeddings:
        del found["lm_head.weight"]
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


def _in_mxfp4(shapes: Mapping[str, Shape]) -> Tensors:
    for name, shape in shapes.items():
        if name.endswith(("gate_up_proj", "down_proj")):  # of all experts, by input here
            count, num_in, num_out = shape
            yield f"{name}_blocks", "uint8", (count, num_out, num_in // 32, 16)
            yield f"{name}_scales", "uint8", (count, num_out, num_in // 32)
        else:
            yield name, "bfloat16", shape


def _in_fp8(raw: dict[str, Any], shapes: Mapping[str, Shape]) -> Tensors:
    config = family_of(raw).config(raw)
    assert config.fp8 is not None
    has_kv_scales = "kv_cache_quant_algo" in raw["quantization_config"]
    for name, shape in _one_by_one(shapes).items():
        layer = name.removesuffix(".weight")
        kind = layer.rpartition(".")[2]
        if "_proj" not in kind or len(shape) < 2 or config.fp8.ignores(layer):
            yield name, _dtype(name), shape
            continue
        yield name, "float8_e4m3fn", shape
        scale, *_ = config.fp8.scale_shapes(shape[0], shape[1])
        of_scale = "bfloat16" if config.fp8.weights == "channel" else "float32"
        yield f"{layer}.{config.fp8.scale_name}", of_scale, scale
        if config.fp8.activations == "static":
            yield f"{layer}.input_scale", "float32", ()
        if has_kv_scales and kind in ("k_proj", "v_proj"):
            yield f"{layer}.{kind[0]}_scale", "float32", ()


def _one_by_one(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Experts that are in one tensor [E, in, out] each in its own, as tools that quantize write them."""
    found = dict(shapes)
    for name, shape in shapes.items():
        if len(shape) == 3 and name.endswith("_proj"):
            (count, num_in, num_out), (root, _, kind) = found.pop(name), name.rpartition(".")
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            found |= {
                f"{root}.{expert}.{each}.weight": (num_out // len(kinds), num_in)
                for expert in range(count)
                for each in kinds
            }
    return found


def _with_mtp(text: dict[str, Any], stored: list[tuple[str, str, Shape]]) -> Tensors:
    """MTP layers are the last layer with attention, or with experts, and what joins a token to the states."""
    yield from stored
    hidden, last = text["hidden_size"], text["num_hidden_layers"] - 1
    if "num_nextn_predict_layers" in text:
        root, one = f"model.layers.{last + 1}.", (hidden,)
        table = (text["vocab_size"], hidden)
        more = {"enorm": one, "hnorm": one, "shared_head.norm": one, "eh_proj": (hidden, 2 * hidden)}
        own = {root + name: shape for name, shape in (more | {"embed_tokens": table}).items()}
        own |= {f"{root}shared_head.head": table}
    elif "linear_num_key_heads" in text:
        root, norms = "mtp.layers.0.", ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        own = {f"mtp.{name}": (hidden,) for name in norms} | {"mtp.fc": (hidden, 2 * hidden)}
    else:
        return
    for name, dtype, shape in stored:
        if f"layers.{last}." in name and "visual" not in name:
            yield root + name.partition(f"layers.{last}.")[2], dtype, shape
    yield from ((f"{name}.weight", "bfloat16", shape) for name, shape in own.items())


# ---- mixtures

_GPT_OSS: dict[str, Any] = json.loads("""{
  "architectures": ["GptOssForCausalLM"], "attention_bias": true, "experts_per_token": 4, "head_dim": 64,
  "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
  "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8,
  "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
  "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
  "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
  "vocab_size": 201088
}""")


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return _GPT_OSS | {"layer_types": kinds, "num_hidden_layers": layers, "num_local_experts": experts}


GPT_OSS_20B, GPT_OSS_120B = _gpt_oss(24, 32), _gpt_oss(36, 128)
QWEN3_30B: dict[str, Any] = json.loads("""{
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
  "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
  "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null,
  "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936
}""")
QWEN3_235B = QWEN3_30B | {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536}
QWEN3_235B |= {"num_attention_heads": 64, "num_hidden_layers": 94}

# ---- latents

GLM: dict[str, Any] = json.loads("""{
  "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": false, "eos_token_id": [154820, 154827, 154829],
  "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240,
  "kv_lora_rank": 512, "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_group": 1,
  "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 20,
  "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
  "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
  "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880
}""")
# of 61 layers here are five
DEEPSEEK: dict[str, Any] = GLM | json.loads("""{
  "architectures": ["DeepseekV3ForCausalLM"], "eos_token_id": 1, "first_k_dense_replace": 3, "hidden_size": 7168,
  "intermediate_size": 18432, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
  "n_group": 8, "n_routed_experts": 256, "num_attention_heads": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 5, "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
  "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
    "quant_method": "fp8", "weight_block_size": [128, 128]},
  "rms_norm_eps": 1e-06,
  "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn"},
  "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "v_head_dim": 128,
  "vocab_size": 129280
}""")

# ---- hybrids

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
_DENSE_TEXT = QWEN3_8["text_config"]
_MOE = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "hidden_size": 2048}
_MOE |= {"num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32}
QWEN3_5_35B = QWEN3_8 | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {name: _DENSE_TEXT[name] for name in _DENSE_TEXT if name != "intermediate_size"}
    | {**_MOE, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8},
}
QWEN3_NEXT: dict[str, Any] = {
    name: value
    for name, value in _DENSE_TEXT.items()
    if name.startswith(("linear", "head", "hidden", "rms", "full"))
}
QWEN3_NEXT |= _MOE | json.loads("""{
  "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1, "eos_token_id": 151645,
  "intermediate_size": 5120, "max_position_embeddings": 262144, "mlp_only_layers": [], "norm_topk_prob": true,
  "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "partial_rotary_factor": 0.25,
  "rope_scaling": null, "rope_theta": 10000000, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "use_sliding_window": false, "vocab_size": 151936
}""")

# ---- Llama-4

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
_SCOUT_TEXT = {name: value for name, value in SCOUT["text_config"].items() if name != "no_rope_layers"}
MAVERICK = SCOUT | {
    "text_config": _SCOUT_TEXT
    | {"interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": False, "rope_scaling": None}
    | {"max_position_embeddings": 1048576, "moe_layers": list(range(1, 48, 2))}
}
# Of the published head, whose config is a Llama-4's with another number of layers and no experts
EAGLE_OF_LLAMA4 = {name: value for name, value in SCOUT["text_config"].items() if name != "rope_scaling"} | {
    "architectures": ["Llama4ForCausalLM"],
    "interleave_moe_layer_step": 0,
    "moe_layers": [],
    "no_rope_layers": [1],
    "num_hidden_layers": 1,
}

# ---- Gemma 4

_GEMMA4: dict[str, Any] = json.loads("""{
  "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 2, "dtype": "bfloat16", "enable_moe_block": false,
  "eos_token_id": 1, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "initializer_range": 0.02,
  "model_type": "gemma4_text", "num_kv_shared_layers": 0, "pad_token_id": 0, "rms_norm_eps": 1e-06,
  "rope_parameters": {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
  "tie_word_embeddings": true, "use_cache": true, "use_double_wide_mlp": false, "vocab_size": 262144,
  "vocab_size_per_layer_input": 262144
}""")


def _gemma4(
    hidden: int, inner: int, layers: int, heads: tuple[int, int, int | None], window: int, every: int
) -> dict[str, Any]:
    return _GEMMA4 | {
        "attention_k_eq_v": heads[2] is not None,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "layer_types": [
            "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
        ],
        "max_position_embeddings": 131072 if window == 512 else 262144,
        "num_attention_heads": heads[0],
        "num_global_key_value_heads": heads[2],
        "num_hidden_layers": layers,
        "num_key_value_heads": heads[1],
        "sliding_window": window,
        "use_bidirectional_attention": None if window == 512 else "vision",
    }


_BY_LAYER = {"hidden_size_per_layer_input": 256}
_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_NOT_IN_12B = ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
_12B = _gemma4(3840, 15360, 48, (16, 8, 1), 1024, 6) | {"model_type": "gemma4_unified_text"}
GEMMA4_TEXTS: dict[str, dict[str, Any]] = {
    "E2B": _gemma4(1536, 6144, 35, (8, 1, None), 512, 5)
    | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, **_BY_LAYER},
    "E4B": _gemma4(2560, 10240, 42, (8, 2, None), 512, 6) | {"num_kv_shared_layers": 18, **_BY_LAYER},
    "12B": {name: value for name, value in _12B.items() if name not in _NOT_IN_12B},
    "26B": _gemma4(2816, 2112, 30, (16, 8, 2), 1024, 6) | {"hidden_size_per_layer_input": None, **_EXPERTS},
    "31B": _gemma4(5376, 21504, 60, (32, 16, 4), 1024, 6),
}


def gemma4(size: str) -> dict[str, Any]:
    return json.loads("""{
      "audio_config": {"model_type": "gemma4_audio"}, "audio_token_id": 258881, "boa_token_id": 256000,
      "boi_token_id": 255999, "dtype": "bfloat16", "eoa_token_id": 258883, "eoi_token_id": 258882,
      "eos_token_id": [1, 106, 50], "image_token_id": 258880, "model_type": "gemma4", "tie_word_embeddings": true,
      "transformers_version": "5.5.0.dev0", "video_token_id": 258884,
      "vision_config": {"model_type": "gemma4_vision"}, "vision_soft_tokens_per_image": 280
    }""") | {
        "architectures": [f"Gemma4{'Unified' * (size == '12B')}ForConditionalGeneration"],
        "text_config": GEMMA4_TEXTS[size],
    }


def published_gemma4(size: str) -> Checkpoint:
    """Layers that see the keys of another have their own in the files as well."""
    raw = gemma4(size)
    text = {name: value for name, value in raw["text_config"].items() if name not in _BY_LAYER or value}
    text |= (
        {} if size == "12B" else {"hidden_size_per_layer_input": text.get("hidden_size_per_layer_input", 0)}
    )
    shapes = saved(raw | {"text_config": text})
    kinds, shared = text["layer_types"], text["num_kv_shared_layers"]
    first = len(kinds) - shared
    for layer in range(first, len(kinds)):
        source = max(each for each in range(first) if kinds[each] == kinds[layer])
        shapes |= {
            name.replace(f"layers.{source}.", f"layers.{layer}."): shape
            for name, shape in shapes.items()
            if f"language_model.layers.{source}.self_attn." in name and "q_" not in name and "o_" not in name
        }
    return checkpoint_of(raw, [(name, "bfloat16", shape) for name, shape in shapes.items()])


# ---- in FP8

_FLOAT8: dict[str, Any] = json.loads("""{
  "actorder": null, "block_structure": null, "group_size": null, "num_bits": 8, "observer_kwargs": {},
  "symmetric": true, "type": "float"
}""")
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
AUTO = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
BLOCKS = DEEPSEEK["quantization_config"]


def dynamic(*ignored: str) -> dict[str, Any]:
    """Of compressed-tensors, with a scale for each output and for each row."""
    return {
        "config_groups": {
            "group_0": {
                "input_activations": {**_FLOAT8, "dynamic": True, "observer": None, "strategy": "token"},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {**_FLOAT8, "dynamic": False, "observer": "minmax", "strategy": "channel"},
            }
        },
        "format": "float-quantized",
        "global_compression_ratio": 1.463543865167781,
        "ignore": ["lm_head", *ignored],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


LLAMA3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
LLAMA3_SCALING |= {"original_max_position_embeddings": 8192}


def dense(family: str, hidden: int, inner: int, layers: int, heads: int, **changes: Any) -> dict[str, Any]:
    return json.loads("""{
      "hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128,
      "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
      "vocab_size": 128256
    }""") | {
        "architectures": [f"{family}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        **changes,
    }


# ---- heads


def assistant(size: str, width: int) -> tuple[dict[str, Any], Tensors]:
    """Of a Gemma 4; its text part is a smaller one of the target's kind."""
    target = _12B if size == "12B" else GEMMA4_TEXTS[size]
    own: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 8 * width,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "num_attention_heads": 4 if size == "E4B" else target["num_attention_heads"],
    }
    raw = {
        "architectures": [f"Gemma4{'Unified' * (size == '12B')}AssistantForCausalLM"],
        "backbone_hidden_size": target["hidden_size"],
        "centroid_intermediate_top_k": 32,
        "dtype": "bfloat16",
        "model_type": "gemma4_assistant",
        "num_centroids": 2048,
        "text_config": {
            name: target[name] for name in target if "experts" not in name and "moe_i" not in name
        }
        | own,
        "tie_word_embeddings": True,
        "transformers_version": "5.7.0",
        "use_ordered_embeddings": size[0] == "E",
    }
    dtypes = {"masked_embedding.token_ordering": "int64"}
    return raw, [(name, dtypes.get(name, "bfloat16"), shape) for name, shape in saved(raw).items()]


def deepspec(kind: str) -> tuple[dict[str, Any], Tensors]:
    """DeepSpec's head for the Gemma 4 of 12B: its config, and names and shapes as its code makes them."""
    num_layers = 1 if kind == "Eagle3" else 5
    raw: dict[str, Any] = _12B | {
        "architectures": [f"Gemma4{kind}Model"],
        "layer_types": ["full_attention"] * num_layers,
        "num_hidden_layers": num_layers,
        "num_target_layers": 48,
        "target_layer_ids": [5, 17, 29, 41, 46],
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
    text = _12B | {"num_hidden_layers": 1, "layer_types": ["full_attention"], "tie_word_embeddings": True}
    layer = saved({"architectures": ["Gemma4ForCausalLM"], **text, "model_type": "gemma4_text"})
    for name, shape in layer.items():
        if name.startswith("model.layers.0.") and "v_proj" not in name and name.endswith(".weight"):
            is_wide = kind == "Eagle3" and name.endswith(("q_proj.weight", "k_proj.weight"))
            part = name.removeprefix("model.layers.0.").removesuffix(".weight")
            shapes |= {
                f"layers.{n}.{part}": (shape[0], 2 * shape[1]) if is_wide else shape
                for n in range(num_layers)
            }
    stored = [(f"{name}.weight", "bfloat16", shape) for name, shape in shapes.items()]
    stored += [(f"layers.{layer}.layer_scalar", "bfloat16", (1,)) for layer in range(num_layers)]
    if kind == "Eagle3":
        return raw | {"ttt_length": 7, "step_loss_decay": 1.0, "draft_num_hidden_layers": 1}, stored
    raw |= {"block_size": 7, "mask_token_id": 4, "num_anchors": 512, "markov_rank": 256}
    raw |= {"markov_head_type": "vanilla", "enable_confidence_head": True}
    raw |= {"confidence_head_with_markov": True}
    own = {f"markov_head.markov_w{n}.weight": (262144, 256) for n in (1, 2)}
    own |= {"confidence_head.proj.weight": (1, 4096), "confidence_head.proj.bias": (1,)}
    return raw, stored + [(name, "bfloat16", shape) for name, shape in own.items()]


def eagle_of_llama4(*, own: bool) -> tuple[dict[str, Any], Tensors]:
    """With or without an embedding and output weights of its own."""
    apart = ("model.embed_tokens.weight", "lm_head.weight")
    dense = EAGLE_OF_LLAMA4 | {"interleave_moe_layer_step": 1}
    shapes = {name.removeprefix("model."): shape for name, shape in saved(dense).items() if name not in apart}
    shapes["fc.weight"] = (5120, 2 * 5120)
    if own:
        shapes |= dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (202048, 5120))
    return EAGLE_OF_LLAMA4, [(name, "bfloat16", shape) for name, shape in shapes.items()]


def eagle3(target: dict[str, Any], **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """An ordinary head of one layer for a target of those sizes, as SpecForge and NVIDIA write them."""
    text = target.get("text_config", target)
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 32000,
        "head_dim": 64,
        "hidden_size": text["hidden_size"],
        "intermediate_size": 17280,
        "num_attention_heads": 64,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "vocab_size": text["vocab_size"],
        **changes,
    }
    return raw, [("midlayer.hidden_norm.weight", "bfloat16", (text["hidden_size"],))]
