"""What the engine asks of a model of any family: a target verifies, a head drafts for it."""

from typing import Protocol

import torch
from torch import Tensor

from specgen.models.layers import Attend, WriteKV
from specgen.models.model_config import HeadConfig, TargetConfig
from specgen.ops import Map, Rope


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
    """A network that drafts from the target's features: rows go in as token ids and the hidden states before them."""

    @property
    def config(self) -> HeadConfig: ...
    @property
    def draft_to_target(self) -> Tensor: ...  # [Vd] int64: the target's id of each draft id
    @property
    def rope(self) -> Rope: ...
    @property
    def argmax(self) -> Map: ...  # of logits [..., Vd] -> [...]

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [rows, num_aux * Ht] as hidden states that a pass can be fed, [rows, H]."""
        ...

    def write_kv(self, token_ids: Tensor, hidden: Tensor, write_kv: WriteKV) -> None:
        """Store what later rows attend to of rows that were accepted, without their attention."""
        ...

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        """One pass; returns the hidden states [rows, H] that ``logits`` reads and that the next pass is fed."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the draft vocabulary, [n, Vd] in the model's dtype."""
        ...
