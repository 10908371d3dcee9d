"""Hand-made rows of requests and passes, for tests of reports, and the directories that sessions with them leave."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specgen.record import columns
from specgen.record.record_rows import EngineRow, PassRow, RequestRow, Row, Session, Step, StepCounts
from specgen.record.results import RunDirectory
from specgen.report.report import Report, report_of

Given = RequestRow | EngineRow


def request(
    name: str,
    steps: Sequence[tuple[int, int]],
    *,
    begin: float = 0.0,
    dropped: int = 0,
    drafts: Sequence[Sequence[int]] = (),
    **others: Any,
) -> Iterator[RequestRow]:
    """One request that verifies ``(drafted, accepted)`` once per second and drops that many tokens of the last step."""
    found = [
        Step(number, drafts[number] if drafts else (*range(drafted),), accepted, accepted + 1)
        for number, (drafted, accepted) in enumerate(steps)
    ]
    if dropped:
        found[-1] = found[-1]._replace(emitted=found[-1].emitted - dropped)
    most = max((drafted for drafted, _ in steps), default=0)
    usual: dict[str, Any] = {
        "reason": "stop",
        "category": None,
        "turn": 1,
        "num_turns": 1,
        "num_prompt_tokens": 5,
        "num_cached_tokens": 0,
        "num_output_tokens": 1 + sum(step.emitted for step in found),
        "arrival": begin,
        "first_token": begin + 1,
        "ended": begin + 1 + len(steps),
        "parts": None,
    }
    counts = StepCounts.of(found, most)
    yield RequestRow(name=name, counts=counts, steps=found, **usual | others)


def refusal(name: str, *, time: float = 0.0) -> Iterator[RequestRow]:
    """A request that ends before it begins."""
    yield from request(
        name, [], begin=time, ended=time, first_token=None, reason="error", num_output_tokens=0
    )


(RECORD,) = request("a", [], first_token=None)  # of whatever has no figures


def pass_row(kind: str = "decode", **changes: Any) -> PassRow:
    """A pass of one sequence, of which nothing came."""
    rows = ("num_spec_tokens", "target_rows", "first_pass_rows", "first_pass_kept", "loop_rows")
    usual: dict[str, Any] = {"number": 0, "time": 1.0, "seconds": 0.1, "num_sequences": 1}
    return PassRow(kind=kind, **usual | dict.fromkeys(rows, 0) | changes)


def padded_step(k: int, *accepted: int, **others: Any) -> PassRow:
    """A decode step of a padded drafter batch: how many of K drafts of each sequence were accepted."""
    rows = len(accepted) * (k + 1)
    return pass_row(
        num_sequences=len(accepted),
        num_spec_tokens=k,
        target_rows=rows,
        first_pass_rows=rows,
        first_pass_kept=sum(accepted) + len(accepted),
        loop_rows=len(accepted) * k,
        num_rejected=len(accepted) * k - sum(accepted),
        **others,
    )


def decode_steps(*lengths: int) -> Iterator[PassRow]:
    """A decode step of one sequence for each draft length."""
    for k in lengths:
        yield pass_row(
            num_spec_tokens=k,
            target_rows=k + 1,
            first_pass_rows=k + 1,
            first_pass_kept=1,
            loop_rows=max(k - 1, 0),
        )


def recorded(sessions: Mapping[str, Iterable[Given]]) -> tuple[list[RequestRow], list[Row]]:
    """The tables of several sessions, by name; failed requests are in neither."""
    requests, passes = list[RequestRow](), list[Row]()
    for name, rows in sessions.items():
        rows = list(rows)
        first = min(row.arrival if isinstance(row, RequestRow) else row.time for row in rows)
        passes.append(Session(name=name, time=first))
        for row in rows:
            if not isinstance(row, RequestRow):
                passes.append(row)
            elif row.reason != "error":
                requests.append(replace(row, session=name))
    return requests, passes


def fold(rows: Iterable[Given], *, num_spec_tokens: int) -> Report:
    """The report of one session."""
    rows = list(rows)
    passes = [row for row in rows if not isinstance(row, RequestRow)]
    return reported((row for row in rows if isinstance(row, RequestRow)), passes, num_spec_tokens)


def reported(requests: Iterable[RequestRow], passes: Iterable[Row], num_spec_tokens: int) -> Report:
    """The report of these tables."""
    requests = list(requests)
    failed = sum(row.reason == "error" for row in requests)
    return report_of(columns.of(requests, num_spec_tokens), passes, num_errors=failed)


def as_json(rows: Iterable[Given], num_spec_tokens: int = 3) -> dict[str, Any]:
    """The same as ``report.json`` has it."""
    found = json.dumps(fold(rows, num_spec_tokens=num_spec_tokens).to_json(), allow_nan=False)
    decoded: dict[str, Any] = json.loads(found)
    return decoded


def write_session(path: Path, rows: Iterable[Given], *, text: str = "text") -> None:
    """Let a process record ``rows`` in the run directory ``path``."""
    with RunDirectory(path) as files:
        for each in rows:
            if not isinstance(each, RequestRow):
                files.record(each)
            elif each.reason != "error":
                row = {"id": each.name, "prompt": each.name, "text": text}
                row |= {"token_ids": [1] * each.num_output_tokens, "finish_reason": each.reason}
                row |= {"turn": each.turn, "num_prompt_tokens": each.num_prompt_tokens}
                files.add_completion(row | {"category": each.category}, each)
