"""What the ``config.json`` of each family with experts or recurrent layers says, beside what all have; no torch."""

from specgen.config import require, shown
from specgen.models.config_fields import Raw, by_layer, count, flag, items, number
from specgen.models.fp8_config import quantization, without_quantization
from specgen.models.model_config import DeltaConfig, LatentConfig, MixtureConfig, SigmoidWeights, TargetConfig


def read_deepseek(config: Raw) -> TargetConfig:
    """DeepSeek-V3 and GLM-4.7-Flash, which are one architecture.

    Latent attention, and behind the first dense layers experts beside one that all tokens go through.
    """
    layers, latent = _mixtures(config), LatentConfig.from_hf(config)
    num_heads = count(config, "num_attention_heads")
    num_kv_heads = count(config, "num_key_value_heads", num_heads)
    require(
        num_kv_heads == num_heads,
        f"num_key_value_heads is {num_kv_heads} of {num_heads} heads: latents are of all heads, config.json is wrong",
    )
    mixture = deepseek_mixture(config, layers) if any(layers) else None
    return TargetConfig.from_hf({**config, "head_dim": latent.key_dim}, mixture=mixture, latent=latent)


def deepseek_mixture(config: Raw, layers: tuple[bool, ...]) -> MixtureConfig:
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
    named = by_layer(config, "mlp_layer_types", {"dense": False, "sparse": True})
    dense = config.get("first_k_dense_replace")
    require(
        bool(named) or (type(dense) is int and dense >= 0),
        f"first_k_dense_replace is {shown(dense)}: it must be the number of layers without experts",
    )
    return named or tuple(layer >= int(str(dense)) for layer in range(count(config, "num_hidden_layers")))


_OPTIONAL = ("layer_types", "rope_parameters")  # null is their default
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def read_gpt_oss(config: Raw) -> TargetConfig:
    """GPT-OSS: sinks, biases, windows in every second layer, and mixtures in all; it may leave out defaults."""
    stated = quantization(config)
    method = stated.get("quant_method")
    require(
        not stated or method == "mxfp4",
        f"quantization_config has the method {shown(method)}: a GPT-OSS has plain weights or 'mxfp4'",
    )
    num_layers = count(config, "num_hidden_layers")
    given = {name: value for name, value in config.items() if value is not None or name not in _OPTIONAL}
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    settings = {"rope_parameters": _YARN, "layer_types": kinds} | without_quantization(given)
    mixture = MixtureConfig(
        num_experts=count(config, "num_local_experts"),
        num_chosen=count(config, "num_experts_per_tok"),
        width=count(config, "intermediate_size"),
        layers=(True,) * num_layers,
        weights="softmax of chosen",
        router="router",
        biases=True,
        fused="in, out alternating",
        mxfp4=bool(stated),
        alpha=number(config, "swiglu_alpha", 1.702),
        shift=1.0,
        limit=number(config, "swiglu_limit", 7.0),
    )
    return TargetConfig.from_hf(settings, windowed=True, mixture=mixture, sinks=True, norm_casts_last=True)


def sparse_layers(config: Raw) -> tuple[bool, ...]:
    """Which layers of a Qwen3-MoE or Qwen3-Next are mixtures: every n-th one but those that are named."""
    step, dense = count(config, "decoder_sparse_step", 1), items(config, "mlp_only_layers")
    require(
        all(type(layer) is int for layer in dense),
        f"mlp_only_layers is {shown(dense)}: it must be a list of layer numbers",
    )
    return tuple(
        layer not in dense and (layer + 1) % step == 0 for layer in range(count(config, "num_hidden_layers"))
    )


def read_qwen3_moe(config: Raw) -> TargetConfig:
    """Qwen3-MoE: a Qwen3 of which all layers, every n-th one, or none are mixtures."""
    layers = sparse_layers(config)
    window = config.get("sliding_window") if flag(config, "use_sliding_window") else None
    require(
        window is None,  # whatever layer_types says: transformers does not ask them
        f"sliding_window is {shown(window)} and in use: a target of this family needs full attention in all layers",
    )
    if not any(layers):
        return TargetConfig.from_hf(config, qk_norm=True)
    mixture = _qwen_mixture(config, layers, flag(config, "norm_topk_prob"), beside=False)
    return TargetConfig.from_hf(config, qk_norm=True, mixture=mixture)


def _qwen_mixture(config: Raw, layers: tuple[bool, ...], normalized: bool, *, beside: bool) -> MixtureConfig:
    """``beside`` the experts there may be a gated one that all tokens go through."""
    return MixtureConfig(
        num_experts=count(config, "num_experts"),
        num_chosen=count(config, "num_experts_per_tok"),
        width=count(config, "moe_intermediate_size"),
        layers=layers,
        weights="normalized" if normalized else "softmax",
        router="gate",
        shared_width=count(config, "shared_expert_intermediate_size") if beside else 0,
        shared_gate=beside,
    )


# ---- hybrids: a Gated DeltaNet in most layers and attention in the others


def read_qwen3_5(config: Raw) -> TargetConfig:
    """Qwen3.5 and what is built like it: Qwen3.6, Qwen3.8."""
    return _hybrid(config, None)


def read_qwen3_5_moe(config: Raw) -> TargetConfig:
    """The same with experts in all layers, beside a gated one that all tokens go through."""
    mixture = _qwen_mixture(config, (True,) * count(config, "num_hidden_layers"), True, beside=True)
    return _hybrid({**config, "intermediate_size": mixture.width}, mixture)  # which no layer has


def read_qwen3_next(config: Raw) -> TargetConfig:
    """Their predecessor, in which all layers, every n-th one, or none have experts."""
    layers, normalized = sparse_layers(config), flag(config, "norm_topk_prob")
    return _hybrid(config, _qwen_mixture(config, layers, normalized, beside=True) if any(layers) else None)


def _hybrid(config: Raw, mixture: MixtureConfig | None) -> TargetConfig:
    return TargetConfig.from_hf(
        {**config, "layer_types": None},  # none has a window
        qk_norm=True,
        query_gates=True,
        norm_casts_last=True,
        norm_adds_one=True,
        mixture=mixture,
        delta=_delta(config),
    )


def _delta(config: Raw) -> DeltaConfig | None:
    """Read which layers are such ones, and their widths; None where all attend."""
    interval = count(config, "full_attention_interval")
    layers = by_layer(config, "layer_types", {"full_attention": False, "linear_attention": True}) or tuple(
        (layer + 1) % interval != 0 for layer in range(count(config, "num_hidden_layers"))
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
