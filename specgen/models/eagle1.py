"""The EAGLE-1 head (Li et al., 2024), which is EAGLE-2's too: drafts from the target's last hidden state."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.models.eagle1_config import Eagle1Config
from specgen.models.layers import Attend, HeadLayers
from specgen.models.protocols import MaskSlot, Target
from specgen.models.rotary import rope_of
from specgen.models.take import Take
from specgen.ops import Largest, Map, Ops, Rope
from specgen.ops.reference import joined


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
            rope=rope_of(config, ops, draft_to_target.device),
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
