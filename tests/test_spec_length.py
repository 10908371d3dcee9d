"""The choice of K: near the best fixed K at every batch size and acceptance, and stable between equals."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from specgen.config import DraftLength
from specgen.core.spec_length import BestPlan, FixedPlan, RunningAcceptance, SpecLength, StepCosts, StepPlan
from specgen.engine.step_costs import timed_plans
from tests.marks import mostly_slow

MOST = 7
PLANS = timed_plans(256, DraftLength(most=MOST, kind="auto"))
TIMED = [(size, plan.num_drafts, plan.quarters) for size in PLANS for plan in PLANS[size]]
STEPS = 2000
Curve = Sequence[float]  # conditional acceptance by position


def cost(num_sequences: int, k: int) -> float:
    """Seconds per step, like an 8B model on an H100: memory-bound in a small batch, compute-bound in a large one."""
    return cost_of(num_sequences, k, num_sequences * k)


def cost_of(num_sequences: int, k: int, num_verified: float) -> float:
    """The same where so many drafts are verified in all."""
    rows = num_sequences + num_verified
    return ((5.8**3 + (0.0336 * rows) ** 3) ** (1 / 3) + 0.02 * num_sequences + 0.35 * k) / 1000


COSTS = StepCosts(seconds={(size, k): cost(size, k) for size, k, _ in TIMED})


OF_POSITION = 3.3e-8  # seconds, as an 8B model reads 128 KiB


def flat(rate: float) -> Curve:
    return (rate,) * MOST


def speed(num_sequences: int, k: int, curve: Curve, num_positions: int = 0) -> float:
    """Tokens per second with ``k`` drafts in the long run, with so many positions in the cache."""
    return num_sequences * tokens(k, curve) / (cost(num_sequences, k) + num_positions * OF_POSITION)


def tokens(k: int, curve: Curve) -> float:
    return 1 + float(np.cumprod(curve[:k]).sum())


def best(num_sequences: int, curve: Curve, num_positions: int = 0) -> float:
    return max(speed(num_sequences, k, curve, num_positions) for k in range(MOST + 1))


class Decoding:
    """Steps under a policy; the results of a step are read after the next one was launched."""

    def __init__(self, policy: BestPlan, seed: int = 0) -> None:
        self.policy = policy
        self.lengths: list[int] = []
        self._random = np.random.default_rng(seed)
        self._unread: list[tuple[int, int]] = []

    def run(self, num_steps: int, num_sequences: int, curve: Curve, num_positions: int = 0) -> float:
        """Tokens per second over ``num_steps``, from the expected tokens of the chosen lengths."""
        seconds = emitted = 0.0
        for _ in range(num_steps):
            k = self.policy.choose(num_sequences, num_positions).num_drafts
            for drafted, accepted in self._unread:
                self.policy.update((3,) * drafted, drafted, accepted)
            right = self._random.random((num_sequences, k)) < np.array(curve[:k])
            self._unread = [(k, int(many)) for many in np.cumprod(right, 1).sum(1)]
            self.lengths.append(k)
            seconds += cost(num_sequences, k) + num_positions * OF_POSITION
            emitted += num_sequences * tokens(k, curve)
        return emitted / seconds

    @property
    def num_changes(self) -> int:
        """Lasting changes of K: single steps with another K are probes."""
        lasting = [a for a, b in pairwise(self.lengths) if a == b]
        return sum(a != b for a, b in pairwise(lasting))


# --- costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_rows", "most_lost"),
    [
        # a dense model: rows are paid for by the 64, half of the time, from where weights are no longer what takes it
        (lambda rows: (5.0**6 + (0.015 * rows + 0.015 * 64 * -(-rows // 64)) ** 6) ** (1 / 6), 0.007),
        # a mixture: the first rows touch most experts
        (lambda rows: 1.0 + 5.0 * (1 - 0.9**rows) + 0.01 * rows, 0.0005),
    ],
)
def test_few_timed_steps_tell_the_others(of_rows: Callable[[int], float], most_lost: float) -> None:
    """Little speed is lost, on average of all batch sizes and of heads that are right more or less often."""

    def true(size: int, k: int) -> float:
        return of_rows(size * (k + 1)) + 0.3 * k

    assert len(TIMED) <= 28, "each is a CUDA graph to capture before a first token"
    costs, lost = StepCosts(seconds={(size, k): true(size, k) for size, k, _ in TIMED}), []
    for size, rate in product(range(1, 257, 2), (0.5, 0.65, 0.8, 0.9)):
        told = [tokens(k, flat(rate)) / costs.at(size, k) for k in range(MOST + 1)]
        speeds = [tokens(k, flat(rate)) / true(size, k) for k in range(MOST + 1)]
        lost.append(1 - speeds[told.index(max(told))] / max(speeds))
    assert np.mean(lost) < most_lost


def test_costs_are_interpolated_between_measured_batch_sizes_and_lengths():
    costs = StepCosts(seconds={(8, 0): 3.0, (2, 0): 1.0, (4, 0): 1.5, (2, 3): 5.0, (4, 3): 4.0})
    assert costs.lengths == (0, 1, 2, 3)
    assert [costs.at(4, k) for k in range(4)] == pytest.approx([1.5, 1.5 + 2.5 / 3, 1.5 + 5 / 3, 4.0])
    assert [costs.at(size, 0) for size in (1, 2, 3, 4, 6, 8)] == [1.0, 1.0, 1.25, 1.5, 2.25, 3.0]
    assert costs.at(10, 0) == 3.75  # extrapolated
    assert costs.at(10, 3) == 4.0  # but never decreasing
    assert StepCosts(seconds={(2, 1): 1.0}).at(7, 1) == 1.0


def test_what_positions_cost_is_between_that_of_no_and_of_most_drafts():
    costs = StepCosts(
        seconds={(4, k): 2.0 * k + 4 * (k + 1) for k in range(5)},
        partial={(4, k, part): 2.0 * k + 4 + part for k, part in ((1, 1), (4, 1), (4, 4), (4, 16))},
        of_position=(0.01, 0.03),
    )
    for k, each in ((0, 0.01), (2, 0.02), (4, 0.03)):
        assert costs.at(4, k, 700) == pytest.approx(costs.at(4, k) + 700 * each)
    assert costs.at_part(4, 2, 4, 700) == pytest.approx(costs.at_part(4, 2, 4) + 14)
    assert StepCosts(seconds={(1, 0): 1.0}, of_position=(0.01, 0.01)).at(1, 0, 100) == 2.0


# --- acceptance -----------------------------------------------------------------------------------


def expected_tokens(acceptance: RunningAcceptance) -> list[float]:
    """Tokens that a step with 0, 1, ... drafts is expected to give."""
    acceptance.step()
    survival = acceptance.survival(acceptance.chances())
    return [1.0, *(1 + survival.mean(0).cumsum())]


def test_observed_acceptance_outweighs_the_prior():
    acceptance = RunningAcceptance(3)
    for _ in range(100):
        for accepted in (0, 0, 1, 1, 1, 1, 3, 3, 3, 3):
            acceptance.update((3,) * 3, 3, accepted)
    a = expected_tokens(acceptance)
    assert a == pytest.approx([1, 1.8, 2.2, 2.6], rel=0.02)
    assert [expected_tokens(acceptance) for _ in range(3)] == [a] * 3  # no decay without new steps


def test_undrafted_positions_take_the_rate_of_the_last_drafted_one():
    acceptance = RunningAcceptance(4)
    for number in range(1000):
        acceptance.update((3,), 1, number % 2)
    assert expected_tokens(acceptance) == pytest.approx([1, 1.5, 1.75, 1.875, 1.9375], rel=0.01)


def test_steps_without_drafts_do_not_change_the_estimate():
    seen, other = RunningAcceptance(2), RunningAcceptance(2)
    for _ in range(100):
        seen.update((), 0, 0)
    assert expected_tokens(seen) == expected_tokens(other)


def test_one_large_step_does_not_erase_the_estimate():
    acceptance = RunningAcceptance(1)
    for _ in range(100):
        for _ in range(256):
            acceptance.update((3,), 1, 1)
        expected_tokens(acceptance)
    for _ in range(256):
        acceptance.update((3,), 1, 0)
    assert expected_tokens(acceptance)[1] > 1.8


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "num_sequences"),
    mostly_slow(
        product((0.02, 0.3, 0.6, 0.75, 0.9), (1, 8, 32, 128, 256)), (0.02, 1), (0.75, 32), (0.9, 128)
    ),
)
def test_throughput_is_near_the_best_fixed_k_and_k_is_stable(rate, num_sequences):
    curve, decoding = flat(rate), Decoding(BestPlan(COSTS))
    found = decoding.run(STEPS, num_sequences, curve)
    assert found >= 0.97 * best(num_sequences, curve)
    assert found >= 0.98 * speed(num_sequences, 0, curve)
    assert decoding.num_changes <= 12


RISING, FALLING = (0.5, 0.6, 0.65, 0.7, 0.7, 0.7, 0.7), (0.8, 0.4, 0.2, 0.1, 0.1, 0.1, 0.1)


@pytest.mark.parametrize(
    ("curve", "num_sequences"),
    mostly_slow(product((RISING, FALLING), (1, 8, 32, 64, 128, 256)), (RISING, 64), (FALLING, 8)),
)
def test_acceptance_that_varies_by_position(curve, num_sequences):
    decoding = Decoding(BestPlan(COSTS))
    assert decoding.run(STEPS, num_sequences, curve) >= 0.97 * best(num_sequences, curve)
    assert decoding.num_changes <= 30


@pytest.mark.parametrize(
    ("rates", "num_sequences"),
    mostly_slow(
        product(((0.9, 0.3), (0.3, 0.9), (0.9, 0.02), (0.02, 0.9)), (1, 8, 32, 128, 256)),
        ((0.9, 0.3), 32),
        ((0.02, 0.9), 8),
    ),
)
def test_k_follows_a_change_in_acceptance(rates, num_sequences):
    before, after = rates
    decoding = Decoding(BestPlan(COSTS))
    decoding.run(STEPS // 2, num_sequences, flat(before))
    decoding.run(STEPS // 4, num_sequences, flat(after))  # time to adapt
    assert decoding.run(STEPS // 4, num_sequences, flat(after)) >= 0.97 * best(num_sequences, flat(after))


@pytest.mark.parametrize("rate", mostly_slow([0.3, 0.6, 0.75, 0.9], 0.75))
def test_k_follows_a_shrinking_batch(rate):
    curve, decoding, ideal, taken = flat(rate), Decoding(BestPlan(COSTS)), 0.0, 0.0
    for num_sequences in range(256, 0, -1):
        taken += num_sequences / decoding.run(8, num_sequences, curve)
        ideal += num_sequences / best(num_sequences, curve)
    assert ideal >= 0.97 * taken
    assert decoding.num_changes <= MOST + 5
    assert decoding.lengths[-1] > decoding.lengths[100]


@pytest.mark.parametrize("num_sequences", mostly_slow([1, 32, 256], 32))
def test_exploration_takes_less_than_half_a_percent_of_the_time(num_sequences):
    """With a drafter that is never accepted, each probe is a full loss."""
    decoding = Decoding(BestPlan(COSTS))
    decoding.run(500, num_sequences, flat(0.0))
    decoding.lengths.clear()
    decoding.run(STEPS, num_sequences, flat(0.0))
    plain, seconds = cost(num_sequences, 0), sum(cost(num_sequences, k) for k in decoding.lengths)
    assert STEPS * plain < seconds <= 1.005 * STEPS * plain


@pytest.mark.parametrize("change", [lambda k: 0.0, lambda k: 0.0002 * (k == 3)])
def test_k_does_not_alternate_between_equal_choices(change: Callable[[int], float]):
    """The cost of each K is proportional to its tokens, so that noise decides."""
    curve = flat(0.7)
    seconds = {(size, k): tokens(k, curve) + change(k) for size in (1, 256) for k in range(MOST + 1)}
    decoding = Decoding(BestPlan(StepCosts(seconds=seconds)))
    decoding.run(STEPS, 64, curve)
    assert decoding.num_changes <= 20


def test_one_step_of_a_larger_batch_does_not_change_k():
    decoding = Decoding(BestPlan(COSTS))
    decoding.run(100, 1, flat(0.95))
    for _ in range(20):
        decoding.run(3, 256, flat(0.95))
        decoding.run(3, 1, flat(0.95))
    assert decoding.lengths[100:] == [MOST] * 120


def test_a_much_better_k_is_taken_at_once():
    decoding = Decoding(BestPlan(COSTS))
    decoding.run(200, 1, flat(0.6))
    decoding.run(5, 256, flat(0.6))
    assert min(decoding.lengths[100:200]) > 2 >= max(decoding.lengths[200:])


def test_a_change_resets_what_other_lengths_would_have_saved():
    """K 1 is 70 % faster for one sequence, K 0 5 % faster for two."""
    seconds = {(1, 0): 1.0, (1, 1): 1.0, (2, 0): 1.0, (2, 1): 1.7 * 1.05}
    length = BestPlan(StepCosts(seconds=seconds))
    assert [length.choose(size, 0).num_drafts for size in (2, 1, 2, 2)] == [0, 1, 1, 1]


def test_a_gain_of_half_a_percent_does_not_change_k():
    seconds = {(1, k): 1.0 if k == 2 else 10.0 for k in range(4)}
    seconds |= {(2, 0): 9.0, (2, 1): 9.0, (2, 2): 3.0, (2, 3): 4.0 / 1.005}  # where every draft is right
    decoding = Decoding(BestPlan(StepCosts(seconds=seconds)))
    decoding.run(100, 1, flat(1.0))
    decoding.run(STEPS, 2, flat(1.0))
    assert decoding.lengths.count(3) < 0.02 * STEPS


def test_a_length_that_was_not_timed_is_chosen_where_it_is_the_best():
    seconds = {(size, k): each for size in (1, 256) for k, each in ((0, 1.0), (2, 1.0), (4, 1.4), (7, 4.0))}
    decoding = Decoding(BestPlan(StepCosts(seconds=seconds)))
    decoding.run(400, 32, (0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1))
    assert decoding.lengths.count(3) > 300


def test_the_choice_is_deterministic():
    one, two = Decoding(BestPlan(COSTS), seed=1), Decoding(BestPlan(COSTS), seed=1)
    for decoding in (one, two):
        decoding.run(300, 16, flat(0.6))
    assert one.lengths == two.lengths


def test_a_fixed_k_never_changes():
    fixed = FixedPlan(StepPlan(num_drafts=4))
    fixed.update((3,) * 4, 4, 0)
    assert [fixed.choose(size, 0) for size in (1, 256)] == [StepPlan(num_drafts=4)] * 2
    assert fixed.most == 4


@pytest.mark.parametrize(
    ("num_sequences", "context"),
    mostly_slow([(64, 8000), (128, 4000), (16, 32000), (1, 32000)], (64, 8000), (1, 32000)),
)
def test_drafts_pay_in_large_batches_of_long_contexts(num_sequences, context):
    """The step takes long for the sake of its contexts, whatever is drafted."""
    curve, num_positions = flat(0.75), num_sequences * context
    knows, assumes_short = (
        Decoding(BestPlan(replace(COSTS, of_position=each)))
        for each in ((OF_POSITION, OF_POSITION), (0.0, 0.0))
    )
    found = knows.run(STEPS, num_sequences, curve, num_positions)
    assert found > 0.98 * best(num_sequences, curve, num_positions)
    usual = assumes_short.run(STEPS, num_sequences, curve, num_positions)
    assert found > usual * (1.03 if num_sequences >= 64 else 0.99)


def test_what_is_verified_of_the_drafts_depends_on_the_contexts_too():
    policy = BestPlan(replace(WITH_PARTS, of_position=(OF_POSITION, OF_POSITION)))
    speed_of(policy, 128, tells=True, num_steps=150)
    short = policy.choose(128, 0)
    for _ in range(20):
        long = policy.choose(128, 128 * 8000)
    assert long.num_verified(128) is None or long.num_verified(128) > 1.5 * short.num_verified(128)


# --- a part of the drafts -------------------------------------------------------------------------

RIGHT = np.array([0.08, 0.13, 0.21, 0.28, 0.34, 0.46, 0.64, 0.69, 0.81, 0.93, 0.97, 0.995])  # by level
SHARES = np.array([0.04] * 9 + [0.15, 0.2, 0.29])  # of drafts
WITH_PARTS = StepCosts(
    seconds=COSTS.seconds,
    partial={(size, k, part): cost_of(size, k, size * part / 4) for size, k, part in TIMED if part},
)


def speed_of(policy: SpecLength, num_sequences: int, *, tells: bool, num_steps: int = 400) -> float:
    """Tokens per second with a drafter that knows how likely each draft is, or says anything."""
    random = np.random.default_rng(0)
    unread: list[tuple[tuple[int, ...], int, int]] = []
    seconds = emitted = 0.0
    for step in range(num_steps):
        plan = policy.choose(num_sequences, 0)
        for each in unread:
            policy.update(*each)
        k, count = plan.num_drafts, plan.num_verified(num_sequences)
        known = random.choice(len(RIGHT), (num_sequences, k), p=SHARES)
        said = known if tells else random.integers(0, len(RIGHT), known.shape)
        right = random.random(known.shape) < RIGHT[known]
        kept = np.ones(known.shape, dtype=bool)
        if count is not None:
            likely = np.cumprod(np.array(plan.chances)[np.arange(k), said], 1)
            kept = (likely >= np.sort(likely.flatten())[-count]) & (likely > 0)
        accepted = np.cumprod(right & kept, 1).sum(1)
        unread = [
            (tuple(map(int, row)), int(verified), int(many))
            for row, verified, many in zip(said, kept.sum(1), accepted, strict=True)
        ]
        if step >= 100:
            seconds += cost_of(num_sequences, k, num_sequences * k if count is None else count)
            emitted += num_sequences + int(accepted.sum())
    return emitted / seconds


@pytest.mark.parametrize(
    ("num_sequences", "least"), mostly_slow([(64, 1.04), (128, 1.07), (256, 1.07)], (128, 1.07))
)
def test_verifying_what_is_likely_pays_in_large_batches(num_sequences, least):
    uniform, auto = (speed_of(BestPlan(costs), num_sequences, tells=True) for costs in (COSTS, WITH_PARTS))
    assert auto > least * uniform


@pytest.mark.parametrize("num_sequences", mostly_slow([1, 8, 32, 64, 128], 64))
def test_a_drafter_that_knows_nothing_of_itself_costs_nothing(num_sequences):
    uniform, auto = (speed_of(BestPlan(costs), num_sequences, tells=False) for costs in (COSTS, WITH_PARTS))
    assert auto >= 0.985 * uniform


def test_a_batch_that_drains_to_one_sequence_verifies_all_again():
    policy = BestPlan(WITH_PARTS)
    speed_of(policy, 128, tells=True, num_steps=150)
    assert policy.choose(128, 0).quarters is not None
    assert policy.choose(1, 0).quarters is None


def test_costs_of_a_part_are_those_of_its_drafts_and_rows():
    """One draft takes 2 ms, a row 1 ms, and the form of a part 3 ms."""
    seconds = {(4, k): 2.0 * k + 4 * (k + 1) for k in range(5)}
    partial = {(4, k, part): 2.0 * k + 4 + part + 3 for k, part in ((1, 1), (4, 1), (4, 4), (4, 16))}
    costs = StepCosts(seconds=seconds, partial=partial)
    for k, part in ((4, 8), (3, 8), (2, 4), (1, 1)):
        assert costs.at_part(4, k, part) == pytest.approx(2.0 * k + 4 + part + 3)


def test_costs_of_a_part_know_the_steps_in_the_cost_of_rows():
    """Rows are paid for 32 at a time; parts are timed with 4 and 16 sequences, and with 8 only whole steps are."""

    def true(size: int, k: int, num_rows: int) -> float:
        return 10.0 * -(-num_rows // 32) + k * (0.5 + 0.1 * size)

    seconds = {(size, k): true(size, k, size * (k + 1)) for size in (4, 8, 16) for k in range(5)}
    partial = {
        (size, k, part): true(size, k, size + size * part // 4) + 2
        for size in (4, 16)
        for k, part in ((1, 1), (4, 1), (4, 4), (4, 8), (4, 16))
    }
    costs = StepCosts(seconds=seconds, partial=partial)
    for part in (4, 8, 16):
        assert costs.at_part(8, 4, part) == pytest.approx(true(8, 4, 8 + 2 * part) + 2)
