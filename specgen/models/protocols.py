"""The interface between the engine and a model of any family: a target verifies, a head drafts for it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.attention import Attend
from specgen.models.layers import Chosen
from specgen.models.llama import Vocabulary
from specgen.models.model_config import HeadConfig, TargetConfig
from specgen.ops import Largest, Rope


class Target(Protocol):
    """The target model; see ``Llama``."""

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
    def vocabulary(self) -> Vocabulary: ...
    def forward(
        self, token_ids: Tensor, attend: Attend, aux_layers: tuple[int, ...] = (), chosen: Chosen = None
    ) -> tuple[Tensor, Tensor]: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class MaskSlot:
    """What a head that drafts in one pass is fed in place of the tokens that it has yet to draft."""

    token_id: int
    hidden: Tensor  # [1, H]


class Head(Protocol):
    """A network that drafts from the target's features; see ``Eagle3Head``.

    ``of_pass`` is what computes ``forward`` and ``logits`` of the pass that drafts token ``index`` of a step.
    """

    @property
    def mask(self) -> MaskSlot | None: ...

    @property
    def config(self) -> HeadConfig: ...
    @property
    def draft_to_target(self) -> Tensor: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def largest(self) -> Largest: ...
    def of_pass(self, index: int) -> "Head": ...
    def fuse(self, features: Tensor) -> Tensor: ...
    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None: ...
    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
