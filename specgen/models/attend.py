"""What a layer says of its attention, and the one callable that a model sees of it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """A layer's attention parameters: all that an attention backend knows of the layer."""

    index: int  # of its planes in the KV cache
    scale: float  # of q . k
    window: int | None = None  # positions that a row sees, its own included; None: all
    sinks: Tensor | None = None  # [Hq] float32: logits of no position, in the softmax's sum alone (GPT-OSS)
    k_scale: float = 1.0  # a key is its number in an FP8 page times this; see ``kv_scales``
    v_scale: float = 1.0
    value_dim: int | None = None  # values are the first numbers of the keys, so many (latents); None: stored

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1, self.window
        assert self.k_scale > 0, self.k_scale
        assert self.v_scale > 0, self.v_scale

    def kv_scales(self, pages: Tensor) -> tuple[float, float]:
        """What keys and values are divided by on their way into ``pages`` and multiplied by on their way out.

        Pages in the model's number format hold them as they are.
        """
        return (self.k_scale, self.v_scale) if pages.dtype.itemsize == 1 else (1.0, 1.0)


class Attend(Protocol):
    """Attention over the sequences of one pass; a model knows positions, attention, cache and batching only by it."""

    def __call__(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        """Rotate q and k, store k and v, attend to all stored positions.

        ``qkv`` is [rows, Hq + 2 * Hkv, D], the heads of q, k and v in that order; the result is [rows, Hq * D].
        """
        ...

    def write_kv(self, layer: LayerAttention, heads: Tensor) -> object:
        """Store rotated keys and values without attending; ``heads`` are [rows, 2 * Hkv, D], k before v."""
        ...

    def latent(self, layer: "LatentLayer", q: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        """The same of latent attention: rotate q and key, store latent and key, attend to all stored positions.

        ``q`` is [rows, Hq, key_dim], which may be written to, ``latent`` [rows, rank] and ``key`` [rows, rope_dim]
        (see ``LatentConfig``); the result is [rows, Hq * Dv].
        """
        ...

    def write_latents(self, layer: "LatentLayer", latent: Tensor, key: Tensor) -> object:
        """Store latent and rotated key without attending."""
        ...


@dataclass(frozen=True, kw_only=True)
class LatentLayer:
    """A layer's latent attention, in two forms that give the same up to rounding.

    Expanded, latents become a key and a value of each head: less work where a pass has about as many rows as positions.
    Absorbed, queries become as wide as latents, which are the keys and values of all heads, and are read once.
    """

    expanded: LayerAttention
    absorbed: LayerAttention
    up: Tensor  # [Hq, nope_dim + value_dim, rank]: from a latent to a head's key, without positions, and its value
    nope_dim: int

    def absorb(self, q: Tensor, out: Tensor) -> None:
        """Queries without positions [rows, Hq, nope_dim] as queries of latents, into ``out`` [rows, Hq, rank]."""
        torch.bmm(q.transpose(0, 1), self.up[:, : self.nope_dim], out=out.transpose(0, 1))

    def lift(self, attended: Tensor) -> Tensor:
        """What the absorbed form attended to, [rows, Hq, rank], as values [rows, Hq, value_dim]."""
        values = self.up[:, self.nope_dim :]
        out = attended.new_empty(*attended.shape[:2], values.shape[1])
        torch.bmm(attended.transpose(0, 1), values.mT, out=out.transpose(0, 1))
        return out

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated latents [n, width] as keys [n, Hq, key_dim] and values [n, Hq, value_dim], whose rows are strided."""
        latent, rotated = latents[:, : self.up.shape[2]], latents[:, None, self.up.shape[2] :]
        heads = F.linear(latent, self.up.flatten(0, 1)).view(len(latent), *self.up.shape[:2])
        keys, values = heads.tensor_split((self.nope_dim,), -1)
        return torch.cat((keys, rotated.expand(-1, len(self.up), -1)), -1), values
