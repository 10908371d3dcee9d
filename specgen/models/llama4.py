"""Llama-4 and its EAGLE head: what their configs say, and layers of a Llama that attend and weigh in their own ways.

Layers with rotary positions attend in chunks, every fourth has neither; a token goes through one expert, whose input is
weighed, and a shared one. How the checkpoints differ from a Llama's in names is resolved here, when they are read.
"""

from collections.abc import Set
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specgen.attention import Attend, Temperature
from specgen.config import require, shown
from specgen.models.config_fields import Raw, architectures, count, flag, items, number
from specgen.models.config_keys import LLAMA4_HEADS, Keys, known_keys
from specgen.models.eagle import Eagle1Config, Eagle1Head
from specgen.models.layers import Attention, Block, HeadLayers, Projection, load_norm
from specgen.models.llama import Llama
from specgen.models.loader import Loader
from specgen.models.model_config import (
    HeadConfig,
    LayerConfig,
    MixtureConfig,
    TargetConfig,
    dtype_name,
    layer_settings,
)
from specgen.models.protocols import Target, embedding_of, output_of
from specgen.models.rotary import RopeConfig
from specgen.ops import Ops

_SPELLINGS = {".feed_forward.": ".mlp.", ".shared_expert.": ".shared_experts."}
_WRAPPED = "language_model."  # what all names of the text part begin with in a vision-language model


def other_names(tensors: Set[str]) -> dict[str, str]:
    """The tensors of a Llama-4 or its head that are named otherwise than here, and their names here."""
    if not any(".feed_forward." in name for name in tensors):
        return {}
    return {name: usual for name in tensors if (usual := _usual_name(name)) != name}


def _usual_name(name: str) -> str:
    name = name.removeprefix(_WRAPPED)
    for spelling, usual in _SPELLINGS.items():
        name = name.replace(spelling, usual)
    return name


# ---- configs


@dataclass(frozen=True, kw_only=True)
class Llama4Config(TargetConfig):
    """A target; ``chunk`` and ``qk_norm``, which has no weights, are of the rotated layers."""

    # of the others too, where the order of a head's numbers is all the same
    interleaved: ClassVar[bool] = True
    rotated: tuple[bool, ...]  # by layer; the others have no positions, and see all
    temperature: Temperature | None  # of the others

    def facts(self) -> dict[str, str]:
        heat, rotated = self.temperature, self.rotated.count(True)
        tuned = (
            "" if heat is None else f", queries times 1 + {heat.scale:g} log(1 + positions // {heat.floor:,})"
        )
        return {
            **super().facts(),
            "chunks": f"{self.chunk:,} positions, in {rotated} of {self.num_layers} layers; the others have no rotary "
            f"positions and see all{tuned}",
        }


def read_llama4(config: Raw) -> Llama4Config:
    """Scout, in which all layers have experts, and Maverick, in which every second has."""
    num_layers = count(config, "num_hidden_layers")
    layers = _layers_with_experts(config, num_layers)
    plain = TargetConfig.from_hf(
        _as_llama(config),
        qk_norm=flag(config, "use_qk_norm"),
        mixture=_mixture(config, layers) if any(layers) else None,
    )
    return Llama4Config(
        **{each.name: getattr(plain, each.name) for each in fields(plain)}
        | {"chunk": count(config, "attention_chunk_size"), "rope": _rope(plain)},
        rotated=_rotated(config, num_layers),
        temperature=_temperature(config),
    )


def _as_llama(config: Raw) -> dict[str, Any]:
    """What layers say in the words of a Llama's config; what these do not have is left out."""
    own = ("attention_chunk_size", "attn_temperature_tuning", "no_rope_layers", "layer_types")
    plain = {name: value for name, value in config.items() if name not in own}
    return plain | {"intermediate_size": count(config, "intermediate_size_mlp")}


def _rope(config: LayerConfig) -> RopeConfig:
    """A norm behind the rotation undoes what that multiplies with."""
    yarn = config.rope.yarn
    if yarn is None or not config.qk_norm:
        return config.rope
    return replace(config.rope, yarn=replace(yarn, concentration=1.0))


def _mixture(config: Raw, layers: tuple[bool, ...]) -> MixtureConfig:
    chosen, width = count(config, "num_experts_per_tok"), count(config, "intermediate_size")
    require(
        chosen == 1,
        f"num_experts_per_tok is {chosen}: experts whose inputs are weighed are supported one per token, use another "
        "checkpoint",
    )
    return MixtureConfig(
        num_experts=count(config, "num_local_experts"),
        num_chosen=chosen,
        width=width,
        layers=layers,
        weights="sigmoid",
        router="router",
        fused="in, out",
        shared_width=width,
    )


def _layers_with_experts(config: Raw, num_layers: int) -> tuple[bool, ...]:
    """Those that are named, or every n-th."""
    if config.get("moe_layers") is None:
        step = count(config, "interleave_moe_layer_step")
        return tuple((layer + 1) % step == 0 for layer in range(num_layers))
    named = items(config, "moe_layers")
    require(
        all(type(layer) is int and 0 <= layer < num_layers for layer in named),
        f"moe_layers is {shown(named)}: it must be a list of the numbers of {num_layers} layers",
    )
    return tuple(layer in named for layer in range(num_layers))


_KINDS = {True: "chunked_attention", False: "full_attention"}  # by whether a layer is rotated


def _rotated(config: Raw, num_layers: int) -> tuple[bool, ...]:
    """By layer: in ``no_rope_layers`` 1 is one that is, whatever the name says."""
    given, kinds = items(config, "no_rope_layers"), items(config, "layer_types")
    interval = count(config, "no_rope_layer_interval")
    require(
        all(each in (0, 1) for each in given) and (not given or len(given) >= num_layers),
        f"no_rope_layers is {shown(given)}: it must have a 1 or a 0 for each of {num_layers} layers",
    )
    found = tuple(map(bool, given[:num_layers])) or tuple(
        (layer + 1) % interval != 0 for layer in range(num_layers)
    )
    require(
        not kinds or kinds == [_KINDS[each] for each in found],
        f"layer_types is {shown(kinds)}: rotated layers with chunked_attention and others with full_attention are "
        "supported, use another checkpoint",
    )
    return found


def _temperature(config: Raw) -> Temperature | None:
    if not config["attn_temperature_tuning"]:  # a flag, or a number in old files
        return None
    return Temperature(floor=count(config, "floor_scale"), scale=number(config, "attn_scale"))


# ---- layers


@dataclass(frozen=True, kw_only=True)
class ChunkedAttention(Attention):
    """Of a layer that is rotated."""

    chunk: int

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """See ``Attention``."""
        return self.out(attend.chunked(self.layer, self.chunk, self.qkv(x)))


@dataclass(frozen=True, kw_only=True)
class UnrotatedAttention(Attention):
    """Of a layer without positions."""

    temperature: Temperature | None

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """See ``Attention``."""
        return self.out(attend.tempered(self.layer, self.temperature, self.qkv(x)))


def _unit_norm(config: LayerConfig, projection: Projection, like: Tensor, ops: Ops) -> Projection:
    """With a norm of q and k that has no weights.

    The model has it behind the rotation, which changes the length of no pair: so it may as well be in front.
    """
    num_normed = projection.num_heads - config.num_kv_heads  # all but the values
    weight = torch.ones(num_normed, config.head_dim, dtype=like.dtype, device=like.device)
    return replace(projection, norm=ops.rms_norm(weight, config.rms_norm_eps))


def _in_chunks(config: "Llama4Config | EagleLlama4Config", plain: Block, like: Tensor, ops: Ops) -> Block:
    """``plain``, rotated; ``like`` has the dtype and device of the model."""
    attention = plain.attention
    assert isinstance(attention, Attention)
    qkv = _unit_norm(config, attention.qkv, like, ops) if config.qk_norm else attention.qkv
    return replace(plain, attention=ChunkedAttention(**(vars(attention) | {"qkv": qkv}), chunk=config.chunk))


def build(config: Llama4Config, load: Loader, ops: Ops) -> Llama:
    """Load every tensor of the model by its name."""
    model = Llama.build(replace(config, qk_norm=False), load, ops)
    rope = ops.rope(torch.zeros(config.head_dim // 2, device=model.device))  # which turns by 0

    def own(block: Block, rotated: bool) -> Block:
        attention = block.attention
        assert isinstance(attention, Attention)
        if rotated:
            return _in_chunks(config, block, model.embedding, ops)
        layer = replace(attention.layer, rope=rope)
        still = UnrotatedAttention(**(vars(attention) | {"layer": layer}), temperature=config.temperature)
        return replace(block, attention=still)

    blocks = (own(block, rotated) for block, rotated in zip(model.blocks, config.rotated, strict=True))
    return replace(model, config=config, blocks=tuple(blocks))


# ---- the head


@dataclass(frozen=True, kw_only=True)
class EagleLlama4Config(HeadConfig):
    """An EAGLE-1 head with rotated layers of a Llama-4, an input norm and a final one."""

    family: ClassVar[str] = "EAGLE Llama-4"
    refusal: ClassVar[str] = (
        "no config of a Llama-4 beside fc.weight: the checkpoint is not an EAGLE head of one"
    )
    keys: ClassVar[Keys | None] = LLAMA4_HEADS
    ignored: ClassVar[Set[str]] = Eagle1Config.ignored
    interleaved: ClassVar[bool] = True

    @staticmethod
    def recognizes(config: Raw, tensors: Set[str]) -> bool:
        """By its config, which says Llama-4, and ``fc.weight``, which no target has."""
        kind = " ".join((*architectures(config), str(config.get("model_type")))).lower()
        return "llama4" in kind and Eagle1Config.recognizes(config, tensors)

    @classmethod
    def from_hf(cls, raw: Raw, tensors: Set[str], _: int | None) -> "EagleLlama4Config":
        """Read a head's ``config.json``; what it shares with its target is found in ``tensors`` alone."""
        config = known_keys(raw, LLAMA4_HEADS)
        num_layers = count(config, "num_hidden_layers")
        require(
            all(_rotated({**config, "layer_types": None}, num_layers)),
            "no_rope_layers has a layer without positions: a head's layers must have them",
        )
        require(
            not any(name.endswith(".mlp.router.weight") for name in tensors),
            "the head has experts, which is not supported: use one with an MLP",
        )
        plain = cls(
            draft_vocab_size=count(config, "draft_vocab_size", count(config, "vocab_size")),
            target_hidden_size=count(config, "hidden_size"),
            num_layers=num_layers,
            aux_rule="an EAGLE head reads the last hidden state alone",
            own_embedding="embed_tokens.weight" in tensors,
            own_lm_head="lm_head.weight" in tensors,
            reads_output=True,
            qk_norm=flag(config, "use_qk_norm"),
            chunk=count(config, "attention_chunk_size"),
            dtype=dtype_name(config),
            **layer_settings(_as_llama(config)),
        )
        return replace(plain, rope=_rope(plain))

    def facts(self) -> dict[str, str]:
        return {
            "features": "the target's last hidden state, behind its final norm",
            "fed back": "the hidden state behind the head's final norm",
            **super().facts(),
            "chunks": f"{self.chunk:,} positions",
        }


@dataclass(frozen=True, kw_only=True)
class EagleLlama4Head(Eagle1Head):
    """Layers of a Llama-4 over the embedding beside the hidden state."""

    @classmethod
    def build(
        cls, config: HeadConfig, load: Loader, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "EagleLlama4Head":
        """Load every tensor of the head; ``config`` is an ``EagleLlama4Config``."""
        assert isinstance(config, EagleLlama4Config)
        hidden, table = config.hidden_size, embedding_of(config, load, target)
        prefixes = [f"layers.{index}." for index in range(config.num_layers)]
        plain = HeadLayers.build(replace(config, qk_norm=False), prefixes, hidden, load, ops)
        return cls(
            embedding=table,
            fc=ops.linear(load.linear({"fc": hidden}, 2 * hidden)),
            input_norm=load_norm(config, "layers.0.input_layernorm", hidden, load, ops),
            layers=replace(
                plain,
                blocks=tuple(_in_chunks(config, block, table, ops) for block in plain.blocks),
                kv_proj=_unit_norm(config, plain.kv_proj, table, ops) if config.qk_norm else plain.kv_proj,
            ),
            norm=load_norm(config, "norm", hidden, load, ops),
            lm_head=output_of(config, load, target, ops),
            **cls.common(config, draft_to_target, ops),
        )
