"""Configurations: frozen values that validate themselves."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from specgen.errors import UserError as UserError
from specgen.errors import first_line as first_line
from specgen.errors import require as require
from specgen.errors import shown as shown
from specgen.template_kwargs import PINNED_DATE, TemplateKwargs

DrafterBatchName = Literal["padded", "non-padded"]
DraftSamplingName = Literal["greedy", "probabilistic"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVDtypeName = Literal["auto", "model", "fp8"]
AttentionName = Literal["auto", "trtllm", "flashinfer", "sdpa", "sdpa-static"]
GraphsName = Literal["auto", "step", "pass", "off"]
FormatName = Literal["jsonl", "openai", "parquet"]
ExportName = Literal["md", "latex", "csv"]
EventsName = Literal["full", "summary", "none"]
ExecutorName = Literal["local", "ray"]
# The groups of --help, in their order
Group = Literal["Study", "Table", "Models", "Prompts", "Speculation", "Sampling", "Running", "Results"]

_MAX_AUTO = 7  # drafts per sequence and step
_NGRAM = 3  # tokens that --drafter ngram looks up
_MAX_NGRAM = 16
MTP = "mtp"  # the drafter that is part of the target's checkpoint
NGRAM_BYTES = 4  # per token of the texts that are searched
MAX_LOGIT_BIASES = 1024  # per request
MAX_LOGPROBS = 20  # per token
MOST_DRAFTS = 16  # per sequence and step


@dataclass(frozen=True, kw_only=True)
class DraftLength:
    """K, the drafts per sequence and step: ``most``, or with ``auto`` the fastest at every step, up to ``most``."""

    most: int
    auto: bool = False

    def __post_init__(self) -> None:
        require(
            0 <= self.most <= MOST_DRAFTS,
            f"num-spec-tokens is {self.most}: use 1 to {MOST_DRAFTS}, or 0 for plain decoding",
        )
        require(
            not self.auto or self.most >= 1,
            f"num-spec-tokens is auto and at most 0, which leaves no choice: use 1 to {MOST_DRAFTS}",
        )

    @classmethod
    def of(cls, asked: "DraftLength | int | str") -> "DraftLength":
        """The draft length for a number, also as text, or ``auto``."""
        if isinstance(asked, DraftLength):
            return asked
        if asked == "auto":
            return cls(most=_MAX_AUTO, auto=True)
        require(
            str(asked).isdecimal(),
            f"num-spec-tokens is {asked}: use 1 to {MOST_DRAFTS}, 0 for plain decoding, or auto",
        )
        return cls(most=int(asked))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every K that a step may have."""
        return tuple(range(self.most + 1)) if self.auto else (self.most,)

    def __str__(self) -> str:
        return f"auto, up to {self.most}" if self.auto else str(self.most)


def ngram_length(drafter: str | None) -> int | None:
    """N of a ``drafter`` that is ``ngram:N`` or ``ngram``; None where it names a checkpoint, or is None.

    A directory of such a name is reached as ``./ngram``.
    """
    kind, colon, number = (drafter or "").partition(":")
    if kind != "ngram":
        return None
    length = int(number) if number.isascii() and number.isdecimal() else 0 if colon else _NGRAM
    require(
        1 <= length <= _MAX_NGRAM,
        f"drafter is {drafter!r}: write ngram:N with the number of last tokens to look up, 1 to {_MAX_NGRAM}, "
        "or ./ngram for a directory",
    )
    return length


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


def option(
    default: object,
    group: Group,
    text: str,
    *,
    name: str | None = None,
    shown: str | None = None,
    metavar: str | None = None,
    least: int | None = None,
    off: str | None = None,
    parse: Callable[[str], object] | None = None,
) -> Any:  # noqa: ANN401
    """A field or parameter that is an option of commands; ``text`` is its help.

    ``name`` is the option's where it differs from the field's, ``shown`` the default in ``--help``, and ``parse``
    converts the text of the command line. ``off`` is the switch beside that of a truth value.
    """
    help = {"group": group, "text": text, "name": name, "shown": shown, "metavar": metavar, "least": least}
    return field(default=default, metadata=help | {"off": off, "parse": parse})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request, as vLLM's ``SamplingParams``.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch the filter off. ``seed`` and the
    request's id determine all its random numbers. ``logit_bias`` has pairs of token id and bias. ``logprobs`` asks
    for the log-probability of every output token and of that many top tokens, computed from the raw logits before
    bias, temperature and filters (vLLM's default, ``raw_logprobs``).
    """

    max_tokens: int = option(128, "Sampling", "Longest answer in tokens.", name="max_new_tokens")
    temperature: float = option(0.0, "Sampling", "0 is greedy.")
    top_p: float = option(1.0, "Sampling", "Nucleus; 1 is off.")
    top_k: int = option(0, "Sampling", "Sample from the K most likely tokens; 0 is off.")
    min_p: float = option(0.0, "Sampling", "Drop tokens below this share of the most likely one; 0 is off.")
    seed: int = option(0, "Sampling", "With the request's id it determines all random numbers.")
    stop: tuple[str, ...] = option((), "Sampling", "End a text before this string; may be repeated.")
    ignore_eos: bool = option(False, "Sampling", "Generate to the full length.")
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, f"max-new-tokens is {self.max_tokens}: ask for at least 1")
        require(self.temperature >= 0, f"temperature is {self.temperature}: use 0 (greedy) or more")
        require(0 < self.top_p <= 1, f"top-p is {self.top_p}: use a share in (0, 1]; 1 switches it off")
        require(self.top_k >= 0, f"top-k is {self.top_k}: use 0 (off) or a number of tokens")
        require(0 <= self.min_p <= 1, f"min-p is {self.min_p}: use a share in [0, 1]; 0 switches it off")
        require(all(self.stop), "an empty stop string would end every text at once: remove it")
        require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"logprobs is {self.logprobs}: use 0 (only the chosen token's) to {MAX_LOGPROBS}",
        )
        self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        ids = [token_id for token_id, _ in self.logit_bias]
        require(
            len(ids) <= MAX_LOGIT_BIASES,
            f"logit-bias names {len(ids)} tokens: use at most {MAX_LOGIT_BIASES}",
        )
        require(len(set(ids)) == len(ids), "logit-bias names a token twice: give every token one bias")
        for token_id, bias in self.logit_bias:
            require(-100 <= bias <= 100, f"logit-bias of token {token_id} is {bias}: use -100 to 100")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The models and how they run. ``auto`` is resolved only in ``engine/choices.py``."""

    model: str = option(MISSING, "Models", "Target: a directory or hub id.", shown="the bundled target")
    drafter: str | None = option(
        MISSING,
        "Models",
        "EAGLE head: a directory or hub id. Or ngram[:N]: no head; drafts are copied from the text so far, where its "
        f"last tokens, as many as match up to N ({_NGRAM}), occurred before. Or mtp: the target's own MTP layers.",
        shown="the bundled head",
    )
    chat_template_kwargs: TemplateKwargs | Mapping[str, Any] | str = option(
        TemplateKwargs(),
        "Prompts",
        'Names for the chat template, as JSON: {"reasoning_effort": "low"}, {"enable_thinking": false}; '
        f'{{"{PINNED_DATE}": "2026-01-31"}} is the date it sees.',
        metavar="JSON",
        shown="none, and the date of the run's start",
        parse=TemplateKwargs.of,
    )
    num_spec_tokens: int | Literal["auto"] | DraftLength = option(
        4,
        "Speculation",
        "Draft tokens per step, K; 0 is plain decoding; auto: at every step the fastest for the batch, by the "
        f"measured cost of a step and the acceptance so far, up to {_MAX_AUTO}.",
        metavar="INTEGER|auto",
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
    max_batch_size: int = option(32, "Running", "Sequences per batch.")
    max_prefill_tokens: int = option(2048, "Running", "Prompt tokens per prefill pass.")
    page_size: int = 0  # tokens; 0: the default of the attention backend
    kv_memory: int | None = option(
        None,
        "Running",
        "Memory for the KV cache, such as 512MiB or 2GiB.",
        shown="enough for the batch, at most 1GiB on a CPU and what --gpu-memory-utilization leaves on a GPU",
        parse=parse_bytes,
    )
    device: str = option("auto", "Running", "auto, cpu, cuda or cuda:N.")
    tensor_parallel: int = option(
        1,
        "Running",
        "GPUs that share the model, from --device on, each with a process of its own; on a CPU, processes.",
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
        "trtllm: TensorRT-LLM's decode kernels; flashinfer: its paged wrappers; sdpa: PyTorch's, and "
        "sdpa-static, which can be captured. auto picks and says why.",
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
        require(self.max_batch_size >= 1, f"max-batch-size is {self.max_batch_size}: use at least 1")
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
        ngram_length(self.drafter)
        for name, known in choices(EngineConfig).items():
            value = getattr(self, name)
            require(value in known, f"{name.replace('_', '-')} is {value!r}: use one of {', '.join(known)}")

    @property
    def draft_length(self) -> DraftLength:
        """``num_spec_tokens`` as a ``DraftLength``."""
        return DraftLength.of(self.num_spec_tokens)

    @property
    def template_kwargs(self) -> TemplateKwargs:
        """``chat_template_kwargs`` as ``TemplateKwargs``."""
        return TemplateKwargs.of(self.chat_template_kwargs)

    @property
    def ngram(self) -> int | None:
        """N where n-grams draft, else None."""
        return ngram_length(self.drafter) if self.draft_length.most else None

    @property
    def head(self) -> str | None:
        """The checkpoint that drafts, or ``MTP``; None for n-grams and plain decoding."""
        return self.drafter if self.draft_length.most and self.ngram is None else None

    @property
    def formats(self) -> str:
        """The number formats of a resolved configuration, as a report names them."""
        return self.dtype + (" with an FP8 KV cache" if self.kv_dtype == "fp8" else "")

    def plain(self) -> Self:
        """The same without speculation."""
        return replace(self, num_spec_tokens=0, drafter=None)

    def to_json(self) -> dict[str, Any]:
        """For a manifest, with the draft length in two fields and the template's names as an object.

        A KV cache in the model's format and one GPU are not named, so that a run of an earlier version goes on.
        """
        length, fields = self.draft_length, asdict(self)
        if self.kv_dtype != "fp8":
            del fields["kv_dtype"]
        if self.tensor_parallel == 1:
            del fields["tensor_parallel"]
        auto = {"num_spec_tokens": length.most, "spec_length": "auto" if length.auto else "fixed"}
        return fields | auto | {"chat_template_kwargs": self.template_kwargs.values}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster with an engine on each of ``num_workers``; without an ``address`` it is started on this machine."""

    num_workers: int = 1
    address: str | None = None  # as for ``ray.init``

    def __post_init__(self) -> None:
        require(self.num_workers >= 1, f"num-workers is {self.num_workers}: use at least 1")
        require(find_spec("ray") is not None, "executor is ray, which is not installed: pip install '.[ray]'")
