"""What the ``config.json`` of a GPT-OSS says, with the defaults that it may leave out; no torch."""

from typing import Any

from specgen.config import require, shown
from specgen.models.config_fields import Raw, count, number, section
from specgen.models.mixture_config import MixtureConfig, num_chosen, num_experts
from specgen.models.model_config import TargetConfig

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def read(config: Raw) -> TargetConfig:
    """Sinks, biases, windows in every second layer, and mixtures in all."""
    quantization = section(config, "quantization_config")
    method = quantization.get("quant_method")
    require(
        not quantization or method == "mxfp4",
        f"quantization_config has the method {shown(method)}: a GPT-OSS has plain weights or 'mxfp4'",
    )
    num_layers = count(config, "num_hidden_layers")
    given = {name: value for name, value in config.items() if value is not None}
    settings = _defaults(config, num_layers) | given
    settings.pop("quantization_config", None)
    mixture = MixtureConfig(
        num_experts=num_experts(config),
        num_chosen=num_chosen(config),
        width=count(config, "intermediate_size"),
        layers=(True,) * num_layers,
        weights="softmax of chosen",
        router="router",
        biases=True,
        interleaved=True,
        mxfp4=bool(quantization),
        alpha=number(config, "swiglu_alpha", 1.702),
        shift=1.0,
        limit=number(config, "swiglu_limit", 7.0),
    )
    return TargetConfig.from_hf(settings, windowed=True, mixture=mixture, sinks=True, norm_casts_last=True)


def _defaults(config: Raw, num_layers: int) -> dict[str, Any]:
    """Those of ``transformers`` for what a config may leave out."""
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    rope = {} if config.get("rope_parameters") else {"rope_scaling": _YARN}
    plain = {"attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128}
    return plain | rope | {"layer_types": kinds}
