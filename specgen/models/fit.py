"""Whether a head and a target belong together: every mismatch that would load and then draft badly; no torch."""

from specgen.models.model_config import HeadConfig, TargetConfig


def misfits(target: TargetConfig, head: HeadConfig) -> tuple[str, ...]:
    """Each reason why ``head`` cannot draft for ``target``, with the remedy; empty where they fit."""
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
            f"the head has no embedding of its own and is {head.hidden_size} wide, but the target's embedding is "
            f"{target.hidden_size} wide: use a head that carries embed_tokens.weight"
        )
    return tuple(reasons)
