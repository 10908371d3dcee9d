"""Acceptance statistics of one request and of sets of requests, by draft position."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specgen.config import CONFIDENCE_LEVELS
from specgen.record.record_rows import Step, StepCounts
from specgen.report.intervals import Interval, Ratio

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
    """What the drafter's confidence is worth.

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


def fold_request(steps: Sequence[Step], counts: StepCounts) -> RequestMetrics:
    """The metrics of one request from its steps and their ``counts``."""
    per_step = tuple([step.accepted for step in steps if step.drafts])
    drafted, accepted, num_steps = sum(counts.drafted), sum(counts.accepted), counts.num_steps
    return RequestMetrics(
        mean_acceptance_length=1 + accepted / num_steps if num_steps else None,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        acceptance_histogram=tuple(counts.histogram),
        num_spec_steps=num_steps,
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=len(counts.drafted),
        per_step_accepted=per_step,
        num_steps_without_drafts=counts.without_drafts,
    )


def length_interval(accepted: Ratio, num_spec_tokens: int) -> Interval | None:
    """The 95 % interval of the mean acceptance length; ``accepted`` are drafts per step."""
    interval = accepted.mean_interval()
    if interval is None:
        return None
    # a step yields 1 to K + 1 tokens, also where the approximation exceeds that
    return 1 + max(0.0, interval[0]), 1 + min(float(num_spec_tokens), interval[1])


class RequestSum:
    """Sums over requests, in memory proportional to K and to the number of conversations that have turns to come.

    What is independent is the conversation: the turns of one have its earlier answers in their context. Those that
    begin with the same prompt are one.
    """

    def __init__(self, num_spec_tokens: int) -> None:
        self._num_requests = 0
        self._num_tokens = self._num_emitted = 0  # emitted by steps: all but the prefill's
        # requests and their accepted drafts by steps per request: in integers, so that their order changes nothing
        self._accepted_in: dict[int, tuple[int, int]] = {}
        self._length = Ratio()  # accepted drafts per step
        self._joint = [Ratio() for _ in range(num_spec_tokens)]
        self._conditional = [Ratio() for _ in range(num_spec_tokens)]
        self._histogram = [0] * (num_spec_tokens + 1)
        self._without_drafts = self._unverified = 0
        self._levels = [Ratio() for _ in CONFIDENCE_LEVELS]
        self._open: dict[str, StepCounts] = {}  # of conversations

    def add(
        self, counts: StepCounts, num_tokens: int, conversation: str = "", num_turns_left: int = 0
    ) -> None:
        """Add one request with ``num_tokens`` output tokens, behind which its conversation has so many turns."""
        steps = counts.num_steps
        self._num_requests += 1
        self._num_tokens += num_tokens
        self._num_emitted += max(num_tokens - 1, 0)
        number, accepted = self._accepted_in.get(steps, (0, 0))
        self._accepted_in[steps] = number + 1, accepted + sum(counts.accepted)
        self._without_drafts += counts.without_drafts
        self._unverified += counts.unverified
        self._histogram = [a + b for a, b in zip(self._histogram, counts.histogram, strict=True)]
        earlier = self._open.pop(conversation, None)
        unit = counts if earlier is None else earlier + counts
        if num_turns_left > 0:
            self._open[conversation] = unit
        else:
            self._close(unit)

    def _close(self, unit: StepCounts) -> None:
        """Add all turns of a conversation, or as many as there were."""
        self._length.add(sum(unit.accepted), unit.num_steps)
        for position, hits in enumerate(unit.accepted):
            self._joint[position].add(hits, unit.drafted[position])
            self._conditional[position].add(hits, unit.reached[position])
        for level, hits in enumerate(unit.level_accepted):
            self._levels[level].add(hits, unit.level_reached[level])

    def result(self) -> Speculation:
        """The counters and rates of all requests; none may follow."""
        while self._open:
            self._close(self._open.popitem()[1])
        length, drafted = self._length, sum(ratio.trials for ratio in self._joint)
        steps = length.trials + self._without_drafts
        return Speculation(
            num_requests=self._num_requests,
            total_num_output_tokens=self._num_tokens,
            num_drafts=length.trials,
            num_steps_without_drafts=self._without_drafts,
            num_draft_tokens=drafted,
            num_accepted_tokens=length.hits,
            mean_acceptance_length=None if length.rate is None else 1 + length.rate,
            mean_acceptance_length_ci95=length_interval(length, len(self._joint)),
            mean_acceptance_length_per_request=self._mean_over_requests(),
            draft_acceptance_rate=length.hits / drafted if drafted else None,
            acceptance=tuple(self._position(position) for position in range(len(self._joint))),
            acceptance_histogram=tuple(self._histogram),
            num_unverified_tokens=self._unverified,
            confidence=self._confidence(),
            tokens_per_step=self._num_emitted / steps if steps else None,
        )

    def _confidence(self) -> Confidence:
        accepted = [level.hits for level in self._levels]
        rejected = [level.trials - level.hits for level in self._levels]
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
                for at_least, level in zip(CONFIDENCE_LEVELS, self._levels, strict=True)
            ),
            auc=surer / pairs if pairs else None,
        )

    def _mean_over_requests(self) -> float | None:
        sums = sorted((steps, accepted) for steps, (_, accepted) in self._accepted_in.items() if steps)
        requests = sum(number for steps, (number, _) in self._accepted_in.items() if steps)
        return 1 + sum(accepted / steps for steps, accepted in sums) / requests if requests else None

    def _position(self, position: int) -> Position:
        joint, conditional = self._joint[position], self._conditional[position]
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
