"""Tiny random mixtures of experts in the public formats, plain and in MXFP4."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specgen.models.model_config import TargetConfig
from tests.tiny_checkpoints import change_tensors, read

WINDOW = 8
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 64,
    "truncate": False,
}

TINY: dict[str, Any] = {  # what every tiny target of a family that ``transformers`` writes is like
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "eos_token_id": 2,
    "pad_token_id": None,
}


def write_gpt_oss(path: Path, *, std: float = 0.1, seed: int = 0, **changes: Any) -> TargetConfig:
    """A GPT-OSS of 4 layers and 6 experts, 2 per token, with sinks and gates that matter; ``changes`` of its config."""
    import transformers

    settings = {
        "intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_local_experts": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "rope_parameters": YARN,
        "initializer_range": std,
    }
    config = transformers.GptOssConfig(**TINY | settings | changes)
    torch.manual_seed(seed)
    return _save(transformers.GptOssForCausalLM(config), path)


def write_qwen3_moe(path: Path, *, std: float = 0.1, seed: int = 0, **changes: Any) -> TargetConfig:
    """A Qwen3-MoE of 6 layers and 6 experts, 2 per token; ``changes`` of its config."""
    import transformers

    settings = {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_experts": 6,
        "norm_topk_prob": True,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": std,
    }
    config = transformers.Qwen3MoeConfig(**TINY | settings | changes)
    torch.manual_seed(seed)
    return _save(transformers.Qwen3MoeForCausalLM(config), path)


def _save(model: Any, path: Path) -> TargetConfig:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
            elif name.endswith("sinks"):
                parameter.normal_(1.0, 1.5)
            elif name.endswith(("router.weight", "mlp.gate.weight")):
                parameter.mul_(3)  # else the experts weigh alike
            elif name.endswith("gate_up_proj"):
                parameter.mul_(9)  # else nothing is clamped
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
    model.save_pretrained(path)
    return read(path)


def change(path: Path, tensors: dict[str, Tensor | None], **config: Any) -> None:
    """Replace, add or (None) remove tensors and settings of a checkpoint in one file."""
    change_tensors(path, tensors)
    file = path / "config.json"
    settings = json.loads(file.read_text()) | config
    file.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


def packed_in_mxfp4(path: Path) -> TargetConfig:
    """Turn the GPT-OSS in ``path`` into one in MXFP4: random blocks of the size that its experts had."""
    tensors: dict[str, Tensor | None] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            count, num_in, num_out = tensor.shape
            shape = (count, num_out, num_in // 32)
            tensors[name] = None
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    change(path, tensors, quantization_config=quantization)
    return read(path)


def in_one_tensor(path: Path) -> None:
    """Turn the Qwen3-MoE in ``path``, with tensors for each expert, into one with two for all of a layer's."""
    config, stored = read(path), load_file(path / "model.safetensors")
    assert config.mixture is not None
    fused: dict[str, Tensor | None] = {name: None for name in stored if ".experts." in name}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack(
                [stored[f"{prefix}{e}.{name}_proj.weight"] for e in range(config.mixture.num_experts)]
            )
            for name in ("gate", "up", "down")
        )
        fused |= {f"{prefix}gate_up_proj": torch.cat((gate, up), 1), f"{prefix}down_proj": down}
    change(path, fused)
