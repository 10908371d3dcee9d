"""The EAGLE3 head: fuses the target's features and drafts a token a pass; its tensors' names in a checkpoint."""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.config import UserError, require
from specgen.models.layers import MLP, Attend, Attention, KeysValues, WriteKV, inverse_frequencies
from specgen.models.model_config import Eagle3Config
from specgen.models.weights import Take
from specgen.ops import Map, Norm, Ops, Pair, Rope

# Carried by some checkpoints and needed by nobody here; d2t and t2d are read apart, in the vocabulary map.
IGNORED_TENSORS = frozenset(
    {
        "d2t",
        "t2d",
        "midlayer.self_attn.rotary_emb.inv_freq",
        "layers.0.self_attn.rotary_emb.inv_freq",
        "rotary_emb.inv_freq",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }
)


@dataclass(frozen=True, kw_only=True)
class TensorPrefixes:
    """How a checkpoint names its parts: ``midlayer.*`` (EAGLE, SpecForge) or ``layers.0.*`` (speculators),
    either below ``model.`` or not."""

    root: str
    layer: str

    @classmethod
    def of(cls, tensors: Set[str]) -> "TensorPrefixes":
        """Found by the one tensor that every head has and nothing else does."""
        for root in ("", "model."):
            for layer in ("midlayer.", "layers.0."):
                if f"{root}{layer}hidden_norm.weight" in tensors:
                    return cls(root=root, layer=root + layer)
        raise UserError(
            "no midlayer.hidden_norm.weight or layers.0.hidden_norm.weight: the checkpoint is no EAGLE3 head"
        )


@dataclass(frozen=True, kw_only=True)
class Eagle3Head:
    """An EAGLE3 drafter of one layer, in any of its dialects."""

    config: Eagle3Config
    embedding: Tensor  # [V, H]; the target's unless the checkpoint has its own
    feature_norm: Norm | None  # over [rows, parts, N]
    feature_parts: int  # how many norms the features fall into
    fc: Map  # [rows, aux layers * Ht] -> [rows, H]
    inputs: Pair  # ids [rows] and hidden [rows, H] -> both normed, side by side [rows, 2 * H]
    attention: Attention
    keys_values: KeysValues  # of the same attention
    post_norm: Norm
    mlp: MLP
    norm: Norm
    lm_head: Map  # [n, H] -> [n, Vd]
    draft_to_target: Tensor  # [Vd] int64: the target's id of each draft id
    argmax: Map  # of logits [..., Vd] -> [...]
    rope: Rope

    @classmethod
    def build(
        cls,
        config: Eagle3Config,
        prefixes: TensorPrefixes,
        take: Take,
        target_embedding: Tensor,
        draft_to_target: Tensor,
        ops: Ops,
    ) -> "Eagle3Head":
        """Take every tensor of the head; the embedding is ``target_embedding`` unless the head has its own."""
        root, layer, hidden, eps = prefixes.root, prefixes.layer, config.hidden_size, config.rms_norm_eps
        width = config.num_features * config.target_hidden_size
        table = (
            take(root + "embed_tokens.weight", (config.vocab_size, hidden))
            if config.own_embedding
            else target_embedding
        )

        def vector(name: str) -> Tensor:
            return take(name, (hidden,))

        return cls(
            config=config,
            embedding=table,
            feature_norm=_feature_norm(config, root, take, ops),
            feature_parts=config.num_features if config.fc_norm else 1,
            fc=ops.linear(take(root + "fc.weight", (hidden, width))),
            inputs=ops.embed_beside(
                table, vector(layer + "input_layernorm.weight"), vector(layer + "hidden_norm.weight"), eps
            ),
            attention=Attention.build(config, 0, 2 * hidden, layer, take, ops),
            keys_values=KeysValues.build(config, 2 * hidden, layer, take, ops),
            post_norm=ops.rms_norm(vector(layer + "post_attention_layernorm.weight"), eps),
            mlp=MLP.build(config, layer, take, ops),
            norm=ops.rms_norm(vector(root + "norm.weight"), eps),
            lm_head=ops.linear(take("lm_head.weight", (config.draft_vocab_size, hidden))),
            draft_to_target=draft_to_target,
            argmax=ops.argmax,
            rope=ops.rope(inverse_frequencies(config.rope, config.head_dim, draft_to_target.device)),
        )

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs it fuses."""
        return self.config.aux_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [rows, aux layers * Ht] as hidden states that a pass can be fed, [rows, H]."""
        if self.feature_norm is not None:
            parts = features.view(features.shape[0], self.feature_parts, -1)
            features = self.feature_norm(parts).flatten(1)
        return self.fc(features)

    def write_kv(self, token_ids: Tensor, hidden: Tensor, write_kv: WriteKV) -> None:
        """Store the keys and values of rows that ``forward`` could be given, without their attention.

        With one layer nothing else of a row reaches another one, so this is all that an accepted row must leave.
        """
        self.keys_values(self.inputs(token_ids, hidden), self.attention.layer, write_kv)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        """One pass over ``token_ids`` [rows] with ``hidden`` [rows, H], the states of the tokens before them.

        Returns the hidden states that ``logits`` reads and that the next pass is fed, [rows, H].
        """
        inputs = self.inputs(token_ids, hidden)
        stream = inputs[:, self.config.hidden_size :] if self.config.norm_before_residual else hidden
        stream, normed = self.post_norm.add(stream, self.attention(inputs, attend))
        stream, normed = self.norm.add(stream, self.mlp(normed))
        return normed if self.config.norm_output else stream

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [n, Vd] in the model's dtype, from the result of ``forward``, [n, H]."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))


def vocabulary_map(config: Eagle3Config, d2t: Tensor | None, t2d: Tensor | None) -> Tensor:
    """The target's id of each draft id, [Vd] int64, from the offsets ``d2t`` [Vd] and the mask ``t2d`` [V].

    ``UserError`` where they cannot be of one vocabulary: such a head would draft the wrong tokens.
    """
    drafted, vocab = config.draft_vocab_size, config.vocab_size
    require(
        drafted <= vocab, f"draft_vocab_size is {drafted}, more than the vocabulary of {vocab}: wrong config"
    )
    ids = torch.arange(drafted)
    if d2t is None:
        require(
            drafted == vocab,
            f"the head drafts {drafted} of {vocab} tokens but has no d2t: add the tensor that maps them",
        )
        return ids
    require(
        d2t.shape == ids.shape and not d2t.is_floating_point(),
        f"d2t is {list(d2t.shape)} of {d2t.dtype}: it must hold {drafted} integers, one for each draft token",
    )
    ids = ids + d2t.cpu()
    low, high = int(ids.min()), int(ids.max())
    require(
        low >= 0 and high < vocab,
        f"d2t maps to token ids {low} to {high}, outside the vocabulary of {vocab}: "
        "it must hold offsets (target id minus draft id)",
    )
    require(len(set(ids.tolist())) == drafted, "d2t maps two draft tokens to one target token: it is wrong")
    if t2d is not None:
        marked = t2d.cpu().nonzero().flatten()
        require(
            t2d.shape == (vocab,) and torch.equal(marked, ids.sort().values),
            f"t2d marks {marked.numel()} of {t2d.numel()} tokens, other ones than the {drafted} of d2t: "
            "the checkpoint mixes two vocabularies, export it again",
        )
    return ids


def _feature_norm(config: Eagle3Config, root: str, take: Take, ops: Ops) -> Norm | None:
    count, width = config.num_features, config.target_hidden_size
    if config.norm_before_fc:
        return ops.rms_norm(take(root + "input_norm.weight", (count * width,)), config.rms_norm_eps)
    if config.fc_norm:
        weights = [take(f"{root}fc_norm.{index}.weight", (width,)) for index in range(count)]
        return ops.rms_norm(torch.stack(weights), config.rms_norm_eps)
    return None
