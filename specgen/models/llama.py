"""The target: a Llama or Qwen3 decoder over packed rows, and the names of its tensors in a checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.models.config import TargetConfig
from specgen.models.layers import MLP, Attend, Attention, inverse_frequencies, rotary
from specgen.models.weights import Take
from specgen.ops import Ops


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """One pre-norm transformer layer."""

    input_norm: Tensor  # [H]
    attention: Attention
    post_norm: Tensor  # [H]
    mlp: MLP

    @classmethod
    def build(cls, config: TargetConfig, index: int, take: Take) -> "DecoderLayer":
        """Take ``model.layers.{index}.*``."""
        prefix, hidden = f"model.layers.{index}.", (config.hidden_size,)
        return cls(
            input_norm=take(prefix + "input_layernorm.weight", hidden),
            attention=Attention.build(config, config.hidden_size, prefix, take),
            post_norm=take(prefix + "post_attention_layernorm.weight", hidden),
            mlp=MLP.build(config, prefix, take),
        )


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A Llama or Qwen3 target; whether q and k are normed is data of its layers."""

    config: TargetConfig
    ops: Ops
    embedding: Tensor  # [V, H]
    layers: tuple[DecoderLayer, ...]
    norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]; the embedding itself where they are tied
    frequencies: Tensor  # [D / 2]

    @classmethod
    def build(cls, config: TargetConfig, take: Take, ops: Ops) -> "Llama":
        """Take every tensor of the model by its name in a Hugging Face checkpoint."""
        table = (config.vocab_size, config.hidden_size)
        embedding = take("model.embed_tokens.weight", table)
        return cls(
            config=config,
            ops=ops,
            embedding=embedding,
            layers=tuple(DecoderLayer.build(config, index, take) for index in range(config.num_layers)),
            norm=take("model.norm.weight", (config.hidden_size,)),
            lm_head=embedding if config.tied_embeddings else take("lm_head.weight", table),
            frequencies=inverse_frequencies(config.rope, config.head_dim, embedding.device),
        )

    @staticmethod
    def ignored_tensors(config: TargetConfig) -> set[str]:
        """Tensors that some checkpoints carry and nobody needs: rotary tables and a copy of a tied head."""
        names = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)}
        return (
            names | {"model.rotary_emb.inv_freq"} | ({"lm_head.weight"} if config.tied_embeddings else set())
        )

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """One pass over ``token_ids`` [rows] at ``positions`` [rows], both int64.

        Returns the hidden states before the final norm, [rows, H], and the residual stream at the inputs of
        ``aux_layers`` side by side in the order given, [rows, len(aux_layers) * H].
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        tables = rotary(self.frequencies, positions, self.dtype)
        stream = F.embedding(token_ids, self.embedding)
        inputs = []
        for index, layer in enumerate(self.layers):
            inputs.append(stream)
            normed = ops.rms_norm(stream, layer.input_norm, eps)
            stream = stream + layer.attention(normed, tables, index, attend, ops)
            stream = stream + layer.mlp(ops.rms_norm(stream, layer.post_norm, eps), ops)
        inputs.append(stream)
        features = [inputs[index] for index in aux_layers]
        return stream, torch.cat(features, -1) if features else stream[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [n, V] in float32 from hidden states [n, H] before the final norm."""
        return F.linear(self.ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps), self.lm_head).float()
