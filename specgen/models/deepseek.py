"""What the ``config.json`` of a DeepSeek-V3 or a GLM-4.7-Flash says, which is one architecture; no torch."""

from specgen.config import require, shown
from specgen.models.config_fields import Raw, count, flag, items, number
from specgen.models.model_config import LatentConfig, MixtureConfig, SigmoidWeights, TargetConfig

_KINDS = {"dense": False, "sparse": True}


def read(config: Raw) -> TargetConfig:
    """Latent attention, and behind the first dense layers experts beside one that all tokens go through."""
    layers, latent = _mixtures(config), LatentConfig.from_hf(config)
    num_heads = count(config, "num_attention_heads")
    num_kv_heads = count(config, "num_key_value_heads", num_heads)
    require(
        num_kv_heads == num_heads,
        f"num_key_value_heads is {num_kv_heads} of {num_heads} heads: latents are of all heads, config.json is wrong",
    )
    mixture = mixture_of(config, layers) if any(layers) else None
    return TargetConfig.from_hf({**config, "head_dim": latent.key_dim}, mixture=mixture, latent=latent)


def mixture_of(config: Raw, layers: tuple[bool, ...]) -> MixtureConfig:
    """The experts of ``layers``."""
    width = count(config, "moe_intermediate_size")
    return MixtureConfig(
        num_experts=count(config, "n_routed_experts"),
        num_chosen=count(config, "num_experts_per_tok"),
        width=width,
        layers=layers,
        weights=SigmoidWeights(
            num_groups=count(config, "n_group"),
            num_chosen_groups=count(config, "topk_group"),
            normalized=flag({"norm_topk_prob": True, **config}, "norm_topk_prob"),
            scale=number(config, "routed_scaling_factor"),
        ),
        router="gate",
        shared_width=width * count(config, "n_shared_experts"),
    )


def _mixtures(config: Raw) -> tuple[bool, ...]:
    """Which layers are mixtures: by name, or all but the first; none in some files."""
    kinds, num_layers = items(config, "mlp_layer_types"), count(config, "num_hidden_layers")
    for kind in kinds:
        require(
            isinstance(kind, str) and kind in _KINDS,
            f"mlp_layer_types has {shown(kind)}: only {' and '.join(_KINDS)} are supported",
        )
    dense = config.get("first_k_dense_replace")
    require(
        bool(kinds) or (type(dense) is int and dense >= 0),
        f"first_k_dense_replace is {shown(dense)}: it must be the number of layers without experts",
    )
    layers = tuple(_KINDS[kind] for kind in kinds) or tuple(
        layer >= int(str(dense)) for layer in range(num_layers)
    )
    require(
        len(layers) == num_layers,
        f"mlp_layer_types names {len(layers)} layers, num_hidden_layers {num_layers}: config.json is wrong",
    )
    return layers
