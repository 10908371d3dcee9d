"""Multi-token prediction (DeepSeek-V3, 2024): layers that were trained with the target draft for it."""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from specgen.attention import Attend
from specgen.config import require
from specgen.models import llama
from specgen.models.config_fields import Raw, count
from specgen.models.layers import Block, LatentAttention, Loader
from specgen.models.mixture_targets import deepseek_mixture
from specgen.models.model_config import HeadConfig, LatentConfig, TargetConfig, dtype_name, layer_settings
from specgen.models.protocols import Head, Target
from specgen.ops import Map, Norm, Ops, Pair

NOT_MTP = "no model.layers.N.eh_proj.weight alone: the checkpoint is no MTP layer either"


def mtp_prefixes(config: Raw, names: Set[str]) -> tuple[str, ...]:
    """Of the tensors of each MTP layer; they are numbered on behind the target's layers."""
    first, prefixes = count(config, "num_hidden_layers"), list[str]()
    while f"model.layers.{first + len(prefixes)}.eh_proj.weight" in names:
        prefixes.append(f"model.layers.{first + len(prefixes)}.")
    return tuple(prefixes)


def is_mtp(config: Raw, tensors: Set[str]) -> bool:
    """MTP layers without their target, which has its own embedding."""
    return "model.embed_tokens.weight" not in tensors and any(
        name.endswith(".eh_proj.weight") for name in tensors
    )


@dataclass(frozen=True, kw_only=True)
class MtpConfig(HeadConfig):
    """MTP layers of a target with latent attention, each with experts."""

    family: ClassVar[str] = "MTP"
    takes_fp8: ClassVar[bool] = True
    takes_turns: ClassVar[bool] = True
    prefixes: tuple[str, ...]  # of the tensors of each layer
    own_lm_head: bool

    @classmethod
    def from_hf(cls, config: Raw, tensors: Set[str], num_target_layers: int | None) -> "MtpConfig":
        """Read the ``config.json`` of the target; ``tensors`` says what the layers share with it."""
        del num_target_layers  # they read no layer but the last
        prefixes, latent = mtp_prefixes(config, tensors), LatentConfig.from_hf(config)
        require(
            bool(prefixes),
            f"config.json has {count(config, 'num_hidden_layers')} layers and no MTP layer has the next number: "
            "use --drafter mtp with the target's own checkpoint",
        )
        return cls(
            draft_vocab_size=count(config, "vocab_size"),
            target_hidden_size=count(config, "hidden_size"),
            num_layers=len(prefixes),
            aux_layers=(),
            aux_rule="an MTP layer reads the last hidden state alone",
            own_embedding=any(name.endswith(".embed_tokens.weight") for name in tensors),
            own_lm_head=any(name.endswith(".shared_head.head.weight") for name in tensors),
            reads_output=True,
            qk_norm=False,
            dtype=dtype_name(config),
            prefixes=prefixes,
            latent=latent,
            mixture=deepseek_mixture(config, (True,) * len(prefixes)),
            **layer_settings({**config, "head_dim": latent.key_dim}),
        )

    @property
    def title(self) -> str:
        return "the target's MTP layer" if self.num_layers == 1 else "the target's MTP layers"

    def facts(self) -> dict[str, str]:
        return {
            "features": "the target's last hidden state, behind its final norm",
            "fed back": "the hidden state behind shared_head.norm",
            "output": "its own output weights" if self.own_lm_head else "the target's output weights",
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
        prefix, hidden, eps = config.prefixes[index], config.hidden_size, config.rms_norm_eps
        table, head = f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head"

        def vector(name: str) -> Tensor:
            return load(f"{prefix}{name}.weight", (hidden,))

        embedding = load(table, (config.vocab_size, hidden)) if table in load else target.embedding
        block = Block.build(config, index, prefix, load, ops, hidden)
        own = f"{head}.weight" in load
        return cls(
            inputs=ops.embed_norm_concat(embedding, vector("enorm"), vector("hnorm"), eps, False),
            project=ops.linear(load.linear({f"{prefix}eh_proj": hidden}, 2 * hidden)),
            input_norm=ops.rms_norm(vector("input_layernorm"), eps, False, block.attention.input_scale),
            block=block,
            norm=ops.rms_norm(vector("shared_head.norm"), eps),
            logits=ops.linear(load.linear({head: config.vocab_size}, hidden)) if own else _logits(target),
        )

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        """Store what later rows read of these: neither attention nor experts are computed."""
        assert isinstance(self.block.attention, LatentAttention)
        self.block.attention.write_kv(self.input_norm(self.project(self.inputs(token_ids, hidden))), attend)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """See ``Head.forward``. The normed state is fed back; some engines feed back the one before the norm."""
        stream = self.project(self.inputs(token_ids, hidden))
        _, normed = self.norm.add(*self.block(stream, self.input_norm(stream), attend))
        return normed, normed


def _logits(target: Target) -> Map:
    return lambda hidden: target.logits(hidden)  # looked up when it drafts: an outline of a target has none


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
            config=config,
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
    prefixes = mtp_prefixes({"num_hidden_layers": config.num_layers}, names)
    return llama.ignored_tensors(config, names) | {name for name in names if name.startswith(prefixes)}
