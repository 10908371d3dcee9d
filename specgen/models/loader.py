"""How the layers of targets and heads ask for their weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from specgen.ops.weight import Weight

Arrange = Callable[[Tensor], Tensor]  # a tensor as a checkpoint has it -> as the model wants it


class Loader(Protocol):
    """Loads tensors of a checkpoint to their device; ``UserError`` if one is missing or of another shape.

    A call returns a tensor in the model's dtype, such as a vector or an embedding table; ``linear`` the weights of
    linear layers [num_out[name], num_in], named without ``.weight``, joined in this order, with their ``.bias`` if
    ``bias``; ``in`` tests whether a name exists. ``flat`` returns a tensor of any shape as a vector, ``scalar`` the one
    number of a tensor (1 where no weights are read), ``float32`` a tensor in that dtype whatever the model's is.

    ``stacked`` fills one weight [E, n * num_out, num_in] from E lists of n names of linear layers ``shape`` = (num_out,
    num_in), each list one below the other. ``packed`` returns bytes as they are. ``shape`` is always the stored one.

    ``output`` is the weight of an output layer, or ``tied`` rows of an embedding in its place: of a drafter a copy in
    FP8 where that is asked for.
    """

    def __call__(self, name: str, shape: tuple[int, ...], arrange: Arrange | None = None) -> Tensor: ...
    def stacked(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> Weight: ...
    def packed(self, name: str, shape: tuple[int, ...], arrange: Arrange) -> Tensor: ...
    def linear(self, num_out: Mapping[str, int], num_in: int, *, bias: bool = False) -> Weight: ...
    def output(self, name: str, num_out: int, num_in: int, tied: Tensor | None = None) -> Weight: ...
    def flat(self, name: str, length: int) -> Tensor: ...
    def float32(self, name: str, shape: tuple[int, ...]) -> Tensor: ...
    def scalar(self, name: str) -> float: ...
    def __contains__(self, name: object) -> bool: ...
