"""Events survive their JSON lines, and broken lines are refused."""

import json
import time

import pytest

from specgen.config import UserError
from specgen.events import (
    Captured,
    Finished,
    Merged,
    OutOfMemory,
    Preempted,
    Prefilled,
    Resumed,
    Sharded,
    Stepped,
    Submitted,
    Switched,
    Touched,
    Verified,
    from_line,
    read,
    to_line,
)

EVENTS = (
    Submitted(sequence="a", time=0.0, num_prompt_tokens=7, category="métier", turn=2),
    Prefilled(sequence="a", time=0.25, emitted=1, num_cached=0),
    Verified(sequence="a", time=0.5, drafts=(3, 1, 2), accepted=2, emitted=3),
    Verified(sequence="a", time=0.75, drafts=(), accepted=0, emitted=1),
    Switched(sequence="a", time=0.75, part="reasoning", at=4),
    Preempted(sequence="a", time=1.0),
    Stepped(
        kind="decode",
        time=1.25,
        seconds=0.125,
        num_sequences=2,
        num_spec_tokens=3,
        target_rows=8,
        first_pass_rows=8,
        first_pass_kept=5,
        loop_rows=4,
    ),
    Stepped(
        kind="decode",
        time=1.375,
        seconds=0.125,
        num_sequences=2,
        num_spec_tokens=3,
        target_rows=8,
        first_pass_rows=8,
        first_pass_kept=5,
        loop_rows=4,
        experts=Touched(experts=12.5, plain=7.25, num_experts=32, num_bytes=12345),
    ),
    Finished(sequence="a", time=1.5, reason="stop", num_output_tokens=5),
    Captured(time=1.5, what="step", num_sequences=2, seconds=0.5, fits=True),
    OutOfMemory(time=1.75, max_batch_size=16, max_prefill_tokens=512),
    Resumed(time=0.0),
    Sharded(time=0.0, shard="1/4"),
    Merged(time=0.0),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_a_line_round_trips(event):
    line = to_line(event)
    assert "\n" not in line
    assert from_line(line) == event


def test_a_line_names_its_type_and_fields():
    assert json.loads(to_line(EVENTS[2])) == {
        "event": "verified",
        "sequence": "a",
        "time": 0.5,
        "drafts": [3, 1, 2],
        "accepted": 2,
        "emitted": 3,
    }


def test_the_names_of_the_types_are_a_file_format():
    names = (
        "submitted prefilled verified switched preempted stepped finished captured out_of_memory resumed sharded "
        "merged"
    )
    assert list(dict.fromkeys(json.loads(to_line(event))["event"] for event in EVENTS)) == names.split()


def test_a_line_costs_little_more_than_its_json():
    """A step of 256 sequences writes 257 of them while the device waits for the host."""
    event = EVENTS[2]
    line = json.loads(to_line(event))

    def seconds(work):
        began = time.process_time()
        for _ in range(2000):
            work()
        return time.process_time() - began

    times = [(seconds(lambda: to_line(event)), seconds(lambda: json.dumps(line))) for _ in range(5)]
    assert min(ours for ours, _ in times) < 2 * min(plain for _, plain in times)


def test_the_turn_of_a_request_is_1_by_default():
    assert from_line(
        '{"event": "submitted", "sequence": "a", "time": 0.0, "num_prompt_tokens": 7}'
    ) == Submitted(sequence="a", time=0.0, num_prompt_tokens=7, category=None, turn=1)


def test_a_file_round_trips_in_order(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(to_line(event) + "\n" for event in EVENTS))
    assert tuple(read(path)) == EVENTS
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(EVENTS)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "7",
        '{"event": "verified", "sequence": "a", "ti',
        '{"event": "sneezed", "time": 0.0}',
        '{"event": "preempted", "sequence": "a"}',
        '{"event": "preempted", "sequence": "a", "time": 0.0, "mood": 1}',
        '{"sequence": "a", "time": 0.0}',
    ],
)
def test_invalid_lines_are_refused(line):
    with pytest.raises(UserError, match=r"^not an event: "):
        from_line(line)
