"""The rows of passes and requests survive their lines, and broken lines are refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from specgen.record.record_rows import (
    Captured,
    OutOfMemory,
    RequestRow,
    Row,
    Session,
    Step,
    StepCounts,
    from_line,
    moved,
    to_line,
)
from tests.commands import refused
from tests.streams import decode_steps, recorded, request

(STEP,) = decode_steps(2)
ROWS: list[Row] = [
    Session(name="1/4-2", time=0.25, machine="host"),
    replace(STEP, idle=0.5, idle_outside=0.25),
    replace(STEP, number=7, num_rejected=3, num_preempted=1),
    Captured(time=1.5, what="step", num_sequences=2, seconds=0.5, fits=False),
    OutOfMemory(time=1.75, max_batch_size=16, max_prefill_tokens=512),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_a_line_round_trips(row: Row) -> None:
    line = to_line(row)
    assert "\n" not in line
    assert from_line(line) == row


def test_counts_of_another_k_add_up() -> None:
    """As those of the samples of a prompt, whose rows have the K of their longest step."""
    steps = [Step(0, (1, 2), 1, 2), Step(1, (), 0, 1)], [Step(2, (1, 2, 3), 3, 4, (0, 5, 11), is_cut=True)]
    ours, theirs = StepCounts.of(steps[0], 2), StepCounts.of(steps[1], 3)
    assert ours + theirs == theirs + ours == StepCounts.of([*steps[0], *steps[1]], 3)


def test_the_experts_that_earlier_versions_counted_are_left_out() -> None:
    line = {
        **json.loads(to_line(STEP)),
        "experts": {"experts": 3.5, "plain": 2.0, "num_experts": 8, "num_bytes": 7},
    }
    assert from_line(json.dumps(line)) == STEP


def test_the_kinds_are_a_file_format_and_nothing_is_left_out_but_zeros() -> None:
    lines = [json.loads(to_line(row)) for row in ROWS]
    assert [line["row"] for line in lines] == ["session", "pass", "pass", "capture", "out_of_memory"]
    assert lines[1] == {
        "row": "pass",
        "number": 0,
        "kind": "decode",
        "time": 1.0,
        "seconds": 0.1,
        "num_sequences": 1,
        "num_spec_tokens": 2,
        "target_rows": 3,
        "first_pass_rows": 3,
        "first_pass_kept": 1,
        "loop_rows": 1,
        "idle": 0.5,
        "idle_outside": 0.25,
    }


@pytest.mark.parametrize(
    "line",
    [
        *("", "[]", "7", '{"row": "pass", "num', '{"row": "sneeze", "time": 0.0}', '{"time": 0.0}'),
        *('{"row": "session", "time": 0.0}', '{"row": "session", "name": "a", "time": 0.0, "mood": 1}'),
        '{"row": "pass", "number": 1, "kind": "decode", "mood": 1}',
    ],
)
def test_invalid_lines_are_refused(line: str) -> None:
    with refused(r"^not a row of passes\.jsonl: "):
        from_line(line)


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_a_request_is_read_as_it_was_recorded(dropped: int) -> None:
    """Also the tokens of its last step, of which the end of the text may have dropped some."""
    steps = [(2, 1), (0, 0), (3, 3)]
    ((whole,), _) = recorded({"0/1-0": request("a", steps, category="x", dropped=dropped)})
    assert whole.steps is not None
    assert [step.emitted for step in whole.steps] == [2, 1, 4 - dropped]
    row: dict[str, Any] = {"id": "a", "token_ids": [1] * whole.num_output_tokens, "finish_reason": "stop"}
    row |= {"num_prompt_tokens": 5, "category": "x", "record": whole.to_json()}
    assert RequestRow.of_row(json.loads(json.dumps(row, default=vars))) == replace(
        whole, steps=[each._replace(drafts=list(each.drafts)) for each in whole.steps]
    )
    assert [RequestRow.of_row(row | {"text": text}).is_empty for text in ("a", " \n", "")] == [
        False,
        True,
        True,
    ]
    with refused(r"the row of 'a' has no record, as in earlier versions: generate into"):
        RequestRow.of_row({name: row[name] for name in row if name != "record"})


def test_a_row_of_a_later_engine_is_moved() -> None:
    (row,) = request("a", [(2, 1), (0, 0)], begin=1.0)
    moved_row = row.moved(10.0).numbered([7, 9])
    assert (moved_row.arrival, moved_row.first_token, moved_row.ended) == (11.0, 12.0, 14.0)
    assert [step.number for step in moved_row.steps or ()] == [7, 9]
    assert moved(STEP, 1.5) == replace(STEP, time=2.5)
    assert moved(ROWS[3], 1.5) == replace(ROWS[3], time=3.0)  # type: ignore[arg-type, type-var]
