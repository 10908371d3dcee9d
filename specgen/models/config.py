"""What a ``config.json`` says about a target or a head, checked and under one set of names; no torch."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from specgen.config import require

_FAMILIES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # architecture -> has q/k norms
_INPUTS = "as layer inputs"

Raw = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretching of slow rotary frequencies (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base and, for Llama 3.1 and later, its scaling."""

    theta: float
    llama3: Llama3Scaling | None = None

    @classmethod
    def from_hf(cls, config: Raw) -> "RopeConfig":
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before)."""
        parameters: Raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        require(
            kind in ("default", "llama3"),
            f"rope type {kind!r} is not supported: use a checkpoint with 'default' or 'llama3' rotary positions",
        )
        partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
        require(partial == 1.0, f"partial_rotary_factor is {partial}: only fully rotary heads are supported")
        return cls(theta=theta, llama3=_llama3(parameters) if kind == "llama3" else None)


def _llama3(parameters: Raw) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_positions=int(parameters["original_max_position_embeddings"]),
    )


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A Llama or Qwen3 target; the two differ by ``qk_norm`` alone."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tied_embeddings: bool
    qk_norm: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, config: Raw) -> "TargetConfig":
        """Read a ``config.json``; ``ValueError`` names the first thing in it that is not supported."""
        architecture = _architecture(config)
        require(
            architecture in _FAMILIES,
            f"architecture {architecture!r} is not supported: use one of {', '.join(_FAMILIES)}",
        )
        refuse_unsupported(config)
        return cls(
            architecture=architecture,
            num_layers=_count(config, "num_hidden_layers"),
            max_positions=_count(config, "max_position_embeddings"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=_FAMILIES[architecture],
            dtype=dtype_name(config),
            eos_token_ids=eos_token_ids(config),
            **_block(config),
        )


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An EAGLE3 head of one decoder layer.

    ``aux_layers`` index the target's layer *inputs*: ``i`` is the residual stream that enters layer ``i``, and
    the target's number of layers is the stream behind the last one. ``aux_rule`` says how they were understood.
    """

    dialect: Literal["eagle", "speculators"]
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    aux_layers: tuple[int, ...]
    aux_rule: str
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    qk_norm: bool
    own_embedding: bool
    reduced_vocab: bool  # draft ids are mapped by a d2t tensor
    layer_prefix: str  # of the decoder layer's tensors
    dtype: str

    @classmethod
    def from_hf(cls, config: Raw, target: TargetConfig, tensors: Set[str]) -> "Eagle3Config":
        """Read a head's ``config.json`` beside its target's; ``tensors`` are the names in its checkpoint, which
        alone tell how its layer is named, and whether it has q/k norms, a vocabulary map and an own embedding."""
        nested = "transformer_layer_config" in config
        layer: Raw = config["transformer_layer_config"] if nested else config
        refuse_unsupported(layer)
        num_layers = _count(layer, "num_hidden_layers")
        require(
            num_layers == 1,
            f"the head has {num_layers} decoder layers: only heads of one layer are supported",
        )
        prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
        flags: Raw = {**(config.get("eagle_config") or {}), **config}
        aux_layers, aux_rule = _aux_layers(config, target.num_layers)
        return cls(
            dialect="speculators" if nested else "eagle",
            draft_vocab_size=int(config.get("draft_vocab_size") or layer["vocab_size"]),
            target_hidden_size=int(config.get("target_hidden_size") or layer["hidden_size"]),
            num_layers=num_layers,
            aux_layers=aux_layers,
            aux_rule=aux_rule,
            norm_before_residual=bool(flags.get("norm_before_residual", False)),
            norm_before_fc=bool(flags.get("norm_before_fc", False)),
            fc_norm=bool(flags.get("fc_norm", False)),
            norm_output=bool(flags.get("norm_output", False)),
            qk_norm=prefix + "self_attn.q_norm.weight" in tensors,
            own_embedding="embed_tokens.weight" in tensors,
            reduced_vocab="d2t" in tensors,
            layer_prefix=prefix,
            dtype=dtype_name(config),
            **_block(layer),
        )


def _aux_layers(config: Raw, num_layers: int) -> tuple[tuple[int, ...], str]:
    key = "eagle_aux_hidden_state_layer_ids"
    if ids := config.get(key):
        return tuple(ids), f"{key} {list(ids)} of the config, read {_INPUTS}"
    if ids := (config.get("eagle_config") or {}).get(key):
        return tuple(i + 1 for i in ids), f"eagle_config.{key} {list(ids)}, read as layer outputs"
    return (2, num_layers // 2, num_layers - 3), f"none given: the default 2, L//2, L-3, {_INPUTS}"


def _architecture(config: Raw) -> str:
    names = config.get("architectures") or ["none"]
    return str(names[0])


def refuse_unsupported(config: Raw) -> None:
    """``ValueError`` for a layer that computes something else than these models do, naming the setting."""
    for name in ("attention_bias", "mlp_bias"):
        require(not config.get(name), f"{name} is true: checkpoints with biases are not supported")
    require(not config.get("quantization_config"), "quantization_config is set: use unquantized weights")
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
    require(
        not sliding, f"sliding_window is {config.get('sliding_window')}: only full attention is supported"
    )
    activation = config.get("hidden_act", "silu")
    require(activation == "silu", f"hidden_act is {activation!r}: only 'silu' is supported")


def dtype_name(config: Raw) -> str:
    """``float32``, ``bfloat16`` or ``float16``: what the weights are stored in, as the config says."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def eos_token_ids(config: Raw) -> tuple[int, ...]:
    """The ids that end a text; none, one or several in the config."""
    ids = config.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _count(config: Raw, name: str) -> int:
    require(name in config, f"config.json has no {name}: it is not a checkpoint of a supported family")
    return int(config[name])


def _block(config: Raw) -> dict[str, Any]:
    """The settings that a target's layers and a head's layer have in common."""
    hidden_size, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    return {
        "vocab_size": _count(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _count(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or num_heads),
        "head_dim": int(config.get("head_dim") or hidden_size // num_heads),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope": RopeConfig.from_hf(config),
    }
