"""How a model asks for its tensors: by the names in the checkpoint and the shapes that its config implies."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from specgen.ops.weight import Weight


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
