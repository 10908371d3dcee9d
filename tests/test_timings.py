"""Latencies over requests, and wall times of resumed and sharded runs."""

import pytest

from specgen.report.timings import LatencyStats, WallClock, latency_stats


def test_latency_stats_do_not_depend_on_order():
    assert latency_stats([]) is None
    times = [5.0, 1.0, 2.0, 3.0, 100.0]
    assert latency_stats(times) == LatencyStats(mean=22.2, median=3.0, p99=pytest.approx(96.2))
    assert latency_stats([2.0]) == LatencyStats(mean=2.0, median=2.0, p99=2.0)


def clock(*times, session="0/1-0", seconds=None):
    """A clock that has seen ``times`` of a session."""
    made = WallClock() if seconds is None else seconds
    for time in times:
        made.see(session, time)
    return made


def test_a_clock_runs_from_the_first_time_to_the_last_whatever_their_order():
    assert clock().seconds == 0
    assert clock(0.5).seconds == 0
    assert clock(0.25, 0.75, 0.5, 0.125).seconds == 0.625


def test_resumed_times_add_up():
    run = clock(0.25, 0.75)
    assert clock(0.125, 0.375, session="0/1-1", seconds=run).seconds == 0.75
    assert clock(3.0, 3.5, session="0/1-3", seconds=run).seconds == 1.25
    assert not run.sharded


def test_the_slowest_shard_counts():
    run = clock(0.25, 0.75, session="0/4-0")
    assert not run.sharded, "one shard alone is a run"
    for number, (times, slowest) in enumerate(
        (((0.125, 0.25), 0.5), ((0.0, 0.875), 0.875), ((2.0, 2.25), 0.875))
    ):
        assert clock(*times, session=f"{number + 1}/4-0", seconds=run).seconds == slowest
    assert run.sharded


def test_a_shard_may_be_resumed_and_a_merged_run_too():
    run = clock(0.0, 0.5, session="0/3-0")
    clock(0.0, 0.25, session="1/3-0", seconds=run)
    assert clock(0.0, 0.5, session="1/3-1", seconds=run).seconds == 0.75
    assert clock(0.0, 0.625, session="2/3-0", seconds=run).seconds == 0.75
    assert clock(0.0, 0.125, session="0/1-5", seconds=run).seconds == 0.875
