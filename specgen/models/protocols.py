"""The seams of a model: what it is given, what the engine asks of it, and which of its parts may be another's."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from specgen.models.model_config import HeadConfig, TargetConfig
from specgen.ops import Map, Rope
from specgen.ops.weight import Weight

# All that a model sees of positions, attention, cache and batching. Takes a layer's number and the heads of q, k and v
# in that order, [rows, Hq + 2 * Hkv, D]; rotates q and k, stores k and v, attends to all that is stored of the row's
# sequence. Returns [rows, Hq * D].
Attend = Callable[[int, Tensor], Tensor]
# What ``Attend`` does without a look at what is stored; takes the heads of k and v alone, [rows, 2 * Hkv, D].
Keep = Callable[[int, Tensor], object]


class Take(Protocol):
    """Hands out a checkpoint's tensors, each on its device; ``UserError`` if one is missing or of another shape."""

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A vector, or a table of rows, in the model's dtype."""
        ...

    def linear(self, num_out: Mapping[str, int], num_in: int) -> Weight:
        """The weights of linear layers [num_out[name], num_in], named without ``.weight``, joined in this order."""
        ...

    def __contains__(self, name: object) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        ...


class FeedForward(Protocol):
    """What comes behind attention in a layer: [rows, H] -> [parts, rows, H]; see ``Ops.linear_parts``."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Target(Protocol):
    """The model whose texts are generated, of any family; see ``Llama``."""

    @property
    def config(self) -> TargetConfig: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def embedding(self) -> Tensor: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def argmax(self) -> Map: ...
    def forward(
        self, token_ids: Tensor, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Head(Protocol):
    """A network that drafts from the target's features, of any family; see ``Eagle3Head``."""

    @property
    def config(self) -> HeadConfig: ...
    @property
    def draft_to_target(self) -> Tensor: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def argmax(self) -> Map: ...
    def fuse(self, features: Tensor) -> Tensor: ...
    def remember(self, token_ids: Tensor, hidden: Tensor, keep: Keep) -> None: ...
    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
