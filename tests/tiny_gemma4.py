"""Tiny random Gemma 4s of each size in the public formats."""

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from specgen.models.gemma4 import Gemma4Config
from tests.tiny_checkpoints import change_json, read
from tests.tiny_mixtures import TINY

WINDOW = 6
_KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
_COMMON: dict[str, Any] = {
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": _KINDS * 2,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 3.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "rope_parameters": {  # of which in 256 positions all that turn differ
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    },
}
_OF_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_PLAIN = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128}
SIZES: dict[str, dict[str, Any]] = {
    "31b": _PLAIN | _OF_KEYS,
    "26b": _PLAIN
    | _OF_KEYS
    | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40},
    "e2b": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "12b": _OF_KEYS,
}


def write_gemma4(
    path: Path, size: str = "31b", *, wrapped: bool = False, std: float = 0.15, seed: int = 0, **changes: Any
) -> Gemma4Config:
    """A Gemma 4 of 6 layers like one of ``SIZES``, ``wrapped`` as with images; ``changes`` of its config."""
    import transformers

    settings = {name: value for name, value in TINY.items() if name != "num_experts_per_tok"}
    settings |= _COMMON | SIZES[size] | {"pad_token_id": 0, "initializer_range": std} | changes
    name = "Gemma4Unified" if size == "12b" else "Gemma4"
    config: Any = getattr(transformers, f"{name}TextConfig")(**settings)
    if wrapped:
        outer = getattr(transformers, f"{name}Config")
        config = outer(text_config=config.to_dict(), vision_config=None, audio_config=None)
    torch.manual_seed(seed)
    model: Any = getattr(transformers, f"{name}For{'ConditionalGeneration' if wrapped else 'CausalLM'}")(
        config
    )
    with torch.no_grad():
        for kind, each in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(each.shape)
            if kind.endswith("layer_scalar"):
                each.copy_(0.8 + 0.1 * noise)
            elif (
                kind.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "scale"))
                and "embed" not in kind
            ):
                each.copy_(1 + 0.2 * noise)
            elif kind.endswith("router.proj.weight"):
                each.copy_(3 * noise)
            elif kind.endswith(("proj", "weight")):
                each.copy_(std * noise)
    model.save_pretrained(path)
    return cast(Gemma4Config, read(path))


def write_assistant(
    path: Path,
    target: Gemma4Config,
    *,
    ordered: tuple[int, int] = (0, 0),
    std: float = 0.2,
    seed: int = 1,
    **changes: Any,
) -> None:
    """A random assistant as published, 32 wide; ``ordered``: centroids, and how many of them are chosen."""
    torch.manual_seed(seed)
    width, wide, vocab = 32, target.hidden_size, target.vocab_size
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    heads, size = target.global_kv_heads
    text = {name: _COMMON[name] for name in ("rope_parameters", "sliding_window")} | {
        "model_type": "gemma4_text",
        "attention_k_eq_v": target.keys_are_values,
        "final_logit_softcapping": None,
        "global_head_dim": size,
        "num_global_key_value_heads": heads,
        "head_dim": target.head_dim,
        "num_key_value_heads": target.num_kv_heads,
        "num_attention_heads": target.num_heads,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": width,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 48,
        "layer_types": kinds,
        "max_position_embeddings": 256,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "vocab_size_per_layer_input": 0,
    }
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, width) * std,
        "model.norm.weight": 1 + 0.2 * torch.randn(width),
        "pre_projection.weight": torch.randn(width, 2 * wide) * std,
        "post_projection.weight": torch.randn(wide, width) * std,
    }
    for index, kind in enumerate(kinds):
        numbers = target.num_heads * (size if kind == "full_attention" else target.head_dim)
        tensors |= gemma4_layer(f"model.layers.{index}.", width, 48, {"q": numbers, "o": numbers}, std)
        tensors[f"model.layers.{index}.self_attn.q_norm.weight"] = 1 + 0.2 * torch.randn(
            numbers // target.num_heads
        )
    config: dict[str, Any] = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": "float32",
        "backbone_hidden_size": wide,
        "use_ordered_embeddings": ordered != (0, 0),
        "tie_word_embeddings": True,
        "text_config": text,
    }
    if ordered != (0, 0):
        config |= {"num_centroids": ordered[0], "centroid_intermediate_top_k": ordered[1]}
        tensors["masked_embedding.centroids.weight"] = torch.randn(ordered[0], width) * std
        tensors["masked_embedding.token_ordering"] = torch.randperm(vocab)
    write_files(path, tensors, config | changes)


def write_deepspec(
    path: Path,
    target: Gemma4Config,
    kind: str = "eagle3",
    *,
    markov: int = 0,
    own: bool = True,
    std: float = 0.2,
    seed: int = 1,
    **changes: Any,
) -> None:
    """A random head as DeepSpec writes them for Gemma 4, ``kind`` "eagle3" or "dspark"; ``markov``: its rank."""
    torch.manual_seed(seed)
    width, vocab = target.hidden_size, target.vocab_size
    kv, size = target.global_kv_heads
    num_layers, ids = (1, [0, 1, 3, 4]) if kind == "eagle3" else (2, [0, 2, 4])
    numbers, read = target.num_heads * size, 2 * width if kind == "eagle3" else width
    tensors = {
        "fc.weight": torch.randn(width, len(ids) * width) * std,
        "norm.weight": 1 + 0.2 * torch.randn(width),
        ("layers.0." if kind == "eagle3" else "") + "hidden_norm.weight": 1 + 0.2 * torch.randn(width),
    }
    if own:
        tensors |= {f"{name}.weight": torch.randn(vocab, width) * std for name in ("embed_tokens", "lm_head")}
    heads = {"q": numbers, "k": kv * size, "o": numbers}
    heads |= {} if target.keys_are_values else {"v": kv * size}
    for index in range(num_layers):
        prefix = f"layers.{index}."
        tensors |= gemma4_layer(prefix, width, 48, heads, std, read)
        tensors |= {f"{prefix}self_attn.{name}_norm.weight": 1 + 0.2 * torch.randn(size) for name in "qk"}
    config = {name: _COMMON[name] for name in ("rope_parameters", "sliding_window", "eos_token_id")} | {
        "architectures": ["Gemma4Eagle3Model" if kind == "eagle3" else "Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "attention_k_eq_v": target.keys_are_values,
        "final_logit_softcapping": 3.0,
        "global_head_dim": size,
        "num_global_key_value_heads": kv,
        "head_dim": target.head_dim,
        "num_key_value_heads": target.num_kv_heads,
        "num_attention_heads": target.num_heads,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": width,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 48,
        "layer_types": ["full_attention"] * num_layers,
        "max_position_embeddings": 256,
        "num_hidden_layers": num_layers,
        "num_target_layers": target.num_layers,
        "rms_norm_eps": 1e-6,
        "target_layer_ids": ids,
        "tie_word_embeddings": False,
        "use_bidirectional_attention": "vision",
        "vocab_size": vocab,
    }
    if kind == "dspark":
        config |= {"block_size": 5, "mask_token_id": 4, "markov_rank": markov, "num_anchors": 8}
    if markov:
        config |= {
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        tensors |= {
            "markov_head.markov_w1.weight": torch.randn(vocab, markov),
            "markov_head.markov_w2.weight": torch.randn(vocab, markov) * 0.5,
            "confidence_head.proj.weight": torch.randn(1, width + markov) * std,
            "confidence_head.proj.bias": torch.randn(1),
        }
    write_files(path, tensors, config | changes)


def gemma4_layer(
    prefix: str, width: int, inner: int, heads: dict[str, int], std: float, read: int | None = None
) -> dict[str, torch.Tensor]:
    """A layer's tensors but for norms of heads; ``heads`` are the rows of projections, of "o" the columns.

    Its attention has inputs ``read`` wide, or as the stream.
    """
    names = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    shapes = {f"self_attn.{name}_proj": (rows, read or width) for name, rows in heads.items() if name != "o"}
    shapes |= {"self_attn.o_proj": (width, heads["o"]), "mlp.down_proj": (width, inner)}
    shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, width))
    return {
        **{f"{prefix}{name}.weight": 1 + 0.2 * torch.randn(width) for name in names},
        **{f"{prefix}{name}.weight": torch.randn(shape) * std for name, shape in shapes.items()},
        f"{prefix}layer_scalar": 0.8 + 0.1 * torch.randn(1),
    }


def write_files(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))


def as_on_the_hub(path: Path) -> None:
    """Spell the shapes of layers as the published configs do."""
    file = path / "config.json"
    written = json.loads(file.read_text())
    text = written.get("text_config", written)
    shape = text.pop("per_layer_config")["2"]
    text["global_head_dim"] = shape["head_dim"]
    text["num_global_key_value_heads"] = shape.get("num_key_value_heads")
    file.write_text(json.dumps(written))


def change_text(path: Path, **changes: Any) -> None:
    """Fields of the text part's config."""
    file = path / "config.json"
    written = json.loads(file.read_text())
    if "text_config" in written:
        changes = {"text_config": written["text_config"] | changes}
    change_json(file, **changes)
