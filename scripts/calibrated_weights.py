"""Synthetic weights as slow as real ones, whose text is known in advance: the target, and what targets and heads share.

All projections of the target are random; those that write to the residual stream are so small that the stream stays the
embedding e(t) of its own token t. The row of ``lm_head`` for the token after t is e(t), and embeddings are nearly
orthogonal: of 128,256 of width 4,096 no other reaches a tenth of the right logit. Heads: calibrated_heads.py.

In FP8 layers are as modelopt stores them, with a scale per tensor, or as Qwen does, by blocks of 128: their random
projections are those of the same layers in bfloat16, rounded; activations before them have RMS 1.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from calibrated_shapes import HybridShape, Shape
from torch import Tensor

LOGIT = 30.0  # of the right token; the others' are near 0, so sampling at temperature 1 gives the same text
RESIDUAL = 0.005  # RMS of the output of a random block; the stream has RMS 1
NOISE = 0.02  # RMS of the random part of a calibrated matrix's output; multiplying zeros would be faster
DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Named:
    """A tensor of a checkpoint, made on demand."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    dtype: torch.dtype = DTYPE


Layer = Callable[[str, "Source"], Iterator[Named]]  # all tensors of a layer, from the prefix of their names


class Source:
    """Random tensors on one device, the same for a seed and a device."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        """Of ``shape`` in bfloat16."""
        values = torch.empty(shape, dtype=DTYPE, device=self.device)
        return values.normal_(0.0, std, generator=self._generator)

    def linear(self, name: str, rows: int, width: int, rms: float) -> Named:
        """A projection ``[rows, width]`` that takes rows of RMS 1 to rows of RMS ``rms``."""
        shape = (rows, width)
        return Named(name=name, shape=shape, make=lambda: self.normal(shape, rms / width**0.5))

    def noise(self, name: str, shape: tuple[int, ...], std: float) -> Named:
        """Random numbers that are no projection's weight: biases, sinks, the matrices of all experts in one."""
        return Named(name=name, shape=shape, make=lambda: self.normal(shape, std))

    def uint8(self, name: str, shape: tuple[int, ...], start: int, end: int) -> Named:
        """Random uint8 from ``start`` to ``end - 1``."""

        def make() -> Tensor:
            values = torch.empty(shape, dtype=torch.uint8, device=self.device)
            return values.random_(start, end, generator=self._generator)

        return Named(name=name, shape=shape, make=make, dtype=torch.uint8)

    def orthogonal(self, count: int, width: int) -> Tensor:
        """``[count, width]`` float32: random directions at right angles, ``count`` of at most ``width``."""
        values = torch.randn(width, count, generator=self._generator, device=self.device)
        return torch.linalg.qr(values).Q.T

    def ones(self, name: str, width: int) -> Named:
        """The weight of a norm."""
        return self.constant(name, width, 1.0)

    def zeros(self, name: str, width: int) -> Named:
        """The weight of a norm that adds 1 to it."""
        return self.constant(name, width, 0.0)

    def constant(self, name: str, width: int, value: float) -> Named:
        """So many times the same number."""
        return Named(
            name=name,
            shape=(width,),
            make=lambda: torch.full((width,), value, dtype=DTYPE, device=self.device),
        )

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> Named:
        """Random float32 from ``low`` to ``high``."""

        def make() -> Tensor:
            values = torch.empty(shape, device=self.device)
            return values.uniform_(low, high, generator=self._generator)

        return Named(name=name, shape=shape, make=make, dtype=torch.float32)

    def shaped(self, name: str, rows: int, width: int, add: Callable[[Tensor], None]) -> Named:
        """A projection ``[rows, width]`` of small random numbers, to which ``add`` adds what it is to compute."""

        def make() -> Tensor:
            weight = self.normal((rows, width), NOISE / width**0.5)
            add(weight)
            return weight

        return Named(name=name, shape=(rows, width), make=make)

    def integers(self, count: int, below: int) -> Tensor:
        """``[count]`` int64, from 1 on."""
        return torch.randint(1, below, (count,), generator=self._generator, device=self.device)

    def stretches(self, count: int, width: int, stretch: int) -> Tensor:
        """``[count, width]``, each ``stretch`` of a row with the norm sqrt(stretch)."""
        values = self.normal((count, width // stretch, stretch), 1.0)
        for part in values.split(1 << 14):  # a float32 copy of the whole would not fit beside a model
            norm = torch.linalg.vector_norm(part, dim=-1, keepdim=True, dtype=torch.float32)
            part.copy_(part / norm * stretch**0.5)
        return values.view(count, width)


def target_tensors(
    shape: Shape,
    embedding: Tensor,
    followers: Mapping[int, int],
    source: Source,
    layer: Layer | None = None,
) -> Iterator[Named]:
    """Every tensor of a language model that writes the token in ``followers`` behind each of them.

    ``embedding`` [V, H] is what its first layer takes in; ``layer`` makes the tensors of a layer that is not dense.
    """
    layer = layer or partial(dense_layer, shape)
    table = (shape.vocab_size, shape.hidden_size)
    yield Named(name="model.embed_tokens.weight", shape=table, make=lambda: embedding / shape.embedding_scale)
    for index in range(shape.num_layers):
        yield from layer(f"model.layers.{index}.", source)
    norm = source.zeros if isinstance(shape, HybridShape) else source.ones
    yield norm("model.norm.weight", shape.hidden_size)
    yield Named(
        name="lm_head.weight", shape=table, make=lambda: output_weights(shape, embedding, followers, source)
    )


def output_weights(shape: Shape, embedding: Tensor, followers: Mapping[int, int], source: Source) -> Tensor:
    """``[V, H]``: the row of a token's follower is the token's embedding; others are random."""
    rows = source.stretches(shape.vocab_size, shape.hidden_size, shape.head_dim)
    before = torch.tensor(list(followers.keys()), device=source.device)
    after = torch.tensor(list(followers.values()), device=source.device)
    rows[after] = embedding[before]
    return rows.mul_(LOGIT / shape.hidden_size)


def dense_layer(shape: Shape, prefix: str, source: Source) -> Iterator[Named]:
    """Every tensor of a dense layer."""
    yield source.ones(prefix + "input_layernorm.weight", shape.hidden_size)
    yield from attention(shape, prefix, source)
    yield source.ones(prefix + "post_attention_layernorm.weight", shape.hidden_size)
    yield from mlp(shape, prefix, source)


def attention(shape: Shape, prefix: str, source: Source) -> Iterator[Named]:
    """Random projections of a target's attention, and norms of q and k."""
    hidden = shape.hidden_size
    prefix += "self_attn."
    yield source.linear(prefix + "q_proj.weight", shape.q_size, hidden, 1.0)
    yield source.linear(prefix + "k_proj.weight", shape.kv_size, hidden, 1.0)
    yield source.linear(prefix + "v_proj.weight", shape.kv_size, hidden, 1.0)
    yield source.linear(prefix + "o_proj.weight", hidden, shape.q_size, RESIDUAL)
    if shape.qk_norm:
        yield source.ones(prefix + "q_norm.weight", shape.head_dim)
        yield source.ones(prefix + "k_norm.weight", shape.head_dim)


def mlp(shape: Shape, prefix: str, source: Source) -> Iterator[Named]:
    """A random gated feed-forward block."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    yield source.linear(prefix + "mlp.gate_proj.weight", inner, hidden, 1.0)
    yield source.linear(prefix + "mlp.up_proj.weight", inner, hidden, 1.0)
    yield source.linear(prefix + "mlp.down_proj.weight", hidden, inner, RESIDUAL)


Fp8Format = Literal["fp8", "fp8-block"]
BLOCK = 128
E4M3 = torch.float8_e4m3fn
_QUANTIZED = tuple(f"_proj{end}.weight" for end in ("", "_with_mqa", "_qkv", "_z"))  # ends of their names
_LARGEST = 448.0  # of e4m3
_INPUT = 24.0  # the largest activation; greater ones saturate
_SIGMAS = {
    "k_proj": 5.0,
    "up_proj": 7.0,
}  # deviations that e4m3 holds, by name: scales are to differ; others 6


@dataclass(frozen=True, kw_only=True)
class Fp8Layers:
    """Makes the tensors of ``layer`` with its projections in FP8; see ``calibrated_weights.Layer``."""

    layer: Layer
    format: Fp8Format
    plain: tuple[str, ...] = ("lm_head",)  # linear layers of the model that stay in bfloat16

    def __call__(self, prefix: str, source: Source) -> Iterator[Named]:
        for named in self.layer(prefix, source):
            if named.name.endswith(_QUANTIZED):
                yield from self._quantized(named)
            else:
                yield named

    @property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` says of it."""
        block = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(self.plain),
        }
        modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": list(self.plain)}
        return {"quantization_config": block if self.format == "fp8-block" else modelopt}

    def _quantized(self, named: Named) -> Iterator[Named]:
        (rows, width), stem = named.shape, named.name.removesuffix("weight")
        name = stem.rstrip(".").rpartition(".")[-1]
        largest = _SIGMAS.get(name, 6.0)
        rms = RESIDUAL if name in ("o_proj", "out_proj", "down_proj") else 1.0
        scale = rms / width**0.5 * largest / _LARGEST

        def values() -> Tensor:
            return named.make().float().div_(scale).clamp_(-_LARGEST, _LARGEST).to(E4M3)

        yield replace(named, make=values, dtype=E4M3)
        if self.format == "fp8-block":
            yield _filled(stem + "weight_scale_inv", (-(-rows // BLOCK), -(-width // BLOCK)), scale)
        else:
            yield _filled(stem + "weight_scale", (), scale)
            yield _filled(stem + "input_scale", (), _INPUT / _LARGEST)


def _filled(name: str, shape: tuple[int, ...], value: float) -> Named:
    """A tensor of one number."""
    return Named(name=name, shape=shape, make=lambda: torch.full(shape, value), dtype=torch.float32)
