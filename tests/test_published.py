"""The published shapes of mixtures, latent attention with MTP layers, and FP8: what is read of their configs.

What weights take, which ranks can share them, what heads fit; no weights.
"""

import json
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
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
from specgen.checkpoints.tensor_reader import Checkpoint, TensorReader
from specgen.checkpoints.weight_files import TensorInfo
from specgen.config import UserError
from specgen.device import Ranks
from specgen.models.eagle import Eagle3Config
from specgen.models.families import family_of
from specgen.models.fp8_config import kv_scheme, with_modelopt
from specgen.models.model_config import TargetConfig
from specgen.ops import reference
from tests.marks import mostly_slow

Shape = tuple[int, ...]


def checkpoint_of(raw: dict[str, Any], tensors: Iterable[tuple[str, str, Shape]]) -> Checkpoint:
    """One with that config and the names, dtypes and shapes of ``tensors``, and no weights."""
    infos = {name: TensorInfo(file=Path("x"), shape=shape, dtype=dtype) for name, dtype, shape in tensors}
    return Checkpoint(name="published", path=Path(), config=raw, generation={}, tensors=infos)


GPT_OSS = """{
  "architectures": ["GptOssForCausalLM"], "attention_bias": true, "experts_per_token": 4, "head_dim": 64,
  "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
  "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8,
  "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
  "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
  "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
  "vocab_size": 201088
}"""


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return json.loads(GPT_OSS) | {
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "num_hidden_layers": layers,
        "num_local_experts": experts,
    }


QWEN3_MOE = """{
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128,
  "hidden_act": "silu", "max_position_embeddings": 40960, "mlp_only_layers": [], "norm_topk_prob": true,
  "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false,
  "use_sliding_window": false, "vocab_size": 151936
}"""


def qwen3_moe(layers: int, hidden: int, width: int, heads: int) -> dict[str, Any]:
    return json.loads(QWEN3_MOE) | {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
    }


def tensors(config: TargetConfig) -> Iterator[tuple[str, str, Shape]]:
    """Names, dtypes and shapes as published."""
    mixture, hidden = config.mixture, config.hidden_size
    count, width = mixture.num_experts, mixture.width
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", "bfloat16", (config.vocab_size, hidden)
    yield "model.norm.weight", "bfloat16", (hidden,)
    rows = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes: dict[str, Shape] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        for name, heads in rows.items():
            shapes[f"self_attn.{name}_proj.weight"] = (heads * config.head_dim, hidden)
        shapes["self_attn.o_proj.weight"] = (hidden, config.num_heads * config.head_dim)
        shapes[f"mlp.{mixture.router}.weight"] = (count, hidden)
        if config.sinks:
            shapes |= {
                name.replace("weight", "bias"): (s[0],) for name, s in shapes.items() if "norm" not in name
            }
            shapes |= {"self_attn.sinks": (config.num_heads,)}
            for name, out, num_in in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
                yield f"{prefix}mlp.experts.{name}_blocks", "uint8", (count, out, num_in // 32, 16)
                yield f"{prefix}mlp.experts.{name}_scales", "uint8", (count, out, num_in // 32)
                shapes[f"mlp.experts.{name}_bias"] = (count, out)
        else:
            shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
            for expert in range(count):
                one = f"mlp.experts.{expert}."
                shapes |= {f"{one}{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
                shapes[f"{one}down_proj.weight"] = (hidden, width)
        yield from ((f"{prefix}{name}", "bfloat16", shape) for name, shape in shapes.items())


PUBLISHED = {  # GB of weights and bytes of KV per token, in bfloat16
    "gpt-oss-20b": (gpt_oss(24, 32), 13.76, 49_152),
    "gpt-oss-120b": (gpt_oss(36, 128), 65.25, 73_728),
    "qwen3-30b-a3b": (qwen3_moe(48, 2048, 768, 32), 61.06, 98_304),
    "qwen3-235b-a22b": (qwen3_moe(94, 4096, 1536, 64), 470.19, 192_512),
}


@pytest.mark.parametrize("name", mostly_slow(PUBLISHED, "gpt-oss-20b", "qwen3-30b-a3b"))
def test_published_checkpoints_are_complete(name: str) -> None:
    raw, gigabytes, kv_bytes = PUBLISHED[name]
    config = family_of(raw).config(raw)
    reader = TensorReader(checkpoint=checkpoint_of(raw, tensors(config)), dtype=torch.bfloat16, device=META)
    build_target(config, reader)
    assert sum(reader.taken.values()) / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert config.kv_spec.bytes_per_token(2) == kv_bytes


def test_gpt_oss_is_read_as_published() -> None:
    raw = PUBLISHED["gpt-oss-20b"][0]
    config = family_of(raw).config(raw)
    assert config.windows == (128, None) * 12
    facts = config.facts()
    assert facts["experts"] == "32 in all layers, 2880 wide, in MXFP4, gate and up clamped at 7"
    assert (
        facts["rotary"]
        == "base 150,000, YaRN scaling by 32 from 4,096 positions (exact bounds), cos and sin times 1.347"
    )
    assert facts["biases"] == "q, k and v, attention output"


def head(target: TargetConfig, **changes: Any) -> Eagle3Config:
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 32000,
        "head_dim": 64,
        "hidden_size": target.hidden_size,
        "intermediate_size": 17280,
        "num_attention_heads": 64,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "vocab_size": target.vocab_size,
    }
    names = frozenset({"midlayer.hidden_norm.weight"})
    return Eagle3Config.from_hf(raw | changes, names, target.num_layers)


@pytest.mark.parametrize(
    ("target", "changes", "inputs"),
    [
        ("gpt-oss-20b", {}, (2, 12, 21)),
        ("gpt-oss-20b", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 21]}}, (2, 12, 22)),
        ("gpt-oss-120b", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}}, (24, 30, 36)),
        ("gpt-oss-120b", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}, (2, 18, 33)),
        ("gpt-oss-120b", {"eagle_config": {"use_aux_hidden_state": False}}, ()),
        ("qwen3-30b-a3b", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}}, (2, 24, 45)),
    ],
    ids=str,
)
def test_published_heads_fit(target: str, changes: dict[str, Any], inputs: tuple[int, ...]) -> None:
    raw = PUBLISHED[target][0]
    config = family_of(raw).config(raw)
    drafter = head(config, **changes)
    assert drafter.aux_layers == inputs
    assert misfits(config, drafter) == ()


META = torch.device("meta")

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


def latent_tensors(raw: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
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
def test_published_latents_and_mtp_layers_are_complete(
    raw: dict[str, Any], billions: float, kv_bytes: int
) -> None:
    checkpoint = checkpoint_of(raw, latent_tensors(raw))
    readers = [
        TensorReader(checkpoint=each, dtype=torch.bfloat16, device=META)
        for each in (checkpoint, mtp_part(checkpoint))
    ]
    target = build_target(target_config(checkpoint), readers[0])
    config = drafter_config(readers[1].checkpoint, target.config.num_layers)
    build_head(config, readers[1], target, torch.empty(0, device=META))
    last = f"model.layers.{raw['num_hidden_layers']}."
    stored = [
        (name.startswith(last), prod(s) * getattr(torch, d).itemsize) for name, d, s in latent_tensors(raw)
    ]
    scales = {name for name, _, _ in latent_tensors(raw) if name.endswith("_scale_inv")}
    for is_mtp, reader in enumerate(readers):
        right = sum(size for of_mtp, size in stored if of_mtp == bool(is_mtp))
        assert sum(reader.taken.values()) == right
    parameters = sum(
        prod(s) for name, _, s in latent_tensors(raw) if name not in scales and not name.startswith(last)
    )
    assert parameters / 1e9 == pytest.approx(billions, abs=0.1)
    assert target.config.kv_spec.bytes_per_token(2) == kv_bytes
    assert config.kv_spec.bytes_per_token(2) == 1152


def test_deepseek_is_read_as_published() -> None:
    config = target_config(checkpoint_of(DEEPSEEK, latent_tensors(DEEPSEEK)))
    assert config.latent.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)  # 1 + 0.1 ln 40
    assert config.facts()["rotary"].endswith("cos and sin times 1")
    assert config.facts()["router"] == (
        "chooses 8 per token; the choice from 4 of 8 groups with a bias; weights by sigmoid, divided by their sum, "
        "times 2.5"
    )


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

DENSE = """{
  "hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128,
  "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "vocab_size": 128256
}"""


def dense(family: str, hidden: int, width: int, layers: int, heads: int, **changes: Any) -> dict[str, Any]:
    return json.loads(DENSE) | {
        "architectures": [f"{family}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        **changes,
    }


MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}

FLOAT8: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "group_size": None,
    "num_bits": 8,
    "observer_kwargs": {},
    "symmetric": True,
    "type": "float",
}

DYNAMIC = {
    "config_groups": {
        "group_0": {
            "input_activations": {**FLOAT8, "dynamic": True, "observer": None, "strategy": "token"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {**FLOAT8, "dynamic": False, "observer": "minmax", "strategy": "channel"},
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.463543865167781,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

AUTO = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}

BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def plain(config: TargetConfig) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the checkpoint that was quantized."""
    if config.mixture is not None:
        yield from ((name, shape) for name, _, shape in tensors(config))
        return
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name in ("model.embed_tokens", *([] if config.tied_embeddings else ["lm_head"])):
        yield f"{name}.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for name, out in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}self_attn.{name}_proj.weight", (out, hidden)
            if config.qkv_bias:
                yield f"{prefix}self_attn.{name}_proj.bias", (out,)
            if config.qk_norm and name != "v":
                yield f"{prefix}self_attn.{name}_norm.weight", (config.head_dim,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)


def published(config: TargetConfig, kv_scales: bool) -> Iterator[tuple[str, str, Shape]]:
    """Names, dtypes and shapes."""
    fp8 = config.fp8
    for name, shape in plain(config):
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            yield name, "bfloat16", shape
            continue
        yield name, "float8_e4m3fn", shape
        scale, *_ = fp8.scale_shapes(shape[0], shape[1])
        yield f"{layer}.{fp8.scale_name}", "float32" if fp8.weights == "tensor" else "bfloat16", scale
        if fp8.activations == "static":
            yield f"{layer}.input_scale", "float32", ()
        if kv_scales and layer[-6:-5] in "kv":
            yield f"{layer}.{layer[-6]}_scale", "float32", ()


EIGHT = (1, 2, 4, 8)
QWEN3 = {"family": "Qwen3", "vocab_size": 151936, "quantization_config": BLOCKS}
LLAMA_8B = {"family": "Llama", "hidden": 4096, "width": 14336, "layers": 32, "heads": 32}
# the config, hf_quant_config.json, GB of weights, the format of the KV cache, numbers of ranks
FP8_CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any], float, str | None, tuple[int, ...]]] = {
    "nvidia/Llama-3.3-70B-Instruct-FP8": (
        dense("Llama", 8192, 28672, 80, 64, rope_scaling=LLAMA3),
        MODELOPT,
        *(72.68, "FP8", (*EIGHT, 16)),
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": (
        dense(**LLAMA_8B, rope_scaling=LLAMA3, quantization_config=DYNAMIC),
        *({}, 9.09, None, (*EIGHT, 16)),
    ),
    "neuralmagic/Meta-Llama-3-8B-Instruct-FP8": (
        dense(**LLAMA_8B, quantization_config=AUTO),
        *({}, 9.09, None, (*EIGHT, 16)),
    ),
    "RedHatAI/Qwen2.5-7B-Instruct-FP8-dynamic": (
        dense(
            *("Qwen2", 3584, 18944, 28, 28),
            num_key_value_heads=4,
            vocab_size=152064,
            quantization_config=DYNAMIC,
        ),
        *({}, 8.71, None, (1, 2, 4)),
    ),
    "Qwen/Qwen3-0.6B-FP8": (
        dense(hidden=1024, width=3072, layers=28, heads=16, tie_word_embeddings=True, **QWEN3),
        *({}, 0.75, None, EIGHT),
    ),
    "Qwen/Qwen3-32B-FP8": (
        dense(hidden=5120, width=25600, layers=64, heads=64, **QWEN3),
        *({}, 34.33, None, EIGHT),
    ),
    "Qwen/Qwen3-30B-A3B-FP8": (
        qwen3_moe(48, 2048, 768, 32) | {"quantization_config": BLOCKS},
        *({}, 31.17, None, (1, 2)),
    ),
}


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        FP8_CHECKPOINTS,
        *(name for name in FP8_CHECKPOINTS if name not in ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-30B-A3B-FP8")),
    ),
)
def test_published_checkpoints_are_complete_for_every_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    raw, separate, gigabytes, kv_format, fitting = FP8_CHECKPOINTS[name]
    raw = with_modelopt(raw, separate) if separate else raw
    config = family_of(raw).config(raw)
    checkpoint = checkpoint_of(raw, published(config, kv_format is not None))
    assert kv_scheme(checkpoint.config) == kv_format
    shapes: list[Shape] = []
    monkeypatch.setattr(reference, "fp8_linear", lambda weight, _: shapes.append(tuple(weight.data.shape)))
    for size in (1, 2, 4, 8, 16):
        for rank in {0, size - 1}:
            reader = TensorReader(
                checkpoint=checkpoint, dtype=torch.bfloat16, device=META, ranks=Ranks(rank=rank, size=size)
            )
            if size not in fitting:
                with pytest.raises(UserError, match=f"use one of {', '.join(map(str, fitting))}$"):
                    build_target(config, reader)
                continue
            build_target(config, reader)
            if size == 1:
                assert sum(reader.taken.values()) / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert len(shapes) >= 2 * config.num_layers
    assert all(out % 64 == width % 128 == 0 for out, width in shapes)  # what kernels for GPUs take
