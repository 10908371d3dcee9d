"""The EAGLE3 head: fuses the target's features and drafts one token per pass."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen.models.eagle3_config import Eagle3Config, tensor_prefixes
from specgen.models.layers import Attend, HeadLayers
from specgen.models.protocols import MaskSlot, Target
from specgen.models.rotary import rope_of
from specgen.models.take import Take
from specgen.ops import Largest, Map, Norm, Ops, Pair, Rope


@dataclass(frozen=True, kw_only=True)
class Eagle3Head:
    """An EAGLE3 head in any of its formats; its first layer reads the embedding beside the hidden state."""

    config: Eagle3Config
    embedding: Tensor  # [V, H]; the target's unless the checkpoint has its own
    feature_norm: Norm | None  # over [rows, num_feature_norms, N]
    num_feature_norms: int  # 1: over all features concatenated
    fc: Map | None  # [rows, num_features * Ht] -> [rows, H]; None: the one feature is the hidden state
    inputs: Pair  # ids [rows] and hidden [rows, H] -> both normed, concatenated [rows, 2 * H]
    layers: HeadLayers
    norm: Norm
    lm_head: Map  # [n, H] -> [n, Vd]
    draft_to_target: Tensor  # [Vd] int64: the target's id of each draft id
    largest: Largest  # of logits
    rope: Rope
    mask: MaskSlot | None = None  # of P-EAGLE

    @classmethod
    def build(
        cls, config: Eagle3Config, take: Take, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "Eagle3Head":
        """Load every tensor of the head; the embedding is the target's unless the head has its own."""
        root, prefixes = tensor_prefixes(take, config.num_layers)
        hidden, eps, table = config.hidden_size, config.rms_norm_eps, target.embedding
        if config.own_embedding:
            table = take(root + "embed_tokens.weight", (config.vocab_size, hidden))

        def vector(name: str) -> Tensor:
            return take(name, (hidden,))

        head = cls(
            config=config,
            embedding=table,
            feature_norm=_feature_norm(config, root, take, ops),
            num_feature_norms=config.num_features if config.fc_norm else 1,
            fc=_fc(config, root, take, ops),
            inputs=ops.embed_norm_concat(
                table,
                vector(prefixes[0] + "input_layernorm.weight"),
                vector(prefixes[0] + "hidden_norm.weight"),
                eps,
            ),
            layers=HeadLayers.build(config, prefixes, 2 * hidden, take, ops),
            norm=ops.rms_norm(vector(root + "norm.weight"), eps),
            lm_head=ops.linear(take.linear({"lm_head": config.draft_vocab_size}, hidden)),
            draft_to_target=draft_to_target,
            largest=ops.largest,
            rope=rope_of(config, ops, draft_to_target.device),
        )
        if config.mask_token_id is None:
            return head
        features = take.flat(root + "mask_hidden", config.num_features * config.target_hidden_size)
        mask = MaskSlot(token_id=config.mask_token_id, hidden=head.fuse(features[None]))
        return replace(head, mask=mask)

    def of_pass(self, index: int) -> "Eagle3Head":
        """Itself: every draft comes from the same layers."""
        return self

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [rows, num_features * Ht] as hidden states for ``forward``, [rows, H]."""
        if self.feature_norm is not None:
            grouped = features.view(features.shape[0], self.num_feature_norms, -1)
            features = self.feature_norm(grouped).flatten(1)
        return features if self.fc is None else self.fc(features)

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        """Store the keys and values of accepted rows; see ``HeadLayers``."""
        self.layers.write_kv(*self._enter(token_ids, hidden), attend)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One pass over ``token_ids`` [rows] with ``hidden`` [rows, H], the states of the tokens before them.

        Returns the hidden states that the next pass takes, and those that ``logits`` takes: normed. [rows, H] each.
        """
        stream, normed = self.norm.add(*self.layers(*self._enter(token_ids, hidden), attend))
        return normed if self.config.norm_output else stream, normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [n, Vd] in the model's dtype, of normed hidden states [n, H]."""
        return self.lm_head(hidden)

    def _enter(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream [rows, H] that enters the first layer, and the inputs of its attention [rows, 2 * H]."""
        inputs = self.inputs(token_ids, hidden)
        return inputs[:, self.config.hidden_size :] if self.config.norm_before_residual else hidden, inputs


def _feature_norm(config: Eagle3Config, root: str, take: Take, ops: Ops) -> Norm | None:
    count, width = config.num_features, config.target_hidden_size
    if config.norm_before_fc:
        return ops.rms_norm(take(root + "input_norm.weight", (count * width,)), config.rms_norm_eps)
    if config.fc_norm:
        weights = [take(f"{root}fc_norm.{index}.weight", (width,)) for index in range(count)]
        return ops.rms_norm(torch.stack(weights), config.rms_norm_eps)
    return None


def _fc(config: Eagle3Config, root: str, take: Take, ops: Ops) -> Map | None:
    width = config.num_features * config.target_hidden_size
    if not config.reads_output:
        return ops.linear(take.linear({root + "fc": config.hidden_size}, width))
    if root + "fc.weight" in take:  # of no use then, and of another shape it would be of another kind of head
        take.linear({root + "fc": config.hidden_size}, width)
    return None
