"""What a target's layer and a head's layer share: rotary tables, attention projections, the gated MLP."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.models.config import Eagle3Config, Llama3Scaling, RopeConfig, TargetConfig
from specgen.models.weights import Take
from specgen.ops import Ops


class Attend(Protocol):
    """Attention over the sequences of one pass: stores ``k`` and ``v`` and attends to everything before them.

    ``q`` is [rows, Hq, D], ``k`` and ``v`` are [rows, Hkv, D], rotary positions already applied; the result is
    [rows, Hq * D]. All a model sees of attention, cache and batching.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Cosines and sines of one pass, shared by its layers; the first half of ``sin`` carries the minus sign."""

    cos: Tensor  # [rows, 1, D]
    sin: Tensor  # [rows, 1, D]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The projections of one layer; q, k and v are one matrix, and so are the q and k norms."""

    qkv: Tensor  # [(Hq + 2 * Hkv) * D, width of the input]
    out: Tensor  # [H, Hq * D]
    qk_norm: Tensor | None  # [Hq + Hkv, D]
    num_heads: int
    num_kv_heads: int
    eps: float

    @classmethod
    def build(cls, config: TargetConfig | Eagle3Config, width: int, prefix: str, take: Take) -> "Attention":
        """Take ``{prefix}self_attn.*``, its q, k and v reading rows that are ``width`` wide."""
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        prefix += "self_attn."
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        return cls(
            qkv=torch.cat([take(f"{prefix}{name}.weight", (size, width)) for name, size in rows.items()]),
            out=take(f"{prefix}o_proj.weight", (config.hidden_size, q_rows)),
            qk_norm=_qk_norm(config, prefix, take) if config.qk_norm else None,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            eps=config.rms_norm_eps,
        )

    def __call__(self, x: Tensor, rotary: Rotary, layer: int, attend: Attend, ops: Ops) -> Tensor:
        """Project, rotate, attend, project back: [rows, width] -> [rows, H]."""
        num_qk = self.num_heads + self.num_kv_heads
        heads = F.linear(x, self.qkv).view(x.shape[0], num_qk + self.num_kv_heads, -1)
        qk = heads[:, :num_qk]
        if self.qk_norm is not None:
            qk = ops.rms_norm(qk, self.qk_norm, self.eps)
        qk = ops.rope(qk, rotary.cos, rotary.sin)
        mixed = attend(layer, qk[:, : self.num_heads], qk[:, self.num_heads :], heads[:, num_qk:])
        return F.linear(mixed, self.out)


@dataclass(frozen=True, kw_only=True)
class MLP:
    """The gated feed-forward block; gate and up are one matrix."""

    gate_up: Tensor  # [2 * I, H]
    down: Tensor  # [H, I]

    @classmethod
    def build(cls, config: TargetConfig | Eagle3Config, prefix: str, take: Take) -> "MLP":
        """Take ``{prefix}mlp.*``."""
        wide, narrow = (
            (config.intermediate_size, config.hidden_size),
            (config.hidden_size, config.intermediate_size),
        )
        gate_up = [take(f"{prefix}mlp.{name}.weight", wide) for name in ("gate_proj", "up_proj")]
        return cls(gate_up=torch.cat(gate_up), down=take(f"{prefix}mlp.down_proj.weight", narrow))

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        """[rows, H] -> [rows, H]."""
        return F.linear(ops.silu_and_mul(F.linear(x, self.gate_up)), self.down)


def _qk_norm(config: TargetConfig | Eagle3Config, prefix: str, take: Take) -> Tensor:
    q_norm = take(f"{prefix}q_norm.weight", (config.head_dim,))
    k_norm = take(f"{prefix}k_norm.weight", (config.head_dim,))
    return torch.stack([q_norm] * config.num_heads + [k_norm] * config.num_kv_heads)


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Radians per position of each rotary pair, [D / 2] in float32."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / rope.theta ** (steps / head_dim)
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    return frequencies.to(device)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    # Waves longer than the original context are slowed by `factor`, short ones kept, those between blended.
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def rotary(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> Rotary:
    """The tables of one pass: ``frequencies`` [D / 2], ``positions`` [rows]."""
    angles = positions[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return Rotary(cos=torch.cat((cos, cos), -1).to(dtype), sin=torch.cat((-sin, sin), -1).to(dtype))
