"""Tiny random checkpoints in the public formats."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

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
    return read(path)


def read(path: Path) -> TargetConfig:
    """The config of the target in ``path``."""
    written = json.loads((path / "config.json").read_text())
    return family_of(written).config(written)


def change_json(file: Path, **changes: Any) -> None:
    """Replace or add fields of a JSON object in ``file``, or of one that is not there yet."""
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | changes))


def change_tensors(path: Path, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a checkpoint in one file."""
    file = path / "model.safetensors"
    changed = load_file(file) | dict(tensors)
    present = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(present, file, metadata={"format": "pt"})


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
    num_layers: int = 1,
    windows: list[int | None] | None = None,
    biases: bool = False,
    reads_output: bool = False,
    mask_token: tuple[str, int] | None = None,
    binary: bool = False,
    std: float = 0.15,
    seed: int = 1,
    changed: dict[str, torch.Tensor | None] | None = None,
    changed_config: dict[str, Any] | None = None,
) -> None:
    """Write a random EAGLE3 or P-EAGLE head for ``target``, as wide as the target unless ``hidden_size`` is given.

    ``draft_vocab_size`` None is the full vocabulary, without d2t; ``windows`` has one for each layer;
    ``reads_output`` is ``use_aux_hidden_state: false``; a ``mask_token``, its key in the config and its id, makes
    a P-EAGLE head.

    ``changed`` replaces, adds or (None) removes tensors at the end, ``changed_config`` top-level settings: for
    checkpoints that must be refused.
    """
    torch.manual_seed(seed)
    width, num_features = hidden_size or target.hidden_size, len(aux_layer_ids or (0, 0, 0))
    single = dialect == "eagle" and num_layers == 1 and mask_token is None
    prefix = "midlayer." if single else "layers.0."
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
    for index in range(1, num_layers):
        tensors |= _later_layer(target, width, f"layers.{index}.", qk_norm, std)
    if mask_token is not None:
        tensors["mask_hidden"] = torch.randn(1, 1, num_features * target.hidden_size)
    if biases:
        tensors |= _biases(tensors, "_proj.weight")
    if reads_output:
        del tensors["fc.weight"]
    flags = {
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
    }
    whole = dialect == "speculators"  # that library saves every field
    config = _head_config(target, width, dialect, qk_norm, num_layers, windows)
    if biases:
        config.get("transformer_layer_config", config).update(attention_bias=True, mlp_bias=True)
    if mask_token is not None:
        config |= _parallel_settings(config, dialect, *mask_token)
    if reads_output:
        config["eagle_config"] = {"use_aux_hidden_state": False}
    config |= {name: on for name, on in flags.items() if on or whole}
    if draft_vocab_size is not None:
        config["draft_vocab_size"] = draft_vocab_size
    if aux_layer_ids is not None:
        place = config if aux_at == "top" else config.setdefault("eagle_config", {})
        place["eagle_aux_hidden_state_layer_ids"] = aux_layer_ids
    _write(path, tensors | (changed or {}), config | (changed_config or {}), binary)


def write_eagle1_head(
    path: Path,
    target: TargetConfig,
    *,
    num_layers: int = 1,
    fc_bias: bool = False,
    qkv_bias: bool = False,
    own_embedding: bool = False,
    binary: bool = False,
    std: float = 0.15,
    seed: int = 1,
    changed: dict[str, torch.Tensor | None] | None = None,
    changed_config: dict[str, Any] | None = None,
) -> None:
    """Write a random EAGLE-1 head for ``target``; nothing in its config says what it is."""
    torch.manual_seed(seed)
    width, prefix = target.hidden_size, "layers.0."
    tensors = _layer_tensors(target, width, width, prefix, std)
    tensors["fc.weight"] = torch.randn(width, 2 * width) * std
    tensors[f"{prefix}post_attention_layernorm.weight"] = 1 + 0.2 * torch.randn(width)
    for index in range(1, num_layers):
        tensors |= _later_layer(target, width, f"layers.{index}.", False, std)
    if fc_bias:
        tensors |= _biases(tensors, "fc.weight")
    if qkv_bias:
        tensors |= _biases(tensors, "q_proj.weight", "k_proj.weight", "v_proj.weight")
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(target.vocab_size, width) * std
    layer = _layer_config(target, width, num_layers)
    del layer["head_dim"]  # hidden_size / num_attention_heads
    config = layer | {"architectures": ["LlamaForCausalLM"], "pad_token_id": 0, "torch_dtype": "float16"}
    config |= {"qkv_bias": True} if qkv_bias else {}
    config |= {} if fc_bias else {"bias": False}  # absent, it is true
    tensors = {name: tensor.half() for name, tensor in tensors.items()}
    _write(path, tensors | (changed or {}), config | (changed_config or {}), binary)


def write_dflash_head(
    path: Path,
    target: TargetConfig,
    dialect: Literal["z-lab", "speculators", "DeepSpec"] = "z-lab",
    *,
    block_size: int = 6,
    mask_token_id: int = 6,
    layer_ids: tuple[int, ...] = (0, 2, 4),
    num_layers: int = 2,
    nested: bool = False,
    draft_vocab_size: int | None = None,
    own: bool = False,
    qk_norm: bool = True,
    windows: list[int | None] | None = None,
    markov: tuple[str, int] | None = None,
    confidence: bool = False,
    second: tuple[int, int, int] | None = None,
    mask_embedding: bool = False,
    biases: bool = False,
    std: float = 0.15,
    seed: int = 1,
    changed: dict[str, torch.Tensor | None] | None = None,
    changed_config: dict[str, Any] | None = None,
) -> None:
    """Write a random DFlash head, or with ``markov``, its kind and rank, a DSpark head.

    ``layer_ids`` are as the dialect has them: outputs of layers, or speculators' inputs. ``nested`` puts the settings
    of the block into ``dflash_config``, ``second`` makes it a DFlash2 head: taps and groups of its convolutions and the
    number of candidates, with scaled embeddings and logits. ``own`` adds embedding and output weights,
    ``mask_embedding`` a file of its own for that of the mask token. ``changed``: as of ``write_head``.
    """
    torch.manual_seed(seed)
    width, drafted = target.hidden_size, draft_vocab_size or target.vocab_size
    tensors = {"fc.weight": torch.randn(width, len(layer_ids) * width) * std}
    tensors |= {name: 1 + 0.2 * torch.randn(width) for name in ("hidden_norm.weight", "norm.weight")}
    for index in range(num_layers):
        tensors |= _later_layer(target, width, f"layers.{index}.", qk_norm, std)
    if biases:
        tensors |= _biases(tensors, "q_proj.weight", "k_proj.weight", "v_proj.weight")
    if own:
        tensors["embed_tokens.weight"] = torch.randn(target.vocab_size, width) * std
    if own or draft_vocab_size is not None:
        tensors["lm_head.weight"] = torch.randn(drafted, width) * std
    if draft_vocab_size is not None:
        tensors |= vocabulary_map(target.vocab_size, draft_vocab_size)
    settings: dict[str, Any] = {"block_size": block_size, "mask_token_id": mask_token_id}
    settings["aux_hidden_state_layer_ids" if dialect == "speculators" else "target_layer_ids"] = list(
        layer_ids
    )
    if markov is not None:
        kind, rank = markov
        settings |= {"markov_head_type": kind, "markov_rank": rank}
        tensors["markov_head.markov_w1.weight"] = torch.randn(target.vocab_size, rank)
        tensors["markov_head.markov_w2.weight"] = torch.randn(drafted, rank) * 0.5
        shapes = {
            "gated": ("gate_proj", rank, width + rank),
            "rnn": ("joint_proj", 3 * rank, 2 * rank + width),
        }
        if kind in shapes:
            name, *shape = shapes[kind]
            tensors[f"markov_head.{name}.weight"] = torch.randn(shape) * 0.3
            tensors[f"markov_head.{name}.bias"] = torch.randn(shape[0])
    if confidence:
        settings |= {"enable_confidence_head": True, "confidence_head_with_markov": markov is not None}
        tensors["confidence_head.proj.weight"] = torch.randn(1, width + (markov[1] if markov else 0)) * std
        tensors["confidence_head.proj.bias"] = torch.randn(1)
    if second is not None:
        tensors |= _second_version(target, num_layers, *second)
        taps, groups, candidates = second
        settings |= {"conv_kernel_size": taps, "conv_group_size": width // groups, "selector_rank": 4}
        settings |= {"selector_top_k": candidates, "input_embedding_scale": 1.5, "output_multiplier": 0.7}
        settings |= {"final_logit_softcapping": 3.0}
    layer = _layer_config(target, width, num_layers) | {"model_type": "qwen3"}
    if biases:
        layer |= {"attention_bias": True}
    if windows is not None:
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        layer |= {
            "layer_types": kinds,
            "sliding_window": next(filter(None, windows)),
            "use_sliding_window": True,
        }
    config: dict[str, Any] = {"dtype": "float32"}
    if draft_vocab_size is not None:
        config["draft_vocab_size"] = draft_vocab_size
    if dialect == "speculators":
        version = "" if second is None else "2"
        config |= {"architectures": [f"DFlash{version}DraftModel"]}
        config |= {"speculators_model_type": f"dflash{version}"}
        config |= {"transformer_layer_config": layer}
    else:
        config |= layer | {
            "architectures": ["Qwen3DSparkModel" if dialect == "DeepSpec" else "DFlashDraftModel"],
            "num_target_layers": target.num_layers,
        }
    config |= {"dflash_config": settings} if nested else settings
    _write(path, tensors | (changed or {}), config | (changed_config or {}), binary=False)
    if mask_embedding:
        saved = {"mask_token_id": mask_token_id, "embedding": torch.randn(width) * std}
        torch.save(saved, path / "mask_embedding.pt")


def _second_version(
    target: TargetConfig, num_layers: int, taps: int, groups: int, candidates: int
) -> dict[str, torch.Tensor]:
    """The tensors that a DFlash2 head has in addition."""
    width, rank = target.hidden_size, 4
    tensors = {
        f"candidate_selector.{name}": torch.randn(target.vocab_size, rank)
        for name in ("predecessor_codebook", "successor_codebook")
    }
    tensors["candidate_selector.hidden_projection.weight"] = torch.randn(rank, width) * 0.1
    for prefix in (f"layers.{i}.{part}_conv." for i in range(num_layers) for part in ("attention", "mlp")):
        tensors[f"{prefix}base_kernel"] = torch.randn(2, taps, width) * 0.5
        tensors[f"{prefix}base_kernel"][:, 0] += 1
        tensors[f"{prefix}kernel_projection.weight"] = torch.randn(2 * taps * groups, width) * 0.1
    return tensors


def _write(
    path: Path, tensors: Mapping[str, torch.Tensor | None], config: dict[str, Any], binary: bool
) -> None:
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(present, path / "pytorch_model.bin")
    else:
        save_file(present, path / "model.safetensors")


def vocabulary_map(vocab_size: int, draft_vocab_size: int) -> dict[str, torch.Tensor]:
    """A random choice of target ids as ``d2t`` (offsets) and ``t2d`` (mask)."""
    chosen = torch.randperm(vocab_size)[:draft_vocab_size].sort().values
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[chosen] = True
    return {"d2t": chosen - torch.arange(draft_vocab_size), "t2d": mask}


def _head_tensors(
    target: TargetConfig, hidden: int, num_features: int, prefix: str, std: float
) -> dict[str, torch.Tensor]:
    fc = {"fc.weight": torch.randn(hidden, num_features * target.hidden_size) * std}
    tensors = fc | _layer_tensors(target, hidden, 2 * hidden, prefix, std)
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    tensors |= {f"{prefix}{name}.weight": 1 + 0.2 * torch.randn(hidden) for name in norms}
    return tensors | {"norm.weight": 1 + 0.2 * torch.randn(hidden)}


def _later_layer(
    target: TargetConfig, hidden: int, prefix: str, qk_norm: bool, std: float
) -> dict[str, torch.Tensor]:
    """A layer after the first: it reads neither the embedding nor a feature."""
    tensors = _layer_tensors(target, hidden, hidden, prefix, std)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = 1 + 0.2 * torch.randn(hidden)
    for name in ("q_norm", "k_norm") if qk_norm else ():
        tensors[f"{prefix}self_attn.{name}.weight"] = 1 + 0.2 * torch.randn(target.head_dim)
    return tensors


def _biases(tensors: Mapping[str, torch.Tensor], *endings: str) -> dict[str, torch.Tensor]:
    """One for each weight whose name ends so."""
    weights = {name: weight for name, weight in tensors.items() if name.endswith(endings)}
    return {name.replace(".weight", ".bias"): torch.randn(len(weight)) for name, weight in weights.items()}


def _layer_tensors(
    target: TargetConfig, hidden: int, num_in: int, prefix: str, std: float
) -> dict[str, torch.Tensor]:
    """The matrices of a layer of width ``hidden`` whose attention reads ``num_in`` numbers."""
    intermediate = target.intermediate_size
    q_rows, kv_rows = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    shapes = {
        "self_attn.q_proj": (q_rows, num_in),
        "self_attn.k_proj": (kv_rows, num_in),
        "self_attn.v_proj": (kv_rows, num_in),
        "self_attn.o_proj": (hidden, q_rows),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    return {f"{prefix}{name}.weight": torch.randn(shape) * std for name, shape in shapes.items()}


def _layer_config(target: TargetConfig, hidden: int, num_layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_positions,
        "hidden_act": "silu",
    }


def _head_config(
    target: TargetConfig,
    hidden: int,
    dialect: str,
    qk_norm: bool,
    num_layers: int,
    windows: list[int | None] | None,
) -> dict[str, Any]:
    other = {} if hidden == target.hidden_size else {"target_hidden_size": target.hidden_size}
    layer = _layer_config(target, hidden, num_layers) | ({"model_type": "qwen3"} if qk_norm else {})
    if windows is not None:
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        layer |= {"layer_types": kinds, "sliding_window": next(filter(None, windows))}
        layer |= {"use_sliding_window": True}
    if dialect == "eagle":
        return layer | other | {"architectures": ["LlamaForCausalLMEagle3"], "dtype": "float32"}
    return other | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "embed_requires_grad": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": [target.architecture]}},
        "transformer_layer_config": layer,
        "dtype": "float32",
    }


def _parallel_settings(config: dict[str, Any], dialect: str, key: str, mask_token: int) -> dict[str, Any]:
    """What a P-EAGLE head's config says differently."""
    if dialect == "eagle":
        return {"parallel_drafting": True, key: mask_token}
    return {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_config": config["speculators_config"] | {"algorithm": "peagle"},
        key: mask_token,
    }
