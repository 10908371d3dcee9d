"""The scales of an FP8 KV cache, under the names that published checkpoints have for them."""

import math
from typing import Literal

from specgen.config import UserError
from specgen.models.take import Take

# Of modelopt, of compressed-tensors now and earlier, and of older files with one scale for keys and values.
_NAMES = (
    "{0}_proj.{0}_scale",
    "{0}_scale",
    "attn.{0}_scale",
    "{0}_proj.output_scale",
    "kv_scale",
    "attn.kv_scale",
)


def kv_scale(which: Literal["k", "v"], prefix: str, take: Take) -> float:
    """What a layer's stored keys or values are multiplied by; 1 where the checkpoint says nothing, or 0 or less.

    ``prefix`` is that of the layer's attention, ``model.layers.0.self_attn.``. ``UserError`` for a scale that is not
    finite.
    """
    names = (prefix + name.format(which) for name in _NAMES)
    name = next((name for name in names if name in take), None)
    if name is None:
        return 1.0
    scale = take.scalar(name)
    if not math.isfinite(scale):
        raise UserError(f"{name} is {scale}: the checkpoint is damaged, download it again")
    return scale if scale > 0 else 1.0
