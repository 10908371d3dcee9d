"""Heads whose layers are a Gemma 4's without windows, as DeepSpec writes them: EAGLE3, and DFlash or DSpark."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.attention import Attend, LayerAttention
from specgen.config import require, shown
from specgen.models.config_fields import Raw, count, items
from specgen.models.config_keys import GEMMA4_DFLASH, GEMMA4_EAGLE3, Keys
from specgen.models.dflash import DFlashConfig, DFlashHead, require_trained_on
from specgen.models.eagle import Eagle3Config
from specgen.models.gemma4 import (
    Gemma4Block,
    Gemma4Layers,
    Gemma4Stack,
    head_layers,
    norms_of,
    projection,
    root_of,
)
from specgen.models.layers import Projection, load_norm
from specgen.models.loader import Loader
from specgen.models.model_config import HeadConfig
from specgen.models.protocols import Head, Target, embedding_of, output_of
from specgen.ops import Map, Norm, Ops

_FOURTH_NORM = "layers.0.pre_feedforward_layernorm.weight"  # which layers of a Llama have not
_IDS = "target_layer_ids"
_REFUSAL = f"no {_FOURTH_NORM} of a Gemma 4's layers"


def _without_windows(config: Raw) -> dict[str, Any]:
    """The fields of ``Gemma4Layers``, of which there is one kind."""
    found = head_layers(config)
    require(
        not any(found["windows"]),
        f"layer_types is {shown(items(config, 'layer_types'))}: heads with layers like a Gemma 4's need full_attention",
    )
    return found | {"rope": found["global_rope"]}


def _embedding(config: HeadConfig) -> dict[str, str]:
    whose = "its own" if config.own_embedding else "the target's"
    return {"embedding": f"{whose}, times the root of {config.hidden_size}"}


@dataclass(frozen=True, kw_only=True)
class Gemma4DFlashConfig(Gemma4Layers, DFlashConfig):
    """A DFlash or DSpark head, whose embedding is scaled, its own or the target's."""

    family: ClassVar[str] = "DFlash Gemma-4"
    refusal: ClassVar[str] = _REFUSAL
    keys: ClassVar[Keys | None] = GEMMA4_DFLASH

    @staticmethod
    def recognizes(_: Raw, tensors: Set[str]) -> bool:
        return {"hidden_norm.weight", _FOURTH_NORM} <= tensors

    @staticmethod
    def layers(config: Raw, tensors: Set[str]) -> dict[str, Any]:
        del tensors  # which say no more
        return {name: value for name, value in _without_windows(config).items() if name not in _SAID}

    @property
    def takes_scaled(self) -> bool:
        return True

    def facts(self) -> dict[str, str]:
        found = super().facts()
        return {name: text for name, text in found.items() if name != "scaled"} | _embedding(self)


_SAID = ("dtype", "logit_cap")  # by what all DFlash heads say


@dataclass(frozen=True, kw_only=True)
class Gemma4DFlashHead(DFlashHead):
    """As ``DFlashHead``, whose ``blocks`` it has none of."""

    config: Gemma4DFlashConfig
    layers: Gemma4Stack

    @classmethod
    def build(
        cls,
        config: Any,  # noqa: ANN401  a ``Gemma4DFlashConfig``
        load: Loader,
        target: Target,
        draft_to_target: Tensor,
        ops: Ops,
    ) -> "Gemma4DFlashHead":
        """Load every tensor of the head; embedding and output weights are the target's unless it has its own."""
        prefixes = [f"layers.{index}." for index in range(config.num_layers)]
        layers = [
            LayerAttention(index=index, scale=1.0, causal=config.causal(index))
            for index in range(config.num_layers)
        ]
        fields = cls.around(config, load, target, draft_to_target, ops)
        scale = root_of(config.hidden_size, fields["embedding"].dtype)
        return cls(
            context=_context(config, prefixes, load, ops),
            blocks=(),
            convs=(),
            norms=(),
            layers=Gemma4Stack.build(config, "", layers, load, ops),
            **fields | {"embedding_scale": scale},
        )

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        del token_ids
        heads = self.context(hidden).view(len(hidden), 2, len(self.layers.blocks), -1, self.context.head_dim)
        for layer, own in zip(self.layers.blocks, heads.unbind(2), strict=True):
            attend.write_kv(layer.attention.layer, own.flatten(1, 2).contiguous())

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        del hidden
        return self.layers.last(self.embed(token_ids), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) if self.config.own_lm_head else self.lm_head(hidden)  # which are capped


def _context(config: Gemma4Layers, prefixes: list[str], load: Loader, ops: Ops) -> Projection:
    """The keys of all layers, then their values, as one matrix."""
    (kv, size), twice = config.global_kv_heads, config.keys_are_values
    kinds = ("k",) if twice else ("k", "v")
    names = [f"{prefix}self_attn.{which}_proj" for which in kinds for prefix in prefixes]
    weight = load.linear(dict.fromkeys(names, kv * size), config.hidden_size, bias=config.qkv_bias)
    if twice:
        weight = weight.reordered([*range(len(names) * kv * size)] * 2)
    keys = torch.cat([norms_of(config, f"{prefix}self_attn.k_norm", size, kv, load) for prefix in prefixes])
    return Projection(
        linear=ops.linear(weight),
        input_scale=weight.static_scale,
        norm=ops.rms_norm(torch.cat((keys, torch.ones_like(keys))), config.rms_norm_eps, casts_last=True),
        num_heads=2 * len(keys),
        head_dim=size,
    )


@dataclass(frozen=True, kw_only=True)
class Gemma4EagleConfig(Gemma4Layers, HeadConfig):
    """An EAGLE3 head of one layer, whose embedding is scaled, its own or the target's."""

    family: ClassVar[str] = "EAGLE3 Gemma-4"
    refusal: ClassVar[str] = _REFUSAL
    keys: ClassVar[Keys | None] = GEMMA4_EAGLE3
    ignored: ClassVar[Set[str]] = Eagle3Config.ignored

    @staticmethod
    def recognizes(_: Raw, tensors: Set[str]) -> bool:
        return {"layers.0.hidden_norm.weight", _FOURTH_NORM} <= tensors

    @classmethod
    def from_hf(cls, config: Raw, tensors: Set[str], num_target_layers: int | None) -> "Gemma4EagleConfig":
        """Read a head's ``config.json``; ``tensors`` are the names in its checkpoint."""
        require_trained_on(num_target_layers, config)
        ids = items(config, _IDS)
        require(
            bool(ids) and all(type(i) is int for i in ids) and ids == sorted(set(ids)),
            f"{_IDS} is {shown(ids)}: it must be a list of ascending layer numbers, those that the head was trained on",
        )
        layers = _without_windows(config)
        require(
            layers["num_layers"] == 1,
            f"num_hidden_layers is {layers['num_layers']}: of layers like a Gemma 4's an EAGLE3 head has one",
        )
        return cls(
            **layers,
            draft_vocab_size=count(config, "draft_vocab_size", layers["vocab_size"]),
            target_hidden_size=count(config, "target_hidden_size", layers["hidden_size"]),
            aux_layers=tuple(i + 1 for i in ids),
            aux_rule=f"{_IDS} {ids} are layer outputs, so 1 is added",
            own_embedding="embed_tokens.weight" in tensors,
            own_lm_head="lm_head.weight" in tensors,
            reads_output=False,
        )

    @property
    def takes_scaled(self) -> bool:
        return True

    def facts(self) -> dict[str, str]:
        inputs = ", ".join(map(str, self.aux_layers))
        return {
            "dialect": "DeepSpec",
            "features": f"the target's residual stream at the inputs of layers {inputs}",
            "rule": self.aux_rule,
            **super().facts(),
            **_embedding(self),
        }


@dataclass(frozen=True, kw_only=True)
class Gemma4EagleHead(Head):
    """A layer of a Gemma 4, whose attention reads the embedding beside the hidden state."""

    config: Gemma4EagleConfig
    embedding: Tensor  # [V, H]; the target's unless the checkpoint has its own
    fc: Map  # [rows, num_features * Ht] -> [rows, H]
    hidden_norm: Norm
    embedding_norm: Norm
    block: Gemma4Block
    stored: Projection  # keys and values of the block's attention
    lm_head: Map  # [n, H] -> [n, Vd]

    @classmethod
    def build(
        cls, config: Gemma4EagleConfig, load: Loader, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "Gemma4EagleHead":
        """Load every tensor of the head; embedding and output weights are the target's unless it has its own."""
        hidden, prefix = config.hidden_size, "layers.0."
        layer = LayerAttention(index=0, scale=1.0)
        return cls(
            embedding=embedding_of(config, load, target),
            fc=ops.linear(load.linear({"fc": hidden}, len(config.aux_layers) * config.target_hidden_size)),
            hidden_norm=load_norm(config, f"{prefix}hidden_norm", hidden, load, ops),
            embedding_norm=load_norm(config, f"{prefix}input_layernorm", hidden, load, ops),
            block=Gemma4Block.build(config, 0, prefix, "norm", layer, load, ops, 2 * hidden),
            stored=projection(config, 0, f"{prefix}self_attn.", 2 * hidden, 0, load, ops),
            lm_head=output_of(config, load, target, ops),
            **cls.common(config, draft_to_target, ops),
        )

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        attend.write_kv(self.block.attention.layer, self.stored(self._inputs(token_ids, hidden)))

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        attended = self.block.attention(self._inputs(token_ids, hidden), attend)
        return self.block.behind(hidden, attended)

    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = self.lm_head(hidden), self.config.logit_cap
        return (logits / cap).tanh() * cap if cap is not None and self.config.own_lm_head else logits

    def _inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Of the attention, [rows, 2 * H]: both normed, the embedding first."""
        scale = root_of(self.config.hidden_size, hidden.dtype)
        embedded = self.embedding_norm(F.embedding(token_ids, self.embedding) * scale)
        return torch.cat((embedded, self.hidden_norm(hidden)), -1)
