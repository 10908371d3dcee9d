"""The EAGLE-1 head (Li et al., 2024), which is EAGLE-2's too: its published format, and how it drafts."""

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.config import require
from specgen.models.config_fields import Raw, count
from specgen.models.eagle3 import is_eagle3
from specgen.models.layers import Attend, HeadLayers
from specgen.models.model_config import HeadConfig, dtype_name, head_biases, layer_settings, layer_windows
from specgen.models.protocols import MaskSlot, Target
from specgen.models.rotary import rope_of
from specgen.models.take import Take
from specgen.ops import Largest, Map, Ops, Rope
from specgen.ops.reference import joined

NOT_EAGLE1 = "no fc.weight and layers.0.self_attn.q_proj.weight: the checkpoint is not an EAGLE-1 head either"
IGNORED_TENSORS = frozenset({"rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"})


def is_eagle1(config: Raw, tensors: Set[str]) -> bool:
    """By its tensors: a config says Llama or Qwen2, and nothing of a head."""
    return not is_eagle3(config, tensors) and {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= tensors


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(HeadConfig):
    """An EAGLE-1 head."""

    family: ClassVar[str] = "EAGLE-1"
    fc_each_pass: ClassVar[bool] = True
    fc_bias: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.draft_vocab_size == self.vocab_size,
            f"draft_vocab_size is {self.draft_vocab_size} of {self.vocab_size}: an EAGLE-1 head drafts the target's "
            "whole vocabulary",
        )

    @classmethod
    def from_hf(cls, config: Raw, tensors: Set[str], num_target_layers: int | None) -> "Eagle1Config":
        """Read a head's ``config.json``; its biases and embedding are found in ``tensors`` alone."""
        del num_target_layers  # it reads no layer but the last
        return cls(
            draft_vocab_size=count(config, "draft_vocab_size", count(config, "vocab_size")),
            target_hidden_size=count(config, "hidden_size"),
            num_layers=count(config, "num_hidden_layers"),
            aux_layers=(),
            aux_rule="an EAGLE-1 head reads the last hidden state alone",
            own_embedding="embed_tokens.weight" in tensors,
            reads_output=True,
            fc_bias="fc.bias" in tensors,
            qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in tensors),
            windows=layer_windows(config),
            dtype=dtype_name(config),
            **head_biases(config, tensors),
            **layer_settings(config),
        )

    def facts(self) -> dict[str, str]:
        return {
            "features": "the target's last hidden state, behind its final norm",
            "norms": "none of the inputs, none at the end",
            "fc": "with a bias" if self.fc_bias else "without a bias",
            "output": "the target's output weights",
            **super().facts(),
        }


@dataclass(frozen=True, kw_only=True)
class Eagle1Head:
    """Layers of the target's kind over the embedding beside the hidden state; neither norm in front nor behind."""

    config: Eagle1Config
    embedding: Tensor  # [V, H]; the target's unless the checkpoint has its own
    fc: Map  # embedding and hidden state concatenated [rows, 2 * H] -> [rows, H]
    layers: HeadLayers
    target: Target  # for its output weights
    draft_to_target: Tensor  # [V] int64: the ids themselves
    largest: Largest  # of logits
    rope: Rope
    mask: MaskSlot | None = None

    @classmethod
    def build(
        cls, config: Eagle1Config, take: Take, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "Eagle1Head":
        """Load every tensor of the head; the embedding is the target's unless the head has its own."""
        hidden, table = config.hidden_size, target.embedding
        if config.own_embedding:
            table = take("embed_tokens.weight", (config.vocab_size, hidden))
        prefixes = [f"layers.{index}." for index in range(config.num_layers)]
        return cls(
            config=config,
            embedding=table,
            fc=ops.linear(take.linear({"fc": hidden}, 2 * hidden, bias=config.fc_bias)),
            layers=HeadLayers.build(config, prefixes, hidden, take, ops),
            target=target,
            draft_to_target=draft_to_target,
            largest=ops.largest,
            rope=rope_of(config.rope, config.rotary_dim, ops, draft_to_target.device),
        )

    def of_pass(self, index: int) -> "Eagle1Head":
        """Itself: every draft comes from the same layers."""
        return self

    def fuse(self, features: Tensor) -> Tensor:
        """The target's last hidden states behind its final norm [rows, H], as they are."""
        return features

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        """Store the keys and values of accepted rows; see ``HeadLayers``."""
        inputs = self._inputs(token_ids, hidden)
        self.layers.write_kv(inputs, inputs, attend)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One pass over ``token_ids`` [rows] with ``hidden`` [rows, H], the states of the tokens before them.

        Returns the hidden states that the next pass takes, and those that ``logits`` takes; here the same.
        """
        inputs = self._inputs(token_ids, hidden)
        stream, *parts = self.layers(inputs, inputs, attend)
        hidden = (stream + joined(parts).sum(0)).to(stream.dtype)
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [n, V] of hidden states [n, H]."""
        return self.target.logits(hidden)

    def _inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """The residual stream, [rows, H], which is also what the first attention reads: there is no norm."""
        return self.fc(torch.cat((F.embedding(token_ids, self.embedding), hidden), -1))
