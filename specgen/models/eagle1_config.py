"""The published format of EAGLE-1 heads: how it is recognized, read and described; no torch."""

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from specgen.config import require
from specgen.models.config_fields import Raw, count
from specgen.models.eagle3_config import is_eagle3
from specgen.models.model_config import HeadConfig, dtype_name, head_biases, layer_settings, layer_windows

NOT_EAGLE1 = "no fc.weight and layers.0.self_attn.q_proj.weight: the checkpoint is not an EAGLE-1 head either"
IGNORED_TENSORS = frozenset({"rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"})


def is_eagle1(config: Raw, tensors: Set[str]) -> bool:
    """By its tensors: a config says Llama or Qwen2, and nothing of a head."""
    return not is_eagle3(config, tensors) and {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= tensors


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(HeadConfig):
    """An EAGLE-1 head."""

    family: ClassVar[str] = "EAGLE-1"
    fc_each_pass: ClassVar[bool] = True
    fc_bias: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.draft_vocab_size == self.vocab_size,
            f"draft_vocab_size is {self.draft_vocab_size} of {self.vocab_size}: an EAGLE-1 head drafts the target's "
            "whole vocabulary",
        )

    @classmethod
    def from_hf(cls, config: Raw, tensors: Set[str], num_target_layers: int | None) -> "Eagle1Config":
        """Read a head's ``config.json``; biases and an embedding of its own are found in ``tensors`` alone."""
        del num_target_layers  # it reads no layer but the last
        return cls(
            draft_vocab_size=count(config, "draft_vocab_size", count(config, "vocab_size")),
            target_hidden_size=count(config, "hidden_size"),
            num_layers=count(config, "num_hidden_layers"),
            aux_layers=(),
            aux_rule="an EAGLE-1 head reads the last hidden state alone",
            own_embedding="embed_tokens.weight" in tensors,
            reads_output=True,
            fc_bias="fc.bias" in tensors,
            qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in tensors),
            windows=layer_windows(config),
            dtype=dtype_name(config),
            **head_biases(config, tensors),
            **layer_settings(config),
        )

    def facts(self) -> dict[str, str]:
        return {
            "features": "the target's last hidden state, behind its final norm",
            "norms": "none of the inputs, none at the end",
            "fc": "with a bias" if self.fc_bias else "without a bias",
            "output": "the target's output weights",
            **super().facts(),
        }
