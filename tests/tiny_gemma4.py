"""Tiny random Gemma 4s of each size in the public formats."""

import json
from pathlib import Path
from typing import Any, cast

import torch

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
