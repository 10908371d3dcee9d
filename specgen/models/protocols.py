"""What the engine needs of a model: a target verifies, a head drafts for it."""

from typing import Protocol

import torch
from torch import Tensor

from specgen.models.layers import Attend, Keep
from specgen.models.model_config import HeadConfig, TargetConfig
from specgen.ops import Map, Rope


class Shared(Protocol):
    """What a head may use of its target's weights in place of its own."""

    @property
    def embedding(self) -> Tensor: ...  # [V, H]
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [n, V] in the model's dtype, from hidden states [n, H] that ``forward`` returned."""
        ...


class Target(Shared, Protocol):
    """The model whose texts are generated."""

    @property
    def config(self) -> TargetConfig: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def argmax(self) -> Map: ...  # of logits [..., V] -> [...]
    def forward(
        self, token_ids: Tensor, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """One pass over ``token_ids`` [rows]; where they stand is known to ``attend``.

        Returns the hidden states behind the final norm, [rows, H], and the residual stream at the inputs of
        ``aux_layers`` side by side in the order given, [rows, len(aux_layers) * H].
        """
        ...


class Head(Protocol):
    """A network that drafts from the target's features."""

    @property
    def config(self) -> HeadConfig: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def argmax(self) -> Map: ...  # of logits [..., Vd] -> [...]
    @property
    def draft_to_target(self) -> Tensor: ...  # [Vd] int64: the target's id of each draft id
    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [rows, aux layers * Ht] as hidden states that a pass can be fed, [rows, H]."""
        ...

    def remember(self, token_ids: Tensor, hidden: Tensor, keep: Keep) -> None:
        """Keep what later rows look at of rows that ``forward`` could be given: their keys and values."""
        ...

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        """One pass over ``token_ids`` [rows] with ``hidden`` [rows, H], the states of the tokens before them.

        Returns the hidden states that ``logits`` reads and that the next pass is fed, [rows, H].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [n, Vd] in the model's dtype, from the result of ``forward``, [n, H]."""
        ...
