"""Acceptance statistics of one request and of sets of requests, by draft position."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain, pairwise
from operator import add
from typing import Any

import numpy as np

from specgen.config import CONFIDENCE_LEVELS, require
from specgen.record.columns import Array, Run
from specgen.record.record_rows import PARTS, RequestRow, StepCounts
from specgen.report.intervals import Estimate, Interval, Ratio, clustered_mean, student_t

_UNLIKE = 1.02  # a length over the tokens per step that texts got


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """The speculation of one request; fields as in vLLM's ``RequestSpecDecodeMetrics``, but for the last.

    Only steps with drafts count; the two rates are None without any. ``num_spec_tokens`` is the configured K.
    """

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: tuple[int, ...]  # [K + 1]: steps that accepted exactly j drafts
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: tuple[int, ...]  # [num_spec_steps]
    num_steps_without_drafts: int

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_row(self) -> dict[str, Any]:
        """The numbers alone, for a row, whose ``record`` has the lists."""
        return {name: number for name, number in vars(self).items() if not isinstance(number, tuple)}

    @classmethod
    def of_samples(cls, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All of it, from a row of ``completions.jsonl``, or of the samples of a prompt together.

        Steps that were not kept are none in ``per_step_accepted``.
        """
        requests = [RequestRow.of_row(row) for row in rows]
        steps = chain.from_iterable(request.steps or () for request in requests)
        counts = reduce(add, (request.counts for request in requests))
        per_step = (step.accepted for step in steps if step.drafts)
        return metrics_of(counts, per_step, rows[0]["metrics"]["num_spec_tokens"]).to_json()


@dataclass(frozen=True, kw_only=True)
class Position:
    """Acceptance of the draft at one position; rates and intervals are None without data.

    ``rate`` (joint) is ``accepted / drafted``: the steps that accepted more than ``position`` drafts
    among those that drafted more. ``conditional`` is ``accepted / reached``: among those that also
    accepted all earlier ones.
    """

    position: int
    drafted: int
    reached: int
    accepted: int
    rate: float | None
    ci95: Interval | None
    conditional: float | None
    conditional_ci95: Interval | None


@dataclass(frozen=True, kw_only=True)
class Level:
    """Drafts of which the drafter was so sure, behind accepted ones; ``share`` of them were accepted."""

    at_least: float  # of its confidence
    drafts: int
    accepted: int
    share: float | None
    ci95: Interval | None


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """How well the drafter's confidence predicts acceptance.

    ``auc`` is the chance that of an accepted and a rejected draft, any two, the drafter was surer of the accepted one
    (half a chance where both are of one level): 0.5 says nothing, 1 tells all. None without both kinds.
    """

    levels: tuple[Level, ...]
    auc: float | None

    @property
    def bounds(self) -> list[tuple[float, float]]:
        """The ends of each level."""
        return list(pairwise([*(level.at_least for level in self.levels), 1.0]))

    @property
    def ece(self) -> float | None:
        """The expected calibration error: how far accepted shares are from confidence, the mean over drafts.

        Confidence is that of the middle of a draft's level. 0 for a drafter that is accepted as often as it expects.
        None without a draft.
        """
        drafts = sum(level.drafts for level in self.levels)
        far = (
            abs(level.accepted - level.drafts * (low + high) / 2)
            for level, (low, high) in zip(self.levels, self.bounds, strict=True)
        )
        return sum(far) / drafts if drafts else None


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Counters and acceptance of a set of requests; ``mean_acceptance_length`` is pooled over their steps.

    ``num_drafts`` counts the steps with drafts, ``num_accepted_tokens`` all accepted drafts, as vLLM's metrics do: also
    those behind the end of a text, which no text has. ``tokens_per_step`` is what texts got from a step, with drafts or
    without (None where it is not known). Drafts are those that were verified, but for ``num_unverified_tokens``.
    Intervals (95 %) treat conversations, not steps, as independent: see ``intervals.Ratio``. Reports of earlier
    versions lack what has a default, here and in ``Report``.
    """

    num_requests: int
    total_num_output_tokens: int
    num_drafts: int
    num_steps_without_drafts: int = 0
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float | None
    mean_acceptance_length_ci95: Interval | None
    mean_acceptance_length_per_request: float | None
    draft_acceptance_rate: float | None
    acceptance: tuple[Position, ...]  # [K]
    acceptance_histogram: tuple[int, ...]  # [K + 1]: steps that accepted exactly j drafts
    num_unverified_tokens: int = 0  # drafts that were found too unlikely to be accepted
    confidence: Confidence = Confidence(levels=(), auc=None)
    tokens_per_step: float | None = None
    # steps that accepted no more drafts because of a constraint; None: there was none
    cut_rate: float | None = None

    @property
    def length_over_all_steps(self) -> float | None:
        """1 + accepted drafts / verify steps, those without drafts too; None without a step that has some."""
        steps = self.num_drafts + self.num_steps_without_drafts
        return 1 + self.num_accepted_tokens / steps if self.num_drafts else None

    @property
    def received(self) -> float | None:
        """``tokens_per_step`` where it is not about the length over all steps: as texts ended within their steps."""
        length, got = self.length_over_all_steps, self.tokens_per_step
        return got if length is not None and got is not None and length > _UNLIKE * got else None


def metrics_of(counts: StepCounts, per_step: Iterable[int], num_spec_tokens: int) -> RequestMetrics:
    """The metrics of one request of a run with this K: of its ``counts``, and what each step with drafts accepted."""
    more = num_spec_tokens - len(counts.drafted)
    require(
        more >= 0, f"a step has {len(counts.drafted)} drafts but K is {num_spec_tokens}: give the run's K"
    )
    drafted, accepted, num_steps = sum(counts.drafted), sum(counts.accepted), counts.num_steps
    return RequestMetrics(
        mean_acceptance_length=1 + accepted / num_steps if num_steps else None,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        acceptance_histogram=(*counts.histogram, *[0] * more),
        num_spec_steps=num_steps,
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=num_spec_tokens,
        per_step_accepted=tuple(per_step),
        num_steps_without_drafts=counts.without_drafts,
    )


def _length_interval(accepted: Ratio, num_spec_tokens: int) -> Interval | None:
    """The 95 % interval of the mean acceptance length; ``accepted`` are drafts per step."""
    interval = accepted.mean_interval()
    if interval is None:
        return None
    # a step yields 1 to K + 1 tokens, also where the approximation exceeds that
    return 1 + max(0.0, interval[0]), 1 + min(float(num_spec_tokens), interval[1])


class Acceptance:
    """The verify steps of a set of requests: counts by draft position and by confidence, their rates and intervals.

    What is independent is not the step but the unit of ``Run``: the turns of a conversation have its earlier answers in
    their context.
    """

    def __init__(self, run: Run) -> None:
        self.counts, self._num_tokens = run.counts, run.num_output_tokens
        _, self._units = np.unique(run.unit, return_inverse=True)

    @property
    def num_spec_tokens(self) -> int:
        return self.counts.num_spec_tokens

    def per_unit(self, column: Array) -> Array:
        """The sums of ``column`` ``[n]`` over the requests of each unit."""
        # in floats, which are exact up to 2^53
        return np.bincount(self._units, column).astype(np.int64)

    def ratio(self, hits: Array, trials: Array) -> Ratio:
        """The ratio of two columns ``[n]``, unit by unit."""
        return Ratio(self.per_unit(hits), self.per_unit(trials))

    @property
    def length(self) -> Ratio:
        """Accepted drafts per step with drafts."""
        return self.ratio(self.counts.num_accepted, self.counts.num_drafts)

    @property
    def mean_length(self) -> float | None:
        """The mean acceptance length: 1 + accepted drafts per step with drafts; None without one."""
        rate = self.length.rate
        return None if rate is None else 1 + rate

    def over_all_steps(self, positions: slice = slice(None)) -> Ratio:
        """Accepted drafts at ``positions`` per step, with drafts or without."""
        accepted = self.counts.accepted[:, positions].sum(axis=1, dtype=np.int64)
        return self.ratio(accepted, self.counts.num_steps)

    def joint(self, position: int) -> Ratio:
        """Accepted drafts at ``position`` per draft."""
        return self.ratio(self.counts.accepted[:, position], self.counts.drafted[:, position])

    def conditional(self, position: int) -> Ratio:
        """Accepted drafts at ``position`` per draft behind accepted ones."""
        return self.ratio(self.counts.accepted[:, position], self.counts.reached[:, position])

    def speculation(self) -> Speculation:
        """All that a report says of these requests."""
        counts, length = self.counts, self.length
        num_drafts, most = counts.num_drafts, self.num_spec_tokens
        drafted, without = int(counts.drafted.sum()), int(counts.without_drafts.sum())
        steps, emitted = length.trials + without, int(np.maximum(self._num_tokens - 1, 0).sum())
        at_least = [length.trials, *counts.accepted.sum(axis=0, dtype=np.int64).tolist(), 0]
        return Speculation(
            num_requests=len(counts),
            total_num_output_tokens=int(self._num_tokens.sum()),
            num_drafts=length.trials,
            num_steps_without_drafts=without,
            num_draft_tokens=drafted,
            num_accepted_tokens=length.hits,
            mean_acceptance_length=self.mean_length,
            mean_acceptance_length_ci95=_length_interval(length, most),
            mean_acceptance_length_per_request=_mean_over_requests(num_drafts, counts.num_accepted),
            draft_acceptance_rate=length.hits / drafted if drafted else None,
            acceptance=tuple(self._position(position) for position in range(most)),
            acceptance_histogram=tuple(a - b for a, b in pairwise(at_least)),
            num_unverified_tokens=int(counts.unverified.sum()),
            confidence=self._confidence(),
            tokens_per_step=emitted / steps if steps else None,
            cut_rate=cut / length.trials if (cut := int(counts.cut.sum())) else None,
        )

    def _confidence(self) -> Confidence:
        counts, levels = self.counts, range(len(CONFIDENCE_LEVELS))
        # accepted drafts per draft that the target decided on
        ratios = [self.ratio(counts.level_accepted[:, at], counts.level_reached[:, at]) for at in levels]
        accepted = [level.hits for level in ratios]
        rejected = [level.trials - level.hits for level in ratios]
        below, surer = 0, 0.0  # rejected ones of lower levels; pairs
        for right, wrong in zip(accepted, rejected, strict=True):
            surer += right * (below + wrong / 2)
            below += wrong
        pairs = sum(accepted) * sum(rejected)
        return Confidence(
            levels=tuple(
                Level(
                    at_least=at_least,
                    drafts=level.trials,
                    accepted=level.hits,
                    share=level.rate,
                    ci95=level.share_interval(),
                )
                for at_least, level in zip(CONFIDENCE_LEVELS, ratios, strict=True)
            ),
            auc=surer / pairs if pairs else None,
        )

    def _position(self, position: int) -> Position:
        joint, conditional = self.joint(position), self.conditional(position)
        return Position(
            position=position,
            drafted=joint.trials,
            reached=conditional.trials,
            accepted=joint.hits,
            rate=joint.rate,
            ci95=joint.share_interval(),
            conditional=conditional.rate,
            conditional_ci95=conditional.share_interval(),
        )

    @cached_property
    def length_over_all_steps(self) -> Estimate | None:
        """1 + accepted drafts per step, with drafts or without; None without a step.

        So it is what plain decoding's passes are divided by, also of n-grams, which draft in some steps only.
        """
        found = self.over_all_steps()
        if found.rate is None:
            return None
        return Estimate(1 + found.rate, _length_interval(found, self.num_spec_tokens))

    @cached_property
    def positions_over_all_steps(self) -> list[Estimate]:
        """[K]: accepted drafts by position per step, with drafts or without: 1 + their sum is the length."""
        found = [self.over_all_steps(slice(i, i + 1)).estimate for i in range(self.num_spec_tokens)]
        return [each for each in found if each is not None]

    def mean_over_requests_interval(self) -> Interval | None:
        """The 95 % interval of the mean of the requests' lengths, over units; None without a spread.

        As the mean in a report, of steps with drafts.
        """
        drafting = np.flatnonzero(self.counts.num_drafts)
        lengths = 1 + self.counts.num_accepted[drafting] / self.counts.num_drafts[drafting]
        units: dict[int, list[float]] = {}
        for unit, length in zip(self._units[drafting].tolist(), lengths.tolist(), strict=True):
            units.setdefault(unit, []).append(length)
        interval, _ = clustered_mean(list(units.values()))
        if interval is None:
            return None
        # as in ``_length_interval``
        return max(1.0, interval[0]), min(self.num_spec_tokens + 1.0, interval[1])


def mean_length(parts: Sequence[Acceptance | None]) -> Estimate | None:
    """The mean of the lengths over all steps of independent data sets, each with the same weight; None without one.

    Degrees of freedom by Satterthwaite (Biometrics Bulletin 2, 1946).
    """
    known = [each for each in parts if each is not None and each.counts.num_steps.any()]
    if not known or len(known) < len(parts):
        return None
    ratios = [each.over_all_steps() for each in known]
    mean = 1 + math.fsum(each.rate or 0.0 for each in ratios) / len(ratios)
    spreads = [(each.variance(), each.groups - 1) for each in ratios if each.groups > 1]
    spreads = [(variance, freedom) for variance, freedom in spreads if variance]
    if len(spreads) < len(ratios):
        return Estimate(mean, None)
    total = math.fsum(variance for variance, _ in spreads)
    freedom = total**2 / math.fsum(variance**2 / freedom for variance, freedom in spreads)
    half = student_t(freedom) * math.sqrt(total) / len(ratios)
    most = max(each.num_spec_tokens for each in known) + 1.0
    return Estimate(mean, (max(1.0, mean - half), min(most, mean + half)))


def figures(run: Run, by: str | None = None) -> dict[str, Acceptance]:
    """The acceptance of a run: of all its requests under ``""``, or ``by`` ``category``, ``turn`` or ``part``."""
    if by is None:
        return {"": Acceptance(run)}
    groups = {part: run.part(part) for part in PARTS} if by == "part" else run.by(by)
    return {label: Acceptance(group) for label, group in groups.items()}


def _mean_over_requests(steps: Array, accepted: Array) -> float | None:
    """The mean of the requests' lengths; summed by number of steps, so that the order of requests changes nothing."""
    by_steps = np.bincount(steps, accepted)[1:].tolist()
    requests = int(np.count_nonzero(steps))
    lengths = sum(accepted / steps for steps, accepted in enumerate(by_steps, start=1))
    return 1 + lengths / requests if requests else None
