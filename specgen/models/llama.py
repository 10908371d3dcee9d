"""The decoder of Llama and its relatives over packed rows, and the names of its tensors in a checkpoint."""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.models.layers import Attend, Block
from specgen.models.mlp import Chosen
from specgen.models.model_config import TargetConfig
from specgen.models.rotary import rope_of
from specgen.models.take import Take
from specgen.models.vocabulary import Vocabulary
from specgen.ops import Norm, Ops, Rope


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A target of any family of the table: how they differ (norms of q and k, mixtures, ...) is data of its layers."""

    config: TargetConfig
    embedding: Tensor  # [V, H]
    blocks: tuple[Block, ...]
    norms: tuple[Norm, ...]  # of the inputs of each block, and the final one
    vocabulary: Vocabulary
    rope: Rope

    @classmethod
    def build(cls, config: TargetConfig, take: Take, ops: Ops) -> "Llama":
        """Load every tensor of the model by its name in a Hugging Face checkpoint."""
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        embedding = take("model.embed_tokens.weight", (vocab_size, hidden_size))
        blocks = tuple(
            Block.build(config, index, f"model.layers.{index}.", take, ops, hidden_size)
            for index in range(config.num_layers)
        )
        norms = {
            f"model.layers.{index}.input_layernorm.weight": block.attention.input_scale
            for index, block in enumerate(blocks)
        }
        return cls(
            config=config,
            embedding=embedding,
            blocks=blocks,
            norms=tuple(
                ops.rms_norm(take(name, (hidden_size,)), config.rms_norm_eps, config.norm_casts_last, scale)
                for name, scale in [*norms.items(), ("model.norm.weight", None)]
            ),
            vocabulary=Vocabulary.build(config, embedding, take, ops),
            rope=rope_of(config.rope, config.rotary_dim, ops, embedding.device),
        )

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(
        self, token_ids: Tensor, attend: Attend, aux_layers: tuple[int, ...] = (), chosen: Chosen = None
    ) -> tuple[Tensor, Tensor]:
        """One pass over ``token_ids`` [rows]; ``attend`` knows their positions.

        Returns the hidden states after the final norm, [rows, H], and the residual stream at the inputs of
        ``aux_layers``, concatenated in the order given, [rows, len(aux_layers) * H].
        """
        stream = F.embedding(token_ids, self.embedding)
        normed = self.norms[0](stream)
        inputs = {0: stream} if 0 in aux_layers else {}  # no other stream outlives its layer
        for index, (block, norm) in enumerate(zip(self.blocks, self.norms[1:], strict=True), start=1):
            # not block(...), during which this frame would hold on to the stream before it
            stream, normed = block.post_norm.add(stream, block.attention(normed, attend))
            stream, normed = norm.add(stream, *block.mlp(normed, chosen))
            if index in aux_layers:
                inputs[index] = stream
        features = [inputs[index] for index in aux_layers]
        return normed, torch.cat(features, -1) if features else stream[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [n, V] in the model's dtype, from hidden states [n, H] that ``forward`` returned."""
        return self.vocabulary.whole(self.vocabulary.share(hidden))


def ignored_tensors(config: TargetConfig, names: Set[str]) -> Set[str]:
    """Tensors in some checkpoints that no pass uses: rotary tables, and a copy of a tied head."""
    del names
    tables = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)}
    tied = {"lm_head.weight"} if config.tied_embeddings else set()
    return tables | tied | {"model.rotary_emb.inv_freq"}
