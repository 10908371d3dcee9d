"""Tiny random Llama-4s and their EAGLE heads in the public formats."""

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

from specgen.models.llama4 import Llama4Config
from specgen.models.model_config import TargetConfig
from tests.tiny_checkpoints import change_tensors, read
from tests.tiny_mixtures import TINY

CHUNK = 16
_WIDTHS: dict[str, Any] = {
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_chunk_size": CHUNK,
    "floor_scale": 10,
    "attn_scale": 0.7,
    "bos_token_id": 1,
}
_VISION = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}


def write_llama4(
    path: Path, architecture: str = "Llama4ForCausalLM", *, std: float = 0.15, seed: int = 0, **changes: Any
) -> Llama4Config:
    """A Llama-4 of 6 layers, of which the fourth has no positions, and 6 experts; ``changes`` of its config."""
    import transformers

    settings = TINY | _WIDTHS | {"initializer_range": std} | changes
    if architecture == "Llama4ForCausalLM":
        config: Any = transformers.Llama4TextConfig(**settings)
    else:
        config = transformers.Llama4Config(text_config=settings, vision_config=_VISION)
    torch.manual_seed(seed)
    model: Any = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("router.weight"):
                parameter.copy_(2 * std * noise)  # else all weigh one half
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.copy_(1.5 * std * noise)  # else what positions do is small
            else:
                parameter.copy_(std * noise)
    model.save_pretrained(path)
    return cast(Llama4Config, read(path))


def one_by_one(path: Path) -> None:
    """Turn the Llama-4 in ``path`` into one with tensors for each expert, as its FP8 is published."""
    tensors: dict[str, torch.Tensor | None] = {}
    for name, stored in load_file(path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        tensors[name] = None
        prefix, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(stored.mT):
            parts = {"gate_proj": matrix[: len(matrix) // 2], "up_proj": matrix[len(matrix) // 2 :]}
            parts = parts if kind == "gate_up_proj" else {kind: matrix}
            tensors |= {f"{prefix}.{expert}.{part}.weight": rows for part, rows in parts.items()}
    change_tensors(path, tensors)


def write_eagle_llama4(
    path: Path,
    target: TargetConfig,
    *,
    num_layers: int = 1,
    chunk: int = CHUNK,
    own_embedding: bool = False,
    own_lm_head: bool = False,
    qk_norm: bool = True,
    std: float = 0.15,
    seed: int = 1,
    changed: dict[str, torch.Tensor | None] | None = None,
    changed_config: dict[str, Any] | None = None,
) -> None:
    """A random EAGLE head for ``target``, of whatever family that is."""
    torch.manual_seed(seed)
    hidden, inner, size = target.hidden_size, target.intermediate_size, target.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden), "norm.weight": (hidden,)}
    for layer in range(num_layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (target.num_heads * size, hidden),
            "self_attn.k_proj": (target.num_kv_heads * size, hidden),
            "self_attn.v_proj": (target.num_kv_heads * size, hidden),
            "self_attn.o_proj": (hidden, target.num_heads * size),
            "feed_forward.gate_proj": (inner, hidden),
            "feed_forward.up_proj": (inner, hidden),
            "feed_forward.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    if own_embedding:
        shapes["embed_tokens.weight"] = (target.vocab_size, hidden)
    if own_lm_head:
        shapes["lm_head.weight"] = (target.vocab_size, hidden)
    tensors: dict[str, torch.Tensor | None] = {
        name: 1 + 0.2 * torch.randn(shape) if len(shape) == 1 else std * torch.randn(shape)
        for name, shape in shapes.items()
    }
    tensors |= changed or {}
    config = {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "attention_chunk_size": chunk,
        "head_dim": size,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "interleave_moe_layer_step": 0,
        "intermediate_size": 8,
        "intermediate_size_mlp": inner,
        "max_position_embeddings": target.max_positions,
        "moe_layers": [],
        "no_rope_layers": [1] * num_layers,
        "num_attention_heads": target.num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": target.num_kv_heads,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "torch_dtype": "float32",
        "use_qk_norm": qk_norm,
        "vocab_size": target.vocab_size,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | (changed_config or {})))
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(present, path / "model.safetensors", metadata={"format": "pt"})
