"""Tiny random checkpoints in the public formats."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from specgen.models.families import family_of
from specgen.models.model_config import TargetConfig

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_target(
    path: Path,
    family: Literal["llama", "qwen2", "qwen3"] = "llama",
    *,
    vocab_size: int = 128,
    hidden_size: int = 64,
    num_layers: int = 6,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = 16,
    max_positions: int = 256,
    tied: bool = False,
    biases: bool = False,
    rope: dict[str, Any] | None = None,
    eos_token_id: int | list[int] = 2,
    max_shard_size: str = "5GB",
    std: float = 0.15,
    seed: int = 0,
) -> TargetConfig:
    """Write a random target with ``save_pretrained``; ``std`` spreads the logits so that greedy texts vary."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=std,
        bos_token_id=1,
        eos_token_id=eos_token_id,
        pad_token_id=None,
        **({} if head_dim is None else {"head_dim": head_dim}),
        **({"attention_bias": True, "mlp_bias": True} if biases else {}),
    )
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    written = json.loads((path / "config.json").read_text())
    return family_of(written).config(written)


def write_head(
    path: Path,
    target: TargetConfig,
    dialect: Literal["eagle", "speculators"] = "eagle",
    *,
    hidden_size: int | None = None,
    draft_vocab_size: int | None = 48,
    aux_layer_ids: list[int] | None = None,
    aux_at: Literal["top", "eagle_config"] = "top",
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    qk_norm: bool = False,
    own_embedding: bool = False,
    binary: bool = False,
    std: float = 0.15,
    seed: int = 1,
    changed: dict[str, torch.Tensor | None] | None = None,
    changed_config: dict[str, Any] | None = None,
) -> None:
    """Write a random head for ``target``, as wide as the target unless ``hidden_size`` is given.

    ``draft_vocab_size`` None is the full vocabulary, without d2t.

    ``changed`` replaces, adds or (None) removes tensors at the end, ``changed_config`` top-level settings: for
    checkpoints that must be refused.
    """
    torch.manual_seed(seed)
    width, num_features = hidden_size or target.hidden_size, len(aux_layer_ids or (0, 0, 0))
    prefix = "midlayer." if dialect == "eagle" else "layers.0."
    tensors = _head_tensors(target, width, num_features, prefix, std)
    tensors["lm_head.weight"] = torch.randn(draft_vocab_size or target.vocab_size, width) * std
    if draft_vocab_size is not None:
        tensors |= vocabulary_map(target.vocab_size, draft_vocab_size)
    if qk_norm:
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = 1 + 0.2 * torch.randn(target.head_dim)
    if norm_before_fc:
        tensors["input_norm.weight"] = 1 + 0.2 * torch.randn(num_features * target.hidden_size)
    if fc_norm:
        for i in range(num_features):
            tensors[f"fc_norm.{i}.weight"] = 1 + 0.2 * torch.randn(target.hidden_size)
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(target.vocab_size, width) * std
    flags = {
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
    }
    whole = dialect == "speculators"  # that library saves every field
    config = _head_config(target, width, dialect, qk_norm)
    config |= {name: on for name, on in flags.items() if on or whole}
    if draft_vocab_size is not None:
        config["draft_vocab_size"] = draft_vocab_size
    if aux_layer_ids is not None:
        place = config if aux_at == "top" else config.setdefault("eagle_config", {})
        place["eagle_aux_hidden_state_layer_ids"] = aux_layer_ids
    tensors = {name: tensor for name, tensor in (tensors | (changed or {})).items() if tensor is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | (changed_config or {})))
    if binary:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors")


def vocabulary_map(vocab_size: int, draft_vocab_size: int) -> dict[str, torch.Tensor]:
    """A random choice of target ids as ``d2t`` (offsets) and ``t2d`` (mask)."""
    chosen = torch.randperm(vocab_size)[:draft_vocab_size].sort().values
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[chosen] = True
    return {"d2t": chosen - torch.arange(draft_vocab_size), "t2d": mask}


def _head_tensors(
    target: TargetConfig, hidden: int, num_features: int, prefix: str, std: float
) -> dict[str, torch.Tensor]:
    intermediate = target.intermediate_size
    q_rows, kv_rows = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    shapes = {
        "fc": (hidden, num_features * target.hidden_size),
        f"{prefix}self_attn.q_proj": (q_rows, 2 * hidden),
        f"{prefix}self_attn.k_proj": (kv_rows, 2 * hidden),
        f"{prefix}self_attn.v_proj": (kv_rows, 2 * hidden),
        f"{prefix}self_attn.o_proj": (hidden, q_rows),
        f"{prefix}mlp.gate_proj": (intermediate, hidden),
        f"{prefix}mlp.up_proj": (intermediate, hidden),
        f"{prefix}mlp.down_proj": (hidden, intermediate),
    }
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    tensors = {f"{name}.weight": torch.randn(shape) * std for name, shape in shapes.items()}
    tensors |= {f"{prefix}{name}.weight": 1 + 0.2 * torch.randn(hidden) for name in norms}
    return tensors | {"norm.weight": 1 + 0.2 * torch.randn(hidden)}


def _head_config(target: TargetConfig, hidden: int, dialect: str, qk_norm: bool) -> dict[str, Any]:
    other = {} if hidden == target.hidden_size else {"target_hidden_size": target.hidden_size}
    layer = {
        "model_type": "qwen3" if qk_norm else "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_positions,
        "hidden_act": "silu",
    }
    if dialect == "eagle":
        return layer | other | {"architectures": ["LlamaForCausalLMEagle3"], "dtype": "float32"}
    return other | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": [target.architecture]}},
        "transformer_layer_config": layer,
        "dtype": "float32",
    }
