"""What the ``config.json`` of a Qwen3-MoE says of its experts; no torch."""

from specgen.config import require, shown
from specgen.models.config_fields import Raw, count, flag, items
from specgen.models.mixture_config import MixtureConfig, num_chosen, num_experts
from specgen.models.model_config import TargetConfig


def read(config: Raw) -> TargetConfig:
    """A Qwen3 of which all layers, every n-th one, or none are mixtures."""
    step, dense = count(config, "decoder_sparse_step", 1), items(config, "mlp_only_layers")
    require(
        all(type(layer) is int for layer in dense),
        f"mlp_only_layers is {shown(dense)}: it must be a list of layer numbers",
    )
    layers = tuple(
        layer not in dense and (layer + 1) % step == 0 for layer in range(count(config, "num_hidden_layers"))
    )
    if not any(layers):
        return TargetConfig.from_hf(config, qk_norm=True)
    mixture = MixtureConfig(
        num_experts=num_experts(config),
        num_chosen=num_chosen(config),
        width=count(config, "moe_intermediate_size"),
        layers=layers,
        weights="normalized" if flag(config, "norm_topk_prob") else "softmax",
        router="gate",
    )
    return TargetConfig.from_hf(config, qk_norm=True, mixture=mixture)
