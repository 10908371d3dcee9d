"""The EAGLE3 head: fuses the target's features and drafts one token per pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.models.eagle3_config import Eagle3Config, tensor_prefixes
from specgen.models.layers import MLP, Attend, Attention, Projection, WriteKV, inverse_frequencies
from specgen.models.protocols import Target
from specgen.models.take import Take
from specgen.ops import Map, Norm, Ops, Pair, Rope


@dataclass(frozen=True, kw_only=True)
class Eagle3Head:
    """An EAGLE3 head of one layer, in any of its formats."""

    config: Eagle3Config
    embedding: Tensor  # [V, H]; the target's unless the checkpoint has its own
    feature_norm: Norm | None  # over [rows, num_feature_norms, N]
    num_feature_norms: int  # 1: over all features concatenated
    fc: Map  # [rows, aux layers * Ht] -> [rows, H]
    inputs: Pair  # ids [rows] and hidden [rows, H] -> both normed, concatenated [rows, 2 * H]
    attention: Attention
    kv_proj: Projection  # of the same attention
    post_norm: Norm
    mlp: MLP
    norm: Norm
    lm_head: Map  # [n, H] -> [n, Vd]
    draft_to_target: Tensor  # [Vd] int64: the target's id of each draft id
    argmax: Map  # of logits [..., Vd] -> [...]
    rope: Rope

    @classmethod
    def build(
        cls, config: Eagle3Config, take: Take, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "Eagle3Head":
        """Load every tensor of the head; the embedding is the target's unless the head has its own."""
        root, layer = tensor_prefixes(take)
        hidden, eps, kv_heads = config.hidden_size, config.rms_norm_eps, config.num_kv_heads
        fc_width, table = config.num_features * config.target_hidden_size, target.embedding
        if config.own_embedding:
            table = take(root + "embed_tokens.weight", (config.vocab_size, hidden))

        def vector(name: str) -> Tensor:
            return take(name, (hidden,))

        return cls(
            config=config,
            embedding=table,
            feature_norm=_feature_norm(config, root, take, ops),
            num_feature_norms=config.num_features if config.fc_norm else 1,
            fc=ops.linear(take.linear({root + "fc": hidden}, fc_width)),
            inputs=ops.embed_norm_concat(
                table, vector(layer + "input_layernorm.weight"), vector(layer + "hidden_norm.weight"), eps
            ),
            attention=Attention.build(config, 0, 2 * hidden, layer, take, ops),
            kv_proj=Projection.build(config, {"k": kv_heads, "v": kv_heads}, 2 * hidden, layer, take, ops),
            post_norm=ops.rms_norm(vector(layer + "post_attention_layernorm.weight"), eps),
            mlp=MLP.build(config, layer, take, ops),
            norm=ops.rms_norm(vector(root + "norm.weight"), eps),
            lm_head=ops.linear(take.linear({"lm_head": config.draft_vocab_size}, hidden)),
            draft_to_target=draft_to_target,
            argmax=ops.argmax,
            rope=ops.rope(inverse_frequencies(config.rope, config.head_dim, draft_to_target.device)),
        )

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [rows, aux layers * Ht] as hidden states for ``forward``, [rows, H]."""
        if self.feature_norm is not None:
            grouped = features.view(features.shape[0], self.num_feature_norms, -1)
            features = self.feature_norm(grouped).flatten(1)
        return self.fc(features)

    def write_kv(self, token_ids: Tensor, hidden: Tensor, write_kv: WriteKV) -> None:
        """Store the keys and values of accepted rows without computing their attention.

        In a head of one layer no other state of a row is read by later rows.
        """
        write_kv(self.attention.layer, self.kv_proj(self.inputs(token_ids, hidden)))

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        """One pass over ``token_ids`` [rows] with ``hidden`` [rows, H], the states of the tokens before them.

        Returns the hidden states that ``logits`` and the next pass take, [rows, H].
        """
        inputs = self.inputs(token_ids, hidden)
        stream = inputs[:, self.config.hidden_size :] if self.config.norm_before_residual else hidden
        stream, normed = self.post_norm.add(stream, self.attention(inputs, attend))
        stream, normed = self.norm.add(stream, self.mlp(normed))
        return normed if self.config.norm_output else stream

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [n, Vd] in the model's dtype, from the result of ``forward``, [n, H]."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))


def _feature_norm(config: Eagle3Config, root: str, take: Take, ops: Ops) -> Norm | None:
    count, width = config.num_features, config.target_hidden_size
    if config.norm_before_fc:
        return ops.rms_norm(take(root + "input_norm.weight", (count * width,)), config.rms_norm_eps)
    if config.fc_norm:
        weights = [take(f"{root}fc_norm.{index}.weight", (width,)) for index in range(count)]
        return ops.rms_norm(torch.stack(weights), config.rms_norm_eps)
    return None
