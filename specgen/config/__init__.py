"""Configurations: frozen values that validate themselves. May import no other package."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, replace
from datetime import date
from importlib.util import find_spec
from math import inf
from typing import Any, Literal, NamedTuple, Self, cast, get_args, get_origin, get_type_hints

from specgen.config.errors import UserError as UserError
from specgen.config.errors import first_line as first_line
from specgen.config.errors import is_text as is_text
from specgen.config.errors import require as require
from specgen.config.errors import shown as shown
from specgen.config.errors import under as under
from specgen.config.field_types import VLLM_NAMES as VLLM_NAMES
from specgen.config.field_types import Group as Group
from specgen.config.field_types import check_types, with_vllm_names
from specgen.config.field_types import counts as counts
from specgen.config.field_types import option as option
from specgen.config.sampling_params import MAX_LOGIT_BIASES as MAX_LOGIT_BIASES
from specgen.config.sampling_params import MAX_LOGPROBS as MAX_LOGPROBS
from specgen.config.sampling_params import SamplingParams as SamplingParams
from specgen.config.sampling_params import check_own as check_own
from specgen.config.structured import StructuredOutputs as StructuredOutputs
from specgen.config.urls import require_no_secrets

VERSION = "0.1.0"  # of specgen

DrafterBatchName = Literal["padded", "non-padded"]
DraftSamplingName = Literal["greedy", "probabilistic"]
DraftLmHeadName = Literal["model", "fp8"]
VerificationName = Literal["token", "block"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVDtypeName = Literal["auto", "model", "fp8"]
AttentionName = Literal["auto", "hopper", "trtllm", "flashinfer", "sdpa", "sdpa-static"]
GraphsName = Literal["auto", "step", "pass", "off"]
FormatName = Literal["jsonl", "openai", "parquet"]
LayoutName = Literal["speculators", "specforge"]
ExportName = Literal["md", "latex", "csv"]
ExecutorName = Literal["local", "ray"]
GenerationConfigName = Literal["model", "none"]
# The groups of --help, in their order
_MAX_AUTO = 7  # drafts per sequence and step
_LOOKUPS = {"ngram": 3, "suffix": 8}  # drafters without a checkpoint, and how many last tokens they look up
_MAX_NGRAM = 16
MTP = "mtp"  # the drafter that is part of the target's checkpoint
NGRAM_BYTES = 4  # per token of the texts that are searched
POOL_TOKENS = 1 << 18  # of the newest answers that --drafter suffix looks up
LARGEST_AUTOMATON = 16 << 20  # entries of 4 bytes, of the table of a request's constraints
MOST_DRAFTS = 16  # per sequence and step
# Where levels of a drafter's confidence begin: tenths, and finer near certainty, where most drafts are
CONFIDENCE_LEVELS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
PINNED_DATE = "strftime_now"  # the argument of a chat template that is the date it sees
_RENDERERS = {  # arguments of a chat template that are not the user's
    *("messages", "conversation", "conversations", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tools", "documents", "tokenize", "tokenizer_kwargs", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "sanitize_control_tokens"),
}


DraftLengthKind = Literal["fixed", "auto", "uniform"]


@dataclass(frozen=True, kw_only=True)
class DraftLength:
    """K, the drafts per sequence and step: ``most``, or with ``auto`` the fastest at every step, up to ``most``.

    ``auto`` also chooses how many of them are verified, the most likely ones of the batch; all with ``uniform``.
    """

    most: int
    kind: DraftLengthKind = "fixed"

    def __post_init__(self) -> None:
        check_types(self)
        require(
            0 <= self.most <= MOST_DRAFTS,
            f"num-spec-tokens is {self.most}: use 1 to {MOST_DRAFTS}, or 0 for plain decoding",
        )
        assert self.kind in get_args(DraftLengthKind), self.kind
        require(
            not self.auto or self.most >= 1,
            f"num-spec-tokens is {self.kind} and at most 0, which leaves no choice: use 1 to {MOST_DRAFTS}",
        )

    @classmethod
    def of(cls, asked: "DraftLength | int | str") -> "DraftLength":
        """The draft length for a number, also as text, ``auto`` or ``uniform``."""
        if isinstance(asked, DraftLength):
            return asked
        if asked in ("auto", "uniform"):
            return cls(most=_MAX_AUTO, kind=cast(DraftLengthKind, asked))
        require(
            str(asked).isdecimal(),
            f"num-spec-tokens is {shown(asked)}: use 1 to {MOST_DRAFTS}, 0 for plain decoding, auto or uniform",
        )
        return cls(most=int(asked))

    @property
    def auto(self) -> bool:
        """Whether every step has a K of its own."""
        return self.kind != "fixed"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every K that a step may have."""
        return tuple(range(self.most + 1)) if self.auto else (self.most,)

    def __str__(self) -> str:
        return f"{self.kind}, up to {self.most}" if self.auto else str(self.most)


NumSpecTokens = int | Literal["auto", "uniform"] | DraftLength


class Lookup(NamedTuple):
    """A drafter without a checkpoint: what followed an earlier occurrence of the last tokens is proposed again."""

    kind: str  # ngram: in the text so far; suffix: in answers that have ended too
    longest: int  # N, the most last tokens that are looked up

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.longest}"

    @property
    def learns(self) -> bool:
        """Whether answers that have ended change what is drafted."""
        return self.kind == "suffix"

    @property
    def pool_bytes(self) -> int:
        """Of answers that have ended and their table, see ``AnswerPool``: for each n-gram a key, a place, a share."""
        return POOL_TOKENS * (NGRAM_BYTES + self.longest * (8 + 4 + 4)) if self.learns else 0


def lookup_of(drafter: str | None) -> Lookup | None:
    """Of a ``drafter`` that is ``ngram``, ``suffix``, or one of these with ``:N``; None of a checkpoint, or of None.

    A directory of such a name is reached as ``./ngram``.
    """
    kind, colon, number = (drafter or "").partition(":")
    if kind not in _LOOKUPS:
        return None
    length = int(number) if number.isascii() and number.isdecimal() else 0 if colon else _LOOKUPS[kind]
    require(
        1 <= length <= _MAX_NGRAM,
        f"drafter is {drafter!r}: write {kind}:N with the number of last tokens to look up, 1 to {_MAX_NGRAM}, "
        f"or ./{kind} for a directory",
    )
    return Lookup(kind, length)


def choices(config: type) -> dict[str, tuple[str, ...]]:
    """The values of every field of ``config`` that is a ``Literal``."""
    hints = get_type_hints(config)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def parse_bytes(text: str, name: str = "kv-memory") -> int:
    """The number of bytes, from text such as ``1073741824``, ``512MiB`` or ``2GB``, of the option ``name``."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {letter: 1 << 10 * power, f"{letter}IB": 1 << 10 * power, f"{letter}B": 1000**power}
    number = text.rstrip("KMGTIBkmgtib ")
    unit = text[len(number) :].strip().upper()
    require(
        unit in units and number.replace(".", "", 1).isdecimal(),
        f"{name} is {text!r}: write a size such as 512MiB or 2GiB",
    )
    return int(float(number) * units[unit])


def parse_batch_size(text: str) -> int:
    """The number of sequences from text; 0 for ``auto``."""
    require(
        text == "auto" or text.isdecimal(), f"max-batch-size is {shown(text)}: use a whole number, or auto"
    )
    return 0 if text == "auto" else int(text)


@dataclass(frozen=True)
class TemplateKwargs:
    """Names and values for a chat template, as one JSON object with sorted keys."""

    text: str = "{}"

    @classmethod
    def of(cls, asked: "TemplateKwargs | Mapping[str, Any] | str | None") -> "TemplateKwargs":
        """From an object or its JSON; ``UserError`` for anything else and for names that have another meaning."""
        if isinstance(asked, TemplateKwargs):
            return asked
        remedy = 'write one JSON object, such as {"reasoning_effort": "low"}'
        try:
            value = json.loads(asked) if isinstance(asked, str) else dict(asked or {})
            text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"chat-template-kwargs is {shown(asked)} ({first_line(error)}): {remedy}"
            ) from error
        require(isinstance(value, dict), f"chat-template-kwargs is {shown(asked)}: {remedy}")
        taken = sorted(_RENDERERS & value.keys())
        require(
            not taken, f"chat-template-kwargs has {', '.join(taken)}, which specgen sets itself: remove it"
        )
        day = value.get(PINNED_DATE, "2026-01-31")
        require(
            isinstance(day, str) and _is_date(day),
            f"chat-template-kwargs has {PINNED_DATE} {shown(day)}: give the date as 2026-01-31",
        )
        return cls(text)

    @property
    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.text)
        return values

    def with_date(self, day: str) -> "TemplateKwargs":
        """The same, and ``day`` as the date that templates see unless they were given one."""
        return TemplateKwargs.of({PINNED_DATE: day} | self.values)

    def __str__(self) -> str:
        return self.text


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@with_vllm_names
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The models and how they run. ``UserError`` for a value that is wrong.

    ``model`` and ``drafter`` are directories, URLs or hub ids, or ``ngram``, ``suffix`` or ``mtp`` as the drafter;
    without one (``drafter=None, num_spec_tokens=0``) decoding is plain. ``max_batch_size`` counts sequences (0: auto),
    ``max_prefill_tokens`` and ``page_size`` tokens, ``kv_memory`` bytes, and ``gpu_memory_utilization`` is a share of
    the GPU. Every field but ``page_size`` and ``synthetic_acceptance`` is an option of ``specgen generate``, whose help
    says more. vLLM's names are taken too (``VLLM_NAMES``). ``auto`` is resolved only in ``engine/choices.py``.
    """

    model: str = option(MISSING, "Models", "Target: a directory, URL or hub id.", shown="the bundled target")
    drafter: str | None = option(
        MISSING,
        "Models",
        "EAGLE, DFlash or DSpark head, or a smaller model of the same vocabulary: a directory, URL or hub id. Or "
        f"ngram[:N]: no head; n-gram lookup of up to N tokens (default {_LOOKUPS['ngram']}) in the text so far; "
        f"suffix[:N] (default {_LOOKUPS['suffix']}): in answers that have ended too. Or mtp: the target's own MTP "
        "layers.",
        shown="the bundled head",
    )
    lora: str | None = option(
        None,
        "Models",
        "A LoRA adapter in PEFT's format, merged into the target when it is loaded: a directory, URL or hub id.",
        metavar="DIR",
        shown="none",
    )
    chat_template_kwargs: TemplateKwargs | Mapping[str, Any] | str = option(
        TemplateKwargs(),
        "Prompts",
        'Variables for the chat template, as JSON: {"reasoning_effort": "low"}, {"enable_thinking": false}; '
        f'{{"{PINNED_DATE}": "2026-01-31"}} is the date it sees.',
        metavar="JSON",
        shown="none, and the date of the run's start",
        parse=TemplateKwargs.of,
    )
    generation_config: GenerationConfigName = option(
        "model",
        "Sampling",
        "What is used of the checkpoint's generation_config.json. model: its repetition_penalty, suppress_tokens, "
        "stop_strings and min_new_tokens, and in sampled texts top_p, top_k and min_p, where no option and no row "
        "says otherwise; only --temperature decides whether texts are sampled. none: its end tokens alone, which "
        "always hold.",
    )
    num_spec_tokens: NumSpecTokens = option(
        4,
        "Speculation",
        "Draft tokens per step, K; 0 is plain decoding; auto: at every step the fastest for the batch, by the "
        f"measured cost of a step and the acceptance so far, up to {_MAX_AUTO}, of which those most likely to be "
        "accepted are verified; uniform: the same, with all of them verified.",
        metavar="INTEGER|auto|uniform",
        parse=DraftLength.of,
    )
    drafter_batch: DrafterBatchName = option(
        "padded",
        "Speculation",
        "The drafter's input after a verify step: all K+1 rows, or only the accepted ones. Without a head it "
        "changes nothing.",
    )
    draft_sampling: DraftSamplingName = option(
        "greedy",
        "Speculation",
        "A head's drafts by argmax, or sampled at the temperature; the distribution of the text is the same.",
    )
    draft_lm_head: DraftLmHeadName = option(
        "model",
        "Speculation",
        "The output layer that a head or a draft model drafts with. model: as it verifies or was trained, in --dtype; "
        "fp8: a copy in FP8 (e4m3), made when it is loaded, of which a draft reads half as much. The text is the same; "
        "a few other drafts are accepted.",
    )
    verification: VerificationName = option(
        "token",
        "Speculation",
        "How sampled drafts are judged: one after the other, or as a block, which accepts as many or more; the "
        "distribution of the text is the same.",
    )
    learn_from: str | None = option(
        None,
        "Speculation",
        "An earlier run's directory, whose newest answers --drafter suffix begins with.",
        metavar="DIR",
        shown="none",
    )
    max_batch_size: int = option(
        0,  # auto
        "Running",
        "Sequences per batch. auto: 32 on a CPU; 256 on a GPU, or as many as its memory holds with 1,024 tokens each.",
        metavar="INTEGER|auto",
        shown="auto",
        parse=parse_batch_size,
    )
    max_prefill_tokens: int = option(2048, "Running", "Prompt tokens per prefill pass.")
    page_size: int = 0  # tokens; 0: the default of the attention backend
    # Drafts are accepted by dice, with these chances by position behind accepted ones, or with one chance that makes
    # this mean acceptance length: texts are not the model's, so only a bench that shows none takes it. Empty: by the
    # target
    synthetic_acceptance: tuple[float, ...] | float = ()
    kv_memory: int | None = option(
        None,
        "Running",
        "Memory for the KV cache, such as 512MiB or 2GiB.",
        shown="enough for the batch, at most 1GiB on a CPU and what --gpu-memory-utilization leaves on a GPU",
        parse=parse_bytes,
    )
    device: str = option("auto", "Running", "auto, cpu, cuda or cuda:N.")
    tensor_parallel: int = option(
        1, "Running", "GPUs that share the model, from --device on, one process each; on a CPU, processes."
    )
    dtype: DtypeName = option("auto", "Running", "auto: float32 on a CPU, bfloat16 on a GPU.")
    kv_dtype: KVDtypeName = option(
        "auto",
        "Running",
        "The target's KV cache. model: in --dtype; fp8: in FP8 (e4m3), which holds twice the tokens of bfloat16, with "
        "the checkpoint's scales or without. auto: fp8 where the checkpoint says so, else model.",
    )
    attention: AttentionName = option(
        "auto",
        "Running",
        "hopper: on compute capability 9.0 the fastest kernel for each pass, specgen's own first; trtllm: FlashInfer's "
        "trtllm API (XQA, trtllm-gen); flashinfer: its paged wrappers; sdpa: PyTorch's, and sdpa-static, which can be "
        "captured. auto picks and says why.",
    )
    cuda_graphs: GraphsName = option(
        "auto",
        "Running",
        "step: a decode step is one CUDA graph; pass: each forward pass is; off: none. auto: step where the "
        "attention backend can.",
    )
    gpu_memory_utilization: float = option(
        0.9, "Running", "Share of the GPU's memory to use, weights and graphs included."
    )
    prefix_cache: bool = option(
        True, "Running", "Compute shared prompt prefixes once. Switch it off to compare with other tables."
    )

    def __post_init__(self) -> None:
        # an object of the caller's could change, and has no hash
        object.__setattr__(self, "chat_template_kwargs", TemplateKwargs.of(self.chat_template_kwargs))
        if str(self.max_batch_size) == "auto":  # of one who writes what the command takes
            object.__setattr__(self, "max_batch_size", 0)
        check_types(self)
        require(
            self.max_batch_size >= 0,
            f"max-batch-size is {self.max_batch_size}: use at least 1, or 0 for auto",
        )
        require(
            self.max_prefill_tokens >= 1, f"max-prefill-tokens is {self.max_prefill_tokens}: use at least 1"
        )
        require(
            0 < self.gpu_memory_utilization <= 1,
            f"gpu-memory-utilization is {self.gpu_memory_utilization}: use a share in (0, 1]",
        )
        require(
            self.tensor_parallel >= 1,
            f"tensor-parallel is {self.tensor_parallel}: use the number of GPUs, at least 1",
        )
        require(self.page_size >= 0, f"page-size is {self.page_size}: use at least 1")
        require(
            self.draft_length.most == 0 or self.drafter is not None,
            f"num-spec-tokens is {self.draft_length.most} but no drafter is given: "
            "name one with --drafter, or use --num-spec-tokens 0",
        )
        lookup_of(self.drafter)
        for url in filter(None, (self.model, self.drafter, self.lora)):
            require_no_secrets(url)
        for name, known in choices(EngineConfig).items():
            value = getattr(self, name)
            require(value in known, f"{name.replace('_', '-')} is {value!r}: use one of {', '.join(known)}")

    @property
    def draft_length(self) -> DraftLength:
        return DraftLength.of(self.num_spec_tokens)

    @property
    def template_kwargs(self) -> TemplateKwargs:
        return TemplateKwargs.of(self.chat_template_kwargs)

    @property
    def lookup(self) -> Lookup | None:
        """What drafts without a checkpoint, if that does."""
        return lookup_of(self.drafter) if self.draft_length.most else None

    @property
    def learns(self) -> bool:
        """Whether answers that have ended change what is drafted."""
        return self.lookup is not None and self.lookup.learns

    @property
    def head(self) -> str | None:
        """The checkpoint that drafts, or ``MTP``; None for n-grams and plain decoding."""
        return self.drafter if self.draft_length.most and self.lookup is None else None

    def synthetic_chances(self) -> tuple[float, ...]:
        """The chances of ``synthetic_acceptance`` at this K (of ``auto``, the largest), the last for later drafts too.

        ``UserError`` for a length that steps of K drafts cannot have.
        """
        length, k = self.synthetic_acceptance, self.draft_length.most
        if isinstance(length, tuple) or k == 0:
            return length if isinstance(length, tuple) else ()
        require(
            1 <= length <= k + 1,
            f"synthetic-acceptance is {length:g}, but a step of K = {k} drafts yields at most {k + 1} tokens: use a "
            "mean acceptance length of 1 to K + 1",
        )
        require(
            self.lookup is None,
            f"synthetic-acceptance is {length:g}, but n-grams may draft fewer than K tokens, so no chance gives them a "
            "length: use chances such as 0.8,0.6",
        )
        low, high = 0.0, 1.0
        for _ in range(60):  # the length rises with the chance: 1 + p + ... + p^K
            middle = (low + high) / 2
            low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < length else (low, middle)
        return (low,)

    @property
    def formats(self) -> str:
        """The number formats of a resolved configuration, as a report names them."""
        drafts = ", drafts by an FP8 lm_head" if self.head and self.draft_lm_head == "fp8" else ""
        return self.dtype + (" with an FP8 KV cache" if self.kv_dtype == "fp8" else "") + drafts

    def plain(self) -> Self:
        """The same without speculation."""
        return replace(self, num_spec_tokens=0, drafter=None, learn_from=None)

    def to_json(self) -> dict[str, Any]:
        """For a manifest, with the draft length in two fields and the template's names as an object.

        A KV cache and drafts in the model's format, verification by token and one GPU are not named, so that a run of
        an earlier version goes on.
        """
        length, off = self.draft_length, EngineConfig(model="", drafter="")
        newer = ("synthetic_acceptance", "draft_lm_head", "verification", "lora", "learn_from")
        unsaid = {name for name in (*newer, "tensor_parallel") if getattr(self, name) == getattr(off, name)}
        unsaid |= {"generation_config"}  # what it does is in the sampling parameters
        unsaid |= set() if self.kv_dtype == "fp8" else {"kv_dtype"}
        fields = {name: value for name, value in asdict(self).items() if name not in unsaid}
        auto = {"num_spec_tokens": length.most, "spec_length": length.kind}
        return fields | auto | {"chat_template_kwargs": self.template_kwargs.values}


def acceptance_rates(text: str) -> tuple[float, ...] | float:
    """``3.2``: a mean acceptance length. Or ``0.8,0.6``: chances of drafts behind accepted ones, by position.

    ``UserError`` for anything else.
    """
    try:
        numbers = tuple(float(each) for each in text.split(","))
    except ValueError:
        numbers = ()
    is_length = len(numbers) == 1
    require(
        bool(numbers) and all(1 <= each < inf if is_length else 0 <= each <= 1 for each in numbers),
        f"synthetic-acceptance is {shown(text)}: use a mean acceptance length of 1 to K + 1 such as 3.2, or chances "
        "from 0 to 1, at least two, such as 0.8,0.6",
    )
    return numbers[0] if is_length else numbers


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster with an engine on each of ``num_workers``; without an ``address`` it is started on this machine."""

    num_workers: int = 1
    address: str | None = None  # as for ``ray.init``

    def __post_init__(self) -> None:
        require(self.num_workers >= 1, f"num-workers is {self.num_workers}: use at least 1")
        require(find_spec("ray") is not None, "executor is ray, which is not installed: pip install '.[ray]'")
