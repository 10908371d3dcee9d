"""``specgen inspect``: what a checkpoint is, how it is read, and whether target and head fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from textwrap import fill
from typing import Any

import torch

from specgen.checkpoints.checkpoint import (
    build_head,
    build_target,
    draft_to_target,
    drafter_config,
    misfits,
    mtp_part,
    open_checkpoint,
    target_config,
)
from specgen.checkpoints.lora import summary, with_lora
from specgen.checkpoints.tensor_reader import Checkpoint, TensorReader
from specgen.config import MTP, NGRAM_BYTES, Lookup, UserError, lookup_of, require, shown, under
from specgen.models.config_fields import architectures
from specgen.models.config_keys import listed
from specgen.models.draft_model import DraftModelConfig
from specgen.models.families import is_head, unread
from specgen.models.fp8_config import FP8, kv_scheme
from specgen.models.llama import visual_tensors
from specgen.models.model_config import HeadConfig, LayerConfig, TargetConfig
from specgen.models.mtp import MtpConfig, mtp_layers
from specgen.models.protocols import no_target
from specgen.text.tokenizer import load_tokenizer

_SCALES = ("_scale", "_scale_inv")  # of FP8
_META = torch.device("meta")  # reads no weights


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The size of a checkpoint, from the headers of its files."""

    num_parameters: int
    num_bytes: int
    num_files: int
    dtypes: tuple[str, ...]
    kv_bytes_per_token: int  # in the floating point dtype that most parameters have, or in FP8
    fp8_kv: bool  # as the checkpoint says

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: LayerConfig) -> "Weights":
        """Of the floating point tensors and of packed ones; tables of ids are not parameters, nor are scales."""
        sizes: dict[str, int] = {}
        packed = 0  # bytes: of two parameters each, and of scales
        for name, info in checkpoint.tensors.items():
            if name.endswith(_SCALES):
                packed += prod(info.shape) * getattr(torch, info.dtype, torch.float32).itemsize
            elif info.dtype in ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn"):
                sizes[info.dtype] = sizes.get(info.dtype, 0) + prod(info.shape)
            elif info.dtype == "uint8":
                packed += prod(info.shape)
                sizes["mxfp4"] = sizes.get("mxfp4", 0) + 2 * prod(info.shape) * name.endswith("_blocks")
        dtypes = sorted(sizes, key=lambda name: -sizes[name])
        width = {name: int(getattr(torch, name).itemsize) for name in dtypes if name != "mxfp4"}
        fp8 = isinstance(config, TargetConfig) and kv_scheme(checkpoint.config) == FP8
        kv_width = 1 if fp8 else next((each for each in width.values() if each > 1), 4)
        return cls(
            num_parameters=sum(sizes.values()),
            num_bytes=packed + sum(sizes[name] * each for name, each in width.items()),
            num_files=len(checkpoint.files),
            dtypes=tuple(dtypes),
            kv_bytes_per_token=config.kv_spec.bytes_per_token(kv_width),
            fp8_kv=fp8,
        )


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """One checkpoint: its config as it is read, its size, and its problems."""

    name: str
    config: TargetConfig | HeadConfig
    weights: Weights
    problems: tuple[str, ...]
    num_mtp_layers: int  # that a target's checkpoint has beside it
    num_visual_tensors: int  # of its vision part
    unread_keys: tuple[str, ...]  # of its config.json, though they may mean something
    lora: str  # what an adapter changes; empty without one
    architecture: str  # of a head that has a config.json, as that names it; else empty

    @property
    def kind(self) -> str:
        """``target``, ``head`` or ``draft model``."""
        other = "draft model" if isinstance(self.config, DraftModelConfig) else "head"
        return "target" if isinstance(self.config, TargetConfig) else other

    @property
    def _windowed(self) -> str:
        """Of a target's KV cache, what goes back behind a window; a drafter keeps all."""
        spec = self.config.kv_spec
        if spec.window is None or self.kind != "target":
            return ""
        share = self.weights.kv_bytes_per_token * spec.windowed_bytes(1) // spec.bytes_per_token(1)
        return f", {share:,} of them only of the last {spec.window:,}, which a window shows"

    def facts(self) -> dict[str, str]:
        fp8 = " in FP8, as the checkpoint says" * self.weights.fp8_kv
        stored, mtp, visual = self.weights.kv_bytes_per_token, self.num_mtp_layers, self.num_visual_tensors
        found = {
            "named": f"{shown(self.architecture)} in config.json" if self.architecture else "",
            **self.config.facts(),
            "LoRA": self.lora,
            "MTP": f"{mtp} layer{'s' * (mtp > 1)}, used by --drafter mtp" if mtp else "",
            "vision": f"{visual} tensors of the part for images and sounds are not loaded: prompts are text"
            if visual
            else "",
            "weights": _size(self.weights),
            "KV cache": f"{stored:,} bytes per token{fp8}{self._windowed}" if stored else "none of its own",
            "not read": listed(self.unread_keys),
        }
        return {name: text for name, text in found.items() if text}

    def to_json(self) -> dict[str, Any]:
        facts = {**asdict(self.config), **asdict(self.weights), "problems": list(self.problems)}
        if isinstance(self.config, HeadConfig):
            facts["draft_vocab_share"] = self.config.draft_vocab_size / self.config.vocab_size
        else:
            facts["num_mtp_layers"] = self.num_mtp_layers
            facts |= {"lora": self.lora} if self.lora else {}
        return {"name": self.name, "kind": self.kind, **facts, "unread_keys": list(self.unread_keys)}


@dataclass(frozen=True, kw_only=True)
class Ngrams:
    """Drafts without a checkpoint."""

    lookup: Lookup
    kv_bytes_per_token: int = NGRAM_BYTES

    @property
    def name(self) -> str:
        return self.lookup.name

    def facts(self) -> dict[str, str]:
        longest, pool = self.lookup.longest, self.lookup.pool_bytes
        tokens = f"tokens, at most {longest}," if longest > 1 else "token"
        where = "in prompt and output" + ", or most often in answers that have ended" * self.lookup.learns
        beside = f", and {pool / (1 << 20):,.0f} MiB for answers" if pool else ""
        return {
            "drafts": f"what followed an earlier occurrence of the last {tokens} {where}",
            "weights": "none: any target will do",
            "memory": f"{self.kv_bytes_per_token} bytes per token{beside}",
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.lookup.kind,
            "length": self.lookup.longest,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            **({"pool_bytes": self.lookup.pool_bytes} if self.lookup.learns else {}),
        }


@dataclass(frozen=True, kw_only=True)
class Description:
    """One checkpoint, or a pair and whether it fits; a drafter may be n-grams."""

    parts: tuple[Inspection | Ngrams, ...]
    misfits: tuple[str, ...]  # every reason why the checkpoint or the pair cannot run
    given: tuple[str, ...]  # how they were asked for

    @property
    def kv_bytes_per_token(self) -> int:
        """Of target and drafter, which share the pages of the cache."""
        return sum(
            part.kv_bytes_per_token if isinstance(part, Ngrams) else part.weights.kv_bytes_per_token
            for part in self.parts
        )

    def pair(self) -> tuple[str, str | None]:
        """Target and drafter as they were given; ``UserError`` without a target."""
        names = [part.name for part in self.parts]
        require(
            isinstance(self.parts[0], Inspection) and self.parts[0].kind == "target",
            f"{names[0]} is no target: a memory plan is of a target, alone or with its drafter",
        )
        others = list(self.given)
        others.remove(names[0])  # once: a target may draft for itself
        return names[0], next(iter(others), None)

    def to_json(self) -> dict[str, Any]:
        """``checkpoints``, ``kv_bytes_per_token`` of all, ``misfits``, and ``fit``: null for a single checkpoint."""
        return {
            "checkpoints": [part.to_json() for part in self.parts],
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "fit": None if len(self.parts) == 1 else not self.misfits,
            "misfits": list(self.misfits),
        }

    def to_text(self, width: int = 100) -> str:
        """For a terminal of ``width`` columns, which only names exceed."""
        lines = []
        for part in self.parts:
            facts = (_line(label, value, width) for label, value in part.facts().items())
            lines += [f"{part.name}: {_kind(part)}", *facts, ""]
        if self.misfits:
            lines += ["This cannot run:", *(f"  - {reason}" for reason in self.misfits)]
        elif len(self.parts) == 2:
            both, size = f"Target and {_drafter(self.parts[1])}", f"{self.kv_bytes_per_token:,} bytes"
            lines.append(f"{both} fit; together {size} of KV cache per token.")
        else:
            lines += ["Complete and supported."]
        if any(isinstance(part, Inspection) for part in self.parts):
            lines += ["NaN in weights is not looked for here, but when they are loaded."]
        return "\n".join(lines)


def describe(path: str, other: str | None = None, adapter: str | None = None) -> Description:
    """Describe one checkpoint (directory or hub id), or a target and a drafter in either order.

    That is a head, ``mtp``, ``ngram[:N]`` or ``suffix[:N]``. With ``adapter``, a LoRA, of the target as it is
    merged. Reads headers and the vocabulary map; of weights only an output layer beside an embedding that config.json
    ties it to. ``UserError`` for anything but checkpoints of known families.
    """
    names = [name for name in (path, other) if name is not None]
    ngrams = [Ngrams(lookup=asked) for name in names if (asked := lookup_of(name)) is not None]
    checkpoints = [open_checkpoint(name) for name in names if lookup_of(name) is None and name != MTP]
    drafts = [is_head(each.config, each.tensors.keys()) for each in checkpoints]
    if drafts == [False, False]:
        drafts = [False, True]  # the second is a draft model
    if adapter is not None:
        checkpoints = [
            each if drafting else with_lora(each, adapter)
            for each, drafting in zip(checkpoints, drafts, strict=True)
        ]
        require(any(each.lora for each in checkpoints), f"lora is {adapter!r} and no target is named: add it")
    if MTP in names:
        require(len(checkpoints) == 1, "mtp is part of a target's checkpoint: name the target beside it")
        checkpoints.append(mtp_part(checkpoints[0]))
        drafts.append(True)
    targets = [_target(each) for each, drafting in zip(checkpoints, drafts, strict=True) if not drafting]
    known = targets[0].config.num_layers if targets else None
    heads = [_head(each, known) for each, drafting in zip(checkpoints, drafts, strict=True) if drafting]
    found = [(part.name, problem) for part in (*targets, *heads) for problem in part.problems]
    reasons = [under(name, problem) for name, problem in found]
    if ngrams and not targets and len(names) == 2:
        reasons.append("both draft and neither is a target: give one target and one drafter")
    elif len(checkpoints) == 2:
        reasons += _pair_misfits(targets, heads)
        if heads and isinstance(heads[0].config, DraftModelConfig):
            reasons += _of_tokens(checkpoints)
    return Description(parts=(*targets, *heads, *ngrams), misfits=tuple(reasons), given=tuple(names))


def _target(checkpoint: Checkpoint) -> Inspection:
    config = target_config(checkpoint)
    return _inspect(checkpoint, config, lambda: build_target(config, _reader(checkpoint)))


def _head(checkpoint: Checkpoint, num_target_layers: int | None) -> Inspection:
    config, nothing = drafter_config(checkpoint, num_target_layers), torch.empty(0, device=_META)
    return _inspect(
        checkpoint,
        config,
        lambda: build_head(config, _reader(checkpoint), no_target(), nothing),
        lambda: draft_to_target(checkpoint, config),
    )


def _reader(checkpoint: Checkpoint) -> TensorReader:
    return TensorReader(checkpoint=checkpoint, dtype=torch.float32, device=_META)


def _inspect(
    checkpoint: Checkpoint, config: TargetConfig | HeadConfig, *checks: Callable[[], object]
) -> Inspection:
    """Run all ``checks``; each ``UserError`` is a problem."""
    problems = []
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(str(error))
    weights = Weights.of(checkpoint, config)
    names = checkpoint.tensors.keys()
    own = mtp_layers(config.num_layers, names) if isinstance(config, TargetConfig) else ()
    has_own_config = isinstance(config, HeadConfig) and not isinstance(config, MtpConfig | DraftModelConfig)
    return Inspection(
        name=checkpoint.name,
        config=config,
        weights=weights,
        problems=tuple(problems),
        num_mtp_layers=len(own),
        num_visual_tensors=len(visual_tensors(names)),
        unread_keys=unread(checkpoint.config, names),
        lora="" if checkpoint.lora is None else summary(checkpoint),
        architecture=", ".join(architectures(checkpoint.config)) if has_own_config else "",
    )


def _pair_misfits(targets: list[Inspection], heads: list[Inspection]) -> tuple[str, ...]:
    if not (targets and heads):
        return (f"both are {(targets or heads)[0].kind}s: give one target and one head",)
    target, head = targets[0].config, heads[0].config
    assert isinstance(target, TargetConfig)
    assert isinstance(head, HeadConfig)
    return misfits(target, head)


def _of_tokens(checkpoints: Sequence[Checkpoint]) -> Iterator[str]:
    """Why the tokens of a target and a draft model are not the same, if they are not."""
    try:
        ours, theirs = (load_tokenizer(str(each.path)) for each in checkpoints)
    except UserError as error:
        yield str(error)
    else:
        yield from filter(None, [ours.difference(theirs)])


def _kind(part: Inspection | Ngrams) -> str:
    if isinstance(part, Ngrams):
        return "drafts from the text so far" + " and from other answers" * part.lookup.learns
    return part.config.title if isinstance(part.config, HeadConfig) else "a target"


def _drafter(part: Inspection | Ngrams) -> str:
    if isinstance(part, Ngrams):
        return "n-grams" + " of all answers" * part.lookup.learns
    return part.kind


def _line(label: str, value: str, width: int) -> str:
    return fill(value, width, initial_indent=f"  {label:<12}", subsequent_indent=" " * 14)


def _size(weights: Weights) -> str:
    files = f"{weights.num_files} file{'s' * (weights.num_files != 1)}"
    mib = weights.num_bytes / (1 << 20)
    return f"{weights.num_parameters:,} parameters, {mib:,.1f} MiB as {', '.join(weights.dtypes)} in {files}"
