"""A LoRA adapter (Hu et al., 2021) in PEFT's format, merged into the tensors of a target as they are read."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specgen.checkpoints.checkpoint import TIED, downloaded, target_config
from specgen.checkpoints.tensor_reader import E4M3, FLOATS, Checkpoint, states_of
from specgen.checkpoints.weight_files import LowRank, TensorInfo, headers, read_json
from specgen.config import UserError, require, shown

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ROOT = "base_model.model."
# Beginnings of a module's name that models and their files may not have in common
_PREFIX = re.compile(r"^((model|language_model)\.)+")
_PARTS = re.compile(r"\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B)$")
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"}
# What changes no merged weight: of training, which modules and which file (their tensors say it), and how it was begun
_WITHOUT_EFFECT = {
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"),
    *("lora_dropout", "modules_to_save", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "runtime_config"),
    "qalora_group_size",  # without use_qalora
}
# What is not supported, with the values that mean nothing
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    # others change the model's own weights too (PiSSA, OLoRA, CorDA, LoftQ)
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True, kw_only=True)
class _Module:
    """What an adapter has of one module, by the end of its tensors' names."""

    name: str  # of its weight in the target's files
    parts: Mapping[str, TensorInfo]


def with_lora(checkpoint: Checkpoint, adapter: str) -> Checkpoint:
    """``checkpoint``, a target's, with the ``adapter`` (a directory, hub id or URL) in its weights: W + scale * B A.

    ``UserError`` names what is not supported, of which weight there is none, or which is not stored as plain floats.
    """
    path = Path(adapter)
    if not path.is_dir():
        path = downloaded(adapter, (_CONFIG, _WEIGHTS))
    for name in (_CONFIG, _WEIGHTS):
        require(
            (path / name).is_file(),
            f"lora is {adapter!r}, without {name}: name the directory of a PEFT adapter",
        )
    config = read_json(path / _CONFIG)
    _require_supported(adapter, config)
    changed = {}
    try:
        for module, found in _modules(path, adapter, checkpoint).items():
            if "weight" not in found.parts:
                _require_targeted(adapter, module, config["target_modules"])
            info = checkpoint.tensors[found.name]
            changed[found.name] = replace(info, lora=_low_rank(adapter, module, found, info, config, path))
    except re.error as error:
        wrong = (
            f"has the pattern {shown(error.pattern)}, which is no regular expression ({error.msg}): mend it"
        )
        raise UserError(f"lora {adapter}: {_CONFIG} {wrong}") from error
    require(bool(changed), f"lora {adapter}: {_WEIGHTS} has no tensor")
    _require_untied(adapter, checkpoint, changed)
    tensors = {**checkpoint.tensors, **changed}
    return replace(checkpoint, tensors=tensors, state=states_of(checkpoint.path, tensors), lora=adapter)


def _require_supported(adapter: str, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    require(kind == "LORA", f"lora {adapter}: peft_type is {shown(kind)}: only LORA is merged")
    for name, value in config.items():
        neutral = _NEUTRAL.get(name, (None, False, [], {}))
        require(
            name in _READ | _WITHOUT_EFFECT or value in neutral,
            f"lora {adapter}: {_CONFIG} says {name} {shown(value)}, which is not supported: merge it with PEFT "
            "(merge_and_unload) and name the result with --model",
        )
    for name, least in (("r", 1), ("lora_alpha", 0)):
        number: Any = config.get(name)
        require(
            type(number) in (int, float) and number >= least,
            f"lora {adapter}: {name} is {shown(number)} in {_CONFIG}: use a number of at least {least}",
        )
    for name in ("rank_pattern", "alpha_pattern"):
        table: Any = config.get(name) or {}
        require(
            isinstance(table, dict) and all(type(each) in (int, float) for each in table.values()),
            f"lora {adapter}: {name} is {shown(table)} in {_CONFIG}: use an object of patterns and their numbers",
        )
    targets = config.get("target_modules")
    require(
        isinstance(targets, str) or (isinstance(targets, list) and all(isinstance(e, str) for e in targets)),
        f"lora {adapter}: target_modules is {shown(targets)}: use a list of names or a pattern",
    )


def _modules(path: Path, adapter: str, checkpoint: Checkpoint) -> dict[str, _Module]:
    """What the adapter has, by the names of modules."""
    by_end: dict[str, list[str]] = {}
    for name, info in checkpoint.tensors.items():
        for each in {name, info.stored or name}:  # as it is read, and as its file and PEFT have it
            by_end.setdefault(_PREFIX.sub("", each), []).append(name)
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in headers(path / _WEIGHTS).items():
        part = _PARTS.search(name)
        end = part[1] if part else name.rpartition(".")[2]
        require(
            name.startswith(_ROOT) and (part is not None or end == "weight"),
            f"lora {adapter}: its tensor {shown(name)} is of no kind that is merged (lora_A, lora_B, a whole weight)",
        )
        module = name.removeprefix(_ROOT)[: -len(end) - 1].removesuffix(".base_layer")
        found.setdefault(module, {})[end] = info
    modules = {}
    for module, parts in found.items():
        weight = f"{module}.weight"
        names = [weight] if weight in checkpoint.tensors else by_end.get(_PREFIX.sub("", weight), [])
        packed = any(
            name.startswith(f"{_PREFIX.sub('', module)}.") and name.endswith("_blocks") for name in by_end
        )
        why = "which MXFP4 packs" if packed else "and the model has no such weight"
        require(len(names) == 1, f"lora {adapter} changes {shown(module)}, {why}: it is of another model")
        modules[module] = _Module(name=names[0], parts=parts)
    return modules


def _require_targeted(adapter: str, module: str, targets: str | list[str]) -> None:
    """As PEFT finds them; without a place in the model it would leave the tensors out."""
    if isinstance(targets, str):
        is_named = targets == "all-linear" or re.fullmatch(targets, module) is not None
    else:
        is_named = any(module == each or module.endswith(f".{each}") for each in targets)
    require(
        is_named,
        f"lora {adapter} has tensors of {shown(module)}, which target_modules does not name: mend either",
    )


def _low_rank(
    adapter: str, module: str, found: _Module, info: TensorInfo, config: Mapping[str, Any], path: Path
) -> LowRank:
    reason = "is in FP8" if info.dtype == E4M3 else f"is stored as {info.dtype}"
    require(
        info.dtype in FLOATS,
        f"lora {adapter} changes {shown(module)}, which {reason}: use the model in bfloat16, or merge and quantize it",
    )
    parts, rank = found.parts, _of_module("rank_pattern", module, config, config["r"])
    own, in_table = parts.get("weight"), "lora_embedding_A" in parts
    a, b = (parts.get(f"lora_embedding_{each}" if in_table else f"lora_{each}.weight") for each in ("A", "B"))
    num_out, num_in = (info.shape[::-1] if in_table else info.shape) if len(info.shape) == 2 else (0, 0)
    shapes = [(each, shape) for each, shape in ((a, (rank, num_in)), (b, (num_out, rank))) if each or not own]
    for each, shape in [*shapes, *([(own, info.shape)] if own else [])]:
        held = "no such tensor" if each is None else f"{list(each.shape)} of {each.dtype}"
        require(
            each is not None and each.shape == shape and each.dtype in FLOATS,
            f"lora {adapter}: {shown(module)} has {held} where the model and {_CONFIG} ask for {list(shape)} of "
            "floats: it is of another model",
        )
    alpha = _of_module("alpha_pattern", module, config, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    files = (path / _CONFIG, path / _WEIGHTS)
    return LowRank(a=a, b=b, scale=scale, own=own, transposed=in_table, files=files)


def _of_module(pattern: str, module: str, config: Mapping[str, Any], otherwise: Any) -> Any:  # noqa: ANN401
    """The value of the first pattern that matches the end of the module's name."""
    known = config.get(pattern) or {}
    return next((known[each] for each in known if re.match(rf"(.*\.)?({each})$", module)), otherwise)


def _require_untied(adapter: str, checkpoint: Checkpoint, changed: Iterable[str]) -> None:
    """An embedding that is the output layer too cannot have a change of its own."""
    tables = [name for name in changed if name in TIED]
    require(
        not tables or not target_config(checkpoint).tied_embeddings,
        f"lora {adapter} changes {next(iter(tables), '')}, and embedding and output layer are one weight "
        "(tie_word_embeddings): merge it with PEFT, untied, and name the result with --model",
    )


def summary(checkpoint: Checkpoint) -> str:
    """Which modules of ``checkpoint`` its adapter changes, by the ends of their names."""
    counts: dict[str, int] = {}
    for name, info in checkpoint.tensors.items():
        if info.lora is not None:
            kind = name.removesuffix(".weight").rpartition(".")[2]
            counts[kind] = counts.get(kind, 0) + 1
    listed = ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in counts.items())
    return f"{checkpoint.lora} changes {listed}"
