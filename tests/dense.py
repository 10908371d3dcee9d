"""Dense attention over one sequence: the simplest ``Attend``."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.attention import DeltaLayer, LatentLayer, LayerAttention, Temperature
from specgen.kv.layout import Layout
from specgen.models.eagle import Eagle3Head
from specgen.models.gemma4 import Gemma4
from specgen.models.llama import Llama
from specgen.ops import Rope, Store

LENGTH = 256  # capacity in positions


class DenseAttend:
    """Causal attention of one sequence, rounded as eager attention in ``transformers``.

    Keeps K and V, so that a sequence may be split into several passes.
    """

    def __init__(self, model: Llama | Gemma4 | Eagle3Head) -> None:
        self.rope = model.rope
        self.config = model.config
        self.kept: dict[int, tuple[Tensor, Tensor, int]] = {}
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: LayerAttention, qkv: Tensor, chunk: int = LENGTH) -> Tensor:
        keys, values, start = self.kept.get(layer.index, (None, None, 0))
        if keys is None or values is None:
            num_kv_heads = (qkv.shape[1] - self.config.num_heads) // 2
            keys, values = qkv.new_zeros(2, 1, LENGTH, num_kv_heads, qkv.shape[-1])
        if layer.stores:
            q = self._rotation(start, len(qkv), layer.rope)(qkv, keys, values)
            self.kept[layer.index] = (keys, values, start + len(qkv))
        else:  # behind the layer that has stored these rows
            start -= len(qkv)
            q = self._rotation(start, len(qkv), layer.rope)(
                qkv, *qkv.new_zeros(2, 1, LENGTH, 0, qkv.shape[-1])
            )
        end = start + len(qkv)
        rows, num_heads, _ = q.shape
        share = num_heads // keys.shape[2]
        k, v = (pages[0, :end].repeat_interleave(share, 1).transpose(0, 1) for pages in (keys, values))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * layer.scale
        future = torch.ones(rows, end, dtype=torch.bool).triu(end - rows + 1)
        hidden = (
            future
            if layer.window is None
            else future | ~(future.new_ones(rows, end).triu(end - rows + 1 - layer.window))
        )
        columns = torch.arange(end)
        hidden = hidden | (columns < columns[start:, None] // chunk * chunk)
        scores = scores.masked_fill(hidden, float("-inf"))
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.to(q.dtype).view(-1, 1, 1).expand(-1, rows, 1)), -1)
            scores = scores - scores.amax(-1, keepdim=True)  # which rounds
        weights = scores.softmax(-1, dtype=torch.float32)[..., :end]
        return (weights.to(q.dtype) @ v).transpose(0, 1).reshape(rows, -1)

    def chunked(self, layer: LayerAttention, size: int, qkv: Tensor) -> Tensor:
        return self(layer, qkv, chunk=size)

    def tempered(self, layer: LayerAttention, temperature: Temperature | None, qkv: Tensor) -> Tensor:
        start = self.kept[layer.index][2] if layer.index in self.kept else 0
        for row, heads in enumerate(qkv[:, : self.config.num_heads], start=start + 1):
            if temperature is not None:
                heads *= 1 + temperature.scale * math.log(1 + row // temperature.floor)
        return self(layer, qkv)

    def latent(self, layer: LatentLayer, q: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        """Expanded."""
        index, width = layer.expanded.index, latent.shape[1] + key.shape[1]
        stored, _, start = self.kept.get(index, (latent.new_zeros(1, LENGTH, 1, width), q, 0))
        rows, end = len(q), start + len(q)
        turned = q[..., layer.nope_dim :]
        self._rotation(start, rows).latents(latent, key, stored, turned, turned)
        self.kept[index] = (stored, stored, end)
        keys, values = (each.transpose(0, 1) for each in layer.expand(stored[0, :end, 0]))
        future = torch.ones(rows, end, dtype=torch.bool).triu(end - rows + 1)
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * layer.expanded.scale
        weights = scores.masked_fill(future, float("-inf")).softmax(-1, dtype=torch.float32)
        return (weights.to(q.dtype) @ values).transpose(0, 1).reshape(rows, -1)

    def recur(self, layer: DeltaLayer, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Row by row, in float32."""
        heads, group = len(layer.log_rate), len(layer.log_rate) // layer.num_key_heads
        zeros = mixed.new_zeros(layer.conv.shape[1] - 1, mixed.shape[1])
        empty = torch.zeros(heads, layer.key_dim, layer.value_dim)
        before, state = self.states.get(layer.index, (zeros, empty))
        rows = torch.cat((before, mixed))
        taken = rows.unfold(0, layer.conv.shape[1], 1)  # [rows, channels, taps]
        keys = layer.num_key_heads * layer.key_dim
        parts = F.silu((taken * layer.conv).sum(-1)).float().split((keys, keys, heads * layer.value_dim), -1)
        q, k = (
            part.view(len(mixed), layer.num_key_heads, -1).repeat_interleave(group, 1) for part in parts[:2]
        )
        q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
        v, out = parts[2].view(len(mixed), heads, -1), []
        decay = (-layer.log_rate.exp() * F.softplus(a.float() + layer.rate_bias)).exp()
        for row, beta in enumerate(b.float().sigmoid()):
            state = state * decay[row, :, None, None]
            error = v[row] - torch.einsum("hkv,hk->hv", state, k[row])
            state = state + k[row, :, :, None] * (beta[:, None] * error)[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, q[row]) * layer.key_dim**-0.5)
        self.states[layer.index] = (rows[len(mixed) :], state)
        return torch.stack(out).to(mixed.dtype)

    def _rotation(self, start: int, rows: int, rope: Rope | None = None) -> Store:
        tables = torch.zeros(1, 1, dtype=torch.int32)
        return (rope or self.rope)(Layout.uniform(tables, torch.tensor([start]), rows, LENGTH))
