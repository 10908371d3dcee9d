"""The multi-token prediction (MTP) layers in the checkpoints of DeepSeek-V3 and its relatives; no torch."""

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from specgen.config import require
from specgen.models import deepseek
from specgen.models.config_fields import Raw, count
from specgen.models.latent_config import LatentConfig
from specgen.models.model_config import HeadConfig, dtype_name, layer_settings

NOT_MTP = "no model.layers.N.eh_proj.weight alone: the checkpoint is no MTP layer either"


def mtp_prefixes(config: Raw, names: Set[str]) -> tuple[str, ...]:
    """Of the tensors of each MTP layer; they are numbered on behind the target's layers."""
    first, prefixes = count(config, "num_hidden_layers"), list[str]()
    while f"model.layers.{first + len(prefixes)}.eh_proj.weight" in names:
        prefixes.append(f"model.layers.{first + len(prefixes)}.")
    return tuple(prefixes)


def is_mtp(config: Raw, tensors: Set[str]) -> bool:
    """MTP layers without their target, which has an embedding of its own."""
    return "model.embed_tokens.weight" not in tensors and any(
        name.endswith(".eh_proj.weight") for name in tensors
    )


@dataclass(frozen=True, kw_only=True)
class MtpConfig(HeadConfig):
    """MTP layers of a target with latent attention, each with experts."""

    family: ClassVar[str] = "MTP"
    takes_fp8: ClassVar[bool] = True
    takes_turns: ClassVar[bool] = True
    prefixes: tuple[str, ...]  # of the tensors of each layer
    own_lm_head: bool

    @classmethod
    def from_hf(cls, config: Raw, tensors: Set[str], num_target_layers: int | None) -> "MtpConfig":
        """Read the ``config.json`` of the target; what the layers share with it is told by ``tensors``."""
        del num_target_layers  # they read no layer but the last
        prefixes, latent = mtp_prefixes(config, tensors), LatentConfig.from_hf(config)
        require(
            bool(prefixes),
            f"config.json has {count(config, 'num_hidden_layers')} layers and no MTP layer has the next number: "
            "use --drafter mtp with the target's own checkpoint",
        )
        return cls(
            draft_vocab_size=count(config, "vocab_size"),
            target_hidden_size=count(config, "hidden_size"),
            num_layers=len(prefixes),
            aux_layers=(),
            aux_rule="an MTP layer reads the last hidden state alone",
            own_embedding=any(name.endswith(".embed_tokens.weight") for name in tensors),
            own_lm_head=any(name.endswith(".shared_head.head.weight") for name in tensors),
            reads_output=True,
            qk_norm=False,
            dtype=dtype_name(config),
            prefixes=prefixes,
            latent=latent,
            mixture=deepseek.mixture_of(config, (True,) * len(prefixes)),
            **layer_settings({**config, "head_dim": latent.key_dim}),
        )

    @property
    def title(self) -> str:
        return "the target's MTP layer" if self.num_layers == 1 else "the target's MTP layers"

    def facts(self) -> dict[str, str]:
        return {
            "features": "the target's last hidden state, behind its final norm",
            "fed back": "the hidden state behind shared_head.norm",
            "output": "its own output weights" if self.own_lm_head else "the target's output weights",
            **super().facts(),
        }
