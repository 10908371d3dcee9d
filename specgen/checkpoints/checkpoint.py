"""Checkpoints: from a directory or hub id to configs and tensors by name, and from those to a model, strictly."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgen.checkpoints.rank_share import RankShare
from specgen.checkpoints.tensor_reader import BESIDES, E4M3, Checkpoint, TensorReader, states_of, uploading
from specgen.checkpoints.weight_files import MASK_EMBEDDING, TensorInfo, are_equal, read_json, tensor_infos
from specgen.config import UserError, first_line, require, shown
from specgen.config.urls import Url, is_url
from specgen.device import SINGLE_RANK, Ranks
from specgen.models import llama4
from specgen.models.config_fields import count, text_part
from specgen.models.config_keys import generation_defaults
from specgen.models.dflash import MASK_ID_TENSOR, DFlashConfig, other_names
from specgen.models.draft_model import DraftModel, DraftModelConfig
from specgen.models.families import FAMILIES, HEAD_FAMILIES, family_of, head_family_of, is_head, is_model
from specgen.models.fp8_config import with_modelopt, without_quantization
from specgen.models.gemma4_assistant import TOKEN_ORDERING, AssistantConfig
from specgen.models.llama import EMBEDDINGS, text_prefix
from specgen.models.model_config import HeadConfig, LayerConfig, TargetConfig
from specgen.models.mtp import mtp_layers
from specgen.models.protocols import Head, Target
from specgen.ops import bind_ops
from specgen.storage import cached_files, hub_id

TIED = ("lm_head.weight", *EMBEDDINGS)
_TABLES = ("int64", "int32", "bool")  # of d2t and t2d


def open_checkpoint(path_or_hub_id: str) -> Checkpoint:
    """A local directory, a Hugging Face hub id or a URL (fetched, or found in its cache); headers only.

    ``UserError`` when it is neither, or when its files are missing, broken or unsafe.
    """
    path = Path(path_or_hub_id)
    if os.path.isdir(path) or path.suffix == ".gguf":
        gguf = next((each.name for each in (path, *path.glob("*.gguf")) if each.suffix == ".gguf"), None)
        require(
            gguf is None or os.path.exists(path / "config.json"),
            f"{path_or_hub_id} holds {gguf}, a GGUF, which is not read: give the model's safetensors",
        )
    if not os.path.isdir(path):  # false also for names that no file can have
        path = _download(path_or_hub_id)
    generation, separate = path / "generation_config.json", path / "hf_quant_config.json"
    config = read_json(path / "config.json")
    tensors = _by_usual_names(tensor_infos(path), path_or_hub_id)
    return Checkpoint(
        name=path_or_hub_id,
        path=path,
        config=with_modelopt(config, read_json(separate)) if separate.exists() else config,
        generation=read_json(generation) if generation.exists() else generation_defaults(config),
        tensors=tensors,
        state=states_of(path, tensors),
    )


def _by_usual_names(infos: dict[str, TensorInfo], checkpoint: str) -> dict[str, TensorInfo]:
    with _about(checkpoint):
        others = other_names(infos.keys()) | llama4.other_names(infos.keys())
    renamed = {others[name]: replace(infos[name], stored=name) for name in others}
    return {name: info for name, info in infos.items() if name not in others} | renamed


@contextmanager
def _about(checkpoint: str) -> Iterator[None]:
    """A ``UserError`` begins with the checkpoint it is about, as target and head have the same files and fields."""
    try:
        yield
    except UserError as error:
        if re.match(rf"{re.escape(checkpoint)}[:/ ]", str(error)):
            raise
        raise UserError(f"{checkpoint}: {error}") from error


def mtp_part(checkpoint: Checkpoint) -> Checkpoint:
    """The MTP layers of a target's checkpoint as a draft head's; ``UserError`` where there are none."""
    num_layers = count(text_part(checkpoint.config), "num_hidden_layers")
    roots = tuple(layer.root for layer in mtp_layers(num_layers, checkpoint.tensors.keys()))
    require(
        bool(roots),
        f"{checkpoint.name} has no MTP layer (no eh_proj.weight behind its last layer, no mtp.layers.0): name a head "
        "with --drafter, or use --drafter ngram",
    )
    tensors = {name: info for name, info in checkpoint.tensors.items() if name.startswith(roots)}
    return replace(checkpoint, name=f"MTP of {checkpoint.name}", tensors=tensors)


def target_config(checkpoint: Checkpoint) -> TargetConfig:
    """The config of a target, as its files say it together.

    EOS ids are generation_config.json's where it has some. Output weights are tied to the embedding where config.json
    says so and there is no ``lm_head.weight`` with other numbers, which is used then, as ``transformers`` does. What
    names of tensors begin with is seen from the tensors.
    """
    if is_head(checkpoint.config, checkpoint.tensors.keys()):
        raise UserError(
            f"{checkpoint.name} is a draft head and no target: name it with --drafter, and its target with --model"
        )
    eos = checkpoint.generation.get("eos_token_id")
    overrides = {} if eos is None else {"eos_token_id": eos}
    with _about(checkpoint.name):
        config = family_of(checkpoint.config).config({**checkpoint.config, **overrides})
    ids = config.eos_token_ids
    require(
        not ids or any(token_id < config.vocab_size for token_id in ids),
        f"{checkpoint.name}: eos_token_id is {', '.join(map(str, ids[:3]))}, outside of the vocabulary of "
        f"{config.vocab_size}, so that no text would end: correct it in "
        f"{'config.json' if eos is None else 'generation_config.json'}",
    )
    return replace(
        config,
        prefix=text_prefix(checkpoint.tensors.keys()),
        tied_embeddings=config.tied_embeddings and not has_own_output(checkpoint),
    )


def has_own_output(checkpoint: Checkpoint) -> bool:
    """Whether a target has an ``lm_head.weight`` that is no copy of its embedding; both are read for it."""
    found = {name: info for name, info in checkpoint.tensors.items() if name in TIED}
    return len(found) == 2 and not are_equal(*found.items())


def drafter_config(checkpoint: Checkpoint, num_target_layers: int | None) -> HeadConfig:
    """The config of a head for a target of ``num_target_layers`` (None: unknown), or of a draft model."""
    names, config = checkpoint.tensors.keys(), checkpoint.config
    if is_model(config, names):
        return DraftModelConfig.of(target_config(checkpoint))
    if not any(info.dtype == E4M3 for info in checkpoint.tensors.values()):  # copied from its target's config
        config = without_quantization(config)
    try:
        family = head_family_of(config, names)
    except UserError as error:
        raise UserError(
            f"{checkpoint.name} is not a draft head ({error}): name one with --drafter, or use --drafter ngram"
        ) from error
    with _about(checkpoint.name):
        found = family.config(config, names, num_target_layers)
    token = checkpoint.read(MASK_ID_TENSOR)
    if token is not None and isinstance(found, DFlashConfig):
        require(
            int(token) == found.mask_token_id,
            f"{checkpoint.name}: {MASK_EMBEDDING} is of token {int(token)} and mask_token_id {found.mask_token_id}: "
            "they are of different heads, download both again",
        )
    return found


def draft_to_target(checkpoint: Checkpoint, config: HeadConfig) -> Tensor:
    """The target's id of each draft id of a head, [Vd] int64, checked."""
    for name in ("d2t", "t2d", TOKEN_ORDERING):
        info = checkpoint.tensors.get(name)
        if info is not None and info.dtype not in _TABLES:
            known = ", ".join(_TABLES)
            raise UserError(f"{checkpoint.name}: {name} is stored as {info.dtype}: use one of {known}")
    if isinstance(config, DraftModelConfig):
        return torch.arange(config.draft_vocab_size)
    with _about(checkpoint.name):
        if isinstance(config, AssistantConfig) and config.num_centroids:
            return _ordered(config.vocab_size, checkpoint.read(TOKEN_ORDERING))
        return vocabulary_map(config, checkpoint.read("d2t"), checkpoint.read("t2d"))


def load_target(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, ranks: Ranks = SINGLE_RANK
) -> Target:
    """The target with weights of ``dtype`` on ``device``, or the share of one of ``ranks``.

    ``UserError`` unless its tensors match its config.
    """
    with uploading(device) as upload:
        reader = TensorReader(checkpoint=checkpoint, dtype=dtype, device=device, ranks=ranks, upload=upload)
        return build_target(target_config(checkpoint), reader)


def load_drafter(checkpoint: Checkpoint, target: Target, fp8_output: bool = False) -> Head:
    """The head on the device and in the dtype of its target, or the share of that one's rank.

    With ``fp8_output`` its logits, and with them the probabilities of sampled drafts, are those of a copy of its output
    layer in FP8; of the target's, where it has none, beside that one. ``UserError`` also where the two do not fit.
    """
    ranks = target.vocabulary.ops.ranks
    config = fitting_config(checkpoint, target.config, ranks.size, fp8_output)
    if fp8_output and not config.own_lm_head:
        whole: Any = target
        target = replace(whole, vocabulary=target.vocabulary.in_fp8())
    ids = draft_to_target(checkpoint, config)
    if target.device.type != "meta":  # a pair without weights still knows its vocabularies
        ids = ids.to(target.device)
    with uploading(target.device) as upload:
        reader = TensorReader(
            checkpoint=checkpoint,
            dtype=target.dtype,
            device=target.device,
            ranks=ranks,
            upload=upload,
        )
        return build_head(config, reader, target, ids)


def check_fit(target: Checkpoint, head: Checkpoint, fp8_output: bool = False) -> None:
    """``UserError`` where ``head`` does not fit ``target``, from their headers."""
    fitting_config(head, target_config(target), 1, fp8_output)


def fitting_config(
    checkpoint: Checkpoint, target: TargetConfig, num_ranks: int, fp8_output: bool
) -> HeadConfig:
    """Of the whole head; ``target`` is one of so many shares. ``UserError`` where they do not fit."""
    config = replace(drafter_config(checkpoint, target.num_layers).over(target), fp8_output=fp8_output)
    for reason in misfits(target, config.shared(num_ranks)):
        raise UserError(f"{checkpoint.name} cannot draft for this target: {reason}")
    return config


def build_target(config: TargetConfig, reader: TensorReader) -> Target:
    """The target of ``config`` from the tensors of ``reader``, or a rank's share; ``UserError`` for unused ones."""
    family, share = FAMILIES[config.architecture], _share(config, reader.ranks, config.vocab_size)
    reader, config = replace(reader, fp8=config.fp8, share=share), config.shared(reader.ranks.size)
    require(
        config.fp8 is None or any(info.dtype == E4M3 for info in reader.checkpoint.tensors.values()),
        f"{reader.checkpoint.name}: config.json says FP8, but no weight is stored in it: download both again",
    )
    with _about(reader.checkpoint.name):
        target = family.build(config, reader, bind_ops(reader.device, reader.dtype, reader.ranks))
    reader.finish(family.ignored(config, reader.checkpoint.tensors.keys()))
    return target


def build_head(config: HeadConfig, reader: TensorReader, target: Target, draft_to_target: Tensor) -> Head:
    """The head of ``config`` from the tensors of ``reader``, or a rank's share; ``UserError`` for unused ones."""
    if isinstance(config, DraftModelConfig):  # whole on every rank
        alone = replace(reader, ranks=SINGLE_RANK, fp8_output=config.fp8_output)
        ops = bind_ops(reader.device, reader.dtype, SINGLE_RANK)
        return DraftModel.over(config, build_target(config.model, alone), draft_to_target, ops)
    family, ranks = HEAD_FAMILIES[config.family], reader.ranks
    if config.num_shares(ranks.size) == 1:
        ranks = SINGLE_RANK
    reader = replace(reader, fp8=config.fp8, fp8_output=config.fp8_output, share=_share(config, ranks))
    config = config.shared(ranks.size)
    ops = bind_ops(reader.device, reader.dtype, ranks)
    with _about(reader.checkpoint.name):
        head = family.build(config, reader, target, draft_to_target, ops)
    reader.finish(config.ignored)
    return head


def _share(config: LayerConfig, ranks: Ranks, vocab_size: int | None = None) -> RankShare | None:
    """What one of ``ranks`` reads of a model, ``lm_head`` whole without ``vocab_size``; None: a rank alone, all."""
    if ranks.size == 1:
        return None
    return RankShare(
        ranks=ranks,
        num_kv_heads=config.num_kv_heads,
        vocab_size=vocab_size,
        fused_experts="out, in" if config.mixture is None else config.mixture.fused,
        fp8=config.fp8,
        delta_keys=0 if config.delta is None else config.delta.num_key_heads * config.delta.key_dim,
        other_kv_heads={
            layer: heads
            for layer in range(config.num_layers)
            if (heads := config.kv_heads(layer)[0]) != config.num_kv_heads
        },
    )


def _download(name: str) -> Path:
    """The directory with a checkpoint's files: those of safetensors, or where there are none PyTorch's own."""
    path = downloaded(name, (*BESIDES, "*.safetensors"))
    found = any(path.glob("*.safetensors"))
    return path if found else downloaded(name, (*BESIDES, "pytorch_model*.bin"))


def downloaded(name: str, patterns: tuple[str, ...]) -> Path:
    """The directory in a cache with the files of the hub id or URL ``name`` whose names match one of ``patterns``.

    ``UserError`` where ``name`` is neither, or its files cannot be had.
    """
    from huggingface_hub import errors as hub

    on_hub = hub_id(Url(name)) if is_url(name) else name
    require(not os.path.isfile(name), f"{name} is a file: name the directory that holds it and config.json")
    require(
        on_hub is None or re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", on_hub) is not None,
        f"{shown(name)} is neither a directory nor a hub id of the form owner/name, nor a URL: check the path",
    )
    try:
        return cached_files(name, patterns)
    except UserError:
        raise  # of a store
    except (OSError, ValueError) as error:
        # What the hub's library says goes on for paragraphs
        reasons = {
            hub.GatedRepoError: "one must ask for access there, and set HF_TOKEN",
            hub.RepositoryNotFoundError: "the hub has none of this name, or only for its owner",
            hub.LocalEntryNotFoundError: "the hub cannot be reached, or HF_HUB_OFFLINE is set",
        }
        why = next((text for kind, text in reasons.items() if isinstance(error, kind)), first_line(error))
        raise UserError(
            f"{name!r} is not a directory here and cannot be downloaded ({why}): check the name"
        ) from error


def misfits(target: TargetConfig, head: HeadConfig) -> tuple[str, ...]:
    """Each reason why ``head`` cannot draft for ``target``, with the remedy; empty if they fit."""
    if head.is_model:
        return head.misfits(target)
    reasons = []
    if head.target_hidden_size != target.hidden_size:
        reasons.append(
            f"the head reads features {head.target_hidden_size} wide, but the target's hidden size is "
            f"{target.hidden_size}: use the target that the head was trained on"
        )
    if head.vocab_size != target.vocab_size:
        reasons.append(
            f"the head's vocabulary has {head.vocab_size} tokens, the target's {target.vocab_size}: "
            "use the target that the head was trained on"
        )
    outside = [layer for layer in head.aux_layers if not 0 <= layer <= target.num_layers]
    if outside:
        reasons.append(
            f"the head reads the input of layer {outside[0]}, but the target has layers 0 to "
            f"{target.num_layers - 1}: use the target that the head was trained on ({head.aux_rule})"
        )
    if not head.own_embedding and head.embedding_size != target.hidden_size:
        reasons.append(
            f"the head has no embedding and is {head.embedding_size} wide, but the target's embedding is "
            f"{target.hidden_size} wide: use a head that carries embed_tokens.weight"
        )
    if target.scaled_embedding and not head.own_embedding and head.takes_scaled is None:
        reasons.append(
            "the head has no embedding, and whether it takes the target's, which is scaled there, as it is or scaled "
            "is not known: use a head that carries embed_tokens.weight, or --drafter ngram"
        )
    ours, theirs = (head.draft_vocab_size, head.hidden_size), (target.vocab_size, target.hidden_size)
    if not head.own_lm_head and ours != theirs:
        reasons.append(
            f"the head has no output weights and drafts {ours[0]} tokens from states {ours[1]} wide, but the target's "
            f"are for {theirs[0]} tokens and {theirs[1]} wide: use a head that carries lm_head.weight"
        )
    return (*reasons, *(() if reasons else head.misfits(target)))


def _ordered(vocab_size: int, order: Tensor | None) -> Tensor:
    """The tokens group by group, [V] int64, of an assistant with centroids."""
    fits = order is not None and torch.equal(order.long().sort().values, torch.arange(vocab_size))
    require(
        fits,
        f"use_ordered_embeddings is true, and {TOKEN_ORDERING} is {'not there' if order is None else 'wrong'}: it must "
        f"have each of the {vocab_size} tokens once",
    )
    assert order is not None
    return order.long()


def vocabulary_map(config: HeadConfig, d2t: Tensor | None, t2d: Tensor | None) -> Tensor:
    """The target's id of each draft id, [Vd] int64, from the offsets ``d2t`` [Vd] and the mask ``t2d`` [V].

    ``UserError`` if they are inconsistent: such a head would draft the wrong tokens.
    """
    drafted, vocab = config.draft_vocab_size, config.vocab_size
    require(
        drafted <= vocab, f"draft_vocab_size is {drafted}, more than the vocabulary of {vocab}: wrong config"
    )
    ids = torch.arange(drafted)
    if d2t is None:
        require(
            drafted == vocab,
            f"the head drafts {drafted} of {vocab} tokens but has no d2t: add the tensor that maps them",
        )
        return ids
    require(
        d2t.shape == ids.shape and not d2t.is_floating_point(),
        f"d2t is {list(d2t.shape)} of {d2t.dtype}: it must hold {drafted} integers, one for each draft token",
    )
    ids = ids + d2t.cpu()
    low, high = int(ids.min()), int(ids.max())
    require(
        low >= 0 and high < vocab,
        f"d2t maps to token ids {low} to {high}, outside the vocabulary of {vocab}: "
        "it must hold offsets (target id minus draft id)",
    )
    require(len(set(ids.tolist())) == drafted, "d2t maps two draft tokens to one target token: it is wrong")
    if t2d is not None:
        marked = t2d.cpu().nonzero().flatten()
        require(
            t2d.shape == (vocab,) and torch.equal(marked, ids.sort().values),
            f"t2d marks {marked.numel()} of {t2d.numel()} tokens, not the {drafted} of d2t: "
            "the checkpoint mixes two vocabularies, export it again",
        )
    return ids
