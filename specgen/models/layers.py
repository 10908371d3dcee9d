"""The layers of targets and heads: norms, projections around attention, decoder layers, and how they load."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from specgen.attention import Attend, DeltaLayer, LatentLayer, LayerAttention
from specgen.config import UserError
from specgen.models.loader import Loader
from specgen.models.mlp import MLP, Mixture
from specgen.models.model_config import DeltaConfig, LatentConfig, LayerConfig
from specgen.ops import Map, Norm, Ops, Pair
from specgen.ops.fp8 import plain_matrix
from specgen.ops.weight import Weight


def norm_weight(config: LayerConfig, name: str, size: int, load: Loader) -> Tensor:
    """``{name}.weight`` [size] as what is normed is multiplied with it; in float32 where 1 is added."""
    if config.norm_adds_one:
        return load.float32(f"{name}.weight", (size,)) + 1
    return load(f"{name}.weight", (size,))


def load_norm(
    config: LayerConfig, name: str, size: int, load: Loader, ops: Ops, out_scale: Tensor | None = None
) -> Norm:
    """The norm ``name`` over ``size`` numbers; see ``MakeNorm`` for ``out_scale``."""
    weight = norm_weight(config, name, size, load)
    return ops.rms_norm(weight, config.rms_norm_eps, config.norm_casts_last, out_scale)


def _by_kind(num_groups: int, sizes: Sequence[int]) -> list[list[int]]:
    """The rows of each kind, where every group has ``sizes[kind]`` of them, one kind behind another."""
    ends, width = list(accumulate(sizes)), sum(sizes)
    starts = range(0, num_groups * width, width)
    return [
        [start + row for start in starts for row in range(end - size, end)]
        for size, end in zip(sizes, ends, strict=True)
    ]


# Of modelopt, of compressed-tensors now and earlier, and of older files with one scale for keys and values.
_NAMES = (
    "{0}_proj.{0}_scale",
    "{0}_scale",
    "attn.{0}_scale",
    "{0}_proj.output_scale",
    "kv_scale",
    "attn.kv_scale",
)


def kv_scale(which: Literal["k", "v"], prefix: str, load: Loader) -> float:
    """What a layer's stored keys or values are multiplied by; 1 where the checkpoint says nothing, or 0 or less.

    ``prefix`` is that of the layer's attention, ``model.layers.0.self_attn.``. ``UserError`` for a scale that is not
    finite.
    """
    names = (prefix + name.format(which) for name in _NAMES)
    name = next((name for name in names if name in load), None)
    if name is None:
        return 1.0
    scale = load.scalar(name)
    if not math.isfinite(scale):
        raise UserError(f"{name} is {scale}: the checkpoint is damaged, download it again")
    return scale if scale > 0 else 1.0


def _in_halves(heads: Mapping[str, int], size: int) -> list[int]:
    """The rows of ``heads`` of "q", "k" and "v" with rotary pairs as halves of a head, not neighbours; v has none."""
    kinds = [name for name, count in heads.items() for _ in range(count)]
    rows = [(name, range(at * size, (at + 1) * size)) for at, name in enumerate(kinds)]
    return [row for name, each in rows for row in (each if name == "v" else _first_of_pairs_first(each))]


def _first_of_pairs_first(pairs: range) -> list[int]:
    return [*pairs[::2], *pairs[1::2]]


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The input projections of one layer's attention as one matrix: q, k and v, or only k and v.

    Behind those heads are the gates of the queries, as many and as wide as these, where there are some.
    """

    linear: Map  # [rows, width] -> [rows, num_heads * D]
    input_scale: Tensor | None  # of its inputs in FP8; see Weight.static_scale
    norm: Norm | None  # of the first heads, q and k
    num_heads: int
    head_dim: int

    @classmethod
    def build(
        cls, config: LayerConfig, heads: Mapping[str, int], width: int, prefix: str, load: Loader, ops: Ops
    ) -> "Projection":
        """Load ``{prefix}self_attn.*``; ``heads`` counts those of "q", "k" and "v", whose inputs are ``width`` wide."""
        prefix, size, num_gates = f"{prefix}self_attn.", config.head_dim, 0
        if config.query_gates:
            num_gates = heads.get("q", 0)
        rows = {f"{prefix}{name}_proj": count * size for name, count in heads.items()}
        if num_gates:
            rows[f"{prefix}q_proj"] *= 2
        normed = {name: count for name, count in heads.items() if name != "v"}
        weight, norm = load.linear(rows, width, bias=config.qkv_bias), None
        if config.interleaved:
            weight = weight.reordered(_in_halves(heads, size))
        if num_gates:  # each head's lies behind it in a checkpoint
            queries, gates = _by_kind(num_gates, (size, size))
            weight = weight.reordered([*queries, *range(2 * len(queries), sum(rows.values())), *gates])
        if config.qk_norm:
            weights = [
                norm_weight(config, f"{prefix}{name}_norm", size, load).repeat(count, 1)
                for name, count in normed.items()
            ]
            norm = ops.rms_norm(torch.cat(weights), config.rms_norm_eps, config.norm_casts_last)
        return cls(
            linear=ops.linear(weight),
            input_scale=weight.static_scale,
            norm=norm,
            num_heads=sum(heads.values()),
            head_dim=size,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, num_heads, D]."""
        return self.with_gates(x)[0]

    def with_gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and behind it the gates [rows, Hq * D], or none: [rows, 0]."""
        rows = self.linear(x).view(x.shape[0], -1, self.head_dim)
        heads, gates = rows[:, : self.num_heads], rows[:, self.num_heads :].flatten(1)
        if self.norm is not None:
            heads = self.norm(heads)
        return heads, gates


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The projections around ``Attend`` of one layer."""

    qkv: Projection
    gated: Pair  # what is attended, by the gates of the queries
    out: Map  # [rows, Hq * D] -> [parts, rows, H]
    layer: LayerAttention

    @classmethod
    def build(
        cls, config: LayerConfig, index: int, width: int, prefix: str, load: Loader, ops: Ops
    ) -> "Attention":
        """Load ``{prefix}self_attn.*`` of layer ``index``, whose q, k and v have inputs ``width`` wide."""
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        out, q_rows = f"{prefix}self_attn.o_proj", config.num_heads * config.head_dim
        sinks = load(f"{prefix}self_attn.sinks", (config.num_heads,)).float() if config.sinks else None
        return cls(
            qkv=Projection.build(config, heads, width, prefix, load, ops),
            gated=ops.sigmoid_gated,
            out=ops.linear_parts(load.linear({out: config.hidden_size}, q_rows, bias=config.o_bias)),
            layer=LayerAttention(
                index=config.cache_index(index),
                scale=config.head_dim**-0.5,
                window=config.window(index),
                causal=config.causal(index),
                sinks=sinks,
                k_scale=kv_scale("k", f"{prefix}self_attn.", load),
                v_scale=kv_scale("v", f"{prefix}self_attn.", load),
            ),
        )

    @property
    def input_scale(self) -> Tensor | None:
        """Of its inputs in FP8; see ``Weight.static_scale``."""
        return self.qkv.input_scale

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """Project, attend, project back: [rows, width] -> [parts, rows, H]; see ``Ops.linear_parts``."""
        heads, gates = self.qkv.with_gates(x)
        attended = attend(self.layer, heads)
        return self.out(self.gated(attended, gates) if gates.shape[1] else attended)

    def write_kv(self, x: Tensor, attend: Attend) -> None:
        """Store the keys and values of [rows, width] without attending."""
        attend.write_kv(self.layer, self.qkv(x))


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """As ``Attention``, for the latents that ``LatentConfig`` describes; rotary pairs are halves here."""

    enter: Map  # [rows, H] -> queries or their latent beside the latent that is stored, in one matrix
    input_scale: Tensor | None  # of its inputs in FP8; see Weight.static_scale
    queries: tuple[Norm, Map] | None  # from their latent to [rows, Hq * key_dim]
    norm: Norm  # of the first ``rank`` numbers of what is stored
    out: Map  # [rows, Hq * value_dim] -> [parts, rows, H]
    layer: LatentLayer
    config: LatentConfig

    @classmethod
    def build(
        cls, config: LayerConfig, index: int, width: int, prefix: str, load: Loader, ops: Ops
    ) -> "LatentAttention":
        """Load ``{prefix}self_attn.*`` of layer ``index``, whose inputs are ``width`` wide."""
        latent, heads, prefix = config.latent, config.num_heads, f"{prefix}self_attn."
        assert latent is not None
        rank, q_rank, q_rows = latent.rank, latent.query_rank, heads * latent.key_dim
        first = {f"{prefix}q_proj": q_rows} if q_rank is None else {f"{prefix}q_a_proj": q_rank}
        enter = load.linear({**first, f"{prefix}kv_a_proj_with_mqa": latent.width}, width)
        order = [*range(q_rank)] if q_rank is not None else [*_of_queries(latent, heads)]
        enter = enter.reordered([*order, *(len(order) + row for row in _halves(latent, latent.rank))])

        kv_norm, queries = norm_weight(config, f"{prefix}kv_a_layernorm", rank, load), None
        if q_rank is not None:
            norm = load_norm(config, f"{prefix}q_a_layernorm", q_rank, load, ops)
            weight = load.linear({f"{prefix}q_b_proj": q_rows}, q_rank)
            queries = norm, ops.linear(weight.reordered([*_of_queries(latent, heads)]))
        up = load.linear({f"{prefix}kv_b_proj": heads * (latent.nope_dim + latent.value_dim)}, rank)
        out = load.linear({f"{prefix}o_proj": config.hidden_size}, heads * latent.value_dim)
        return cls(
            enter=ops.linear(enter),
            input_scale=enter.static_scale,
            queries=queries,
            norm=ops.rms_norm(kv_norm, config.rms_norm_eps, config.norm_casts_last),
            out=ops.linear_parts(out),
            layer=_layer(latent, index, plain_matrix(up, kv_norm.dtype)),  # else the forms would differ
            config=latent,
        )

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """Project, attend, project back: [rows, width] -> [parts, rows, H]; see ``Ops.linear_parts``."""
        entered = self.enter(x)
        q = entered[:, : -self.config.width]
        if self.queries is not None:
            norm, project = self.queries
            q = project(norm(q))
        heads = q.view(len(q), -1, self.config.key_dim)
        return self.out(attend.latent(self.layer, heads, *self._stored(entered)))

    def write_kv(self, x: Tensor, attend: Attend) -> None:
        """Store the latents of [rows, width] without attending."""
        attend.write_latents(self.layer, *self._stored(self.enter(x)))

    def _stored(self, entered: Tensor) -> tuple[Tensor, Tensor]:
        """The latent behind its norm [rows, rank], and the key that all heads share [rows, rope_dim], not rotated."""
        latent, key = entered[:, -self.config.width :].tensor_split((self.config.rank,), -1)
        return self.norm(latent), key


def _layer(config: LatentConfig, index: int, up: Tensor) -> LatentLayer:
    layer = LayerAttention(index=index, scale=config.scale)
    return LatentLayer(
        expanded=layer,
        absorbed=replace(layer, value_dim=config.rank),
        up=up.view(-1, config.nope_dim + config.value_dim, config.rank),
        nope_dim=config.nope_dim,
    )


def _of_queries(config: LatentConfig, num_heads: int) -> Iterator[int]:
    """The rows of all heads' queries in the order that is computed with."""
    for head in range(num_heads):
        yield from (head * config.key_dim + row for row in _halves(config, config.nope_dim))


def _halves(config: LatentConfig, num_plain: int) -> list[int]:
    """``num_plain`` rows as they are, and behind them those of rotary pairs, the first of every pair first."""
    pairs = range(num_plain, num_plain + config.rope_dim)
    return [*range(num_plain), *(_first_of_pairs_first(pairs) if config.interleaved else pairs)]


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """The projections around ``Attend.recur`` of a layer with a Gated DeltaNet."""

    enter: Map  # [rows, width] -> q, k, v [channels] beside the gate of what is read, and a and b unless ``rates``
    rates: Map | None  # [rows, width] -> a beside b [2 * Hv], where these are not stored as the others are
    norm: Pair  # of what each head reads, with the gate
    out: Map  # [rows, Hv * value_dim] -> [parts, rows, H]
    layer: DeltaLayer
    input_scale: None = None  # its inputs are read as they are

    @classmethod
    def build(
        cls, config: LayerConfig, index: int, width: int, prefix: str, load: Loader, ops: Ops
    ) -> "GatedDelta":
        """Load ``{prefix}linear_attn.*`` of layer ``index``, whose inputs are ``width`` wide."""
        delta, prefix = config.delta, f"{prefix}linear_attn."
        assert delta is not None
        heads, channels = delta.num_value_heads, delta.num_channels
        enter, rates = _delta_weights(delta, width, prefix, load)
        together = enter.format == rates.format == "plain"
        out = load.linear({f"{prefix}out_proj": config.hidden_size}, heads * delta.value_dim)
        return cls(
            enter=ops.linear(Weight.joined([enter, rates]) if together else enter),
            rates=None if together else ops.linear(rates),
            norm=ops.gated_norm(load(f"{prefix}norm.weight", (delta.value_dim,)), config.rms_norm_eps),
            out=ops.linear_parts(out),
            layer=DeltaLayer(
                index=config.cache_index(index),
                conv=load(f"{prefix}conv1d.weight", (channels, 1, delta.num_taps)).squeeze(1),
                log_rate=load.float32(f"{prefix}A_log", (heads,)),
                rate_bias=load.float32(f"{prefix}dt_bias", (heads,)),
                num_key_heads=delta.num_key_heads,
                key_dim=delta.key_dim,
                value_dim=delta.value_dim,
            ),
        )

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """Project, recur, project back: [rows, width] -> [parts, rows, H]; see ``Ops.linear_parts``."""
        channels, (heads, value_dim) = len(self.layer.conv), (len(self.layer.log_rate), self.layer.value_dim)
        entered = self.enter(x)
        mixed, gate, rates = entered.tensor_split((channels, channels + heads * value_dim), -1)
        a, b = (rates if self.rates is None else self.rates(x)).chunk(2, -1)
        read = attend.recur(self.layer, mixed, a, b)
        return self.out(self.norm(read, gate.view(len(x), heads, value_dim)).flatten(1))


def _delta_weights(delta: DeltaConfig, width: int, prefix: str, load: Loader) -> tuple[Weight, Weight]:
    """Of queries, keys, values and gate, each kind for all heads; and likewise of a and b.

    Qwen3-Next has all kinds of a key head, and of the value heads that share it, before those of the next one.
    """
    heads, values = delta.num_value_heads, delta.num_value_heads * delta.value_dim
    if f"{prefix}in_proj_qkvz.weight" not in load:
        first = {f"{prefix}in_proj_qkv": delta.num_channels, f"{prefix}in_proj_z": values}
        second = {f"{prefix}in_proj_a": heads, f"{prefix}in_proj_b": heads}
        return load.linear(first, width), load.linear(second, width)
    groups, key, value = delta.num_key_heads, delta.key_dim, values // delta.num_key_heads
    every = load.linear({f"{prefix}in_proj_qkvz": delta.num_channels + values}, width)
    rates = load.linear({f"{prefix}in_proj_ba": 2 * heads}, width)
    b, a = _by_kind(groups, (heads // groups, heads // groups))
    order = _by_kind(groups, (key, key, value, value))
    return every.reordered([row for kind in order for row in kind]), rates.reordered([*a, *b])


@dataclass(frozen=True, kw_only=True)
class Block:
    """A decoder layer without the norm of its inputs, which its predecessor's sum is fused with."""

    attention: Attention | LatentAttention | GatedDelta
    post_norm: Norm
    mlp: MLP | Mixture

    @classmethod
    def build(
        cls, config: LayerConfig, index: int, prefix: str, load: Loader, ops: Ops, width: int
    ) -> "Block":
        """Load ``{prefix}*`` as layer ``index``, whose attention has inputs ``width`` wide."""
        kind: type[Attention] | type[LatentAttention] | type[GatedDelta]
        kind = Attention if config.latent is None else LatentAttention
        if not config.attends(index):
            kind = GatedDelta
        attention = kind.build(config, index, width, prefix, load, ops)
        mlp, scale = _mlp(config, index, prefix, load, ops)
        norm = load_norm(config, f"{prefix}post_attention_layernorm", config.hidden_size, load, ops, scale)
        return cls(attention=attention, post_norm=norm, mlp=mlp)

    def __call__(self, stream: Tensor, normed: Tensor, attend: Attend) -> tuple[Tensor, *tuple[Tensor, ...]]:
        """The residual ``stream`` [rows, H] and the attention's inputs [rows, width].

        Returns the stream behind the attention, and behind it what the MLP adds to it, each [parts, rows, H].
        """
        stream, normed = self.post_norm.add(stream, self.attention(normed, attend))
        return stream, *self.mlp(normed)


def _mlp(
    config: LayerConfig, index: int, prefix: str, load: Loader, ops: Ops
) -> tuple[MLP | Mixture, Tensor | None]:
    """The block behind the attention, and the scale of its inputs; a mixture's router reads them as well."""
    mixture = config.mixture_of(index)
    if mixture is not None:
        return Mixture.build(mixture, config.hidden_size, f"{prefix}mlp.", load, ops), None
    mlp = MLP.build(config.hidden_size, config.intermediate_size, f"{prefix}mlp.", load, ops, config.mlp_bias)
    return mlp, mlp.input_scale


@dataclass(frozen=True, kw_only=True)
class HeadLayers:
    """The decoder layers of a draft head, from the inputs of the first attention to what the last MLP adds."""

    blocks: tuple[Block, ...]
    norms: tuple[Norm, ...]  # of the inputs of each block but the first
    kv_proj: Projection  # of the last block's attention

    @classmethod
    def build(
        cls, config: LayerConfig, prefixes: Sequence[str], width: int, load: Loader, ops: Ops
    ) -> "HeadLayers":
        """Load ``{prefix}*`` of each layer; the attention of the first has inputs ``width`` wide."""
        hidden, kv_heads = config.hidden_size, config.num_kv_heads
        widths = [width, *[hidden] * (len(prefixes) - 1)]
        return cls(
            blocks=tuple(
                Block.build(config, index, prefix, load, ops, widths[index])
                for index, prefix in enumerate(prefixes)
            ),
            norms=tuple(
                load_norm(config, f"{prefix}input_layernorm", hidden, load, ops) for prefix in prefixes[1:]
            ),
            kv_proj=Projection.build(
                config, {"k": kv_heads, "v": kv_heads}, widths[-1], prefixes[-1], load, ops
            ),
        )

    def __call__(self, stream: Tensor, inputs: Tensor, attend: Attend) -> tuple[Tensor, *tuple[Tensor, ...]]:
        """From the residual stream [rows, H] and the inputs of the first attention [rows, width]; see ``Block``."""
        return self.blocks[-1](*self._before_last(stream, inputs, attend), attend)

    def write_kv(self, stream: Tensor, inputs: Tensor, attend: Attend) -> None:
        """Store the keys and values of accepted rows.

        Later rows read no other state of a row, so its attention and MLP in the last layer are not computed.
        """
        _, inputs = self._before_last(stream, inputs, attend)
        attention = self.blocks[-1].attention
        assert isinstance(attention, Attention)
        attend.write_kv(attention.layer, self.kv_proj(inputs))

    def _before_last(self, stream: Tensor, inputs: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        for block, norm in zip(self.blocks[:-1], self.norms, strict=True):
            stream, inputs = norm.add(*block(stream, inputs, attend))
        return stream, inputs
