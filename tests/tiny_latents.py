"""Tiny random targets with latent attention in the public formats, with MTP layers where they are asked for."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from specgen.models.model_config import TargetConfig
from tests.tiny_checkpoints import change_json, change_tensors, read
from tests.tiny_mixtures import TINY
from tests.tiny_mixtures import YARN as OF_MIXTURES

YARN = OF_MIXTURES | {"mscale": 1.0, "mscale_all_dim": 0.7}
del YARN["truncate"]
GLM = {  # widths of GLM-4.7-Flash, which kernels for GPUs take
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}


def write_latent(
    path: Path,
    family: Literal["glm", "deepseek"] = "glm",
    *,
    num_mtp: int = 0,
    own: bool = False,
    std: float = 0.15,
    seed: int = 0,
    **changes: Any,
) -> TargetConfig:
    """A GLM-4.7-Flash or DeepSeek-V3 of 3 layers and 8 experts; ``changes`` of its config.

    Its ``num_mtp`` MTP layers have an embedding and output weights of their ``own``, or the target's.
    """
    import transformers

    settings: dict[str, Any] = {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "kv_lora_rank": 24,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 20,
        "initializer_range": std,
    }
    if family == "deepseek":
        settings |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": YARN}
        settings |= {"num_experts_per_tok": 3}
    kinds = {
        "glm": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
        "deepseek": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    }
    config_class, model_class = kinds[family]
    torch.manual_seed(seed)
    model: Any = model_class(config_class(**TINY | settings | changes))
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(0.0, 3 * std)
            elif name.endswith("e_score_correction_bias"):
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(path)
    if num_mtp:
        _add_mtp(path, num_mtp, own, std)
    return read(path)


def _add_mtp(path: Path, num_mtp: int, own: bool, std: float) -> None:
    """Layers of the shapes of the target's last, in its one file, as DeepSeek names them."""
    settings = json.loads((path / "config.json").read_text())
    tensors, first = load_file(path / "model.safetensors"), settings["num_hidden_layers"]
    hidden, vocab = settings["hidden_size"], settings["vocab_size"]
    last = f"model.layers.{first - 1}."
    shapes = {name.removeprefix(last): t.shape for name, t in tensors.items() if name.startswith(last)}
    shapes |= {
        name: torch.Size((hidden,)) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    }
    shapes["eh_proj.weight"] = torch.Size((hidden, 2 * hidden))
    if own:
        shapes |= {
            name: torch.Size((vocab, hidden)) for name in ("embed_tokens.weight", "shared_head.head.weight")
        }
    for index in range(first, first + num_mtp):
        tensors |= {
            f"model.layers.{index}.{name}": _random(name, shape, std) for name, shape in shapes.items()
        }
    change_tensors(path, tensors)
    change_json(path / "config.json", num_nextn_predict_layers=num_mtp)


def _random(name: str, shape: torch.Size, std: float) -> Tensor:
    if name.endswith("norm.weight"):
        return 1 + 0.2 * torch.randn(shape)
    return torch.randn(shape) * (0.3 if name.endswith("bias") else std)
