"""What the ``config.json`` of a Qwen3-MoE says of its experts; no torch."""

from specgen.config import require, shown
from specgen.models.config_fields import Raw, count, flag, items
from specgen.models.model_config import MixtureConfig, TargetConfig


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
    window = config.get("sliding_window") if flag(config, "use_sliding_window") else None
    require(
        window is None,  # whatever layer_types says: transformers does not ask them
        f"sliding_window is {shown(window)} and in use: a target of this family needs full attention in all layers",
    )
    if not any(layers):
        return TargetConfig.from_hf(config, qk_norm=True)
    mixture = MixtureConfig(
        num_experts=count(config, "num_experts"),
        num_chosen=count(config, "num_experts_per_tok"),
        width=count(config, "moe_intermediate_size"),
        layers=layers,
        weights="normalized" if flag(config, "norm_topk_prob") else "softmax",
        router="gate",
    )
    return TargetConfig.from_hf(config, qk_norm=True, mixture=mixture)
