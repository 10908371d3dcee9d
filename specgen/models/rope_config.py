"""Rotary position embedding, as in a ``config.json``; no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from specgen.config import require, shown
from specgen.models.config_fields import Raw, count, flag, number, section

_YARN_NUMBERS = {"factor": None, "beta_fast": 32.0, "beta_slow": 1.0}  # and their defaults


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling of low rotary frequencies (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (``rope_type: yarn``): low frequencies are divided, high ones kept, those between interpolated."""

    factor: float
    beta_fast: float  # turns within the original positions from which on a frequency is kept
    beta_slow: float  # and up to which it is divided by ``factor``
    original_max_positions: int
    truncate: bool  # the two bounds are rounded to whole pairs
    concentration: float  # factor of cos and sin, so of q . k its square


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base and scaling, if any."""

    theta: float
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None

    @property
    def concentration(self) -> float:
        """Factor of cos and sin."""
        return 1.0 if self.yarn is None else self.yarn.concentration

    def __str__(self) -> str:
        text = f"base {self.theta:,.0f}"
        if self.llama3 is not None:
            text += f", llama3 scaling by {self.llama3.factor:g}"
        if self.yarn is not None:
            bounds = "rounded" if self.yarn.truncate else "exact"
            text += f", YaRN scaling by {self.yarn.factor:g} ({bounds} bounds)"
            text += f", cos and sin times {self.concentration:.4g}"
        return text

    @classmethod
    def from_hf(cls, config: Raw) -> "RopeConfig":
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before)."""
        parameters = section(config, "rope_parameters") or section(config, "rope_scaling")
        by_layer = any(isinstance(value, Mapping) for value in parameters.values())
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        kind = "by layer" if by_layer else kind
        require(
            kind in ("default", "llama3", "yarn"),
            f"rope type {shown(kind)} is not supported: use a checkpoint with 'default', 'llama3' or 'yarn' rotary "
            "positions",
        )
        partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        require(
            partial == 1.0,
            f"partial_rotary_factor is {shown(partial)}: only fully rotary heads are supported",
        )
        return cls(
            theta=number({**config, **parameters}, "rope_theta", 10_000.0),
            llama3=_llama3(parameters) if kind == "llama3" else None,
            yarn=_yarn(parameters) if kind == "yarn" else None,
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


def _yarn(parameters: Raw) -> YarnScaling:
    factor, fast, slow = (number(parameters, name, default) for name, default in _YARN_NUMBERS.items())
    require(slow < fast, f"beta_slow is {slow} and beta_fast {fast}: config.json is wrong")
    # as transformers: two mscales are a ratio, one alone is ignored
    given = [number(parameters, name) for name in ("mscale", "mscale_all_dim") if parameters.get(name)]
    over, under = (_concentration(factor, each) for each in given) if len(given) == 2 else (None, None)
    default = over / under if over and under else _concentration(factor, 1.0)
    return YarnScaling(
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        original_max_positions=count(parameters, "original_max_position_embeddings"),
        truncate=flag(parameters, "truncate", True),
        concentration=number(parameters, "attention_factor", default),
    )


def _concentration(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
