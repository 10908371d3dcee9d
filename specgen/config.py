"""What a user can choose: frozen values that check themselves and name what is wrong."""

import reprlib
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal, Self

DrafterBatchName = Literal["padded", "non-padded"]
DraftSampling = Literal["greedy", "probabilistic"]
SpecLengthName = Literal["fixed", "auto"]

_MOST_AUTO = 7  # drafts in a step
MAX_LOGIT_BIASES = 1024  # of one request
MAX_LOGPROBS = 20  # of one token
_LONGEST_SHOWN = 200  # characters

_short = reprlib.Repr()
_short.maxstring = 100  # a tensor's name is whole


class UserError(ValueError):
    """What the user can mend; the text is one line that says what is wrong, and what to do."""


def require(condition: bool, message: str) -> None:
    """Raise ``UserError(message)`` unless ``condition`` holds."""
    if not condition:
        raise UserError(message)


def shown(value: object) -> str:
    """``value`` on one short line, however large it is: what a file holds is not known before."""
    text = _short.repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def first_line(error: BaseException) -> str:
    """What went wrong in another library, in one short line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(iter(lines), type(error).__name__)[:_LONGEST_SHOWN]


def spec_tokens(asked: int | str) -> tuple[int, SpecLengthName]:
    """``num_spec_tokens`` and ``spec_length`` of an ``EngineConfig`` for a number of drafts, or for ``auto``."""
    if asked == "auto":
        return _MOST_AUTO, "auto"
    require(str(asked).isdecimal(), f"num-spec-tokens is {asked}: use 1 to 16, 0 for plain decoding, or auto")
    return int(asked), "fixed"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded; names and meanings as in vLLM's ``SamplingParams``.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 switch the filter off.
    ``seed`` and the request's id together fix every random draw of the request. ``logit_bias`` has pairs of token id
    and what is added to its logit before anything else. ``logprobs`` asks for the log-probability of every output
    token, and of so many of the likeliest beside it; they are the model's own (vLLM's default, ``raw_logprobs``):
    of its logits before bias, temperature and filters.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
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
            f"logprobs is {self.logprobs}: use 0 (the chosen token's alone) to {MAX_LOGPROBS}",
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
    """What is loaded and how it runs. ``auto`` is resolved in ``engine/choices.py`` and nowhere else."""

    model: str
    drafter: str | None
    num_spec_tokens: int = 4
    spec_length: SpecLengthName = "fixed"  # auto: what pays best at every step, at most num_spec_tokens
    drafter_batch: DrafterBatchName = "padded"
    draft_sampling: DraftSampling = "greedy"
    max_batch_size: int = 32
    max_prefill_tokens: int = 2048
    page_size: int = 0  # positions; 0: what suits the attention backend
    kv_memory: int | None = None  # bytes; None: as much as the batch can need and the device can give
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    cuda_graphs: str = "auto"
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True  # prompts that begin alike are computed once

    def __post_init__(self) -> None:
        require(
            0 <= self.num_spec_tokens <= 16,
            f"num-spec-tokens is {self.num_spec_tokens}: use 1 to 16, or 0 for plain decoding",
        )
        require(self.max_batch_size >= 1, f"max-batch-size is {self.max_batch_size}: use at least 1")
        require(
            self.max_prefill_tokens >= 1, f"max-prefill-tokens is {self.max_prefill_tokens}: use at least 1"
        )
        require(
            0 < self.gpu_memory_utilization <= 1,
            f"gpu-memory-utilization is {self.gpu_memory_utilization}: use a share in (0, 1]",
        )
        require(self.page_size >= 0, f"page-size is {self.page_size}: use at least 1")
        require(
            self.num_spec_tokens == 0 or self.drafter is not None,
            f"num-spec-tokens is {self.num_spec_tokens} but no drafter is given: "
            "name one with --drafter, or use --num-spec-tokens 0",
        )
        require(
            self.spec_length == "fixed" or self.num_spec_tokens >= 1,
            "spec-length is auto and num-spec-tokens is 0, which leaves nothing to choose from: use 1 to 16",
        )

    def plain(self) -> Self:
        """The same without speculation."""
        return replace(self, num_spec_tokens=0, spec_length="fixed", drafter=None)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster with a model pair on each of its ``num_workers``; without an ``address`` one on this machine."""

    num_workers: int = 1
    address: str | None = None  # as ``ray.init`` takes it

    def __post_init__(self) -> None:
        require(self.num_workers >= 1, f"num-workers is {self.num_workers}: use at least 1")
        require(
            find_spec("ray") is not None,
            "executor is ray, which is not installed: pip install '.[ray]'",
        )
