"""What the ``config.json`` of hybrids says: of Gated DeltaNet in most layers and attention in the others; no torch."""

from typing import Literal

from specgen.models.config_fields import Raw, count, flag
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
        delta=DeltaConfig.from_hf(config),
    )


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
