"""The supported architectures: one table of target families and one of draft heads."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from specgen.config import UserError, require, shown
from specgen.models import (
    config_keys,
    dflash,
    eagle,
    gemma4,
    gemma4_assistant,
    gemma4_heads,
    llama,
    llama4,
    mixture_targets,
    mtp,
)
from specgen.models.config_fields import Raw, architectures
from specgen.models.config_keys import DFLASH, HEADS, Keys, known_keys, unread_keys
from specgen.models.dflash import DFlashConfig, DFlashHead
from specgen.models.eagle import Eagle1Config, Eagle1Head, Eagle3Config, Eagle3Head
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
    """Draft heads of one kind, in all their published formats; its name is its configs' ``family``."""

    recognize: Callable[[Raw, Set[str]], bool]  # by a config.json and the names of the tensors
    refusal: str  # for a checkpoint that no family recognizes
    config: Callable[[Raw, Set[str], int | None], HeadConfig]  # also from the target's number of layers
    # from that config; the tensor is draft_to_target
    build: Callable[[Any, Loader, Target, Tensor, Ops], Head]
    ignored: Set[str]  # tensors in some checkpoints that no pass uses
    keys: Keys | None = HEADS  # of its config.json; None: those of its target's family


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


def _mtp_config(raw: Raw, tensors: Set[str], num_target_layers: int | None) -> MtpConfig:
    del num_target_layers  # they read no layer but the last
    return MtpConfig.of_target(family_of(raw).config(raw), tensors)


HEAD_FAMILIES: Mapping[str, HeadFamily] = {
    "DFlash Gemma-4": HeadFamily(  # in front of those that have all of its tensors but one
        recognize=gemma4_heads.is_gemma4_dflash,
        refusal=gemma4_heads.NOT_GEMMA4_HEAD,
        config=gemma4_heads.Gemma4DFlashConfig.from_hf,
        build=gemma4_heads.Gemma4DFlashHead.build,
        ignored=dflash.DFLASH_IGNORED,
        keys=config_keys.GEMMA4_DFLASH,
    ),
    "EAGLE3 Gemma-4": HeadFamily(
        recognize=gemma4_heads.is_gemma4_eagle3,
        refusal=gemma4_heads.NOT_GEMMA4_HEAD,
        config=gemma4_heads.Gemma4EagleConfig.from_hf,
        build=gemma4_heads.Gemma4EagleHead.build,
        ignored=eagle.EAGLE3_IGNORED,
        keys=config_keys.GEMMA4_EAGLE3,
    ),
    "DFlash": HeadFamily(
        recognize=dflash.is_dflash,
        refusal=dflash.NOT_DFLASH,
        config=DFlashConfig.from_hf,
        build=DFlashHead.build,
        ignored=dflash.DFLASH_IGNORED,
        keys=DFLASH,
    ),
    "EAGLE3": HeadFamily(
        recognize=eagle.is_eagle3,
        refusal=eagle.NOT_EAGLE3,
        config=Eagle3Config.from_hf,
        build=Eagle3Head.build,
        ignored=eagle.EAGLE3_IGNORED,
    ),
    "EAGLE Llama-4": HeadFamily(
        recognize=llama4.is_eagle_llama4,
        refusal=llama4.NOT_EAGLE_LLAMA4,
        config=llama4.EagleLlama4Config.from_hf,
        build=llama4.EagleLlama4Head.build,
        ignored=eagle.EAGLE1_IGNORED,
        keys=config_keys.LLAMA4_HEADS,
    ),
    "EAGLE-1": HeadFamily(
        recognize=eagle.is_eagle1,
        refusal=eagle.NOT_EAGLE1,
        config=Eagle1Config.from_hf,
        build=Eagle1Head.build,
        ignored=eagle.EAGLE1_IGNORED,
    ),
    "Gemma 4 assistant": HeadFamily(
        recognize=gemma4_assistant.is_assistant,
        refusal=gemma4_assistant.NOT_ASSISTANT,
        config=gemma4_assistant.AssistantConfig.from_hf,
        build=gemma4_assistant.AssistantHead.build,
        ignored=gemma4_assistant.ASSISTANT_IGNORED,
        keys=config_keys.GEMMA4_ASSISTANT,
    ),
    "MTP": HeadFamily(
        recognize=mtp.is_mtp,
        refusal=mtp.NOT_MTP,
        config=_mtp_config,
        build=MtpHead.build,
        ignored=frozenset(),
        keys=None,
    ),
}
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
    return any(family.recognize(config, tensors) for family in HEAD_FAMILIES.values())


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
        if family.recognize(config, tensors):
            return family
    name = next(iter(architectures(config)), "")
    require(name not in _NOT_BUILT, f"{name}: {_NOT_BUILT.get(name)} are not built")
    raise UserError("; ".join(dict.fromkeys(family.refusal for family in HEAD_FAMILIES.values())))


def unread(config: Raw, tensors: Set[str]) -> tuple[str, ...]:
    """Keys of the ``config.json`` of a target or head that nothing reads, though they may mean something."""
    heads = (family.keys for family in HEAD_FAMILIES.values() if family.recognize(config, tensors))
    return unread_keys(config, next(heads, None) or family_of(config).keys)
