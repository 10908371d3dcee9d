"""Multi-token prediction (DeepSeek-V3, 2024): layers that were trained with the target draft for it."""

from collections.abc import Set
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import Tensor

from specgen.attention import Attend
from specgen.config import require
from specgen.models import llama
from specgen.models.config_fields import Raw
from specgen.models.config_keys import Keys
from specgen.models.layers import Block, GatedDelta, load_norm, norm_weight
from specgen.models.loader import Loader
from specgen.models.model_config import HeadConfig, LayerConfig, TargetConfig
from specgen.models.protocols import Head, Target, logits_of
from specgen.ops import Map, Norm, Ops, Pair


@dataclass(frozen=True, kw_only=True)
class MtpNames:
    """What the tensors of an MTP layer are called, without ``.weight``."""

    root: str  # what all begin with
    block: str  # what those of its decoder layer begin with
    embed_norm: str
    hidden_norm: str
    project: str  # both, the embedding first
    norm: str
    embedding: str  # of layers that have their own
    lm_head: str  # likewise


def _numbered_on(layer: int) -> MtpNames:
    """Of DeepSeek-V3 and its relatives: a layer behind the target's."""
    root = f"model.layers.{layer}."
    return MtpNames(
        root=root,
        block=root,
        embed_norm=f"{root}enorm",
        hidden_norm=f"{root}hnorm",
        project=f"{root}eh_proj",
        norm=f"{root}shared_head.norm",
        embedding=f"{root}embed_tokens",
        lm_head=f"{root}shared_head.head",
    )


def _apart(layer: int) -> MtpNames:
    """Of Qwen3-Next and Qwen3.5: decoder layers, and once what is around them."""
    return MtpNames(
        root="mtp.",
        block=f"mtp.layers.{layer}.",
        embed_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        project="mtp.fc",
        norm="mtp.norm",
        embedding="mtp.embed_tokens",
        lm_head="mtp.lm_head",
    )


def mtp_layers(num_target_layers: int, names: Set[str]) -> tuple[MtpNames, ...]:
    """The MTP layers among the tensors ``names`` of a checkpoint."""
    found = list[MtpNames]()
    while f"{(layer := _numbered_on(num_target_layers + len(found))).project}.weight" in names:
        found.append(layer)
    if not found:
        while f"{(layer := _apart(len(found))).block}input_layernorm.weight" in names:
            found.append(layer)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class MtpConfig(HeadConfig):
    """MTP layers of a target, of its kind; of a hybrid's they attend."""

    family: ClassVar[str] = "MTP"
    refusal: ClassVar[str] = (
        "no model.layers.N.eh_proj.weight or mtp.fc.weight alone: the checkpoint is no MTP layer either"
    )
    keys: ClassVar[Keys | None] = None
    takes_fp8: ClassVar[bool] = True
    names: tuple[MtpNames, ...]  # of each layer

    @staticmethod
    def recognizes(_: Raw, tensors: Set[str]) -> bool:
        """MTP layers without their target, which has its own embedding."""
        return not any(name in tensors for name in llama.EMBEDDINGS) and any(
            name.endswith(".eh_proj.weight") or name == "mtp.fc.weight" for name in tensors
        )

    @classmethod
    def of_target(cls, target: TargetConfig, tensors: Set[str]) -> "MtpConfig":
        """``tensors`` says how many layers there are, and what they share with the target."""
        names = mtp_layers(target.num_layers, tensors)
        require(
            bool(names),
            f"config.json has {target.num_layers} layers and no MTP layer has the next number: "
            "use --drafter mtp with the target's own checkpoint",
        )
        settings: dict[str, Any] = {each.name: getattr(target, each.name) for each in fields(LayerConfig)}
        if target.mixture is not None:
            settings["mixture"] = replace(target.mixture, layers=(True,) * len(names))
        return cls(
            **settings | {"num_layers": len(names), "delta": None},
            draft_vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            aux_rule="an MTP layer reads the last hidden state alone",
            own_embedding=any(f"{each.embedding}.weight" in tensors for each in names),
            own_lm_head=any(f"{each.lm_head}.weight" in tensors for each in names),
            reads_output=True,
            names=names,
        )

    @property
    def title(self) -> str:
        return "the target's MTP layer" if self.num_layers == 1 else "the target's MTP layers"

    def facts(self) -> dict[str, str]:
        return {
            "features": "the target's last hidden state, behind its final norm",
            "fed back": f"the hidden state behind {self.names[0].norm.removeprefix(self.names[0].block)}",
            **super().facts(),
        }


@dataclass(frozen=True, kw_only=True)
class MtpLayer:
    """A decoder layer of the target's kind over the embedding beside the hidden state, both normed."""

    inputs: Pair  # ids [rows] and hidden [rows, H] -> both normed, concatenated [rows, 2 * H]
    project: Map  # -> the residual stream [rows, H]
    input_norm: Norm
    block: Block
    norm: Norm
    logits: Map  # [n, H] -> [n, V]

    @classmethod
    def build(cls, config: MtpConfig, index: int, load: Loader, target: Target, ops: Ops) -> "MtpLayer":
        """Load layer ``index``; embedding and output weights are the target's unless it has its own."""
        names, hidden, embedding = config.names[index], config.hidden_size, target.embedding
        if f"{names.embedding}.weight" in load:
            embedding = load(f"{names.embedding}.weight", (config.vocab_size, hidden))
        embed_weight = norm_weight(config, names.embed_norm, hidden, load)
        weight = norm_weight(config, names.hidden_norm, hidden, load)
        block = Block.build(config, index, names.block, load, ops, hidden)
        scale, own = block.attention.input_scale, f"{names.lm_head}.weight" in load
        return cls(
            inputs=ops.embed_norm_concat(
                embedding, embed_weight, weight, config.rms_norm_eps, config.norm_casts_last
            ),
            project=ops.linear(load.linear({names.project: hidden}, 2 * hidden)),
            input_norm=load_norm(config, f"{names.block}input_layernorm", hidden, load, ops, scale),
            block=block,
            norm=load_norm(config, names.norm, hidden, load, ops),
            logits=ops.linear(load.output(names.lm_head, config.vocab_size, hidden))
            if own
            else logits_of(target),
        )

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        """Store what later rows read of these: neither attention nor experts are computed."""
        assert not isinstance(self.block.attention, GatedDelta)
        self.block.attention.write_kv(self.input_norm(self.project(self.inputs(token_ids, hidden))), attend)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """See ``Head.forward``. The normed state is fed back; some engines feed back the one before the norm."""
        stream = self.project(self.inputs(token_ids, hidden))
        _, normed = self.norm.add(*self.block(stream, self.input_norm(stream), attend))
        return normed, normed


@dataclass(frozen=True, kw_only=True)
class MtpHead(Head):
    """One layer a pass; where there are several they take turns.

    Every layer takes in the accepted rows itself, from the target's hidden states, so it has its own keys and values of
    the whole text and what it drafts depends on no earlier step.
    """

    config: MtpConfig
    layers: tuple[MtpLayer, ...]  # the first one drafts

    @classmethod
    def build(
        cls, config: MtpConfig, load: Loader, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "MtpHead":
        """Load every tensor of the layers."""
        return cls(
            layers=tuple(
                MtpLayer.build(config, index, load, target, ops) for index in range(config.num_layers)
            ),
            **cls.common(config, draft_to_target, ops),
        )

    def of_pass(self, index: int) -> "MtpHead":
        first = index % len(self.layers)
        return replace(self, layers=self.layers[first:] + self.layers[:first])

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        for layer in self.layers:
            layer.write_kv(token_ids, hidden, attend)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        for later in self.layers[1:]:  # whose passes look back at these rows
            later.write_kv(token_ids, hidden, attend)
        return self.layers[0].forward(token_ids, hidden, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.layers[0].logits(hidden)


def ignored_tensors(config: TargetConfig, names: Set[str]) -> Set[str]:
    """As of a Llama, and those of MTP layers; a layer that is neither these nor the target's is none."""
    roots = tuple(layer.root for layer in mtp_layers(config.num_layers, names))
    return llama.ignored_tensors(config, names) | {name for name in names if name.startswith(roots)}
