"""Gemma 4 (2026): what its configs say, and layers unlike those of a Llama.

Four norms a layer; windows in most layers, the others with wider heads, fewer of keys, and a rotation of their own;
in some sizes inputs of each layer beside the stream, layers without keys and values, or experts beside the MLP.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.attention import Attend, LayerAttention
from specgen.config import require, shown
from specgen.models import llama
from specgen.models.config_fields import LARGEST_COUNT, Raw, count, flag, items, number, section
from specgen.models.config_keys import GEMMA4_HEADS, known_keys
from specgen.models.layers import Projection, kv_scale, load_norm, norm_weight
from specgen.models.llama import LanguageModel, Vocabulary
from specgen.models.loader import Loader
from specgen.models.mlp import MLP, Mixture
from specgen.models.model_config import LayerConfig, MixtureConfig, TargetConfig
from specgen.models.rotary import RopeConfig, inverse_frequencies, rope_of
from specgen.ops import Map, Norm, Ops, Pair, Rope, Sandwich, SandwichNorm

# ---- configs

_GLOBAL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: Mapping[str, Mapping[str, Any]] = {  # of transformers, by kind of layer
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_PERIOD = 6  # of layers, the last of which sees all, where no layer_types say it
_SHAPE = ("num_key_value_heads", "head_dim")
# What layers of a Llama have otherwise, or not at all
_OWN = (
    *("hidden_activation", "use_bidirectional_attention", "final_logit_softcapping", "per_layer_config"),
    *_SHAPE,
)


@dataclass(frozen=True, kw_only=True)
class Gemma4Layers(LayerConfig):
    """Of a target or a head; ``num_kv_heads``, ``head_dim`` and ``rope`` are those of layers with a window."""

    global_kv_heads: tuple[int, int]  # of the others: heads of keys, and their width
    global_rope: RopeConfig
    keys_are_values: bool  # in these others: what keys are made of, in front of its norm
    num_shared: int  # last layers, which see the keys and values of the last of their kind before them
    double_wide: bool  # the MLPs of these
    layer_inputs: int  # width of each layer's own input; 0: there is none
    logit_cap: float | None

    def kv_heads(self, layer: int) -> tuple[int, int]:
        return self.global_kv_heads if self.window(layer) is None else super().kv_heads(layer)

    def rope_of(self, layer: int) -> RopeConfig:
        return self.global_rope if self.window(layer) is None else self.rope

    def stores(self, layer: int) -> bool:
        return layer < self.num_layers - self.num_shared

    def source(self, layer: int) -> int:
        """The layer whose keys and values ``layer`` sees: mostly itself."""
        return layer if self.stores(layer) else self.last_stored(self.window(layer) is not None)

    def last_stored(self, windowed: bool) -> int:
        """The last layer with keys and values of its own, of those with a window or of the others."""
        first = self.num_layers - self.num_shared
        return max(each for each in range(first) if (self.window(each) is not None) == windowed)

    def cache_index(self, layer: int) -> int:
        return self.source(layer)  # all that store are in front of those that do not

    def mlp_width(self, layer: int) -> int:
        return self.intermediate_size * (2 if self.double_wide and not self.stores(layer) else 1)

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        return (*super().kv_shapes, self.global_kv_heads)

    def shared(self, count: int) -> Self:
        found, (heads, width) = super().shared(count), self.global_kv_heads
        parts = self.num_heads // found.num_heads  # 1: of a head that stays whole
        return replace(found, global_kv_heads=(max(heads // parts, 1), width))

    def facts(self) -> dict[str, str]:
        shared = f"the last {self.num_shared} layers see keys and values of earlier ones"
        more = {
            "MLP": (f"{self.intermediate_size} wide beside the experts", self.mixture is not None),
            "shared KV": (
                shared + f", {2 * self.intermediate_size} wide" * self.double_wide,
                self.num_shared,
            ),
            "own inputs": (f"{self.layer_inputs} numbers of each token for every layer", self.layer_inputs),
            "logits": (f"capped at {self.logit_cap or 0:g}", self.logit_cap),
        }
        found = super().facts() | self._of_kinds()
        found |= {name: text for name, (text, there) in more.items() if there}
        return {name: text for name, text in found.items() if name != "windows"}

    def _of_kinds(self) -> dict[str, str]:
        heads, width = self.global_kv_heads
        values = ", which are values too" * self.keys_are_values
        windowed = [each for each in self.windows if each is not None]
        if not windowed:
            attention = f"{self.num_heads} heads, {heads} KV heads{values}, {width} wide"
            return {"attention": attention, "rotary": str(self.global_rope)}
        return {
            "attention": f"{self._attention()}, in {len(windowed)} of {self.num_layers} layers with a "
            f"window of {max(windowed):,} positions; {heads} KV heads{values}, {width} wide, in the others",
            "rotary": f"{self.rope}; in layers without a window {self.global_rope}",
        }


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(Gemma4Layers, TargetConfig):
    """A target."""

    scaled_embedding: ClassVar[bool] = True


def head_layers(config: Raw) -> dict[str, Any]:
    """Of a head whose layers are like a Gemma 4's, from its ``config.json``: the fields of ``Gemma4Layers``."""
    found = read_gemma4({**known_keys(config, GEMMA4_HEADS), "num_kv_shared_layers": 0})
    return {each.name: getattr(found, each.name) for each in fields(Gemma4Layers)}


def read_gemma4(config: Raw) -> Gemma4Config:
    """All sizes, of which the 12B is ``Gemma4Unified...``; the two spellings of shapes by layer are both read."""
    _refuse(config)
    kinds, layers = _kinds(config), count(config, "num_hidden_layers")
    shapes, ropes = _shapes(config, kinds), _ropes(config)
    mixed, inputs = flag(config, "enable_moe_block"), config.get("hidden_size_per_layer_input") or 0
    known = {name: value for name, value in config.items() if name not in _OWN}
    of_windows = dict(zip(_SHAPE, shapes.get(_SLIDING, shapes[_GLOBAL]), strict=True))
    plain = TargetConfig.from_hf(
        known | of_windows | {"layer_types": kinds, "rope_parameters": ropes[_SLIDING]},
        qk_norm=True,
        windowed=True,
        norm_casts_last=True,
        mixture=_mixture(config, layers) if mixed else None,
    )
    cap = config.get("final_logit_softcapping")
    found = Gemma4Config(
        **{each.name: getattr(plain, each.name) for each in fields(plain)},
        global_kv_heads=shapes[_GLOBAL],
        global_rope=RopeConfig.from_hf({**known, "rope_parameters": ropes[_GLOBAL]}),
        keys_are_values=flag(config, "attention_k_eq_v"),
        num_shared=_whole(config, "num_kv_shared_layers", layers - 1),
        double_wide=flag(config, "use_double_wide_mlp"),
        layer_inputs=count({"it": inputs}, "it") if inputs else 0,
        logit_cap=None if cap is None else number(config, "final_logit_softcapping"),
    )
    stored = set(kinds[: layers - found.num_shared])
    require(
        stored == set(kinds),
        f"num_kv_shared_layers is {found.num_shared}: no layer with {', '.join(set(kinds) - stored)} is left that has "
        "keys and values for them, config.json is wrong",
    )
    return found


def _refuse(config: Raw) -> None:
    kind, seen = config.get("hidden_activation"), config.get("use_bidirectional_attention")
    require(
        kind == "gelu_pytorch_tanh",
        f"hidden_activation is {shown(kind)}: only 'gelu_pytorch_tanh' is supported, use another checkpoint",
    )
    require(
        seen in (None, "vision"),
        f"use_bidirectional_attention is {shown(seen)}: a row sees none behind it here ('vision' is of images alone), "
        "use a causal model",
    )
    have, need = config.get("vocab_size_per_layer_input"), count(config, "vocab_size")
    require(
        not config.get("hidden_size_per_layer_input") or have == need,
        f"vocab_size_per_layer_input is {shown(have)} of {need} tokens: only tables for all are supported",
    )


def _kinds(config: Raw) -> list[str]:
    """Of layers; the last sees all, whatever the file says, as in ``transformers``."""
    layers = range(1, count(config, "num_hidden_layers") + 1)
    kinds = items(config, "layer_types") or [_SLIDING if each % _PERIOD else _GLOBAL for each in layers]
    return [*kinds[:-1], _GLOBAL]


def _shapes(config: Raw, kinds: list[str]) -> dict[str, tuple[int, int]]:
    """Heads of keys and their width by kind of layer; ``per_layer_config`` says it as newer libraries save it."""
    plain = {name: count(config, name) for name in _SHAPE}
    wider = {"head_dim": count(config, "global_head_dim", 512)}
    if flag(config, "attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        wider["num_key_value_heads"] = count(config, "num_global_key_value_heads")
    others: Raw = {str(index): wider for index, kind in enumerate(kinds) if kind == _GLOBAL}
    others = section(config, "per_layer_config") if "per_layer_config" in config else others
    found: dict[str, tuple[int, int]] = {}
    for index, kind in enumerate(kinds):
        own = section(others, str(index))
        require(
            own.keys() <= set(_SHAPE),
            f"per_layer_config has {', '.join(map(shown, own.keys() - set(_SHAPE)))}: only {' and '.join(_SHAPE)} by "
            "layer are supported, use another checkpoint",
        )
        shape = tuple(count({**plain, **own}, name) for name in _SHAPE)
        require(
            found.setdefault(kind, (shape[0], shape[1])) == shape,
            f"per_layer_config has layers with {kind} of several shapes: those of a kind must be alike",
        )
        heads = count(config, "num_attention_heads")
        require(
            heads % shape[0] == 0,
            f"{heads} attention heads cannot share {shape[0]} KV heads: config.json is wrong",
        )
    unknown = [name for name in others if name not in map(str, range(len(kinds)))]
    require(
        not unknown,
        f"per_layer_config names layer {shown(next(iter(unknown), None))} of {len(kinds)}: it is wrong",
    )
    return found


def _ropes(config: Raw) -> dict[str, Raw]:
    given = section(config, "rope_parameters") or _ROPES
    require(
        all(isinstance(given.get(kind), Mapping) for kind in _ROPES),
        f"rope_parameters is {shown(dict(given))}: it must have {' and '.join(_ROPES)}",
    )
    return {kind: given[kind] for kind in _ROPES}


def _mixture(config: Raw, num_layers: int) -> MixtureConfig:
    return MixtureConfig(
        num_experts=count(config, "num_experts"),
        num_chosen=count(config, "top_k_experts"),
        width=count(config, "moe_intermediate_size"),
        layers=(True,) * num_layers,
        weights="normalized",
        router="router.proj",
        scales="router.per_expert_scale",
        beside_mlp=True,
        activation="gelu tanh",
    )


def _whole(config: Raw, name: str, most: int) -> int:
    value = config.get(name) or 0
    fits = type(value) is int and 0 <= value <= min(most, LARGEST_COUNT)
    require(fits, f"{name} is {shown(value)}: it must be a whole number, at most {most}")
    return int(value)


# ---- layers


@dataclass(frozen=True, kw_only=True)
class Gemma4Attention:
    """Queries, and where the layer stores some also keys and values, all of them normed."""

    qkv: Projection
    out: Map  # [rows, Hq * D] -> [parts, rows, H]
    layer: LayerAttention

    @classmethod
    def build(
        cls,
        config: Gemma4Layers,
        index: int,
        prefix: str,
        width: int,
        layer: LayerAttention,
        load: Loader,
        ops: Ops,
    ) -> "Gemma4Attention":
        """Load ``{prefix}self_attn.*``, whose inputs are ``width`` wide."""
        out, size = {f"{prefix}self_attn.o_proj": config.hidden_size}, config.kv_heads(index)[1]
        return cls(
            qkv=projection(config, index, f"{prefix}self_attn.", width, config.num_heads, load, ops),
            out=ops.linear_parts(load.linear(out, config.num_heads * size, bias=config.o_bias)),
            layer=layer,
        )

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """[rows, H] -> [parts, rows, H]; see ``Ops.linear_parts``."""
        return self.out(attend(self.layer, self.qkv(x)))


def _layer_attention(config: Gemma4Config, index: int, rope: Rope, load: Loader) -> LayerAttention:
    """Of a target's layer; ``rope`` is that of layers without a window."""
    window, source = config.window(index), f"{config.prefix}layers.{config.source(index)}.self_attn."
    return LayerAttention(
        index=config.cache_index(index),
        scale=1.0,
        window=window,
        k_scale=kv_scale("k", source, load),
        v_scale=kv_scale("v", source, load),
        rope=rope if window is None else None,
        stores=config.stores(index),
    )


def projection(
    config: Gemma4Layers, index: int, prefix: str, width: int, num_queries: int, load: Loader, ops: Ops
) -> Projection:
    """Of ``num_queries`` heads, or of keys and values alone, if there are some: see ``Gemma4Attention``.

    Where keys are values, their rows are there twice, and differ by their norms.
    """
    (kv, size), twice = config.kv_heads(index), False
    heads = {"q": num_queries} if num_queries else {}
    if config.stores(index):
        twice = config.keys_are_values and config.window(index) is None
        heads |= {"k": kv} if twice else {"k": kv, "v": kv}
    rows = {f"{prefix}{name}_proj": number * size for name, number in heads.items()}
    weight = load.linear(rows, width, bias=config.qkv_bias)
    normed = [name for name in ("q", "k") if name in heads]
    norms = [norms_of(config, f"{prefix}{name}_norm", size, heads[name], load) for name in normed]
    norms += [torch.ones_like(norms[-1])] * ("k" in heads)  # of values, without a weight
    if twice:
        keys = range(num_queries * size, sum(rows.values()))
        weight = weight.reordered([*range(sum(rows.values())), *keys])
    return Projection(
        linear=ops.linear(weight),
        input_scale=weight.static_scale,
        norm=ops.rms_norm(torch.cat(norms), config.rms_norm_eps, casts_last=True),
        num_heads=sum(map(len, norms)),
        head_dim=size,
    )


def norms_of(config: Gemma4Layers, name: str, size: int, heads: int, load: Loader) -> Tensor:
    """The weight ``name`` of a norm, for each of so many heads: [heads, size]."""
    return norm_weight(config, name, size, load).repeat(heads, 1)


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """What a layer takes in of its own input, behind its MLP."""

    gate: Map  # [rows, H] -> [parts, rows, D]; see Ops.linear_parts
    gated: Pair
    out: Map  # [rows, D] -> [parts, rows, H]
    behind: SandwichNorm

    @classmethod
    def build(cls, config: Gemma4Layers, prefix: str, following: str, load: Loader, ops: Ops) -> "LayerInput":
        hidden, width = config.hidden_size, config.layer_inputs
        norms = Sandwich(
            behind=norm_weight(config, f"{prefix}post_per_layer_input_norm", hidden, load),
            scale=load(f"{prefix}layer_scalar", (1,)),
            before=norm_weight(config, following, hidden, load)[None],
            eps=config.rms_norm_eps,
            sums=False,
        )
        return cls(
            gate=ops.linear_parts(load.linear({f"{prefix}per_layer_input_gate": width}, hidden)),
            gated=ops.gelu_gated,
            out=ops.linear_parts(load.linear({f"{prefix}per_layer_projection": hidden}, width)),
            behind=ops.sandwich(norms),
        )

    def __call__(self, stream: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """The stream [rows, H] with ``own`` [rows, D] taken in, and its norm."""
        stream, normed = self.behind(stream, self.out(self.gated(self.gate(stream), own)))
        return stream, normed[0]


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """The inputs of all layers: of each token a row of a table, and the embedded token projected."""

    table: Tensor  # [V, L * D]
    project: Map  # [rows, H] -> [rows, L * D]
    norm: Norm  # of D numbers

    @classmethod
    def build(cls, config: Gemma4Config, load: Loader, ops: Ops) -> "LayerInputs":
        root, width = config.prefix, config.layer_inputs
        every = config.num_layers * width
        name = f"{root}embed_tokens_per_layer.weight"
        return cls(
            table=load(name, (config.vocab_size, every)),
            project=ops.linear(load.linear({f"{root}per_layer_model_projection": every}, config.hidden_size)),
            norm=load_norm(config, f"{root}per_layer_projection_norm", width, load, ops),
        )

    def __call__(self, token_ids: Tensor, stream: Tensor, width: int) -> Tensor:
        """Of ``token_ids`` [rows], embedded in ``stream`` [rows, H]: [rows, L, D]."""
        found = F.embedding(token_ids, self.table) * root_of(width, stream.dtype)
        projected = self.project(stream) * stream.shape[1] ** -0.5
        normed = self.norm(projected.view(-1, width)).view_as(found)
        return ((normed + found) * 2**-0.5).view(len(found), -1, width)


def root_of(width: int, dtype: torch.dtype) -> float:
    """The root of ``width``, rounded to ``dtype``: what embeddings so wide are multiplied by."""
    return torch.tensor(width**0.5, dtype=dtype).item()


@dataclass(frozen=True, kw_only=True)
class Gemma4Block:
    """A decoder layer without the norm of its inputs, which its predecessor's sum is fused with."""

    attention: Gemma4Attention
    behind_attention: SandwichNorm
    mlp: MLP
    experts: Mixture | None  # beside the MLP; the router reads the stream behind a norm of its own
    behind_mlp: SandwichNorm
    own: LayerInput | None

    @classmethod
    def build(
        cls,
        config: Gemma4Layers,
        index: int,
        prefix: str,
        following: str,
        layer: LayerAttention,
        load: Loader,
        ops: Ops,
        width: int | None = None,
    ) -> "Gemma4Block":
        """Load ``{prefix}*`` of layer ``index``, and the norm named ``following`` of what comes next.

        ``width`` is of its attention's inputs, if not the stream's.
        """
        hidden, mixture, own = config.hidden_size, config.mixture_of(index), config.layer_inputs > 0

        def norm(name: str) -> Tensor:
            return norm_weight(config, name, hidden, load)

        reading = [norm(f"{prefix}pre_feedforward_layernorm")]
        within, experts = None, None
        if mixture is not None:
            routed = load.float32(f"{prefix}router.scale", (hidden,)) * hidden**-0.5
            reading = [reading[0].float(), routed, norm(f"{prefix}pre_feedforward_layernorm_2").float()]
            dense, mixed = (norm(f"{prefix}post_feedforward_layernorm_{each}") for each in (1, 2))
            within = dense, mixed
            experts = Mixture.build(mixture, hidden, prefix, load, ops)
        behind_attention = Sandwich(
            behind=norm(f"{prefix}post_attention_layernorm"),
            before=torch.stack(reading),
            eps=config.rms_norm_eps,
        )
        last = norm(f"{prefix}post_feedforward_layernorm")
        behind_mlp = Sandwich(
            within=within,
            behind=last,
            scale=None if own else load(f"{prefix}layer_scalar", (1,)),
            before=last.new_empty(0, hidden) if own else norm(following)[None],
            eps=config.rms_norm_eps,
        )
        return cls(
            attention=Gemma4Attention.build(config, index, prefix, width or hidden, layer, load, ops),
            behind_attention=ops.sandwich(behind_attention),
            mlp=MLP.build(
                hidden, config.mlp_width(index), f"{prefix}mlp.", load, ops, activation="gelu tanh"
            ),
            experts=experts,
            behind_mlp=ops.sandwich(behind_mlp),
            own=LayerInput.build(config, prefix, following, load, ops) if own else None,
        )

    def __call__(
        self, stream: Tensor, normed: Tensor, attend: Attend, own: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The stream [rows, H] and the attention's inputs; the layer's ``own`` input, if there are any, is [rows, D].

        Returns the stream behind the layer, and the inputs of what comes next.
        """
        return self.behind(stream, self.attention(normed, attend), own)

    def behind(self, stream: Tensor, attended: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same from what the attention returns, [parts, rows, H]."""
        stream, normed = self.behind_attention(stream, attended)
        found = self.mlp(normed[0])
        if self.experts is not None:
            found = *found, *self.experts(normed[2], routed=normed[1])
        stream, normed = self.behind_mlp(stream, *found)
        if self.own is None or own is None:
            return stream, normed[0]
        return self.own(stream, own)


@dataclass(frozen=True, kw_only=True)
class Gemma4Stack:
    """Decoder layers, the norm in front of them, and that behind them."""

    first: Norm
    blocks: tuple[Gemma4Block, ...]

    @classmethod
    def build(
        cls, config: Gemma4Layers, root: str, layers: Sequence[LayerAttention], load: Loader, ops: Ops
    ) -> "Gemma4Stack":
        """Load ``{root}layers.*`` and ``{root}norm``."""
        prefixes = [f"{root}layers.{index}." for index in range(len(layers))]
        norms = [*(f"{prefix}input_layernorm" for prefix in prefixes), f"{root}norm"]
        each = enumerate(zip(prefixes, norms[1:], layers, strict=True))
        return cls(
            first=load_norm(config, norms[0], config.hidden_size, load, ops),
            blocks=tuple(Gemma4Block.build(config, index, *of, load, ops) for index, of in each),
        )

    def __call__(
        self, stream: Tensor, attend: Attend, own: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Of a stream [rows, H], and of inputs [rows, L, D] if there are any: the stream and the norm behind each."""
        normed = self.first(stream)
        for index, block in enumerate(self.blocks):
            stream, normed = block(stream, normed, attend, None if own is None else own[:, index])
            yield stream, normed

    def last(self, stream: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """What is behind all layers."""
        return deque(self(stream, attend), maxlen=1).pop()


@dataclass(frozen=True, kw_only=True)
class Gemma4(LanguageModel):
    """The target; see ``Llama``."""

    config: Gemma4Config
    layer_inputs: LayerInputs | None
    layers: Gemma4Stack

    @classmethod
    def build(cls, config: Gemma4Config, load: Loader, ops: Ops) -> "Gemma4":
        """Load every tensor of the model by its name in a Hugging Face checkpoint."""
        root, hidden, width = config.prefix, config.hidden_size, config.global_kv_heads[1]
        embedding = load(f"{root}embed_tokens.weight", (config.vocab_size, hidden))
        turned = inverse_frequencies(config.global_rope, width, embedding.device)
        rope = ops.rope(turned, config.global_rope.concentration)
        layers = [_layer_attention(config, index, rope, load) for index in range(config.num_layers)]
        return cls(
            config=config,
            embedding=embedding,
            layer_inputs=LayerInputs.build(config, load, ops) if config.layer_inputs else None,
            layers=Gemma4Stack.build(config, root, layers, load, ops),
            vocabulary=Vocabulary.build(config, embedding, load, ops).capped(config.logit_cap),
            rope=rope_of(config.rope, config.rotary_dim, ops, embedding.device),
        )

    @property
    def embedding_scale(self) -> float:
        return root_of(self.config.hidden_size, self.dtype)

    def forward(
        self, token_ids: Tensor, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """See ``Llama.forward``; the input of layer 0 is the scaled embedding."""
        stream = F.embedding(token_ids, self.embedding) * self.embedding_scale
        own, kept = None, {0: stream} if 0 in aux_layers else {}
        if self.layer_inputs is not None:
            own = self.layer_inputs(token_ids, stream, self.config.layer_inputs)
        found = stream, stream
        for index, found in enumerate(self.layers(stream, attend, own), start=1):
            if index in aux_layers:
                kept[index] = found[0]
        features = [kept[index] for index in aux_layers]
        return found[1], torch.cat(features, -1) if features else stream[:, :0]

    def stored(self, windowed: bool) -> LayerAttention:
        """Of the last layer with keys and values of its own that has a window, or has none."""
        return self.layers.blocks[self.config.last_stored(windowed)].attention.layer


def ignored_tensors(config: Gemma4Config, names: Set[str]) -> Set[str]:
    """Also keys and values of layers that see others', which some checkpoints have, and all that is not of text."""
    shared = [index for index in range(config.num_layers) if not config.stores(index)]
    unused = tuple(f"{config.prefix}layers.{index}.self_attn.{name}_" for index in shared for name in "kv")
    found = {name for name in names if name.startswith(unused)}
    return llama.ignored_tensors(config, names) | llama.visual_tensors(names) | found
