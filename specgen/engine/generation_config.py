"""What a checkpoint says of generating: which of its settings hold, which are left to the command or refused.

Every field of ``transformers.GenerationConfig`` is on one of the lists here (a test compares them).
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.config import GenerationConfigName, SamplingParams, UserError, require, shown
from specgen.models.config_fields import count, text_part
from specgen.prompts.fields import read_sampling

FILE = "generation_config.json"

# Fields that hold where neither the command nor a row gives another value, by their names in ``SamplingParams``. The
# three filters say how a text is drawn, so they change sampled texts alone.
TAKEN = {
    "repetition_penalty": "repetition_penalty",
    "suppress_tokens": "suppress_tokens",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "stop_strings": "stop",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words_ids",
    "begin_suppress_tokens": "begin_suppress_tokens",
}
_FILTERS = ("top_p", "top_k", "min_p")
# What the command decides, whatever the file says: whether texts are sampled (a run whose drafts are to be measured is
# not to become one that draws because of the model that it names), how long they are and how many. Filters that only
# sampled texts know and that are not supported are left too. With the values that mean nothing.
LEFT: Mapping[str, tuple[object, ...]] = {
    "do_sample": (False,),
    "temperature": (1.0,),
    "max_new_tokens": (),
    "max_length": (20,),
    "max_time": (),
    "num_return_sequences": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
}
# What changes greedy texts too and is not supported, with the values that mean nothing.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "min_length": (0,),
    "sequence_bias": ({}, []),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "token_healing": (False,),
}
# What changes no token of a text: ids that other parts read or that only fill batches, how transformers computes and
# drafts, what it returns, settings of beams alone (``num_beams`` is refused), and what some models' own code reads.
WITHOUT_EFFECT = {
    *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"),  # EOS ids: ``target_config``
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
    *("prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_early_exit"),
    *(
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "assistant_ensemble_weight",
        "target_lookbehind",
    ),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp"),
    *(
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
    ),
    *("early_stopping", "length_penalty", "diversity_penalty"),
    *("remove_invalid_values", "renormalize_logits"),  # a logit that is not finite ends a text here
    *("transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash"),
    *("chat_format", "max_window_size", "user_token_id", "assistant_token_id", "auto_map"),
}


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
    left |= {name: said[name] for name in sorted(said.keys() - _known())}
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


def _known() -> set[str]:
    return {*TAKEN, *LEFT, *REFUSED, *WITHOUT_EFFECT}


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
