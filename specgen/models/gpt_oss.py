"""What the ``config.json`` of a GPT-OSS says, with the defaults that it may leave out; no torch."""

from typing import Any

from specgen.config import require, shown
from specgen.models.config_fields import Raw, count, number
from specgen.models.fp8_config import quantization, without_quantization
from specgen.models.model_config import MixtureConfig, TargetConfig

_OPTIONAL = ("layer_types", "rope_parameters")  # null is their default
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
    stated = quantization(config)
    method = stated.get("quant_method")
    require(
        not stated or method == "mxfp4",
        f"quantization_config has the method {shown(method)}: a GPT-OSS has plain weights or 'mxfp4'",
    )
    num_layers = count(config, "num_hidden_layers")
    given = {name: value for name, value in config.items() if value is not None or name not in _OPTIONAL}
    settings = _defaults(num_layers) | without_quantization(given)
    mixture = MixtureConfig(
        num_experts=count(config, "num_local_experts"),
        num_chosen=count(config, "num_experts_per_tok"),
        width=count(config, "intermediate_size"),
        layers=(True,) * num_layers,
        weights="softmax of chosen",
        router="router",
        biases=True,
        interleaved=True,
        mxfp4=bool(stated),
        alpha=number(config, "swiglu_alpha", 1.702),
        shift=1.0,
        limit=number(config, "swiglu_limit", 7.0),
    )
    return TargetConfig.from_hf(settings, windowed=True, mixture=mixture, sinks=True, norm_casts_last=True)


def _defaults(num_layers: int) -> dict[str, Any]:
    """Those of ``transformers`` that are more than a value."""
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    return {"rope_parameters": _YARN, "layer_types": kinds}
