"""How a model asks for its tensors: by the name in the checkpoint and the shape that its config implies."""

from collections.abc import Callable

from torch import Tensor

# (name, shape) -> the tensor in the model's dtype on its device; UserError if it is missing or of another shape.
Take = Callable[[str, tuple[int, ...]], Tensor]
