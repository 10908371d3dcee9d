"""From logits to tokens: bias, penalties, temperature and the filters, the draw, and the random numbers behind it.

Greedy is temperature 0. A random number is a pure function of the request's seed, the position of the token it
decides, what it is for, and of a draft the step that it is made in, so a text does not depend on which other requests
ran beside it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from specgen.config import MAX_LOGIT_BIASES, MAX_LOGPROBS, MOST_DRAFTS, SamplingParams
from specgen.decoding.automaton_tables import Tables
from specgen.device import on_device

# What a random number is for. Draws of different purposes at one position are independent.
ACCEPT, EMIT, DRAFT = 1, 2, 3

# A token's count is 1 where the prompt has it, and _IN_OUTPUT more for each time that the output has it
_IN_PROMPT, _IN_OUTPUT = 1, 2
_NO_COUNTS = torch.empty(0, 0, dtype=torch.int32)


# Argmax alone, a plain draw, or a draw from filtered distributions.
SamplingKind = Literal["greedy", "plain", "filtered"]

# Few sizes, because a captured step is one for each.
_BIAS_WIDTHS = (0, 16, 128, MAX_LOGIT_BIASES)
_LOGPROB_WIDTHS = (0, MAX_LOGPROBS)
_ALWAYS = 2**31  # tokens of an output, more than any has
# the most likely token alone, of a million; less might be 0 in float32, which leaves none
_LEAST_TOP_P = 1e-6
HAS_FLASHINFER = find_spec("flashinfer") is not None  # whose kernels keep the top tokens on a GPU


@dataclass(frozen=True)
class SamplingForm:
    """What a batch asks for. The host knows it, so that no pass looks at the columns to decide what to compute."""

    kind: SamplingKind
    num_biases: int  # columns of biased tokens
    num_logprobs: int | None  # of the most likely tokens; None: not asked for
    penalised: bool = False  # whether tokens are counted
    constrained: bool = False  # whether not all tokens are allowed

    @property
    def greedy_only(self) -> bool:
        """Whether nothing is asked of the logits but where the largest is."""
        return self == SamplingForm("greedy", 0, None)

    @staticmethod
    def of(params: Iterable[SamplingParams], end_tokens: Sequence[int] = ()) -> "SamplingForm":
        """The least that serves every one of ``params`` of a model with ``end_tokens``."""
        # most requests of most runs have the same
        params = list({id(each): each for each in params}.values())
        sampled = [p for p in params if p.temperature > 0]
        filtered = any(p.top_k or p.top_p < 1 or p.min_p for p in sampled)
        biases = max((len(biases_of(p, end_tokens)) for p in params), default=0)
        logprobs = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        return SamplingForm(
            kind="filtered" if filtered else "plain" if sampled else "greedy",
            num_biases=_fitting(_BIAS_WIDTHS, biases),
            num_logprobs=None if logprobs is None else _fitting(_LOGPROB_WIDTHS, logprobs),
            penalised=any(p.penalised for p in params),
            constrained=any(p.constrained for p in params),
        )


def biases_of(params: SamplingParams, end_tokens: Sequence[int] = ()) -> list[tuple[int, float, int]]:
    """Tokens, what is added to their logits, and for how many tokens of the output; ``end_tokens`` are the model's."""
    ends = {*end_tokens, *params.stop_token_ids} if params.min_tokens else ()
    return [
        *((token, bias, _ALWAYS) for token, bias in params.logit_bias),
        *((token, float("-inf"), _ALWAYS) for token in params.suppress_tokens),
        *((token, float("-inf"), params.min_tokens) for token in ends),
    ]


def _fitting(widths: tuple[int, ...], needed: int) -> int:
    return next((width for width in widths if width >= needed), widths[-1])  # what needs more is refused


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
    biased_until: Tensor  # [B, form.num_biases] int64: of tokens at positions before that
    penalties: Tensor  # [B, 3] float32: repetition (0: off), presence and frequency; [B, 0] unless penalised
    counts: Tensor  # [B, V] int32, see ``token_counts``; [B, 0] unless penalised
    automata: Tensor  # [B] int64: which of the tables' automata a sequence has
    states: Tensor  # [B] int64: where it is there, see ``Tables``; both 0 where every token is allowed
    tables: Tables | None = None
    form: SamplingForm

    @staticmethod
    def of(
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        device: torch.device,
        counts: Tensor = _NO_COUNTS,
        *,
        end_tokens: Sequence[int] = (),
        num_prompt: Sequence[int] = (),
        places: Sequence[tuple[int, int]] = (),
        tables: Tables | None = None,
    ) -> "SamplingBatch":
        """Columns of ``params``, with one derived seed per sequence (see ``request_seed``).

        Where any of them has penalties, ``counts`` are those of the texts so far. Where any has ``min_tokens``,
        ``end_tokens`` are the model's, and the prompts have ``num_prompt`` tokens. Where any is constrained, ``places``
        are automaton and state of each in ``tables``.
        """
        form = SamplingForm.of(params, end_tokens)
        floats = on_device(
            [[p.temperature, max(p.top_p, _LEAST_TOP_P), p.min_p] for p in params], device, torch.float32
        )
        rows = zip(params, seeds, places or [(0, 0)] * len(params), strict=True)
        ints = on_device([[p.top_k, seed, number, state] for p, seed, (number, state) in rows], device)
        given = [biases_of(p, end_tokens) for p in params]
        filled = [each + [(0, 0.0, 0)] * (form.num_biases - len(each)) for each in given]
        starts = num_prompt or [0] * len(params)
        penalties = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
        return SamplingBatch(
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            top_k=ints[:, 0],
            seeds=ints[:, 1],
            biased_ids=on_device([[token_id for token_id, _, _ in each] for each in filled], device),
            biases=on_device([[bias for _, bias, _ in each] for each in filled], device, torch.float32),
            biased_until=on_device(
                [[begin + count for _, _, count in each] for begin, each in zip(starts, filled, strict=True)],
                device,
            ),
            penalties=on_device([row if form.penalised else [] for row in penalties], device, torch.float32),
            counts=counts
            if form.penalised
            else torch.empty(len(params), 0, dtype=torch.int32, device=device),
            automata=ints[:, 2],
            states=ints[:, 3],
            tables=tables,
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
            biased_until=self.biased_until[rows],
            penalties=self.penalties[rows],
            counts=self.counts[rows],
            automata=self.automata[rows],
            states=self.states[rows],
        )

    def shaped(self, form: SamplingForm) -> "SamplingBatch":
        """Views of the columns that ``form`` needs."""
        width, all_or_none = form.num_biases, slice(None if form.penalised else 0)
        return replace(
            self,
            biased_ids=self.biased_ids[:, :width],
            biases=self.biases[:, :width],
            biased_until=self.biased_until[:, :width],
            penalties=self.penalties[:, all_or_none],
            counts=self.counts[:, all_or_none],
            form=form,
        )

    def count(self, tokens: Tensor, num_kept: Tensor) -> None:
        """Note the first ``num_kept`` ``[B]`` of ``tokens`` ``[B, n]`` as output, on the device alone."""
        if self.form.penalised:
            kept = torch.arange(tokens.shape[1], device=tokens.device) < num_kept[:, None]
            self.counts.scatter_add_(1, tokens, kept.to(self.counts.dtype) * _IN_OUTPUT)

    def walk(self, drafts: Tensor) -> Tensor:
        """States ``[B, n]`` of each row behind the first of ``drafts`` ``[B, n - 1]``.

        A draft that is not allowed, or missing, leaves the state as it is: what lies behind it is never accepted.
        """
        assert self.tables is not None
        return self.tables.walk(self.automata, self.states, drafts)

    def enter(self, walked: Tensor, tokens: Tensor, accepted: Tensor, entering: Tensor | None = None) -> None:
        """Go to the states behind ``accepted`` ``[B]`` of ``walked``'s drafts and the token behind them.

        ``tokens`` ``[B, n]`` are as of ``verify``. Only those of ``entering`` ``[B]``, where it is given.
        """
        at = accepted[:, None]
        found = self.following(walked.gather(1, at)[:, 0], tokens.gather(1, at)[:, 0])
        self.states.copy_(found if entering is None else torch.where(entering, found, self.states))

    def following(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states ``[B]`` behind ``tokens`` ``[B]`` in ``states`` ``[B]``, the same for what is not allowed."""
        assert self.tables is not None
        return self.tables.walk(self.automata, states, tokens[:, None])[:, 1]

    def successors(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states ``[B]`` behind ``tokens`` ``[B]`` in ``states`` ``[B]``, below 0 where one is not allowed."""
        assert self.tables is not None
        return self.tables.successors.index_select(0, states + self.tables.classes[self.automata, tokens])

    def fitting(self, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """``drafts`` ``[B, n]`` up to the first that is not allowed or missing; from there on tokens that are forced.

        Also says which these are, ``[B, n]``. A forced token is the only text that may follow, so far as it goes.
        """
        assert self.tables is not None
        states, copied = self.states, torch.ones_like(self.states, dtype=torch.bool)
        found, forced = list[Tensor](), list[Tensor]()
        for tokens in drafts.unbind(1):
            copied = copied & (tokens >= 0) & (self.successors(states, tokens.clamp(min=0)) >= 0)
            chosen = torch.where(copied, tokens, self.tables.successors.index_select(0, states).long())
            if found:
                chosen = torch.where(found[-1] < 0, found[-1], chosen)
            found.append(chosen)
            forced.append(~copied)
            states = self.following(states, chosen.clamp(min=0))
        return torch.stack(found, 1), torch.stack(forced, 1)


def token_counts(
    texts: Sequence[tuple[Sequence[int], Sequence[int]]], vocab_size: int, device: torch.device
) -> Tensor:
    """What ``texts``, prompts and their outputs, have of every token, ``[B, V]`` int32.

    Four bytes for each token of the vocabulary, which no text can exceed: 156 MB for 256 texts and 152k tokens, a
    fifth of what float32 logits of five rows each take beside them.
    """
    counts = torch.zeros(len(texts) * vocab_size, dtype=torch.int32, device=device)
    for part, weight in ((0, _IN_PROMPT), (1, _IN_OUTPUT)):
        places = [row * vocab_size + token for row, text in enumerate(texts) for token in text[part]]
        if places and weight == _IN_PROMPT:
            counts.scatter_(0, on_device(places, device), weight)  # however often
        elif places:
            index = on_device(places, device)
            counts.scatter_add_(0, index, torch.full_like(index, weight, dtype=torch.int32))
    return counts.view(-1, vocab_size)


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


def draft_places(newest: Tensor, first: int, num_drafts: int) -> Tensor:
    """In place of positions for ``uniform``, ``[B, n]``: those of drafts from ``first`` on behind ``newest`` ``[B]``.

    No two steps share one. A block's drafts behind the accepted ones, and their dice, have had a say in where it ended,
    so the next step's at the same positions have to be new.
    """
    drafted = torch.arange(first, first + num_drafts, device=newest.device)
    return newest[:, None] * MOST_DRAFTS + drafted


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64, whose products wrap around; the masks make the shifts logical."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


def biased(logits: Tensor, positions: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits ``[B, n, V]`` with every sequence's biases added, float32; the same tensor where there are none.

    Row i decides on the token at 1 + i behind ``positions`` ``[B]``.
    """
    if batch.form.num_biases == 0:
        return logits
    decided = positions[:, None] + 1 + torch.arange(logits.shape[1], device=logits.device)
    ids = batch.biased_ids[:, None].expand(-1, logits.shape[1], -1)
    holds = decided[..., None] < batch.biased_until[:, None]
    biases = torch.where(holds, batch.biases[:, None], 0)
    return logits.to(torch.float32, copy=True).scatter_add_(-1, ids, biases)


def penalised(logits: Tensor, drafts: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits ``[B, n, V]`` less the penalties of the text up to each row, float32; the same tensor without any.

    Row i comes behind the first i of ``drafts`` ``[B, n - 1]``, which count there as output. Repetition divides
    logits above 0 and multiplies others, as in ``transformers``, before presence and frequency are taken off, in vLLM's
    order.
    """
    if not batch.form.penalised:
        return logits
    found = _less_penalties(logits, batch.counts[:, None], batch)
    # drafts change the penalty of their own tokens alone, in the rows behind them
    ids = drafts.clamp(min=0)
    before = pad((ids[:, :, None] == ids[:, None]).cumsum(1), (0, 0, 1, 0))  # [B, n, n - 1]: of its token
    places = ids[:, None].expand(-1, logits.shape[1], -1)
    counts = batch.counts.gather(1, ids)[:, None] + _IN_OUTPUT * before
    return found.scatter_(2, places, _less_penalties(logits.gather(2, places), counts, batch))


def constrained(
    logits: Tensor,
    states: Tensor,
    batch: SamplingBatch,
    least: float = float("-inf"),
    ids: Tensor | None = None,
) -> Tensor:
    """Logits ``[B, n, V]`` with ``least`` for tokens that are not allowed in the state ``[B, n]`` of their row.

    They may be of a draft vocabulary, whose tokens are ``ids`` ``[V]``.
    """
    assert batch.tables is not None
    return batch.tables.mask(logits, batch.automata, states, least, ids)


def decisive_logits(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    end_tokens: Sequence[int] = (),
) -> Tensor:
    """``logits`` ``[V]`` after a text as a greedy choice sees them: with the biases and penalties of ``params``.

    ``end_tokens`` are the model's.
    """
    counts = token_counts([(prompt, output)], len(logits), logits.device)
    batch = SamplingBatch.of(
        [params], [0], logits.device, counts, end_tokens=end_tokens, num_prompt=[len(prompt)]
    )
    no_drafts = torch.empty(1, 0, dtype=torch.int64, device=logits.device)
    newest = torch.tensor([len(prompt) + len(output) - 1], device=logits.device)
    return penalised(biased(logits[None, None], newest, batch), no_drafts, batch)[0, 0]


def _less_penalties(logits: Tensor, counts: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits ``[B, n, m]`` of tokens with ``counts`` (shaped alike, or the same for all rows), in a new tensor."""
    repetition, presence, frequency = batch.penalties[:, None, None].unbind(-1)
    repetition = torch.where(repetition > 0, repetition, 1)  # padding rows have zeros
    seen, positive, in_output = counts > 0, logits > 0, counts // _IN_OUTPUT
    # in place, for the sake of memory; what is divided or multiplied by 1 keeps its last bit
    found = logits.to(torch.float32, copy=True)
    found.div_(torch.where(seen & positive, repetition, 1))
    found.mul_(torch.where(seen & ~positive, repetition, 1))
    return found.sub_(presence * (in_output > 0) + frequency * in_output)


def are_finite(logits: Tensor, greedy_tokens: Tensor) -> Tensor:
    """Whether rows ``[..., V]`` are finite, ``[...]`` bool: NaN or inf shows as a non-finite value at the argmax."""
    return logits.gather(-1, greedy_tokens[..., None]).squeeze(-1).abs() < float("inf")


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """What the model thought of ``tokens`` ``[..., n]``, from logits ``[..., n, V]``: ``[..., n, 1 + 2 m]`` float64.

    The token's log-probability, the ids of the m most likely tokens, and their log-probabilities; m is
    ``num_top``, or V where that is less.
    """
    every = logits.log_softmax(-1, dtype=torch.float32)
    top = every.topk(min(num_top, every.shape[-1]))
    chosen = every.gather(-1, tokens[..., None])
    return torch.cat([chosen.double(), top.indices.double(), top.values.double()], -1)


def target_probs(logits: Tensor, greedy_tokens: Tensor, batch: SamplingBatch) -> Tensor:
    """The distribution that is sampled, ``[B, n, V]`` from logits ``[B, n, V]``, each row normalised.

    Temperature, then min-p, top-k and top-p, in vLLM's order. ``greedy_tokens`` ``[B, n]`` is the argmax; see
    ``draft_probs`` for the rows that are one-hot there.
    """
    probs = draft_probs(logits, greedy_tokens, batch)
    if batch.form.kind == "filtered":
        floor = batch.min_p[:, None, None] * probs.amax(-1, keepdim=True)
        keep_top = _keep_top_on_gpu if probs.is_cuda and HAS_FLASHINFER else _keep_top
        probs = keep_top(probs.masked_fill(probs < floor, 0), batch)
    return probs / probs.sum(-1, keepdim=True)


def draft_probs(logits: Tensor, greedy_tokens: Tensor, batch: SamplingBatch) -> Tensor:
    """Softmax at each sequence's temperature, ``[B, n, V]``; one-hot at ``greedy_tokens`` ``[B, n]`` at temperature 0.

    Rows with NaN or inf are one-hot too, so that a draw from them gives a token and the other rows go on.
    """
    temperature = batch.temperature[:, None, None]
    probs = (logits / temperature.clamp(min=1e-6)).softmax(-1)
    chosen = greedy_tokens[..., None]
    settled = (temperature == 0) | ~are_finite(logits, greedy_tokens)[..., None]
    # in place: probabilities of a large batch and vocabulary are what a step needs most memory for
    at_chosen = torch.where(settled, 1, probs.gather(-1, chosen))
    return probs.masked_fill_(settled, 0).scatter_(-1, chosen, at_chosen)


def _keep_top(probs: Tensor, batch: SamplingBatch) -> Tensor:
    """Zero all but the ``top_k`` most likely tokens, then all but the fewest that make up ``top_p`` of the rest."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    top_k = torch.where(batch.top_k > 0, batch.top_k, probs.shape[-1])[:, None, None]
    ordered = ordered.masked_fill(rank >= top_k, 0)
    before = ordered.cumsum(-1) - ordered
    nucleus = batch.top_p[:, None, None]
    outside = (before >= nucleus * ordered.sum(-1, keepdim=True)) & (nucleus < 1)
    return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(outside, 0))


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
