"""Rotary positions: what a ``config.json`` says of them, and the frequencies that follow."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgen.config import require, shown
from specgen.models.config_fields import Raw, count, flag, number, section
from specgen.ops import Ops, Rope

_DEFAULT_THETA = 10_000.0
_LENGTH = "original_max_position_embeddings"
_KINDS = {  # and what is read of each, beside type, base and share of a head
    "default": frozenset[str](),
    "linear": frozenset({"factor", "mscale_all_dim"}),
    "llama3": frozenset({"factor", "mscale_all_dim", "low_freq_factor", "high_freq_factor", _LENGTH}),
    "proportional": frozenset({"factor"}),
    "yarn": frozenset({"factor", "mscale_all_dim", "mscale", "attention_factor", "truncate", _LENGTH})
    | {"beta_fast", "beta_slow"},
}
# The last two are of positions in images; a token of text has one position, whichever way it is counted
_OF_ALL = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_YARN_NUMBERS = {"beta_fast": 32.0, "beta_slow": 1.0}  # and their defaults


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by ``factor`` (``rope_type: linear``)."""

    factor: float


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
    share: float = 1.0  # of a head's numbers that are rotated, the first ones
    turned: float = 1.0  # of their pairs, the first ones; the others turn by 0 (``rope_type: proportional``)
    linear: LinearScaling | None = None
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None

    @property
    def concentration(self) -> float:
        """Factor of cos and sin."""
        return 1.0 if self.yarn is None else self.yarn.concentration

    def __str__(self) -> str:
        part = "" if self.share == 1 else f", of the first {self.share:.3g} of a head"
        part += "" if self.turned == 1 else f", of the first {self.turned:.3g} of its pairs"
        return f"base {self.theta:,.0f}, {self._scaling()}{part}"

    def _scaling(self) -> str:
        if self.linear is not None:
            return f"linear scaling by {self.linear.factor:g}"
        if self.llama3 is not None:
            return f"llama3 scaling by {self.llama3.factor:g} from {self.llama3.original_max_positions:,} positions"
        if self.yarn is not None:
            bounds = "rounded" if self.yarn.truncate else "exact"
            return (
                f"YaRN scaling by {self.yarn.factor:g} from {self.yarn.original_max_positions:,} positions "
                f"({bounds} bounds), cos and sin times {self.concentration:.4g}"
            )
        return "no scaling"

    @classmethod
    def from_hf(cls, config: Raw) -> "RopeConfig":
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before), as it does."""
        parameters = rope_parameters(config)
        kind = parameters["rope_type"]
        part = number(parameters, "partial_rotary_factor")
        divided = kind == "linear" or (kind == "proportional" and "factor" in parameters)
        return cls(
            theta=number(parameters, "rope_theta"),
            share=1.0 if kind == "proportional" else part,
            turned=min(part, 1.0) if kind == "proportional" else 1.0,
            linear=LinearScaling(factor=number(parameters, "factor")) if divided else None,
            llama3=_llama3(parameters) if kind == "llama3" else None,
            yarn=_yarn(parameters, config) if kind == "yarn" else None,
        )


def rope_parameters(config: Raw) -> Raw:
    """The one dictionary of rotary parameters that ``transformers`` makes of all that a ``config.json`` says of them.

    ``rope_scaling``, which model cards tell their readers to add, takes the place of ``rope_parameters``; what stands
    beside the dictionary fills its gaps, but an ``original_max_position_embeddings`` there overrides the one in it.
    ``UserError`` for a kind of scaling that is not supported.
    """
    scaling, parameters = section(config, "rope_scaling"), section(config, "rope_parameters")
    _refuse_lost_theta(config, scaling, parameters)
    chosen = scaling or parameters
    kind = chosen.get("rope_type", chosen.get("type", "default"))
    kind = "by layer" if any(isinstance(value, Mapping) for value in chosen.values()) else kind
    require(
        isinstance(kind, str) and kind in _KINDS,
        f"rope type {shown(kind)} is not supported: use a checkpoint whose rotary positions are of the type "
        f"{' or '.join(map(repr, _KINDS))}",
    )
    found: dict[str, Any] = {"rope_type": kind}
    # null is no base
    theta = None if any("rope_theta" in each for each in (chosen, config)) else _DEFAULT_THETA
    for name, default in (("rope_theta", theta), ("partial_rotary_factor", 1.0)):
        found[name] = next((each[name] for each in (chosen, config) if each.get(name) is not None), default)
    if kind in ("llama3", "yarn"):
        given = (each[_LENGTH] for each in (config, chosen) if each.get(_LENGTH) is not None)
        found[_LENGTH] = next(given, config.get("max_position_embeddings"))
    return {**chosen, **found}


def unread_parameters(config: Raw) -> set[str]:
    """Names in the dictionary of rotary parameters that holds which its kind of scaling does not read."""
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    said = section(config, where)
    by_layer = {kind: each for kind, each in said.items() if isinstance(each, Mapping)}
    if by_layer:
        found = (unread_parameters({"rope_parameters": each}) for each in by_layer.values())
        return set().union(*found)
    known = _OF_ALL | _KINDS[rope_parameters(config)["rope_type"]]
    return {
        f"{where}.{name}" for name, value in said.items() if (value or value is False) and name not in known
    }


def _refuse_lost_theta(config: Raw, scaling: Raw, parameters: Raw) -> None:
    """Where ``transformers`` would go on with another base than the one that the model was saved with."""
    lost, kept = parameters.get("rope_theta"), config.get("rope_theta") or _DEFAULT_THETA
    require(
        not scaling or scaling.get("rope_theta") is not None or lost in (None, kept),
        f"rope_scaling takes the place of rope_parameters and has no rope_theta, so {shown(lost)} there would become "
        f"{shown(kept)}: write rope_theta into rope_scaling",
    )


def latent_scale(config: Raw) -> float:
    """What scaling with ``mscale_all_dim`` multiplies queries and keys of latent attention by, beside the rotation."""
    parameters = rope_parameters(config)
    if parameters["rope_type"] == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    return _concentration(number(parameters, "factor"), number(parameters, "mscale_all_dim"))


def _llama3(parameters: Raw) -> Llama3Scaling:
    factor, low, high = (number(parameters, f"{name}factor") for name in ("", "low_freq_", "high_freq_"))
    require(low <= high, f"low_freq_factor is {low} and high_freq_factor {high}: config.json is wrong")
    return Llama3Scaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=count(parameters, _LENGTH),
    )


def _yarn(parameters: Raw, config: Raw) -> YarnScaling:
    fast, slow = (number(parameters, name, default) for name, default in _YARN_NUMBERS.items())
    require(slow < fast, f"beta_slow is {slow} and beta_fast {fast}: config.json is wrong")
    original = count(parameters, _LENGTH)
    # as transformers, for which a missing one is wrong
    if "factor" in parameters and parameters["factor"] is None:
        parameters = {**parameters, "factor": count(config, "max_position_embeddings") / original}
    factor = number(parameters, "factor")
    # as transformers: two mscales are a ratio, one alone is ignored
    given = [number(parameters, name) for name in ("mscale", "mscale_all_dim") if parameters.get(name)]
    over, under = (_concentration(factor, each) for each in given) if len(given) == 2 else (None, None)
    default = over / under if over and under else _concentration(factor, 1.0)
    return YarnScaling(
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        original_max_positions=original,
        truncate=flag({"truncate": True, **parameters}, "truncate"),  # null is false
        concentration=number(parameters, "attention_factor", default),
    )


def _concentration(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_of(rope: RopeConfig, rotary_dim: int, ops: Ops, device: torch.device) -> Rope:
    """The rotary position embedding of all layers of a model on ``device``."""
    return ops.rope(inverse_frequencies(rope, rotary_dim, device), rope.concentration)


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Radians per position of each rotary pair, [D / 2] in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    frequencies[int(rope.turned * head_dim // 2) :] = 0.0
    if rope.linear is not None:
        frequencies = frequencies / rope.linear.factor
    if rope.llama3 is not None:
        frequencies = _llama3_scaled(frequencies, rope.llama3)
    if rope.yarn is not None:
        frequencies = _yarn_scaled(frequencies, rope.yarn, rope.theta, head_dim)
    return frequencies.to(device)


def _llama3_scaled(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    # Low frequencies are divided by the factor, high ones kept, those between interpolated.
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.nan_to_num(1.0).clamp(0, 1)  # of equal factors a frequency between, which is kept, is 0 / 0
    return frequencies * (blend + (1 - blend) / scaling.factor)


def _yarn_scaled(frequencies: Tensor, scaling: YarnScaling, theta: float, head_dim: int) -> Tensor:
    # As for Llama 3.1, but interpolated by the number of the pair and not by its frequency.
    def pair_that_turns(times: float) -> float:
        share = scaling.original_max_positions / (times * 2 * math.pi)
        return head_dim * math.log(share) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    divided = ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * divided + frequencies * (1 - divided)
