"""How a model asks for its tensors: by the name in the checkpoint and the shape that its config implies."""

from collections.abc import Callable

from torch import Tensor

Shape = tuple[int, ...]
Take = Callable[[str, Shape], Tensor]  # raises ValueError when the tensor is missing or has another shape
