"""Checkpoints: from a directory or hub id to configs and tensors by name, and from those to a model, strictly."""

import os
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specgen.checkpoints.fingerprint import BESIDES
from specgen.checkpoints.rank_share import RankShare
from specgen.checkpoints.tensor_reader import E4M3, Checkpoint, TensorReader
from specgen.checkpoints.upload import uploading
from specgen.checkpoints.weight_files import are_equal, read_json, tensor_infos
from specgen.config import UserError, first_line, require, shown
from specgen.device import SINGLE_RANK, Ranks
from specgen.models.config_keys import generation_defaults
from specgen.models.families import FAMILIES, HEAD_FAMILIES, family_of, head_family_of, is_head
from specgen.models.fit import misfits, vocabulary_map
from specgen.models.fp8_config import with_modelopt, without_quantization
from specgen.models.model_config import HeadConfig, TargetConfig
from specgen.models.mtp import mtp_prefixes
from specgen.models.protocols import Head, Target
from specgen.ops import bind_ops

_TIED = ("lm_head.weight", "model.embed_tokens.weight")
_TABLES = ("int64", "int32", "bool")  # of d2t and t2d


def open_checkpoint(path_or_hub_id: str) -> Checkpoint:
    """A local directory, or a Hugging Face hub id (downloaded, or found in its cache); headers only.

    ``UserError`` when it is neither, or when its files are missing, broken or unsafe.
    """
    path = Path(path_or_hub_id)
    if not os.path.isdir(path):  # false also for names that no file can have
        path = _download(path_or_hub_id)
    generation, separate = path / "generation_config.json", path / "hf_quant_config.json"
    config = read_json(path / "config.json")
    return Checkpoint(
        name=path_or_hub_id,
        path=path,
        config=with_modelopt(config, read_json(separate)) if separate.exists() else config,
        generation=read_json(generation) if generation.exists() else generation_defaults(config),
        tensors=tensor_infos(path),
    )


def mtp_part(checkpoint: Checkpoint) -> Checkpoint:
    """The MTP layers of a target's checkpoint as a draft head's; ``UserError`` where there are none."""
    prefixes = mtp_prefixes(checkpoint.config, checkpoint.tensors.keys())
    require(
        bool(prefixes),
        f"{checkpoint.name} has no MTP layer (no eh_proj.weight behind its last layer): name a head with --drafter, or "
        "use --drafter ngram",
    )
    tensors = {name: info for name, info in checkpoint.tensors.items() if name.startswith(prefixes)}
    return replace(checkpoint, name=f"MTP of {checkpoint.name}", tensors=tensors)


def target_config(checkpoint: Checkpoint) -> TargetConfig:
    """The config of a target, as its files say it together.

    EOS ids are generation_config.json's where it has some. Output weights are tied to the embedding where config.json
    says so and there is no ``lm_head.weight`` with other numbers, which is used then, as ``transformers`` does.
    """
    if is_head(checkpoint.config, checkpoint.tensors.keys()):
        raise UserError(
            f"{checkpoint.name} is a draft head and no target: name it with --drafter, and its target with --model"
        )
    eos = checkpoint.generation.get("eos_token_id")
    overrides = {} if eos is None else {"eos_token_id": eos}
    config = family_of(checkpoint.config).config({**checkpoint.config, **overrides})
    ids = config.eos_token_ids
    require(
        not ids or any(token_id < config.vocab_size for token_id in ids),
        f"{checkpoint.name}: eos_token_id is {', '.join(map(str, ids[:3]))}, outside of the vocabulary of "
        f"{config.vocab_size}, so that no text would end: correct it in "
        f"{'config.json' if eos is None else 'generation_config.json'}",
    )
    return replace(config, tied_embeddings=config.tied_embeddings and not has_own_output(checkpoint))


def has_own_output(checkpoint: Checkpoint) -> bool:
    """Whether a target has an ``lm_head.weight`` that is no copy of its embedding; both are read for it."""
    found = {name: info for name, info in checkpoint.tensors.items() if name in _TIED}
    return len(found) == len(_TIED) and not are_equal(*found.items())


def drafter_config(checkpoint: Checkpoint, num_target_layers: int | None) -> HeadConfig:
    """The config of a head for a target of ``num_target_layers`` (None: unknown)."""
    names, config = checkpoint.tensors.keys(), checkpoint.config
    if not any(info.dtype == E4M3 for info in checkpoint.tensors.values()):  # copied from its target's config
        config = without_quantization(config)
    try:
        family = head_family_of(config, names)
    except UserError as error:
        raise UserError(
            f"{checkpoint.name} is not a draft head ({error}): name one with --drafter, or use --drafter ngram"
        ) from error
    return family.config(config, names, num_target_layers)


def draft_to_target(checkpoint: Checkpoint, config: HeadConfig) -> Tensor:
    """The target's id of each draft id of a head, [Vd] int64, checked."""
    for name in ("d2t", "t2d"):
        info = checkpoint.tensors.get(name)
        if info is not None and info.dtype not in _TABLES:
            known = ", ".join(_TABLES)
            raise UserError(f"{checkpoint.name}: {name} is stored as {info.dtype}: use one of {known}")
    return vocabulary_map(config, checkpoint.read("d2t"), checkpoint.read("t2d"))


def load_target(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, ranks: Ranks = SINGLE_RANK
) -> Target:
    """The target with weights of ``dtype`` on ``device``, or the share of one of ``ranks``.

    ``UserError`` unless its tensors match its config.
    """
    with uploading(device) as upload:
        reader = TensorReader(
            checkpoint=checkpoint,
            dtype=dtype,
            device=device,
            ranks=ranks,
            upload=upload,
            alive=ranks.alive,
        )
        return build_target(target_config(checkpoint), reader)


def load_drafter(checkpoint: Checkpoint, target: Target) -> Head:
    """The head on the device and in the dtype of its target; ``UserError`` also where the two do not fit."""
    config = _fitting_config(checkpoint, target.config)
    ids = draft_to_target(checkpoint, config)
    if target.device.type != "meta":  # a pair without weights still knows its vocabularies
        ids = ids.to(target.device)
    with uploading(target.device) as upload:
        reader = TensorReader(
            checkpoint=checkpoint,
            dtype=target.dtype,
            device=target.device,
            upload=upload,
            alive=target.vocabulary.ranks.alive,
        )
        return build_head(config, reader, target, ids)


def check_fit(target: Checkpoint, head: Checkpoint) -> None:
    """``UserError`` where ``head`` does not fit ``target``, from their headers."""
    _fitting_config(head, target_config(target))


def _fitting_config(checkpoint: Checkpoint, target: TargetConfig) -> HeadConfig:
    config = drafter_config(checkpoint, target.num_layers)
    for reason in misfits(target, config):
        raise UserError(f"{checkpoint.name} cannot draft for this target: {reason}")
    return config


def build_target(config: TargetConfig, reader: TensorReader) -> Target:
    """The target of ``config`` from the tensors of ``reader``, or a rank's share; ``UserError`` for unused ones."""
    family, share = FAMILIES[config.architecture], None
    if reader.ranks.size > 1:
        share = RankShare(
            ranks=reader.ranks,
            num_kv_heads=config.num_kv_heads,
            vocab_size=config.vocab_size,
            transposed_experts=config.mixture is not None and config.mixture.interleaved,
            fp8=config.fp8,
        )
    reader, config = replace(reader, fp8=config.fp8, share=share), config.shared(reader.ranks.size)
    require(
        config.fp8 is None or any(info.dtype == E4M3 for info in reader.checkpoint.tensors.values()),
        f"{reader.checkpoint.name}: config.json says FP8, but no weight is stored in it: download both again",
    )
    target = family.build(config, reader, bind_ops(reader.device, reader.dtype, reader.ranks))
    reader.finish(family.ignored(config, reader.checkpoint.tensors.keys()))
    return target


def build_head(config: HeadConfig, reader: TensorReader, target: Target, draft_to_target: Tensor) -> Head:
    """The head of ``config`` from the tensors of ``reader``; ``UserError`` for unused ones."""
    family, reader = HEAD_FAMILIES[config.family], replace(reader, fp8=config.fp8)
    head = family.build(config, reader, target, draft_to_target, bind_ops(reader.device, reader.dtype))
    reader.finish(family.ignored)
    return head


def _download(hub_id: str) -> Path:
    require(
        re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", hub_id) is not None,
        f"{shown(hub_id)} is neither a directory nor a hub id of the form owner/name: check the path",
    )
    from huggingface_hub import snapshot_download

    def fetch(weights: str) -> Path:
        patterns = [*BESIDES, weights]
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*"]))

    try:
        path = fetch("*.safetensors")
        return path if any(path.glob("*.safetensors")) else fetch("pytorch_model*.bin")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{hub_id!r} is not a directory here and could not be downloaded ({first_line(error)}): "
            "check the name and the network"
        ) from error
