"""The supported architectures: one table of target families and one of draft heads."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from specgen.config import UserError, require, shown
from specgen.models import config_keys, gemma4, llama, llama4, mixture_targets, mtp
from specgen.models.config_fields import Raw, architectures
from specgen.models.config_keys import Keys, known_keys, unread_keys
from specgen.models.dflash import DFlashConfig, DFlashHead
from specgen.models.eagle import Eagle1Config, Eagle1Head, Eagle3Config, Eagle3Head
from specgen.models.gemma4_assistant import AssistantConfig, AssistantHead
from specgen.models.gemma4_heads import (
    Gemma4DFlashConfig,
    Gemma4DFlashHead,
    Gemma4EagleConfig,
    Gemma4EagleHead,
)
from specgen.models.llama4 import EagleLlama4Config, EagleLlama4Head
from specgen.models.loader import Loader
from specgen.models.model_config import HeadConfig, TargetConfig
from specgen.models.mtp import MtpConfig, MtpHead
from specgen.models.protocols import Head, Target
from specgen.ops import Ops


@dataclass(frozen=True, kw_only=True)
class Family:
    """The targets of one architecture."""

    keys: Keys  # of its config.json
    read: Callable[[Raw], TargetConfig]  # from those keys
    build: Callable[[Any, Loader, Ops], Target]  # from that config
    # of the names in a checkpoint, tensors that no pass of it uses
    ignored: Callable[[Any, Set[str]], Set[str]]

    def config(self, raw: Raw) -> TargetConfig:
        """From a ``config.json``; ``UserError`` for what is not supported."""
        return self.read(known_keys(raw, self.keys))


@dataclass(frozen=True, kw_only=True)
class HeadFamily:
    """Draft heads of one kind, in all their published formats."""

    kind: type[HeadConfig]  # says how they are recognized
    config: Callable[[Raw, Set[str], int | None], HeadConfig]  # also from the target's number of layers
    # from that config; the tensor is draft_to_target
    build: Callable[[Any, Loader, Target, Tensor, Ops], Head]


_llama = partial(Family, build=llama.Llama.build, ignored=llama.ignored_tensors)
_latents = partial(_llama, read=mixture_targets.read_deepseek, ignored=mtp.ignored_tensors)


def _ignored_with_vision(config: TargetConfig, names: Set[str]) -> Set[str]:
    return mtp.ignored_tensors(config, names) | llama.visual_tensors(names)


_hybrid = partial(_llama, ignored=_ignored_with_vision)
_qwen3_5 = _hybrid(keys=config_keys.QWEN3_5, read=mixture_targets.read_qwen3_5)
_qwen3_5_moe = _hybrid(keys=config_keys.QWEN3_5_MOE, read=mixture_targets.read_qwen3_5_moe)
_llama4 = Family(
    keys=config_keys.LLAMA4, read=llama4.read_llama4, build=llama4.build, ignored=_ignored_with_vision
)
_gemma4 = partial(Family, read=gemma4.read_gemma4, build=gemma4.Gemma4.build, ignored=gemma4.ignored_tensors)
_gemma4_plain = _gemma4(keys=config_keys.GEMMA4)
_gemma4_unified = _gemma4(keys=config_keys.GEMMA4_UNIFIED)
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _llama(keys=config_keys.LLAMA, read=TargetConfig.from_hf),
    "Qwen2ForCausalLM": _llama(keys=config_keys.QWEN2, read=partial(TargetConfig.from_hf, qkv_bias=True)),
    "Qwen3ForCausalLM": _llama(keys=config_keys.QWEN3, read=partial(TargetConfig.from_hf, qk_norm=True)),
    "Qwen3MoeForCausalLM": _llama(keys=config_keys.QWEN3_MOE, read=mixture_targets.read_qwen3_moe),
    "GptOssForCausalLM": _llama(keys=config_keys.GPT_OSS, read=mixture_targets.read_gpt_oss),
    "DeepseekV3ForCausalLM": _latents(keys=config_keys.DEEPSEEK_V3),
    "Glm4MoeLiteForCausalLM": _latents(keys=config_keys.GLM4_MOE_LITE),
    "Qwen3NextForCausalLM": _hybrid(keys=config_keys.QWEN3_NEXT, read=mixture_targets.read_qwen3_next),
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,  # of which the text part is read
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_moe,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _llama4,  # likewise
    "Gemma4ForCausalLM": _gemma4_plain,
    "Gemma4ForConditionalGeneration": _gemma4_plain,
    "Gemma4UnifiedForCausalLM": _gemma4_unified,
    "Gemma4UnifiedForConditionalGeneration": _gemma4_unified,
}


def _mtp_config(raw: Raw, tensors: Set[str], _: int | None) -> MtpConfig:
    return MtpConfig.of_target(family_of(raw).config(raw), tensors)


_HEADS = (  # those of Gemma-4 in front, as others have all of their tensors but one
    HeadFamily(kind=Gemma4DFlashConfig, config=Gemma4DFlashConfig.from_hf, build=Gemma4DFlashHead.build),
    HeadFamily(kind=Gemma4EagleConfig, config=Gemma4EagleConfig.from_hf, build=Gemma4EagleHead.build),
    HeadFamily(kind=DFlashConfig, config=DFlashConfig.from_hf, build=DFlashHead.build),
    HeadFamily(kind=Eagle3Config, config=Eagle3Config.from_hf, build=Eagle3Head.build),
    HeadFamily(kind=EagleLlama4Config, config=EagleLlama4Config.from_hf, build=EagleLlama4Head.build),
    HeadFamily(kind=Eagle1Config, config=Eagle1Config.from_hf, build=Eagle1Head.build),
    HeadFamily(kind=AssistantConfig, config=AssistantConfig.from_hf, build=AssistantHead.build),
    HeadFamily(kind=MtpConfig, config=_mtp_config, build=MtpHead.build),
)
HEAD_FAMILIES: Mapping[str, HeadFamily] = {each.kind.family: each for each in _HEADS}
# Architectures that are asked for and not built, and what they need.
_NOT_BUILT = {
    "DeepseekV4ForCausalLM": "sparse attention with compressed positions and hyper-connections",
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
    return any(family.kind.recognizes(config, tensors) for family in HEAD_FAMILIES.values())


def is_model(config: Raw, tensors: Set[str]) -> bool:
    """Whether a checkpoint is no head but a whole model of a known family."""
    known = any(name in FAMILIES for name in architectures(config))
    return (
        known
        and not is_head(config, tensors)
        and any(name.endswith("embed_tokens.weight") for name in tensors)
    )


def head_family_of(config: Raw, tensors: Set[str]) -> HeadFamily:
    """The first family that recognizes the head; ``UserError`` if none does."""
    for family in HEAD_FAMILIES.values():
        if family.kind.recognizes(config, tensors):
            return family
    name = next(iter(architectures(config)), "")
    require(name not in _NOT_BUILT, f"{name}: {_NOT_BUILT.get(name)} are not built")
    raise UserError("; ".join(dict.fromkeys(family.kind.refusal for family in HEAD_FAMILIES.values())))


def unread(config: Raw, tensors: Set[str]) -> tuple[str, ...]:
    """Keys of the ``config.json`` of a target or head that nothing reads, though they may mean something."""
    heads = (family.kind.keys for family in HEAD_FAMILIES.values() if family.kind.recognizes(config, tensors))
    return unread_keys(config, next(heads, None) or family_of(config).keys)
