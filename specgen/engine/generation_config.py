"""What a checkpoint says of generating: which of its settings hold, which are left to the command or refused."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.config import GenerationConfigName, SamplingParams, UserError, require, shown
from specgen.models.config_fields import count, text_part
from specgen.models.config_keys import LEFT, REFUSED, TAKEN, WITHOUT_EFFECT
from specgen.prompts.fields import read_sampling

FILE = "generation_config.json"
# They say how a text is drawn, so they change sampled texts alone
_FILTERS = ("top_p", "top_k", "min_p")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """The settings of a checkpoint that are not neutral: ``taken`` are fields of ``SamplingParams``."""

    taken: Mapping[str, Any] = field(default_factory=dict)
    left: Mapping[str, Any] = field(default_factory=dict)  # by their names in the file

    def over(self, asked: SamplingParams, given: Container[str] = ()) -> SamplingParams:
        """``asked`` with what the checkpoint says of the fields that are not ``given``.

        ``UserError`` where that goes together with nothing: a ``min_new_tokens`` above ``max_tokens``.
        """
        held = {name: value for name, value in self.taken.items() if name not in given}
        try:
            return replace(asked, **held)
        except UserError as error:  # they go together no better than with what is asked
            raise UserError(f"{FILE}: {error}, or --generation-config none") from error

    def sentence(self, given: Container[str] = ()) -> str:
        """What holds and what is left, for one line behind ``FILE``; empty where the checkpoint says nothing."""
        parts: dict[str, list[str]] = {
            each: [] for each in ("holds", "holds in sampled texts", "overridden", "left")
        }
        for theirs, ours in TAKEN.items():
            if ours in self.taken:
                how = "holds in sampled texts" if ours in _FILTERS else "holds"
                parts["overridden" if ours in given else how].append(_setting(theirs, self.taken[ours]))
        parts["left"] += [_setting(*each) for each in self.left.items()]
        return "; ".join(f"{how}: {', '.join(what)}" for how, what in parts.items() if what)


def generation_config(checkpoint: Checkpoint, which: GenerationConfigName) -> GenerationConfig:
    """What ``checkpoint`` says of generating, and with ``which`` ``none`` what it would say.

    ``UserError`` for a value that is none, and for a setting that would change greedy texts and is not supported.
    """
    said = {name: value for name, value in checkpoint.generation.items() if value is not None}
    left = {name: said[name] for name in said if _has_effect(name, said[name], LEFT)}
    known = {*TAKEN, *LEFT, *REFUSED, *WITHOUT_EFFECT}
    left |= {name: said[name] for name in sorted(said.keys() - known)}
    refused = {name: said[name] for name in said if _has_effect(name, said[name], REFUSED)}
    taken = _taken({name: said[name] for name in TAKEN if name in said}, checkpoint, which)
    if which == "none":
        held = {name: said[name] for name, ours in TAKEN.items() if ours in taken}
        return GenerationConfig(left=held | refused | left)
    if refused:
        name, value = next(iter(refused.items()))
        raise UserError(
            f"{checkpoint.name}: {FILE} says {_setting(name, value)}, which is not supported: "
            "--generation-config none leaves all of it but the end tokens"
        )
    return GenerationConfig(taken=taken, left=left)


def _has_effect(name: str, value: object, lists: Mapping[str, tuple[object, ...]]) -> bool:
    return name in lists and value not in lists[name]


def _taken(said: Mapping[str, Any], checkpoint: Checkpoint, which: GenerationConfigName) -> dict[str, Any]:
    """As fields of ``SamplingParams``, without those that have its defaults, and tokens that no text can have."""
    try:
        found = read_sampling({TAKEN[name]: value for name, value in said.items() if value != []})
    except UserError as error:
        require(which == "none", f"{checkpoint.name}: {FILE}: {error}, or --generation-config none")
        return {}
    tokens = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
    size = count(text_part(checkpoint.config), "vocab_size") if any(map(found.get, tokens)) else 0
    for name in tokens[:2]:
        if suppressed := found.get(name):
            found[name] = tuple(token for token in suppressed if token < size)
    if words := found.get("bad_words_ids"):
        found["bad_words_ids"] = tuple(each for each in words if max(each) < size)
    plain = SamplingParams()
    return {name: value for name, value in found.items() if value != getattr(plain, name)}


def _setting(name: str, value: object) -> str:
    noun = "sequence" if name == "bad_words_ids" else "token"
    if (noun == "sequence" or name.endswith("suppress_tokens")) and isinstance(value, list | tuple):
        return f"{name} of {len(value)} {noun}{'s' if len(value) > 1 else ''}"
    return f"{name} {shown(value)}"
