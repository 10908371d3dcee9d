"""What ``specgen inspect`` knows: what a checkpoint is, how it is understood, and whether target and head fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

import torch

from specgen.checkpoints.checkpoint import (
    Checkpoint,
    TensorReader,
    draft_to_target,
    drafter_config,
    open_checkpoint,
    target_config,
)
from specgen.config import UserError
from specgen.models import eagle3, llama
from specgen.models.eagle3 import Eagle3Head, TensorPrefixes
from specgen.models.fit import misfits
from specgen.models.llama import Llama
from specgen.models.model_config import Eagle3Config, TargetConfig, architectures
from specgen.ops.reference import torch_ops

_META = torch.device("meta")
_NORMS = {
    "norm_before_fc": "one over the features side by side",
    "fc_norm": "one for each feature",
    "norm_before_residual": "before the residual",
    "norm_output": "of what is fed back",
    "qk_norm": "of q and k",
}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The size of a checkpoint, from the headers of its files."""

    num_parameters: int
    num_bytes: int
    num_files: int
    dtypes: tuple[str, ...]
    kv_bytes_per_token: int  # in the dtype that most parameters have

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: TargetConfig | Eagle3Config) -> "Weights":
        """Counted over the floating point tensors; tables of ids are no parameters."""
        sizes: dict[str, int] = {}
        for info in checkpoint.tensors.values():
            if info.dtype in ("float64", "float32", "bfloat16", "float16"):
                sizes[info.dtype] = sizes.get(info.dtype, 0) + info.numel
        dtypes = sorted(sizes, key=lambda name: -sizes[name])
        width = {name: int(getattr(torch, name).itemsize) for name in dtypes}
        return cls(
            num_parameters=sum(sizes.values()),
            num_bytes=sum(count * width[name] for name, count in sizes.items()),
            num_files=len(checkpoint.files),
            dtypes=tuple(dtypes),
            kv_bytes_per_token=config.kv_spec.bytes_per_token(width[dtypes[0]] if dtypes else 4),
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """One checkpoint: how its config is understood, its size, and what is wrong with it."""

    name: str
    config: TargetConfig | Eagle3Config
    weights: Weights
    problems: tuple[str, ...]

    @property
    def kind(self) -> str:
        """``target`` or ``head``."""
        return "target" if isinstance(self.config, TargetConfig) else "head"

    def to_json(self) -> dict[str, Any]:
        """Everything, under the names of the fields."""
        facts = {**asdict(self.config), **asdict(self.weights), "problems": list(self.problems)}
        if isinstance(self.config, Eagle3Config):
            facts["draft_vocab_share"] = self.config.draft_vocab_size / self.config.vocab_size
        return {"name": self.name, "kind": self.kind, **facts}


@dataclass(frozen=True, kw_only=True)
class Description:
    """One checkpoint, or two and whether they fit."""

    parts: tuple[Part, ...]
    misfits: tuple[str, ...]  # every reason why the checkpoint or the pair cannot run

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all parts: target and head share the cache's pages."""
        return sum(part.weights.kv_bytes_per_token for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """``checkpoints``, ``kv_bytes_per_token`` of all, ``misfits``, and ``fit``: null for a single checkpoint."""
        return {
            "checkpoints": [part.to_json() for part in self.parts],
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "fit": None if len(self.parts) == 1 else not self.misfits,
            "misfits": list(self.misfits),
        }

    def to_text(self) -> str:
        """For a terminal."""
        lines = []
        for part in self.parts:
            is_target = isinstance(part.config, TargetConfig)
            lines += [f"{part.name}: {'a target' if is_target else 'an EAGLE3 head'}"]
            lines += [_line(label, value) for label, value in _facts(part)] + [""]
        if self.misfits:
            lines += ["This cannot run:", *(f"  - {reason}" for reason in self.misfits)]
        elif len(self.parts) == 2:
            lines += [f"Target and head fit; together {self.kv_bytes_per_token:,} bytes of KV cache a token."]
        else:
            lines += ["Complete and supported."]
        return "\n".join(lines)


def describe(path: str, other: str | None = None) -> Description:
    """Describe one checkpoint (directory or hub id), or a target and a head in either order.

    Reads headers and the vocabulary map, no weights. ``UserError`` for what is no checkpoint of a known family.
    """
    checkpoints = [open_checkpoint(name) for name in (path, other) if name is not None]
    targets = [_target(checkpoint) for checkpoint in checkpoints if not _is_head(checkpoint)]
    known = targets[0].config.num_layers if targets else None
    heads = [_head(checkpoint, known) for checkpoint in checkpoints if _is_head(checkpoint)]
    parts = (*targets, *heads)
    reasons = [f"{part.name}: {problem}" for part in parts for problem in part.problems]
    if len(parts) == 2:
        reasons += _pair_misfits(targets, heads)
    return Description(parts=parts, misfits=tuple(reasons))


def _is_head(checkpoint: Checkpoint) -> bool:
    names = " ".join(architectures(checkpoint.config))
    return "eagle3" in names.lower() or any(
        name.endswith("hidden_norm.weight") for name in checkpoint.tensors
    )


def _target(checkpoint: Checkpoint) -> Part:
    config = target_config(checkpoint)
    problems: list[str] = []
    with _collected(problems):
        reader = TensorReader(checkpoint=checkpoint, dtype=torch.float32, device=_META)
        Llama.build(config, reader.take, torch_ops())
        reader.finish(llama.ignored_tensors(config))
    weights = Weights.of(checkpoint, config)
    return Part(name=checkpoint.name, config=config, weights=weights, problems=tuple(problems))


def _head(checkpoint: Checkpoint, num_target_layers: int | None) -> Part:
    config = drafter_config(checkpoint, num_target_layers)
    problems: list[str] = []
    with _collected(problems):
        reader = TensorReader(checkpoint=checkpoint, dtype=torch.float32, device=_META)
        prefixes = TensorPrefixes.of(checkpoint.tensors.keys())
        nothing = torch.empty(0, device=_META)
        Eagle3Head.build(config, prefixes, reader.take, nothing, nothing, torch_ops())
        reader.finish(eagle3.IGNORED_TENSORS)
    with _collected(problems):
        draft_to_target(checkpoint, config)
    weights = Weights.of(checkpoint, config)
    return Part(name=checkpoint.name, config=config, weights=weights, problems=tuple(problems))


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Puts a refusal among ``problems`` instead of ending the description."""
    try:
        yield
    except UserError as error:
        problems.append(str(error))


def _pair_misfits(targets: list[Part], heads: list[Part]) -> tuple[str, ...]:
    if not (targets and heads):
        return (f"both are {(targets or heads)[0].kind}s: give one target and one head",)
    target, head = targets[0].config, heads[0].config
    assert isinstance(target, TargetConfig)
    assert isinstance(head, Eagle3Config)
    return misfits(target, head)


def _line(label: str, value: str) -> str:
    return fill(value, 100, initial_indent=f"  {label:<12}", subsequent_indent=" " * 14)


def _facts(part: Part) -> list[tuple[str, str]]:
    config, weights = part.config, part.weights
    own = _target_facts(config) if isinstance(config, TargetConfig) else _head_facts(config)
    return [
        *own,
        ("layers", f"{config.num_layers}, {config.hidden_size} wide, MLP {config.intermediate_size} wide"),
        (
            "attention",
            f"{config.num_heads} heads, {config.num_kv_heads} KV heads, {config.head_dim} wide each",
        ),
        ("rotary", _rotary(config)),
        ("weights", _size(weights)),
        ("KV cache", f"{weights.kv_bytes_per_token:,} bytes a token"),
    ]


def _target_facts(config: TargetConfig) -> list[tuple[str, str]]:
    tied = "tied to" if config.tied_embeddings else "apart from"
    return [
        ("family", config.architecture + (", q and k normed" if config.qk_norm else "")),
        ("vocabulary", f"{config.vocab_size:,} tokens; output weights {tied} the embedding"),
        ("context", f"{config.max_positions:,} tokens"),
        ("ends texts", ", ".join(map(str, config.eos_token_ids)) or "no token does"),
    ]


def _head_facts(config: Eagle3Config) -> list[tuple[str, str]]:
    inputs = ", ".join(map(str, config.aux_layers)) or "2, L//2, L-3"
    norms = [f"{name} ({meaning})" for name, meaning in _NORMS.items() if getattr(config, name)]
    share = config.draft_vocab_size / config.vocab_size
    embedding = "its own" if config.own_embedding else "the target's"
    return [
        ("dialect", "EAGLE, SpecForge" if config.dialect == "eagle" else "speculators"),
        ("reads", f"the target's residual stream at the inputs of layers {inputs}"),
        ("rule", config.aux_rule),
        ("norms", ", ".join(norms) or "the plain ones of EAGLE3"),
        ("vocabulary", f"drafts {config.draft_vocab_size:,} of {config.vocab_size:,} tokens ({share:.1%})"),
        ("embedding", embedding),
        ("target", f"{config.target_hidden_size} wide"),
    ]


def _rotary(config: TargetConfig | Eagle3Config) -> str:
    scaling = config.rope.llama3
    return f"base {config.rope.theta:,.0f}" + (f", llama3 scaling by {scaling.factor:g}" if scaling else "")


def _size(weights: Weights) -> str:
    files = f"{weights.num_files} file{'s' * (weights.num_files != 1)}"
    mib = weights.num_bytes / (1 << 20)
    return f"{weights.num_parameters:,} parameters, {mib:,.1f} MiB as {', '.join(weights.dtypes)} in {files}"
