"""The EAGLE-1 head (Li et al., 2024), which is EAGLE-2's too: drafts from the target's last hidden state."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.models.eagle1_config import Eagle1Config
from specgen.models.layers import Attend, Block, Projection, inverse_frequencies
from specgen.models.protocols import MaskSlot, Target
from specgen.models.take import Take
from specgen.ops import Map, Norm, Ops, Rope


@dataclass(frozen=True, kw_only=True)
class Eagle1Head:
    """Layers of the target's kind over the embedding beside the hidden state; neither norm in front nor behind."""

    config: Eagle1Config
    embedding: Tensor  # [V, H]; the target's unless the checkpoint has its own
    fc: Map  # embedding and hidden state concatenated [rows, 2 * H] -> [rows, H]
    blocks: tuple[Block, ...]
    norms: tuple[Norm, ...]  # of the inputs of each block but the first
    kv_proj: Projection  # of the last block's attention
    target: Target  # for its output weights
    draft_to_target: Tensor  # [V] int64: the ids themselves
    argmax: Map  # of logits [..., V] -> [...]
    rope: Rope
    mask: MaskSlot | None = None

    @classmethod
    def build(
        cls, config: Eagle1Config, take: Take, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "Eagle1Head":
        """Load every tensor of the head; the embedding is the target's unless the head has its own."""
        hidden, kv_heads, table = config.hidden_size, config.num_kv_heads, target.embedding
        if config.own_embedding:
            table = take("embed_tokens.weight", (config.vocab_size, hidden))
        blocks = tuple(
            Block.build(config, index, f"layers.{index}.", take, ops, hidden)
            for index in range(config.num_layers)
        )
        last = f"layers.{config.num_layers - 1}."
        return cls(
            config=config,
            embedding=table,
            fc=ops.linear(take.linear({"fc": hidden}, 2 * hidden, bias=config.fc_bias)),
            blocks=blocks,
            norms=tuple(
                ops.rms_norm(take(f"layers.{index}.input_layernorm.weight", (hidden,)), config.rms_norm_eps)
                for index in range(1, config.num_layers)
            ),
            kv_proj=Projection.build(config, {"k": kv_heads, "v": kv_heads}, hidden, last, take, ops),
            target=target,
            draft_to_target=draft_to_target,
            argmax=ops.argmax,
            rope=ops.rope(inverse_frequencies(config.rope, config.head_dim, draft_to_target.device)),
        )

    def fuse(self, features: Tensor) -> Tensor:
        """The target's last hidden states behind its final norm [rows, H], as they are."""
        return features

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        """Store the keys and values of accepted rows; see ``Eagle3Head.write_kv``."""
        _, inputs = self._before_last(token_ids, hidden, attend)
        attend.write_kv(self.blocks[-1].attention.layer, self.kv_proj(inputs))

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        """One pass over ``token_ids`` [rows] with ``hidden`` [rows, H], the states of the tokens before them.

        Returns the hidden states that ``logits`` and the next pass take, [rows, H].
        """
        stream, parts = self.blocks[-1](*self._before_last(token_ids, hidden, attend), attend)
        return (stream + parts.sum(0)).to(stream.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [n, V] from the result of ``forward``, [n, H]."""
        return self.target.logits(hidden)

    def _before_last(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """The residual stream [rows, H] that enters the last layer, and the inputs of its attention."""
        stream = inputs = self.fc(torch.cat((F.embedding(token_ids, self.embedding), hidden), -1))
        for block, norm in zip(self.blocks[:-1], self.norms, strict=True):
            stream, inputs = norm.add(*block(stream, inputs, attend))
        return stream, inputs
