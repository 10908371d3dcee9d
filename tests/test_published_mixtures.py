"""The published shapes of mixtures: how their configs are read, what heads fit them, what they take; no weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.checkpoints.checkpoint import build_target, misfits
from specgen.checkpoints.tensor_reader import Checkpoint, TensorReader
from specgen.checkpoints.weight_files import TensorInfo
from specgen.models.eagle import Eagle3Config
from specgen.models.families import family_of
from specgen.models.model_config import TargetConfig
from tests.marks import mostly_slow

Shape = tuple[int, ...]


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }


def qwen3_moe(layers: int, hidden: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def tensors(config: TargetConfig) -> Iterator[tuple[str, str, Shape]]:
    """Names, dtypes and shapes as published."""
    mixture, hidden = config.mixture, config.hidden_size
    assert mixture is not None
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
    infos = {name: TensorInfo(file=Path("x"), shape=s, dtype=d) for name, d, s in tensors(config)}
    checkpoint = Checkpoint(name="published", path=Path(), config=raw, generation={}, tensors=infos)
    reader = TensorReader(checkpoint=checkpoint, dtype=torch.bfloat16, device=torch.device("meta"))
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
