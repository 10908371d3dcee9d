"""How many times as fast an arm is as another, beside scipy; and the best line."""

import math
import random
from collections import Counter
from dataclasses import asdict, replace
from itertools import chain, pairwise

import msgspec
import pytest
from scipy import stats

from specgen.experiments.rounds import Ranking, Repeat, Repeats, half_width
from specgen.experiments.turns import balanced_order, digest
from specgen.report.timings import LatencyStats

SPREAD = LatencyStats(mean=1.0, median=2.0, p99=3.0)


def repeat(seconds: float) -> Repeat:
    return Repeat(
        seconds=seconds,
        num_tokens=1000,
        acceptance_length=2.5,
        acceptance=(0.75, None),
        ttft=SPREAD,
        tpot=None,
        itl=SPREAD,
        step_seconds=0.5,
        mean_sequences=3.5,
        texts={"a": digest((1, 2))},
        num_wrong=0,
        disturbances=("late",),
    )


def repeats(seconds: dict[int, float]) -> Repeats:
    return Repeats(each={f"round {n}": repeat(each) for n, each in seconds.items()})


def drawn(seed: int, numbers: range, mean: float, drift: float = 0.0) -> dict[int, float]:
    rng = random.Random(seed)
    return {n: mean * math.exp(rng.gauss(0, 0.02) + drift * n) for n in numbers}


def test_a_repeat_comes_back_from_its_file() -> None:
    row = asdict(repeat(2.0))
    assert msgspec.convert(row, Repeat) == repeat(2.0)
    earlier = row | {"step_bytes": 9.0, "wall": {"prefill": 1.0}, "prefill_passes": 3, "prefill_flops": 1e12}
    assert msgspec.convert(earlier, Repeat) == repeat(2.0), "what earlier versions kept too is no hindrance"
    assert digest((1, 2)) != digest((12,)) != digest((1, 2, 3))


def test_arms_that_met_are_compared_round_by_round() -> None:
    mine, theirs = drawn(1, range(2, 9), 1.0, 0.3), drawn(2, range(1, 8), 2.0, 0.3)
    found = repeats(mine).speedup(repeats(theirs))
    logs = [math.log(theirs[n] / mine[n]) for n in range(2, 8)]
    ends = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert (found.value, *found.interval) == pytest.approx(
        [math.exp(x) for x in (sum(logs) / 6, ends.low, ends.high)]
    )
    assert half_width(found) == pytest.approx((ends.high - ends.low) / 2)
    assert half_width(found) < 0.05, "that both become slower cancels"
    surer = repeats(mine).speedup(repeats(theirs), 0.999).interval
    assert surer == pytest.approx(
        [math.exp(x) for x in stats.ttest_1samp(logs, 0).confidence_interval(0.999)]
    )


def test_arms_that_never_met_are_compared_as_two_samples() -> None:
    mine, theirs = drawn(3, range(5), 1.0), drawn(4, range(5, 9), 1.5)
    found = repeats(mine).speedup(repeats(theirs))
    logs = [[-math.log(x) for x in each.values()] for each in (mine, theirs)]
    ends = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    assert found.interval == pytest.approx([math.exp(ends.low), math.exp(ends.high)])


def test_one_round_has_no_interval() -> None:
    for one, other in (({1: 1.0}, {1: 2.0}), ({1: 1.0}, {2: 2.0, 3: 2.0})):
        found = repeats(one).speedup(repeats(other))
        assert (found.value, found.interval, half_width(found)) == (pytest.approx(2), None, math.inf)


def test_few_repeats_decide_nothing() -> None:
    slow, fast = {n: 2 + n / 1e6 for n in range(3)}, dict.fromkeys(range(3), 1.0)
    ranking = Ranking(
        plain="plain", arms={"slow": repeats(slow), "fast": repeats(fast), "plain": repeats(slow)}
    )
    assert (ranking.best, ranking.cannot_win("slow"), ranking.cannot_win("fast")) == ("fast", True, False)
    assert not ranking.cannot_win("plain"), "it is what others are measured by"
    del slow[2]
    fewer = Ranking(plain="plain", arms={"slow": repeats(slow), "fast": repeats(fast)})
    assert not fewer.cannot_win("slow")


@pytest.mark.parametrize("num", range(2, 8))
def test_every_arm_is_at_every_place_and_behind_every_other_equally_often(num: int) -> None:
    arms = [f"arm {number}" for number in range(num)]
    orders = [balanced_order(arms, number) for number in range(num * (1 + num % 2))]
    assert all(sorted(order) == arms for order in orders)
    behind = Counter(chain.from_iterable(map(pairwise, orders)))
    assert len(behind) == num * (num - 1)
    assert len(set(behind.values())) == 1
    assert len(set(Counter((at, arm) for order in orders for at, arm in enumerate(order)).values())) == 1
    assert len({order[0] for order in orders[:num]}) == num, "each begins one of the first rounds"


def test_texts_that_differ_from_repeat_to_repeat_are_told() -> None:
    steady, other = repeats({1: 1.0, 2: 1.0}), repeats({1: 1.0, 2: 1.0})
    assert steady.same_texts(other) == 1
    assert steady.disturbances == ["late"]
    changed = replace(other.each["round 2"], texts={"a": digest((1, 3))})
    unsteady = Repeats(each={**other.each, "round 2": changed})
    assert steady.same_texts(unsteady) == unsteady.same_texts(steady) == 0, "the first repeats are the same"
    assert unsteady.disturbances == ["late", "1 of 1 texts differ from repeat to repeat"]
