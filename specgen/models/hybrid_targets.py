"""What the ``config.json`` of hybrids says: of Gated DeltaNet in most layers and attention in the others; no torch."""

from typing import Literal

from specgen.config import require, shown
from specgen.models.config_fields import Raw, count, flag, items
from specgen.models.mixture_targets import sparse_layers
from specgen.models.model_config import DeltaConfig, MixtureConfig, TargetConfig


def read_qwen3_5(config: Raw) -> TargetConfig:
    """Qwen3.5 and what is built like it: Qwen3.6, Qwen3.8."""
    return _read(config, None)


def read_qwen3_5_moe(config: Raw) -> TargetConfig:
    """The same with experts in all layers, beside a gated one that all tokens go through."""
    mixture = _mixture(config, (True,) * count(config, "num_hidden_layers"), "normalized")
    return _read({**config, "intermediate_size": mixture.width}, mixture)  # which no layer has


def read_qwen3_next(config: Raw) -> TargetConfig:
    """Their predecessor, in which all layers, every n-th one, or none have experts."""
    layers = sparse_layers(config)
    weights: Literal["softmax", "normalized"] = "normalized" if flag(config, "norm_topk_prob") else "softmax"
    return _read(config, _mixture(config, layers, weights) if any(layers) else None)


def _read(config: Raw, mixture: MixtureConfig | None) -> TargetConfig:
    return TargetConfig.from_hf(
        {**config, "layer_types": None},  # none has a window
        qk_norm=True,
        query_gates=True,
        norm_casts_last=True,
        norm_adds_one=True,
        mixture=mixture,
        delta=_delta(config),
    )


_RECURRENT = {"full_attention": False, "linear_attention": True}


def _delta(config: Raw) -> DeltaConfig | None:
    """Read which layers are such ones, and their widths; None where all attend."""
    kinds, num_layers = items(config, "layer_types"), count(config, "num_hidden_layers")
    for kind in kinds:
        require(
            isinstance(kind, str) and kind in _RECURRENT,
            f"layer_types has {shown(kind)}: only {' and '.join(_RECURRENT)} are supported",
        )
    interval = count(config, "full_attention_interval")
    layers = tuple(_RECURRENT[kind] for kind in kinds) or tuple(
        (layer + 1) % interval != 0 for layer in range(num_layers)
    )
    require(
        len(layers) == num_layers,
        f"layer_types names {len(layers)} layers, num_hidden_layers {num_layers}: config.json is wrong",
    )
    require(
        not all(layers),
        "no layer has full attention: a hybrid needs some, config.json is of another family",
    )
    found = DeltaConfig(
        layers=layers,
        num_key_heads=count(config, "linear_num_key_heads"),
        num_value_heads=count(config, "linear_num_value_heads"),
        key_dim=count(config, "linear_key_head_dim"),
        value_dim=count(config, "linear_value_head_dim"),
        num_taps=count(config, "linear_conv_kernel_dim"),
    )
    return found if any(layers) else None


def _mixture(
    config: Raw, layers: tuple[bool, ...], weights: Literal["softmax", "normalized"]
) -> MixtureConfig:
    return MixtureConfig(
        num_experts=count(config, "num_experts"),
        num_chosen=count(config, "num_experts_per_tok"),
        width=count(config, "moe_intermediate_size"),
        layers=layers,
        weights=weights,
        router="gate",
        shared_width=count(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
