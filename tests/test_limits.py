"""Limits fall when memory runs out and rise again, later if a raise failed."""

from specgen.core.scheduler import _QUIET, Limits


def passes(limits: Limits, count: int) -> None:
    for _ in range(count):
        limits.see_pass()


def test_out_of_memory_halves_one_limit() -> None:
    limits = Limits(max_batch_size=100, max_prefill_tokens=5)
    limits.lower_batch(31)
    assert (limits.max_batch_size, limits.max_prefill_tokens) == (15, 5)
    assert limits.lower_prefill()
    assert limits.lower_prefill()
    assert (limits.max_batch_size, limits.max_prefill_tokens) == (15, 1)
    assert not limits.lower_prefill()
    limits.lower_batch(1)
    assert limits.max_batch_size == 1


def test_successful_passes_double_limits_up_to_the_configured_ones() -> None:
    limits = Limits(max_batch_size=8, max_prefill_tokens=100)
    limits.lower_batch(6)
    limits.lower_prefill()
    passes(limits, _QUIET - 1)
    assert (limits.max_batch_size, limits.max_prefill_tokens) == (3, 50)
    passes(limits, 1)
    assert (limits.max_batch_size, limits.max_prefill_tokens) == (6, 100)
    passes(limits, _QUIET)
    assert (limits.max_batch_size, limits.max_prefill_tokens) == (8, 100)
    for _ in range(3):
        limits.lower_prefill()
    assert limits.max_prefill_tokens == 12
    passes(limits, 2 * _QUIET)  # after a raise that failed
    assert limits.max_prefill_tokens == 24


def test_only_a_pass_with_which_limits_rise_says_so() -> None:
    limits = Limits(max_batch_size=8, max_prefill_tokens=100)
    assert not any(limits.see_pass() for _ in range(3 * _QUIET)), "they are at their most"
    limits.lower_batch(8)
    assert [limits.see_pass() for _ in range(_QUIET)] == [False] * (_QUIET - 1) + [True]
    assert not any(limits.see_pass() for _ in range(2 * _QUIET))


def test_a_raise_that_failed_is_retried_later() -> None:
    limits = Limits(max_batch_size=8, max_prefill_tokens=100)
    limits.lower_batch(8)
    passes(limits, _QUIET)
    assert limits.max_batch_size == 8
    limits.lower_batch(8)
    limits.lower_batch(4)  # the same out-of-memory error
    assert limits.max_batch_size == 2
    passes(limits, 2 * _QUIET - 1)
    assert limits.max_batch_size == 2
    passes(limits, 1)
    assert limits.max_batch_size == 4
