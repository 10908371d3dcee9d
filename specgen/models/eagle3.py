"""The EAGLE3 head: fuses the target's features, drafts one token a pass, and names its tensors in a checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.models.config import Eagle3Config
from specgen.models.layers import MLP, Attend, Attention, inverse_frequencies, rotary
from specgen.models.weights import Take
from specgen.ops import Ops


@dataclass(frozen=True, kw_only=True)
class Eagle3Head:
    """An EAGLE3 drafter of one layer, in any of its dialects."""

    config: Eagle3Config
    ops: Ops
    embedding: Tensor  # [V, H]; the target's unless the checkpoint has its own
    fc: Tensor  # [H, 3 * Ht]
    fc_norm: Tensor | None  # [3, Ht]: a norm for each feature; [1, 3 * Ht]: one for all of them
    input_norm: Tensor  # [H], of the embeddings
    hidden_norm: Tensor  # [H]
    attention: Attention
    post_norm: Tensor  # [H]
    mlp: MLP
    norm: Tensor  # [H]
    lm_head: Tensor  # [Vd, H]
    draft_to_target: Tensor  # [Vd] int64: the target's id of each draft id
    frequencies: Tensor  # [D / 2]

    @classmethod
    def build(cls, config: Eagle3Config, take: Take, target_embedding: Tensor, ops: Ops) -> "Eagle3Head":
        """Take every tensor of the head; the embedding is ``target_embedding`` unless the head has its own."""
        hidden = (config.hidden_size,)
        layer = config.layer_prefix
        own = config.own_embedding
        return cls(
            config=config,
            ops=ops,
            embedding=take("embed_tokens.weight", (config.vocab_size, *hidden)) if own else target_embedding,
            fc=take("fc.weight", (config.hidden_size, 3 * config.target_hidden_size)),
            fc_norm=_fc_norm(config, take),
            input_norm=take(layer + "input_layernorm.weight", hidden),
            hidden_norm=take(layer + "hidden_norm.weight", hidden),
            attention=Attention.build(config, 2 * config.hidden_size, layer, take),
            post_norm=take(layer + "post_attention_layernorm.weight", hidden),
            mlp=MLP.build(config, layer, take),
            norm=take("norm.weight", hidden),
            lm_head=take("lm_head.weight", (config.draft_vocab_size, *hidden)),
            draft_to_target=_draft_to_target(config, take).to(target_embedding.device),
            frequencies=inverse_frequencies(config.rope, config.head_dim, target_embedding.device),
        )

    @staticmethod
    def ignored_tensors() -> set[str]:
        """Tensors that some checkpoints carry and nobody needs."""
        return {"t2d", "midlayer.self_attn.rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"}

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [rows, 3 * Ht] as the hidden state of the first pass, [rows, H]."""
        if self.fc_norm is not None:
            parts = features.view(len(features), *self.fc_norm.shape)
            features = self._norm(parts, self.fc_norm).view(features.shape)
        return F.linear(features, self.fc)

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass over ``token_ids`` [rows] with the hidden states of the tokens before them, ``hidden`` [rows, H].

        Returns the hidden states that ``logits`` reads and that the next pass is fed, [rows, H].
        """
        tables = rotary(self.frequencies, positions, hidden.dtype)
        embedded = self._norm(F.embedding(token_ids, self.embedding), self.input_norm)
        normed = self._norm(hidden, self.hidden_norm)
        stream = normed if self.config.norm_before_residual else hidden
        both = torch.cat((embedded, normed), -1)
        stream = stream + self.attention(both, tables, 0, attend, self.ops)
        stream = stream + self.mlp(self._norm(stream, self.post_norm), self.ops)
        return self._norm(stream, self.norm) if self.config.norm_output else stream

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [n, Vd] in float32, from the result of ``forward``, [n, H]."""
        normed = hidden if self.config.norm_output else self._norm(hidden, self.norm)
        return F.linear(normed, self.lm_head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.rms_norm(x, weight, self.config.rms_norm_eps)


def _fc_norm(config: Eagle3Config, take: Take) -> Tensor | None:
    if config.norm_before_fc:
        return take("input_norm.weight", (3 * config.target_hidden_size,))[None]
    if config.fc_norm:
        return torch.stack([take(f"fc_norm.{i}.weight", (config.target_hidden_size,)) for i in range(3)])
    return None


def _draft_to_target(config: Eagle3Config, take: Take) -> Tensor:
    ids = torch.arange(config.draft_vocab_size)
    return ids + take("d2t", (config.draft_vocab_size,)).cpu() if config.reduced_vocab else ids
