"""Rotary frequencies, scaled linearly, as of Llama 3.1, or by YaRN."""

import math

import torch
from torch import Tensor

from specgen.models.model_config import LayerConfig
from specgen.models.rope_config import Llama3Scaling, RopeConfig, YarnScaling
from specgen.ops import Ops, Rope


def rope_of(config: LayerConfig, ops: Ops, device: torch.device) -> Rope:
    """The rotary position embedding of all layers of a model on ``device``."""
    return ops.rope(inverse_frequencies(config.rope, config.rotary_dim, device), config.rope.concentration)


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Radians per position of each rotary pair, [D / 2] in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
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
    blend = blend.clamp(0, 1)
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
