"""Watching the operations that torch runs."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """A mode that nothing compiles: torch would import all of its compiler, which takes seconds, to leave it out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
