"""Latencies over requests, wall times of resumed and sharded runs, and their parts."""

import random
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
import torch

from specgen.config import SamplingParams
from specgen.core.passes import IdleClock
from specgen.device import DeviceEvent
from specgen.record.record_rows import Captured, EngineRow, PassRow, from_line, to_line
from specgen.report.tables import wall_table
from specgen.report.timings import LatencyStats, WallClock, WallTime, latency_stats
from tests.engines import Pair, bundled_requests, engine_of
from tests.streams import fold, pass_row, recorded, reported


def test_latency_stats_do_not_depend_on_order():
    assert latency_stats(np.array([])) is None
    times = [5.0, 1.0, 2.0, 3.0, 100.0]
    assert latency_stats(np.array(times)) == LatencyStats(mean=22.2, median=3.0, p99=pytest.approx(96.2))
    assert latency_stats(np.array([2.0, np.nan])) == LatencyStats(mean=2.0, median=2.0, p99=2.0)


@pytest.mark.parametrize(
    "sessions",  # with their times, and the seconds of the run after each
    [
        [("0/1-0", (), 0)],
        [("0/1-0", (0.25, 0.75, 0.5, 0.125), 0.625)],  # from the first to the last, whatever their order
        [
            ("0/1-0", (0.25, 0.75), 0.5),
            ("0/1-1", (0.125, 0.375), 0.75),
            ("0/1-3", (3.0, 3.5), 1.25),
        ],  # resumed
        [
            ("0/4-0", (0.25, 0.75), 0.5),
            ("1/4-0", (0.125, 0.25), 0.5),
            ("2/4-0", (0, 0.875), 0.875),
        ],  # the slowest
        [
            ("0/3-0", (0.0, 0.5), 0.5),
            ("1/3-0", (0.0, 0.25), 0.5),
            ("1/3-1", (0.0, 0.5), 0.75),  # a shard may be resumed
            ("2/3-0", (0.0, 0.625), 0.75),
            ("0/1-5", (0.0, 0.125), 0.875),  # and a merged run, after all shards
        ],
        [("1/2-0", (0, 60), 60), ("1/2-1", (0, 50), 110), ("0/2-0", (0, 100), 110), ("0/2-1", (0, 20), 120)],
    ],
)
def test_the_time_of_a_run_is_that_of_its_sessions(sessions):
    run, shards = WallClock(), set[str]()
    for session, times, seconds in sessions:
        shards.add(session.partition("-")[0])
        for each in times:
            run.update(session, each)
        assert (run.seconds, run.sharded) == (seconds, len(shards) > 1 and bool(times))


def stepped(
    at: float, kind: str, seconds: float, sequences: int, *, waiting: int = 0, **idle: float
) -> PassRow:
    rows = 100 if kind == "prefill" else sequences
    return pass_row(
        kind, time=at, seconds=seconds, num_sequences=sequences, target_rows=rows, num_waiting=waiting, **idle
    )


PASSES: list[EngineRow] = [
    stepped(1.0, "prefill", 1.0, 4, waiting=1),
    stepped(3.0, "decode", 2.0, 4, waiting=1),
    stepped(7.0, "decode", 4.0, 4, waiting=1),
    Captured(time=9.5, what="step", num_sequences=2, seconds=0.5, fits=True),
    stepped(10.0, "decode", 2.0, 2, waiting=1, idle=0.5),  # its sequences would be half of a step of 3 s
    stepped(12.0, "prefill", 1.5, 1, idle=0.5, idle_outside=0.375),
    stepped(15.0, "decode", 3.0, 4),
    stepped(17.0, "decode", 1.25, 1, idle=0.75),
]

PARTS = WallTime(
    prefill=2.5,
    full=9.0 + 1.5 + 0.75,
    filling=0.5,
    tail=0.5,
    captures=0.5,
    idle_outside=0.375,
    idle_engine=1.375,
    rest=0.0,
)


def test_parts_are_those_of_the_passes_and_add_up() -> None:
    begun: list[EngineRow] = [Captured(time=0.0, what="step", num_sequences=1, seconds=0.0, fits=True)]
    found = fold([*begun, *PASSES], num_spec_tokens=0)
    assert found.wall == PARTS
    assert found.wall.whole == found.wall_seconds == 17.0
    later = fold([*begun, *PASSES, Captured(**vars(begun[0]) | {"time": 18.0})], num_spec_tokens=0).wall
    assert later is not None
    assert asdict(later) == {**asdict(PARTS), "rest": 1.0}


def test_smaller_batches_give_no_time_back() -> None:
    """Steps that took a sequence less than those of a larger batch are as good as full, whoever waited."""
    events: list[EngineRow] = [
        stepped(4.0, "decode", 4.0, 4, waiting=1),
        stepped(6.5, "decode", 2.5, 3, waiting=1),  # less than 3 of 4 sequences
        stepped(7.0, "decode", 0.5, 1, waiting=1),
        stepped(9.0, "decode", 2.0, 1),
    ]
    found = fold(events, num_spec_tokens=0).wall
    assert found is not None
    price = 6.5 / 7  # of a sequence, with four or three at once
    assert asdict(found) == pytest.approx(
        {
            **dict.fromkeys(asdict(PARTS), 0.0),
            "full": 9 * price,
            "filling": 1.25 - price,
            "tail": 1.25 - price,
            "rest": -4.0,  # from the end of the first step
        }
    )


def test_no_part_of_noisy_steps_is_below_zero_and_they_add_up() -> None:
    for seed in range(20):
        noisy = random.Random(seed)
        steps = [
            stepped(
                float(at), "decode", noisy.uniform(0.1, 0.3), noisy.randint(1, 6), waiting=noisy.randint(0, 1)
            )
            for at in range(1, 40)
        ]
        found = fold(steps, num_spec_tokens=0).wall
        assert found.filling >= 0 <= found.tail
        assert found.full > 0
        assert found.full + found.filling + found.tail == pytest.approx(sum(each.seconds for each in steps))


def test_rows_that_were_written_have_the_same_parts() -> None:
    lines = [to_line(row) for row in recorded({"0/1-0": PASSES})[1]]
    assert len(lines) == 1 + len(PASSES)
    assert reported([], map(from_line, lines), 0) == fold(PASSES, num_spec_tokens=0)


def test_shards_ran_side_by_side_and_a_prefill_alone_has_no_steps() -> None:
    shards = {"0/2-0": PASSES, "1/2-0": PASSES}
    assert reported(*recorded(shards), 0).wall is None
    sessions = reported(*recorded({"0/1-0": PASSES, "0/1-1": PASSES}), 0)
    assert sessions.wall.prefill == 2 * PARTS.prefill
    assert fold(PASSES[:1], num_spec_tokens=0).wall is None


@pytest.mark.parametrize("ahead", [False, True])
def test_the_parts_of_a_run(
    demo_pair: Pair, device_like: Callable[..., None], own_time: Callable[[float], None], ahead: bool
) -> None:
    device_like(ahead)
    events: list[EngineRow] = []
    engine = engine_of(demo_pair, events.append, max_batch_size=2)
    engine.warm_up()
    requests = bundled_requests(4, SamplingParams(max_tokens=6))
    began = time.perf_counter()
    for number, _ in enumerate(engine.generate(requests)):
        if number == 0:
            own_time(2.0)
    whole = time.perf_counter() - began
    wall = fold(events, num_spec_tokens=4).wall
    wall = wall.of_whole(whole)
    assert wall.whole == pytest.approx(whole)
    assert min(asdict(wall).values()) >= 0
    assert 2.0 <= wall.idle_outside < 2.5
    assert wall.prefill > 0.001
    assert wall.rest < 0.5  # passes and what lies between them leave little
    waiting = [event.num_waiting for event in events if isinstance(event, PassRow)]
    assert (max(waiting), waiting[-1]) == (1, 0)


def test_what_came_before_a_run_or_a_failure_is_not_waited_for() -> None:
    idle, cpu = IdleClock(torch.device("cpu")), torch.device("cpu")
    assert idle.before(idle.launch(), DeviceEvent(cpu)) == 0.0
    idle.leave()
    time.sleep(0.02)
    idle.enter()
    launch = idle.launch()
    assert 0.02 <= launch.caller_seconds <= idle.before(launch, DeviceEvent(cpu))
    assert idle.launch().caller_seconds == 0.0  # each second once
    idle.leave()
    time.sleep(0.02)
    idle.forget()
    idle.enter()
    launch = idle.launch()
    assert (launch.caller_seconds, idle.before(launch, DeviceEvent(cpu))) == (0.0, 0.0)


def test_the_page_shows_the_parts_that_there_are() -> None:
    (table,) = wall_table(PARTS)
    assert [row["share"] for row in table.rows] == [
        part / 17.0 for name, part in asdict(PARTS).items() if part
    ]
    assert list(wall_table(None)) == []
