"""Whether a head and a target belong together: mismatches that would load and then draft badly."""

import torch
from torch import Tensor

from specgen.config import require
from specgen.models.model_config import HeadConfig, TargetConfig


def misfits(target: TargetConfig, head: HeadConfig) -> tuple[str, ...]:
    """Each reason why ``head`` cannot draft for ``target``, with the remedy; empty if they fit."""
    reasons = []
    if head.target_hidden_size != target.hidden_size:
        reasons.append(
            f"the head reads features {head.target_hidden_size} wide, but the target's hidden size is "
            f"{target.hidden_size}: use the target that the head was trained on"
        )
    if head.vocab_size != target.vocab_size:
        reasons.append(
            f"the head's vocabulary has {head.vocab_size} tokens, the target's {target.vocab_size}: "
            "use the target that the head was trained on"
        )
    outside = [layer for layer in head.aux_layers if not 0 <= layer <= target.num_layers]
    if outside:
        reasons.append(
            f"the head reads the input of layer {outside[0]}, but the target has layers 0 to "
            f"{target.num_layers - 1}: use the target that the head was trained on ({head.aux_rule})"
        )
    if not head.own_embedding and head.hidden_size != target.hidden_size:
        reasons.append(
            f"the head has no embedding and is {head.hidden_size} wide, but the target's embedding is "
            f"{target.hidden_size} wide: use a head that carries embed_tokens.weight"
        )
    return tuple(reasons)


def vocabulary_map(config: HeadConfig, d2t: Tensor | None, t2d: Tensor | None) -> Tensor:
    """The target's id of each draft id, [Vd] int64, from the offsets ``d2t`` [Vd] and the mask ``t2d`` [V].

    ``UserError`` if they are inconsistent: such a head would draft the wrong tokens.
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
            f"t2d marks {marked.numel()} of {t2d.numel()} tokens, not the {drafted} of d2t: "
            "the checkpoint mixes two vocabularies, export it again",
        )
    return ids
