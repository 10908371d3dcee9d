"""What a target's layer and a head's layer share: rotary frequencies, attention projections, the gated MLP."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.models.model_config import LayerConfig
from specgen.models.rope_config import Llama3Scaling, RopeConfig
from specgen.models.weights import Take
from specgen.ops import Map, Norm, Ops


class Attend(Protocol):
    """Attention over the sequences of one pass: rotates q and k, stores k and v, attends to all that is stored.

    ``qkv`` is [rows, Hq + 2 * Hkv, D], the heads of q, k and v in that order; the result is [rows, Hq * D].
    All that a model sees of positions, attention, cache and batching.
    """

    def __call__(self, layer: int, qkv: Tensor) -> Tensor: ...


class Keep(Protocol):
    """Stores keys and values of the rows of one pass, the keys rotated: what ``Attend`` does without a look at them.

    ``heads`` are [rows, 2 * Hkv, D], those of k and v in that order.
    """

    def __call__(self, layer: int, heads: Tensor) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The projections of one layer; q, k and v are one matrix, and the q and k norms one norm."""

    qkv: Map  # [rows, width] -> [rows, (Hq + 2 * Hkv) * D]
    out: Map  # [rows, Hq * D] -> [parts, rows, H]
    qk_norm: Norm | None  # over [rows, Hq + Hkv, D]
    num_heads: int
    num_kv_heads: int

    @classmethod
    def build(cls, config: LayerConfig, width: int, prefix: str, take: Take, ops: Ops) -> "Attention":
        """Take ``{prefix}self_attn.*``, whose q, k and v read rows that are ``width`` wide."""
        prefix += "self_attn."
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {prefix + "q_proj": q_rows, prefix + "k_proj": kv_rows, prefix + "v_proj": kv_rows}
        return cls(
            qkv=ops.linear(take.linear(qkv, width)),
            out=ops.linear_parts(take.linear({prefix + "o_proj": config.hidden_size}, q_rows)),
            qk_norm=_qk_norm(config, prefix, take, ops) if config.qk_norm else None,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
        )

    def __call__(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        """Project, attend, project back: [rows, width] -> [parts, rows, H]; see ``Ops.linear_parts``."""
        num_qk = self.num_heads + self.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], num_qk + self.num_kv_heads, -1)
        if self.qk_norm is not None:
            heads = torch.cat((self.qk_norm(heads[:, :num_qk]), heads[:, num_qk:]), 1)
        return self.out(attend(layer, heads))


@dataclass(frozen=True, kw_only=True)
class KeysValues:
    """The part of an attention layer that later rows look at, for rows whose own result nobody reads."""

    kv: Map  # [rows, width] -> [rows, 2 * Hkv * D]
    k_norm: Norm | None  # over [rows, Hkv, D]
    num_kv_heads: int

    @classmethod
    def build(cls, config: LayerConfig, width: int, prefix: str, take: Take, ops: Ops) -> "KeysValues":
        """Take the k and v of ``{prefix}self_attn.*``, which read rows that are ``width`` wide."""
        prefix += "self_attn."
        kv_rows, norm = config.num_kv_heads * config.head_dim, None
        kv = {prefix + "k_proj": kv_rows, prefix + "v_proj": kv_rows}
        projection = ops.linear(take.linear(kv, width))
        if config.qk_norm:
            k_norm = take(f"{prefix}k_norm.weight", (config.head_dim,))
            norm = ops.rms_norm(k_norm.repeat(config.num_kv_heads, 1), config.rms_norm_eps)
        return cls(kv=projection, k_norm=norm, num_kv_heads=config.num_kv_heads)

    def __call__(self, x: Tensor, layer: int, keep: Keep) -> None:
        """Project [rows, width] and keep what comes of it."""
        heads = self.kv(x).view(x.shape[0], 2 * self.num_kv_heads, -1)
        if self.k_norm is not None:
            keys, values = heads.chunk(2, 1)
            heads = torch.cat((self.k_norm(keys), values), 1)
        keep(layer, heads)


class FeedForward(Protocol):
    """What comes behind attention in a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, H] -> [parts, rows, H]; see ``Ops.linear_parts``."""
        ...


@dataclass(frozen=True, kw_only=True)
class MLP:
    """The gated feed-forward block; gate and up are one matrix."""

    gated: Map  # [rows, H] -> [rows, I]
    down: Map  # [rows, I] -> [parts, rows, H]

    @classmethod
    def build(cls, config: LayerConfig, prefix: str, take: Take, ops: Ops) -> "MLP":
        """Take ``{prefix}mlp.*``."""
        hidden, inner = config.hidden_size, config.intermediate_size
        prefix += "mlp."
        return cls(
            gated=ops.gated_linear(
                take.linear({prefix + "gate_proj": inner, prefix + "up_proj": inner}, hidden)
            ),
            down=ops.linear_parts(take.linear({prefix + "down_proj": hidden}, inner)),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Gate, then project back. See ``FeedForward``."""
        return self.down(self.gated(x))


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Radians per position of each rotary pair, [D / 2] in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    return frequencies.to(device)


def _qk_norm(config: LayerConfig, prefix: str, take: Take, ops: Ops) -> Norm:
    q_norm = take(f"{prefix}q_norm.weight", (config.head_dim,))
    k_norm = take(f"{prefix}k_norm.weight", (config.head_dim,))
    by_head = torch.stack([q_norm] * config.num_heads + [k_norm] * config.num_kv_heads)
    return ops.rms_norm(by_head, config.rms_norm_eps)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    # Waves longer than the original context are slowed by the factor, short ones kept, those between blended.
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * (blend + (1 - blend) / scaling.factor)
