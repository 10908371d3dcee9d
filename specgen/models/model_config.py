"""What a ``config.json`` says about a target or a head, checked and under one set of names; no torch."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from specgen.config import require, shown
from specgen.kv.kv_spec import KVSpec

_FAMILIES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # architecture -> has q/k norms
_AUX_KEY = "eagle_aux_hidden_state_layer_ids"
_LARGEST_COUNT = 1 << 24  # of layers, tokens, positions, ...: no model comes near
_LARGEST_NUMBER = 1e18

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
        parameters = _section(config, "rope_parameters") or _section(config, "rope_scaling")
        by_layer = any(isinstance(value, Mapping) for value in parameters.values())
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        kind = "by layer" if by_layer else kind
        require(
            kind in ("default", "llama3"),
            f"rope type {shown(kind)} is not supported: use a checkpoint with 'default' or 'llama3' rotary positions",
        )
        partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        require(
            partial == 1.0,
            f"partial_rotary_factor is {shown(partial)}: only fully rotary heads are supported",
        )
        return cls(
            theta=_number({**config, **parameters}, "rope_theta", 10_000.0),
            llama3=_llama3(parameters) if kind == "llama3" else None,
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
    dtype: str  # that the config names for the weights
    eos_token_ids: tuple[int, ...]

    @property
    def kv_spec(self) -> KVSpec:
        """What its cache stores."""
        return _keys_and_values(self)

    @classmethod
    def from_hf(cls, config: Raw) -> "TargetConfig":
        """Read a ``config.json``; ``UserError`` names the first thing in it that is not supported."""
        architecture = next(iter(architectures(config)), "none")
        require(
            architecture in _FAMILIES,
            f"architecture {shown(architecture)} is not supported: use one of {', '.join(_FAMILIES)}",
        )
        return cls(
            architecture=architecture,
            num_layers=_count(config, "num_hidden_layers"),
            max_positions=_count(config, "max_position_embeddings"),
            tied_embeddings=_flag(config, "tie_word_embeddings"),
            qk_norm=_FAMILIES[architecture],
            dtype=_dtype(config),
            eos_token_ids=_eos_token_ids(config),
            **_layer_settings(config),
        )


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An EAGLE3 head of one decoder layer.

    ``aux_layers`` index the target's layer *inputs*: ``i`` is the residual stream that enters layer ``i``,
    and the target's number of layers is the stream behind the last one; empty if the target is not known and
    the head leaves them to the default. ``aux_rule`` says how they were understood.
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
    norm_before_residual: bool  # the residual is taken behind hidden_norm
    norm_before_fc: bool  # one norm over the features side by side
    fc_norm: bool  # a norm for each feature
    norm_output: bool  # what is fed back is normed (EAGLE 3.1)
    qk_norm: bool
    own_embedding: bool
    dtype: str

    def __post_init__(self) -> None:
        require(
            not (self.norm_before_fc and self.fc_norm),
            "norm_before_fc and fc_norm are both true: a head has one of them, or none",
        )
        require(
            self.num_layers == 1,
            f"the head has {self.num_layers} decoder layers: only heads of one layer are supported",
        )

    @property
    def kv_spec(self) -> KVSpec:
        """What its cache stores."""
        return _keys_and_values(self)

    @property
    def num_features(self) -> int:
        """How many of the target's hidden states are fused; three by default."""
        return len(self.aux_layers) or 3

    @classmethod
    def from_hf(cls, config: Raw, tensors: Set[str], num_target_layers: int | None) -> "Eagle3Config":
        """Read a head's ``config.json``.

        ``tensors``, the names in its checkpoint, alone tell whether it has q/k norms and its own embedding;
        the default aux layers depend on ``num_target_layers``.
        """
        kind = config.get("speculators_model_type", "eagle3")
        require(kind == "eagle3", f"the head is of type {shown(kind)}: only 'eagle3' is supported")
        layer = _section(config, "transformer_layer_config") or config
        nested = _section(config, "eagle_config")
        require(
            _flag(nested, "use_aux_hidden_state", True),
            "use_aux_hidden_state is false: a head that reads the last hidden state only is not EAGLE3",
        )
        flags = {**nested, **config}
        require(
            layer is config or flags.get("norm_before_residual") is not None,
            "config.json does not say norm_before_residual, which speculators then takes as false and vLLM as true: "
            "add it as the head was trained",
        )
        aux_layers, aux_rule = _aux_layers(config.get(_AUX_KEY), nested.get(_AUX_KEY), num_target_layers)
        return cls(
            dialect="eagle" if layer is config else "speculators",
            draft_vocab_size=_count({**layer, **config}, "draft_vocab_size", _count(layer, "vocab_size")),
            target_hidden_size=_count(config, "target_hidden_size", _count(layer, "hidden_size")),
            num_layers=_count(layer, "num_hidden_layers"),
            aux_layers=aux_layers,
            aux_rule=aux_rule,
            norm_before_residual=_flag(flags, "norm_before_residual"),
            norm_before_fc=_flag(flags, "norm_before_fc"),
            fc_norm=_flag(flags, "fc_norm"),
            norm_output=_flag(flags, "norm_output"),
            qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in tensors),
            own_embedding=any(name.endswith("embed_tokens.weight") for name in tensors),
            dtype=_dtype(config),
            **_layer_settings(layer),
        )


def architectures(config: Raw) -> tuple[str, ...]:
    """The classes that the config names for the model; none where it has no such list."""
    return tuple(map(str, _items(config, "architectures")))


def _keys_and_values(config: TargetConfig | Eagle3Config) -> KVSpec:
    """Of grouped-query attention."""
    return KVSpec(
        num_layers=config.num_layers, num_planes=2, num_heads=config.num_kv_heads, head_dim=config.head_dim
    )


def _aux_layers(top: object, nested: object, num_layers: int | None) -> tuple[tuple[int, ...], str]:
    """Layer inputs, and the rule by which they were found.

    Ids at the top level are vLLM's and speculators' (inputs). Ids in ``eagle_config`` are SpecForge's and NVIDIA's
    (outputs), except that heads exist which write the default inputs there (sgl-project/sglang#25454).
    """
    default = () if num_layers is None else (2, num_layers // 2, num_layers - 3)
    if top:
        ids = _ids(top)
        rule = f"{_AUX_KEY} {list(ids)} are layer inputs (the speculators and vLLM format)"
        if ids == tuple(i - 1 for i in default):
            rule += "; read as layer outputs they would be the default: if acceptance is poor, add 1 to each"
        return ids, rule
    if nested:
        ids = _ids(nested)
        if ids == default:
            return ids, f"eagle_config.{_AUX_KEY} {list(ids)} are the default layer inputs"
        outputs = f"eagle_config.{_AUX_KEY} {list(ids)} are layer outputs (the SpecForge and NVIDIA format)"
        return tuple(i + 1 for i in ids), f"{outputs}, so 1 is added"
    return default, "no ids given: the default layer inputs 2, L//2, L-3 of a target of L layers"


def _ids(value: object) -> tuple[int, ...]:
    plain = isinstance(value, list) and all(type(i) is int for i in value)
    require(plain, f"{_AUX_KEY} is {shown(value)}: it must be a list of layer numbers")
    assert isinstance(value, list)
    return tuple(value)


def _layer_settings(config: Raw) -> dict[str, Any]:
    """The settings that a target's layers and a head's layer have in common."""
    _refuse_unsupported(config)
    hidden_size, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", num_heads)
    head_dim = _count(config, "head_dim", hidden_size // num_heads)
    require(
        num_heads % num_kv_heads == 0,
        f"{num_heads} attention heads cannot share {num_kv_heads} KV heads: config.json is wrong",
    )
    require(head_dim % 2 == 0, f"head_dim is {head_dim}: rotary positions need an even one")
    return {
        "vocab_size": _count(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _count(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _number(config, "rms_norm_eps", 1e-6),
        "rope": RopeConfig.from_hf(config),
    }


def _refuse_unsupported(config: Raw) -> None:
    for name in ("attention_bias", "mlp_bias"):
        require(not config.get(name), f"{name} is true: checkpoints with biases are not supported")
    for name in ("quantization_config", "compression_config"):
        require(not config.get(name), f"{name} is set: quantized weights are not supported, use plain ones")
    window, used = config.get("sliding_window"), config.get("use_sliding_window", True)
    sliding = (window and used) or "sliding_attention" in _items(config, "layer_types")
    require(not sliding, f"sliding_window is {shown(window)} and in use: only full attention is supported")
    activation = config.get("hidden_act", "silu")
    require(activation == "silu", f"hidden_act is {shown(activation)}: only 'silu' is supported")


def _llama3(parameters: Raw) -> Llama3Scaling:
    factor, low, high = (_number(parameters, f"{name}factor") for name in ("", "low_freq_", "high_freq_"))
    require(low < high, f"low_freq_factor is {low} and high_freq_factor {high}: config.json is wrong")
    return Llama3Scaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_count(parameters, "original_max_position_embeddings"),
    )


def _dtype(config: Raw) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _eos_token_ids(config: Raw) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    plain = all(type(i) is int and 0 <= i < _LARGEST_COUNT for i in ids)
    require(plain, f"eos_token_id is {shown(value)}: it must be a token id, or a list of them")
    return tuple(ids)


def _section(config: Raw, name: str) -> Raw:
    value = config.get(name) or {}
    require(isinstance(value, Mapping), f"{name} is {shown(value)}: config.json is wrong")
    assert isinstance(value, Mapping)
    return value


def _items(config: Raw, name: str) -> list[Any]:
    value = config.get(name) or []
    require(isinstance(value, list), f"{name} is {shown(value)}: it must be a list")
    assert isinstance(value, list)
    return value


def _flag(config: Raw, name: str, default: bool = False) -> bool:
    value = _given(config, name, default)
    require(isinstance(value, bool), f"{name} is {shown(value)}: it must be true or false")
    return bool(value)


def _count(config: Raw, name: str, default: int | None = None) -> int:
    value = _given(config, name, default)
    fits = type(value) is int and 0 < value <= _LARGEST_COUNT
    require(fits, f"{name} is {shown(value)}: it must be a whole number above 0, at most {_LARGEST_COUNT}")
    assert isinstance(value, int)
    return value


def _number(config: Raw, name: str, default: float | None = None) -> float:
    value = _given(config, name, default)
    # false also for NaN
    fits = isinstance(value, int | float) and value is not True and 0 < value < _LARGEST_NUMBER
    require(fits, f"{name} is {shown(value)}: it must be a number above 0, below {_LARGEST_NUMBER:g}")
    assert isinstance(value, int | float)
    return float(value)


def _given(config: Raw, name: str, default: object) -> object:
    value = default if config.get(name) is None else config[name]
    require(
        value is not None,
        f"config.json has no {name}: it is incomplete, or of a family that is not supported",
    )
    return value
