"""Rotary position embedding, as in a ``config.json``; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from specgen.config import require, shown
from specgen.models.config_fields import Raw, count, number, section


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling of low rotary frequencies (``rope_type: llama3``)."""

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
        parameters = section(config, "rope_parameters") or section(config, "rope_scaling")
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
            theta=number({**config, **parameters}, "rope_theta", 10_000.0),
            llama3=_llama3(parameters) if kind == "llama3" else None,
        )


def _llama3(parameters: Raw) -> Llama3Scaling:
    factor, low, high = (number(parameters, f"{name}factor") for name in ("", "low_freq_", "high_freq_"))
    require(low < high, f"low_freq_factor is {low} and high_freq_factor {high}: config.json is wrong")
    return Llama3Scaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=count(parameters, "original_max_position_embeddings"),
    )
