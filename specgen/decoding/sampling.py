"""From logits to tokens: bias, temperature and the filters, the draw, and the random numbers behind it.

Greedy is temperature 0. A random number is a pure function of the request's seed, the position of the token it
decides, and what it is for, so a text does not depend on which other requests ran beside it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from specgen.config import MAX_LOGIT_BIASES, MAX_LOGPROBS, SamplingParams
from specgen.device import on_device
from specgen.ops.jit_modules import Module

# What a random number is for. Draws of different purposes at one position are independent.
ACCEPT, EMIT, DRAFT = 1, 2, 3


# Argmax alone, a plain draw, or a draw from filtered distributions.
SamplingKind = Literal["greedy", "plain", "filtered"]

# Few sizes, because a captured step is one for each.
_BIAS_WIDTHS = (0, 16, 128, MAX_LOGIT_BIASES)
_LOGPROB_WIDTHS = (0, MAX_LOGPROBS)
_HAS_FLASHINFER = find_spec("flashinfer") is not None


@dataclass(frozen=True)
class SamplingForm:
    """What a batch asks for. The host knows it, so that no pass looks at the columns to decide what to compute."""

    kind: SamplingKind
    num_biases: int  # columns of biased tokens
    num_logprobs: int | None  # of the likeliest tokens; None: not asked for

    @property
    def likeliest_only(self) -> bool:
        """Whether nothing is asked of the logits but where the largest is."""
        return self.kind == "greedy" and self.num_biases == 0 and self.num_logprobs is None

    @staticmethod
    def of(params: Iterable[SamplingParams]) -> "SamplingForm":
        """The least that serves every one of ``params``."""
        params = list(params)
        sampled = [p for p in params if p.temperature > 0]
        filtered = any(p.top_k or p.top_p < 1 or p.min_p for p in sampled)
        biases = max((len(p.logit_bias) for p in params), default=0)
        logprobs = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        return SamplingForm(
            kind="filtered" if filtered else "plain" if sampled else "greedy",
            num_biases=_fitting(_BIAS_WIDTHS, biases),
            num_logprobs=None if logprobs is None else _fitting(_LOGPROB_WIDTHS, logprobs),
        )


def most_demanding(params: Iterable[SamplingParams]) -> SamplingParams:
    """Parameters that make a pass compute all that any of ``params`` asks for."""
    form = SamplingForm.of(params)
    return SamplingParams(
        temperature=0.0 if form.kind == "greedy" else 1.0,
        top_p=0.9 if form.kind == "filtered" else 1.0,
        logit_bias=tuple((token, 0.0) for token in range(form.num_biases)),
        logprobs=form.num_logprobs,
    )


def _fitting(widths: tuple[int, ...], needed: int) -> int:
    return next(width for width in widths if width >= needed)


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters of the B sequences that are decoding, as columns."""

    temperature: Tensor  # [B] float32
    top_p: Tensor  # [B] float32
    top_k: Tensor  # [B] int64, 0: off
    min_p: Tensor  # [B] float32
    seeds: Tensor  # [B] int64
    biased_ids: Tensor  # [B, form.num_biases] int64; token 0 with a bias of 0 where a sequence has fewer
    biases: Tensor  # [B, form.num_biases] float32
    form: SamplingForm

    @staticmethod
    def of(params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> "SamplingBatch":
        """Columns of ``params``, with one derived seed per sequence (see ``request_seed``)."""
        form = SamplingForm.of(params)
        floats = on_device([[p.temperature, p.top_p, p.min_p] for p in params], device, torch.float32)
        ints = on_device([[p.top_k, seed] for p, seed in zip(params, seeds, strict=True)], device)
        filled = [p.logit_bias + ((0, 0.0),) * (form.num_biases - len(p.logit_bias)) for p in params]
        return SamplingBatch(
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            top_k=ints[:, 0],
            seeds=ints[:, 1],
            biased_ids=on_device([[token_id for token_id, _ in pairs] for pairs in filled], device),
            biases=on_device([[bias for _, bias in pairs] for pairs in filled], device, torch.float32),
            form=form,
        )

    def take(self, rows: Tensor | slice) -> "SamplingBatch":
        """The sequences at ``rows``, in that order; a slice gives views."""
        return replace(
            self,
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            seeds=self.seeds[rows],
            biased_ids=self.biased_ids[rows],
            biases=self.biases[rows],
        )

    def shaped(self, form: SamplingForm) -> "SamplingBatch":
        """Views of the columns that ``form`` needs."""
        width = form.num_biases
        return replace(self, biased_ids=self.biased_ids[:, :width], biases=self.biases[:, :width], form=form)


def request_seed(seed: int, request_id: str) -> int:
    """One 63-bit seed from the user's seed and the request's id, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniform(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Uniform float32 in [0, 1) for seeds ``[B]`` and positions ``[B, ...]``.

    SplitMix64 (Steele et al., 2014) in counter mode.
    """
    counter = positions * 4 + purpose
    seeds = seeds.view(-1, *[1] * (positions.dim() - 1))
    return (_mix(_mix(seeds) + counter * -0x61C8864680B583EB) >> 40 & 0xFFFFFF).to(torch.float32) / (1 << 24)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64, whose products wrap around; the masks make the shifts logical."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


def biased(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits ``[B, n, V]`` with every sequence's biases added, float32; the same tensor where there are none."""
    if batch.form.num_biases == 0:
        return logits
    shape = (-1, logits.shape[1], -1)
    ids, biases = (column[:, None].expand(shape) for column in (batch.biased_ids, batch.biases))
    return logits.to(torch.float32, copy=True).scatter_add_(-1, ids, biases)


def are_finite(logits: Tensor, likeliest: Tensor) -> Tensor:
    """Whether rows ``[..., V]`` are finite, ``[...]`` bool: NaN or inf shows as a non-finite value at the argmax."""
    return logits.gather(-1, likeliest[..., None]).squeeze(-1).abs() < float("inf")


def token_logprobs(logits: Tensor, tokens: Tensor, num_likeliest: int) -> Tensor:
    """What the model thought of ``tokens`` ``[B, n]``, from its logits ``[B, n, V]``: ``[B, n, 1 + 2 m]`` float64.

    The token's log-probability, the ids of the m likeliest tokens, and their log-probabilities; m is
    ``num_likeliest``, or V where that is less.
    """
    every = logits.log_softmax(-1, dtype=torch.float32)
    top = every.topk(min(num_likeliest, every.shape[-1]))
    chosen = every.gather(-1, tokens[..., None])
    return torch.cat([chosen.double(), top.indices.double(), top.values.double()], -1)


def target_probs(logits: Tensor, likeliest: Tensor, batch: SamplingBatch) -> Tensor:
    """The distribution that is sampled, ``[B, n, V]`` from logits ``[B, n, V]``, each row normalised.

    Temperature, then min-p, top-k and top-p, in vLLM's order. ``likeliest`` ``[B, n]`` is the argmax; see
    ``draft_probs`` for the rows that are one-hot there.
    """
    probs = draft_probs(logits, likeliest, batch)
    if batch.form.kind == "filtered":
        floor = batch.min_p[:, None, None] * probs.amax(-1, keepdim=True)
        keep_top = _keep_top_on_gpu if probs.is_cuda and _HAS_FLASHINFER else _keep_top
        probs = keep_top(probs.masked_fill(probs < floor, 0), batch)
    return probs / probs.sum(-1, keepdim=True)


def draft_probs(logits: Tensor, likeliest: Tensor, batch: SamplingBatch) -> Tensor:
    """Softmax at each sequence's temperature, ``[B, n, V]``; one-hot at ``likeliest`` ``[B, n]`` at temperature 0.

    Rows with NaN or inf are one-hot too, so that a draw from them gives a token and the other rows go on.
    """
    temperature = batch.temperature[:, None, None]
    probs = (logits / temperature.clamp(min=1e-6)).softmax(-1)
    chosen = likeliest[..., None]
    settled = (temperature == 0) | ~are_finite(logits, likeliest)[..., None]
    # in place: probabilities of a large batch and vocabulary are what a step needs most memory for
    at_chosen = torch.where(settled, 1, probs.gather(-1, chosen))
    return probs.masked_fill_(settled, 0).scatter_(-1, chosen, at_chosen)


def _keep_top(probs: Tensor, batch: SamplingBatch) -> Tensor:
    """Zero all but the ``top_k`` likeliest tokens, then all but the fewest that make up ``top_p`` of the rest."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    top_k = torch.where(batch.top_k > 0, batch.top_k, probs.shape[-1])[:, None, None]
    ordered = ordered.masked_fill(rank >= top_k, 0)
    before = ordered.cumsum(-1) - ordered
    nucleus = batch.top_p[:, None, None]
    outside = (before >= nucleus * ordered.sum(-1, keepdim=True)) & (nucleus < 1)
    return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(outside, 0))


def sampling_modules(params: SamplingParams) -> list[Module]:
    """What passes for ``params`` need compiled on a GPU."""

    def spec() -> Any:  # noqa: ANN401
        from flashinfer.jit.sampling import gen_sampling_module

        return gen_sampling_module()

    filtered = _HAS_FLASHINFER and SamplingForm.of([params]).kind == "filtered"
    return [Module(what="top-k and top-p", spec=spec)] if filtered else []


def _keep_top_on_gpu(probs: Tensor, batch: SamplingBatch) -> Tensor:
    """The same through FlashInfer, without a sort: a fifth of the time at 640 x 128k; ties at the last rank stay."""
    from flashinfer.sampling import top_k_renorm_probs, top_p_renorm_probs

    def by_row(column: Tensor) -> Tensor:
        # the kernels read on without a look at strides, and a prefill's columns lie side by side
        return column[:, None].expand(probs.shape[:-1]).flatten().contiguous()

    rows = probs.flatten(0, -2)
    top_k, top_p = by_row(batch.top_k), by_row(batch.top_p)
    ranks = torch.where(top_k > 0, top_k.clamp(max=rows.shape[1]), rows.shape[1]).to(torch.int32)
    rows = torch.where((top_k > 0)[:, None], top_k_renorm_probs(rows, ranks), rows)
    rows = rows / rows.sum(-1, keepdim=True)  # a share of what is left
    return torch.where((top_p < 1)[:, None], top_p_renorm_probs(rows, top_p), rows).view(probs.shape)


def _running_sum(weights: Tensor) -> Tensor:
    """Along the last dimension, the same in every run: on a GPU torch adds up a lone row in an order that varies."""
    if weights.is_cuda and weights.numel() == weights.shape[-1]:
        return torch.stack((weights, weights)).cumsum(-1)[0]
    return weights.cumsum(-1)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """One index per row of unnormalised ``weights`` ``[..., V]``, by inverting their running sum at ``u`` ``[...]``."""
    cumulative = _running_sum(weights)
    total = cumulative[..., -1]
    # u * total may round up to total, past the last index: step back below it
    threshold = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold[..., None], right=True).squeeze(-1)
