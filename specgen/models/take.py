"""How a model loads its tensors: by the names in the checkpoint and the shapes that its config implies."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from specgen.ops.weight import Weight


class Take(Protocol):
    """Loads tensors of a checkpoint to their device; ``UserError`` if one is missing or of another shape.

    A call returns a vector or an embedding table in the model's dtype; ``linear`` the weights of linear layers
    [num_out[name], num_in], named without ``.weight``, joined in this order, with their ``.bias`` if ``bias``; ``in``
    tests whether a name exists. ``flat`` returns a tensor of any shape as a vector.
    """

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor: ...
    def linear(self, num_out: Mapping[str, int], num_in: int, *, bias: bool = False) -> Weight: ...
    def flat(self, name: str, length: int) -> Tensor: ...
    def __contains__(self, name: object) -> bool: ...
