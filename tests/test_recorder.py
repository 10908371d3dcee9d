"""The rows of passes survive their lines, broken lines are refused, and rows tell what events told."""

import json
from dataclasses import replace
from typing import Any

import pytest

from specgen.config import UserError
from specgen.events import Captured, OutOfMemory, Preempted, Prefilled, Submitted
from specgen.record.recorder import (
    Pass,
    PassRow,
    RecordedStep,
    RequestRow,
    Session,
    from_line,
    to_line,
)
from tests.streams import decode_steps, mixture_steps, padded_step, recorded, request

(STEP,) = decode_steps(2)
(TOUCHING,) = mixture_steps(3, 2, (3.5, 2.0))
ROWS: list[Pass] = [
    Session(name="1/4-2", time=0.25, machine="host"),
    PassRow(number=0, num_rejected=0, num_preempted=0, step=replace(STEP, idle=0.5, idle_outside=0.25)),  # type: ignore[type-var]
    PassRow(number=7, num_rejected=3, num_preempted=1, step=TOUCHING),  # type: ignore[arg-type]
    Captured(time=1.5, what="step", num_sequences=2, seconds=0.5, fits=False),
    OutOfMemory(time=1.75, max_batch_size=16, max_prefill_tokens=512),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_a_line_round_trips(row: Pass) -> None:
    line = to_line(row)
    assert "\n" not in line
    assert from_line(line) == row


def test_the_kinds_are_a_file_format_and_nothing_is_left_out_but_zeros() -> None:
    lines = [json.loads(to_line(row)) for row in ROWS]
    assert [line["row"] for line in lines] == ["session", "pass", "pass", "capture", "out_of_memory"]
    assert lines[1] == {
        "row": "pass",
        "number": 0,
        "num_rejected": 0,
        "num_preempted": 0,
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
        '{"row": "pass", "number": 1, "num_rejected": 0, "num_preempted": 0, "kind": "decode", "mood": 1}',
    ],
)
def test_invalid_lines_are_refused(line: str) -> None:
    with pytest.raises(UserError, match=r"^not a row of passes\.jsonl: "):
        from_line(line)


def test_passes_have_what_happened_since_the_one_before() -> None:
    events = [
        *(Submitted(sequence=name, time=0.0, num_prompt_tokens=5) for name in "ab"),
        *padded_step(3, a=1, b=3),
        Preempted(sequence="b", time=2.0),
        *padded_step(3, a=0),
    ]
    _, (session, *passes) = recorded({"0/1-0": events})
    assert session == Session(name="0/1-0", time=0.0)
    found = [(row.number, row.num_rejected, row.num_preempted) for row in passes if isinstance(row, PassRow)]
    assert found == [(0, 2, 0), (1, 3, 1)]


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_a_request_is_read_as_it_was_recorded(dropped: int) -> None:
    """Also the tokens of its last step, of which the end of the text may have dropped some."""
    steps = [(2, 1), (0, 0), (3, 3)]
    ((whole,), _) = recorded({"0/1-0": request("a", steps, category="x", dropped=dropped)})
    assert whole.steps is not None
    assert [step.emitted for step in whole.steps] == [2, 1, 4 - dropped]
    row: dict[str, Any] = {"id": "a", "token_ids": [1] * whole.num_output_tokens, "finish_reason": "stop"}
    row |= {"num_prompt_tokens": 5, "category": "x", "record": whole.to_json(with_steps=True)}
    assert RequestRow.of_row(json.loads(json.dumps(row, default=vars))) == replace(
        whole,
        steps=[
            RecordedStep(each.number, list(each.drafts), each.accepted, each.emitted) for each in whole.steps
        ],
    )
    with pytest.raises(
        UserError, match=r"the row of 'a' has no record, as in earlier versions: generate into"
    ):
        RequestRow.of_row({name: row[name] for name in row if name != "record"})


def test_what_was_not_submitted_cannot_run() -> None:
    with pytest.raises(UserError, match="'a' is not running here"):
        recorded({"0/1-0": [Prefilled(sequence="a", time=0.0, emitted=1, num_cached=0)]})
