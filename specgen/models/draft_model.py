"""A smaller target of the same vocabulary as drafter: a language model that continues the text by itself."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from specgen.attention import Attend
from specgen.models.model_config import HeadConfig, LayerConfig, TargetConfig
from specgen.models.protocols import Head, Target
from specgen.ops import Ops


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(HeadConfig):
    """That of a target that drafts for another one. It reads none of its features."""

    family: ClassVar[str] = "draft model"
    takes_fp8: ClassVar[bool] = True
    splits: ClassVar[bool] = False
    is_model: ClassVar[bool] = True
    model: TargetConfig

    @classmethod
    def of(cls, model: TargetConfig) -> "DraftModelConfig":
        """``model`` as a drafter, of its own vocabulary for the time being."""
        settings: dict[str, Any] = {each.name: getattr(model, each.name) for each in fields(LayerConfig)}
        return cls(
            **settings,
            draft_vocab_size=model.vocab_size,
            target_hidden_size=model.hidden_size,
            aux_rule="a draft model reads token ids alone",
            own_embedding=True,
            own_lm_head=True,
            reads_output=False,
            model=model,
        )

    def over(self, target: TargetConfig) -> Self:
        drafted = min(self.model.vocab_size, target.vocab_size)  # what is behind in either is padding
        return replace(self, vocab_size=target.vocab_size, draft_vocab_size=drafted)

    def misfits(self, target: TargetConfig) -> tuple[str, ...]:
        del target
        name = self.model.architecture
        if self.model.delta is not None:
            return (
                f"a {name} has recurrent states, which rejected drafts would stay in: as a drafter use a model that "
                "attends in all layers",
            )
        if type(self.model) is not TargetConfig:
            return (
                f"a {name} as drafter is not built: use a Llama or Qwen of the same vocabulary, or a head",
            )
        return ()

    @property
    def title(self) -> str:
        return "a draft model"

    def facts(self) -> dict[str, str]:
        return self.model.facts() | {"drafts": "as a language model of its own, with its own KV cache"}


@dataclass(frozen=True, kw_only=True)
class DraftModel(Head):
    """Its rows are tokens at their own positions, and ``hidden`` is nothing to it."""

    config: DraftModelConfig
    model: Target

    @classmethod
    def over(cls, config: DraftModelConfig, model: Target, draft_to_target: Tensor, ops: Ops) -> "DraftModel":
        return cls(
            config=config,
            model=model,
            draft_to_target=draft_to_target,
            most_likely=ops.most_likely,
            rope=model.rope,
        )

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        self.forward(token_ids, hidden, attend)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        del hidden
        rows = self.config.model.vocab_size
        if rows < self.config.vocab_size:  # the target may say what is padding there, and has no row here
            token_ids = token_ids.clamp(max=rows - 1)
        normed, _ = self.model.forward(token_ids, attend)
        return normed, normed

    def logits(self, hidden: Tensor) -> Tensor:
        found = self.model.logits(hidden)
        return (
            found
            if found.shape[1] == len(self.draft_to_target)
            else found[:, : len(self.draft_to_target)].contiguous()
        )
