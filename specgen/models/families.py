"""The supported architectures: one table of target families and one of draft heads."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from specgen.config import UserError, require, shown
from specgen.models import deepseek, eagle1_config, eagle3_config, gpt_oss, llama, mtp, mtp_config, qwen3_moe
from specgen.models.config_fields import Raw
from specgen.models.eagle1 import Eagle1Head
from specgen.models.eagle1_config import Eagle1Config
from specgen.models.eagle3 import Eagle3Head
from specgen.models.eagle3_config import Eagle3Config
from specgen.models.model_config import HeadConfig, TargetConfig, architectures
from specgen.models.mtp import MtpHead
from specgen.models.mtp_config import MtpConfig
from specgen.models.protocols import Head, Target
from specgen.models.take import Take
from specgen.ops import Ops


@dataclass(frozen=True, kw_only=True)
class Family:
    """The targets of one architecture."""

    config: Callable[[Raw], TargetConfig]  # from a config.json
    build: Callable[[Any, Take, Ops], Target]  # from that config
    ignored: Callable[
        [Any, Set[str]], Set[str]
    ]  # of the names in a checkpoint, tensors that no pass of it uses


@dataclass(frozen=True, kw_only=True)
class HeadFamily:
    """Draft heads of one kind, in all their published formats; its name is its configs' ``family``."""

    recognize: Callable[[Raw, Set[str]], bool]  # by a config.json and the names of the tensors
    refusal: str  # for a checkpoint that no family recognizes
    config: Callable[[Raw, Set[str], int | None], HeadConfig]  # also from the target's number of layers
    build: Callable[[Any, Take, Target, Tensor, Ops], Head]  # from that config; the tensor is draft_to_target
    ignored: Set[str]  # tensors in some checkpoints that no pass uses


_llama = partial(Family, build=llama.Llama.build, ignored=llama.ignored_tensors)
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _llama(config=TargetConfig.from_hf),
    "Qwen2ForCausalLM": _llama(config=partial(TargetConfig.from_hf, qkv_bias=True)),
    "Qwen3ForCausalLM": _llama(config=partial(TargetConfig.from_hf, qk_norm=True)),
    "Qwen3MoeForCausalLM": _llama(config=qwen3_moe.read),
    "GptOssForCausalLM": _llama(config=gpt_oss.read),
    "DeepseekV3ForCausalLM": _llama(config=deepseek.read, ignored=mtp.ignored_tensors),
    "Glm4MoeLiteForCausalLM": _llama(config=deepseek.read, ignored=mtp.ignored_tensors),
}
HEAD_FAMILIES: Mapping[str, HeadFamily] = {
    "EAGLE3": HeadFamily(
        recognize=eagle3_config.is_eagle3,
        refusal=eagle3_config.NOT_EAGLE3,
        config=Eagle3Config.from_hf,
        build=Eagle3Head.build,
        ignored=eagle3_config.IGNORED_TENSORS,
    ),
    "EAGLE-1": HeadFamily(
        recognize=eagle1_config.is_eagle1,
        refusal=eagle1_config.NOT_EAGLE1,
        config=Eagle1Config.from_hf,
        build=Eagle1Head.build,
        ignored=eagle1_config.IGNORED_TENSORS,
    ),
    "MTP": HeadFamily(
        recognize=mtp_config.is_mtp,
        refusal=mtp_config.NOT_MTP,
        config=MtpConfig.from_hf,
        build=MtpHead.build,
        ignored=frozenset(),
    ),
}
# Architectures that are asked for and not built, and what they need.
_NOT_BUILT = {
    "DeepseekV4ForCausalLM": "sparse attention with compressed positions and hyper-connections",
    "Llama4ForCausalLM": "attention in chunks and layers without positions",
    "Llama4ForConditionalGeneration": "attention in chunks and layers without positions",
}


def family_of(config: Raw) -> Family:
    """The family of the target with this ``config.json``; ``UserError`` if it is unsupported."""
    architecture = next(iter(architectures(config)), "none")
    missing = f" ({_NOT_BUILT[architecture]} are not built)" if architecture in _NOT_BUILT else ""
    require(
        architecture in FAMILIES,
        f"architecture {shown(architecture)} is not supported{missing}: use one of {', '.join(FAMILIES)}",
    )
    return FAMILIES[architecture]


def is_head(config: Raw, tensors: Set[str]) -> bool:
    """Whether a checkpoint is a draft head of any family, by its ``config.json`` and the names of its tensors."""
    return any(family.recognize(config, tensors) for family in HEAD_FAMILIES.values())


def head_family_of(config: Raw, tensors: Set[str]) -> HeadFamily:
    """The first family that recognizes the head; ``UserError`` if none does."""
    for family in HEAD_FAMILIES.values():
        if family.recognize(config, tensors):
            return family
    raise UserError("; ".join(family.refusal for family in HEAD_FAMILIES.values()))
