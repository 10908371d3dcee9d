"""The Llama and Qwen3 decoder over packed rows, and the names of its tensors in a checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.models.layers import MLP, Attend, Attention, inverse_frequencies
from specgen.models.model_config import TargetConfig
from specgen.models.take import Take
from specgen.ops import Map, Norm, Ops, Rope
from specgen.ops.weight import Weight


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """One pre-norm transformer layer."""

    input_norm: Norm
    attention: Attention
    post_norm: Norm
    mlp: Map  # [rows, H] -> [parts, rows, H]; see Ops.linear_parts

    @classmethod
    def build(cls, config: TargetConfig, index: int, take: Take, ops: Ops) -> "DecoderLayer":
        """Load ``model.layers.{index}.*``."""
        prefix, hidden, eps = f"model.layers.{index}.", (config.hidden_size,), config.rms_norm_eps
        return cls(
            input_norm=ops.rms_norm(take(prefix + "input_layernorm.weight", hidden), eps),
            attention=Attention.build(config, index, config.hidden_size, prefix, take, ops),
            post_norm=ops.rms_norm(take(prefix + "post_attention_layernorm.weight", hidden), eps),
            mlp=MLP.build(config, prefix, take, ops),
        )


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A Llama or Qwen3 target; whether q and k are normed is data of its layers."""

    config: TargetConfig
    embedding: Tensor  # [V, H]
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    lm_head: Map  # [n, H] -> [n, V]; the embedding's weight if tied
    argmax: Map  # of logits [..., V] -> [...]
    rope: Rope

    @classmethod
    def build(cls, config: TargetConfig, take: Take, ops: Ops) -> "Llama":
        """Load every tensor of the model by its name in a Hugging Face checkpoint."""
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        embedding = take("model.embed_tokens.weight", (vocab_size, hidden_size))
        tied = config.tied_embeddings
        lm_head = Weight(data=embedding) if tied else take.linear({"lm_head": vocab_size}, hidden_size)
        return cls(
            config=config,
            embedding=embedding,
            layers=tuple(DecoderLayer.build(config, index, take, ops) for index in range(config.num_layers)),
            norm=ops.rms_norm(take("model.norm.weight", (hidden_size,)), config.rms_norm_eps),
            lm_head=ops.linear(lm_head),
            argmax=ops.argmax,
            rope=ops.rope(inverse_frequencies(config.rope, config.head_dim, embedding.device)),
        )

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(
        self, token_ids: Tensor, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """One pass over ``token_ids`` [rows]; ``attend`` knows their positions.

        Returns the hidden states after the final norm, [rows, H], and the residual stream at the inputs of
        ``aux_layers``, concatenated in the order given, [rows, len(aux_layers) * H].
        """
        stream = F.embedding(token_ids, self.embedding)
        normed = self.layers[0].input_norm(stream)
        inputs = {0: stream} if 0 in aux_layers else {}  # no other stream outlives its layer
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            stream, normed = layer.post_norm.add(stream, layer.attention(normed, attend))
            stream, normed = next_norm.add(stream, layer.mlp(normed))
            if index + 1 in aux_layers:
                inputs[index + 1] = stream
        features = [inputs[index] for index in aux_layers]
        return normed, torch.cat(features, -1) if features else stream[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [n, V] in the model's dtype, from hidden states [n, H] that ``forward`` returned."""
        return self.lm_head(hidden)


def ignored_tensors(config: TargetConfig) -> frozenset[str]:
    """Tensors in some checkpoints that no pass uses: rotary tables, and a copy of a tied head."""
    names = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)}
    tied = {"lm_head.weight"} if config.tied_embeddings else set()
    return frozenset(names | tied | {"model.rotary_emb.inv_freq"})
