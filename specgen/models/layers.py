"""What a target's layer and a head's layer share: rotary frequencies, attention projections, the gated MLP."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.models.model_config import Eagle3Config, Llama3Scaling, RopeConfig, TargetConfig
from specgen.models.weights import Take
from specgen.ops import Map, Norm, Ops


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """What a layer says of its own attention; whoever computes it learns of the layer by nothing else."""

    index: int  # of its keys and values in the model's cache
    scale: float  # of the products of queries and keys


class Attend(Protocol):
    """Attention over the sequences of one pass: rotates q and k, stores k and v, attends to all that is stored.

    ``qkv`` is [rows, Hq + 2 * Hkv, D], the heads of q, k and v in that order; the result is [rows, Hq * D].
    All that a model sees of positions, attention, cache and batching.
    """

    def __call__(self, layer: LayerAttention, qkv: Tensor) -> Tensor: ...


class WriteKV(Protocol):
    """Stores keys and values of the rows of one pass, the keys rotated: ``Attend`` without the attention.

    ``heads`` are [rows, 2 * Hkv, D], those of k and v in that order.
    """

    def __call__(self, layer: LayerAttention, heads: Tensor) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The projections of one layer; q, k and v are one matrix, and the q and k norms one norm."""

    qkv: Map  # [rows, width] -> [rows, (Hq + 2 * Hkv) * D]
    out: Map  # [rows, Hq * D] -> [parts, rows, H]
    qk_norm: Norm | None  # over [rows, Hq + Hkv, D]
    num_heads: int
    num_kv_heads: int
    layer: LayerAttention

    @classmethod
    def build(
        cls, config: TargetConfig | Eagle3Config, index: int, width: int, prefix: str, take: Take, ops: Ops
    ) -> "Attention":
        """Take ``{prefix}self_attn.*`` of the ``index``-th layer, whose q, k and v read rows ``width`` wide."""
        prefix += "self_attn."
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        qkv = torch.cat([take(f"{prefix}{name}.weight", (n, width)) for name, n in rows.items()])
        out = take(f"{prefix}o_proj.weight", (config.hidden_size, q_rows))
        return cls(
            qkv=ops.linear(qkv),
            out=ops.linear_parts(out),
            qk_norm=_qk_norm(config, prefix, take, ops) if config.qk_norm else None,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            layer=LayerAttention(index=index, scale=config.head_dim**-0.5),
        )

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """Project, attend, project back: [rows, width] -> [parts, rows, H]; see ``Ops.linear_parts``."""
        num_qk = self.num_heads + self.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], num_qk + self.num_kv_heads, -1)
        if self.qk_norm is not None:
            heads = torch.cat((self.qk_norm(heads[:, :num_qk]), heads[:, num_qk:]), 1)
        return self.out(attend(self.layer, heads))


@dataclass(frozen=True, kw_only=True)
class KeysValues:
    """The part of an attention layer that later rows look at, for rows whose own result nobody reads."""

    kv: Map  # [rows, width] -> [rows, 2 * Hkv * D]
    k_norm: Norm | None  # over [rows, Hkv, D]
    num_kv_heads: int

    @classmethod
    def build(cls, config: Eagle3Config, width: int, prefix: str, take: Take, ops: Ops) -> "KeysValues":
        """Take the k and v of ``{prefix}self_attn.*``, which read rows that are ``width`` wide."""
        prefix += "self_attn."
        rows = config.num_kv_heads * config.head_dim
        kv = torch.cat([take(f"{prefix}{name}.weight", (rows, width)) for name in ("k_proj", "v_proj")])
        norm = None
        if config.qk_norm:
            k_norm = take(f"{prefix}k_norm.weight", (config.head_dim,))
            norm = ops.rms_norm(k_norm.repeat(config.num_kv_heads, 1), config.rms_norm_eps)
        return cls(kv=ops.linear(kv), k_norm=norm, num_kv_heads=config.num_kv_heads)

    def __call__(self, x: Tensor, layer: LayerAttention, write_kv: WriteKV) -> None:
        """Project [rows, width] and store the result as the keys and values of ``layer``."""
        heads = self.kv(x).view(x.shape[0], 2 * self.num_kv_heads, -1)
        if self.k_norm is not None:
            keys, values = heads.chunk(2, 1)
            heads = torch.cat((self.k_norm(keys), values), 1)
        write_kv(layer, heads)


@dataclass(frozen=True, kw_only=True)
class MLP:
    """The gated feed-forward block; gate and up are one matrix."""

    gated: Map  # [rows, H] -> [rows, I]
    down: Map  # [rows, I] -> [parts, rows, H]

    @classmethod
    def build(cls, config: TargetConfig | Eagle3Config, prefix: str, take: Take, ops: Ops) -> "MLP":
        """Take ``{prefix}mlp.*``."""
        hidden, inner = config.hidden_size, config.intermediate_size
        gate_up = [take(f"{prefix}mlp.{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")]
        down = take(f"{prefix}mlp.down_proj.weight", (hidden, inner))
        return cls(gated=ops.gated_linear(torch.cat(gate_up)), down=ops.linear_parts(down))

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, H] -> [parts, rows, H]; see ``Ops.linear_parts``."""
        return self.down(self.gated(x))


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Radians per position of each rotary pair, [D / 2] in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    return frequencies.to(device)


def _qk_norm(config: TargetConfig | Eagle3Config, prefix: str, take: Take, ops: Ops) -> Norm:
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
