"""The interface between the engine and a model of any family: a target verifies, a head drafts for it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from specgen.attention import Attend, LayerAttention
from specgen.models.llama import Vocabulary
from specgen.models.loader import Loader
from specgen.models.model_config import HeadConfig, TargetConfig
from specgen.models.rotary import rope_of
from specgen.ops import Map, MostLikely, Ops, Rope


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
    def embedding_scale(self) -> float: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    def forward(
        self, token_ids: Tensor, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class OnePass:
    """The rows of a head that drafts all tokens in one pass: the newest token's, and masks for those to be drafted."""

    mask_token_id: int
    first: int  # the position of the first row, from the newest token's: -1 where ids are shifted against positions
    # [1, H] of a mask, in place of the target's features; None: rows have no such input
    hidden: Tensor | None = None


class LeftToRight(Protocol):
    """What a head that drafts in one pass adds to the logits of a draft when the token before it is known."""

    def step(
        self, logits: Tensor, hidden: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...


@dataclass(frozen=True, kw_only=True)
class Head(ABC):
    """A network that drafts from the target's features; see ``Eagle3Head``."""

    config: HeadConfig
    draft_to_target: Tensor  # [Vd] int64: the target's id of each draft id
    most_likely: MostLikely  # of logits
    rope: Rope
    one_pass: OnePass | None = None  # of one that drafts all tokens in one pass
    markov: LeftToRight | None = None  # of such a one

    @staticmethod
    def common(config: HeadConfig, draft_to_target: Tensor, ops: Ops) -> dict[str, Any]:
        """The fields that every kind has, from its config."""
        rope = rope_of(config.rope, config.rotary_dim, ops, draft_to_target.device)
        own = {"config": config, "draft_to_target": draft_to_target}
        return own | {"most_likely": ops.most_likely, "rope": rope}

    def of_pass(self, index: int) -> Self:
        """What computes ``forward`` and ``logits`` of the pass that drafts token ``index`` of a step."""
        del index
        return self

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features as hidden states [rows, H]; its last ones behind the final norm as they are."""
        return features

    @abstractmethod
    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        """Store what later rows read of accepted rows."""

    @abstractmethod
    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One pass over ``token_ids`` [rows] with ``hidden`` [rows, H], the states of the tokens before them.

        A head whose ``one_pass`` has no ``hidden`` reads none.

        Returns the hidden states that the next pass takes, and those that ``logits`` takes, [rows, H] each.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary [n, Vd], in the model's dtype, of hidden states [n, H]."""


def embedding_of(config: HeadConfig, load: Loader, target: Target, root: str = "") -> Tensor:
    """The table of a head, [V, H]: the target's unless it has its own."""
    shape = config.vocab_size, config.hidden_size
    return load(f"{root}embed_tokens.weight", shape) if config.own_embedding else target.embedding


def output_of(config: HeadConfig, load: Loader, target: Target, ops: Ops) -> Map:
    """The output layer of a head, [n, H] -> [n, Vd]: the target's unless it has its own."""
    if not config.own_lm_head:
        return logits_of(target)
    return ops.linear(load.output("lm_head", config.draft_vocab_size, config.hidden_size))


def logits_of(target: Target) -> Map:
    """The output layer of ``target``, for heads without their own; found as they draft, as an outline has none."""
    return lambda hidden: target.logits(hidden)


def no_target() -> Any:  # noqa: ANN401  it has what heads ask of a target when they are built
    """In place of a ``Target`` where a head's own tensors are all that is looked at."""
    layer = LayerAttention(index=0, scale=1.0)
    nothing = torch.empty(0, device="meta")
    return SimpleNamespace(embedding=nothing, embedding_scale=1.0, stored=lambda windowed: layer)
