"""Tiny random hybrids in the public formats, with an MTP layer where it is asked for."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specgen.models.model_config import TargetConfig
from tests.tiny_checkpoints import change_json, change_tensors, read
from tests.tiny_mixtures import TINY

_WIDTHS: dict[str, Any] = {
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
_EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 6}
_EXPERTS |= {"num_experts_per_tok": 2}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_VISION |= {"num_position_embeddings": 16}
CONFIGS = {  # of transformers, by architecture
    "Qwen3NextForCausalLM": "Qwen3NextConfig",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5Config",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeConfig",
}


def write_hybrid(
    path: Path,
    architecture: str = "Qwen3_5ForCausalLM",
    *,
    mtp: bool = False,
    std: float = 0.15,
    seed: int = 0,
    **changes: Any,
) -> TargetConfig:
    """A hybrid of 4 layers, of which the last attends, and 6 experts if it has some; ``changes`` of its config."""
    import transformers

    settings = TINY | _WIDTHS | _EXPERTS | {"initializer_range": std}
    if "Moe" in architecture:
        del settings["intermediate_size"]
    elif "Next" not in architecture:
        settings = {name: value for name, value in settings.items() if name not in _EXPERTS}
    settings |= changes
    if architecture.endswith("ConditionalGeneration"):
        settings = {"text_config": settings, "vision_config": _VISION}
        settings["tie_word_embeddings"] = changes.get("tie_word_embeddings", False)
    torch.manual_seed(seed)
    model: Any = getattr(transformers, architecture)(getattr(transformers, CONFIGS[architecture])(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter, std))
    model.save_pretrained(path)
    if mtp:
        _add_mtp(path, std)
    return read(path)


def _random(name: str, like: Tensor, std: float) -> Tensor:
    """Of such a size that every part of a layer matters."""
    noise = torch.randn(like.shape)
    if name.endswith("embed_tokens.weight"):
        return noise  # less, and rounding differs more behind the norms
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith("norm.weight") or "pre_fc_norm" in name:  # 1 is added to it
        return 0.2 * noise
    if name.endswith(("A_log", "dt_bias")):
        return noise.abs() if name.endswith("dt_bias") else noise - 1
    if name.endswith("conv1d.weight"):
        return 0.5 * noise
    if "in_proj_qkv" in name:
        return 1.5 * std * noise  # else what is read is as small as the epsilon of the norm behind it
    if name.endswith(".gate.weight"):
        return 3 * std * noise  # else the experts weigh alike
    return std * noise


def _add_mtp(path: Path, std: float) -> None:
    """A layer of the shapes of the target's last, in its one file, as Qwen names it."""
    tensors = load_file(path / "model.safetensors")
    settings = json.loads((path / "config.json").read_text())
    settings = settings.get("text_config", settings)
    hidden, last = settings["hidden_size"], f"layers.{settings['num_hidden_layers'] - 1}."
    shapes = {
        f"mtp.layers.0.{name.partition(last)[2]}": tensor for name, tensor in tensors.items() if last in name
    }
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes |= {f"mtp.{name}.weight": torch.empty(hidden) for name in norms}
    shapes["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden)
    change_tensors(path, {name: _random(name, shape, std) for name, shape in shapes.items()})
    change_json(path / "config.json", mtp_num_hidden_layers=1)
