"""The published FP8 checkpoints: how configs are read, what weights take, which ranks can share them; no weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.checkpoints.checkpoint import build_target
from specgen.checkpoints.tensor_reader import Checkpoint, TensorReader
from specgen.checkpoints.weight_files import TensorInfo
from specgen.config import UserError
from specgen.device import Ranks
from specgen.models.families import family_of
from specgen.models.fp8_config import kv_scheme, with_modelopt
from specgen.models.model_config import TargetConfig
from specgen.ops import reference
from tests.marks import mostly_slow
from tests.test_published_mixtures import qwen3_moe, tensors

Shape = tuple[int, ...]
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def dense(family: str, hidden: int, width: int, layers: int, heads: int, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": width,
        "max_position_embeddings": 131072,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
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
    assert fp8 is not None
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


# quantization_config, hf_quant_config.json, GB of weights, the format of the KV cache, numbers of ranks
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], float, str | None, list[int]]] = {
    "nvidia/Llama-3.3-70B-Instruct-FP8": (
        dense("Llama", 8192, 28672, 80, 64, rope_scaling=LLAMA3),
        {},
        MODELOPT,
        72.68,
        "FP8",
        [1, 2, 4, 8, 16],
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": (
        dense("Llama", 4096, 14336, 32, 32, rope_scaling=LLAMA3),
        DYNAMIC,
        {},
        9.09,
        None,
        [1, 2, 4, 8, 16],
    ),
    "neuralmagic/Meta-Llama-3-8B-Instruct-FP8": (
        dense("Llama", 4096, 14336, 32, 32),
        AUTO,
        {},
        9.09,
        None,
        [1, 2, 4, 8, 16],
    ),
    "RedHatAI/Qwen2.5-7B-Instruct-FP8-dynamic": (
        dense("Qwen2", 3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064),
        DYNAMIC,
        {},
        8.71,
        None,
        [1, 2, 4],
    ),
    "Qwen/Qwen3-0.6B-FP8": (
        dense("Qwen3", 1024, 3072, 28, 16, vocab_size=151936, tie_word_embeddings=True),
        BLOCKS,
        {},
        0.75,
        None,
        [1, 2, 4, 8],
    ),
    "Qwen/Qwen3-32B-FP8": (
        dense("Qwen3", 5120, 25600, 64, 64, vocab_size=151936),
        BLOCKS,
        {},
        34.33,
        None,
        [1, 2, 4, 8],
    ),
    "Qwen/Qwen3-30B-A3B-FP8": (qwen3_moe(48, 2048, 768, 32), BLOCKS, {}, 31.17, None, [1, 2]),
}


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        PUBLISHED,
        *(name for name in PUBLISHED if name not in ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-30B-A3B-FP8")),
    ),
)
def test_published_checkpoints_are_complete_for_every_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    raw, stated, separate, gigabytes, kv_format, fitting = PUBLISHED[name]
    raw = raw | ({"quantization_config": stated} if stated else {})
    raw = with_modelopt(raw, separate) if separate else raw
    config = family_of(raw).config(raw)
    infos = {
        tensor: TensorInfo(file=Path("x"), shape=shape, dtype=dtype)
        for tensor, dtype, shape in published(config, kv_format is not None)
    }
    checkpoint = Checkpoint(name=name, path=Path(), config=raw, generation={}, tensors=infos)
    assert kv_scheme(checkpoint.config) == kv_format
    shapes: list[Shape] = []
    monkeypatch.setattr(reference, "fp8_linear", lambda weight, _: shapes.append(tuple(weight.data.shape)))
    meta = torch.device("meta")
    for size in (1, 2, 4, 8, 16):
        for rank in {0, size - 1}:
            reader = TensorReader(
                checkpoint=checkpoint,
                dtype=torch.bfloat16,
                device=meta,
                ranks=Ranks(rank=rank, size=size),
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
