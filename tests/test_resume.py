"""What a kill leaves is cut to what is whole: torn lines go, and events end where completions do."""

import json
import os
from pathlib import Path

import pytest

from specgen.events import Finished, Resumed, read, to_line
from specgen.report.report import fold
from specgen.rundir import results
from specgen.rundir.results import RunDirectory
from specgen.rundir.resume import recover
from specgen.rundir.row_file import RowFile
from tests.streams import refusal, request

EVENTS = [
    *request("a", [(2, 1), (2, 2)]),
    *request('{"event":"finished","sequence":"x"', [(2, 0)]),
    *request("c", [(2, 2)]),
]
LINES = [to_line(event) + "\n" for event in EVENTS]
ROWS = [json.dumps({"id": event.sequence}) + "\n" for event in EVENTS if isinstance(event, Finished)]
ENDS = [at + 1 for at, event in enumerate(EVENTS) if isinstance(event, Finished)]


def left(path: Path, completions: str, events: str) -> tuple[list[str], list[str]]:
    """The content of the files when a run resumes: ids, and the lines of events before the mark."""
    (path / "completions.jsonl").write_text(completions)
    (path / "events.jsonl").write_text(events)
    rows = RowFile(path / "completions.jsonl")
    recover(path / "events.jsonl", rows)
    *lines, mark = (path / "events.jsonl").read_text().splitlines(keepends=True) or [""]
    assert mark == (to_line(Resumed(time=0.0)) + "\n" if lines else "")
    return [row["id"] for row in rows.values()], lines


@pytest.mark.parametrize("done", range(4))
@pytest.mark.parametrize("torn", ["", '{"id":"half'])
def test_events_end_where_the_first_completion_is_missing(tmp_path: Path, done: int, torn: str) -> None:
    ids, lines = left(tmp_path, "".join(ROWS[:done]) + torn, "".join(LINES))
    assert len(ids) == done
    assert lines == (LINES[: ENDS[done] - 1] if done < 3 else LINES)


@pytest.mark.parametrize("cut", range(0, sum(map(len, LINES)), 37))
def test_a_torn_line_goes_wherever_it_is_torn(tmp_path: Path, cut: int) -> None:
    _, lines = left(tmp_path, "", "".join(LINES)[:cut])
    assert "".join(LINES).startswith("".join(lines))
    assert len(lines) == min("".join(LINES)[:cut].count("\n"), ENDS[0] - 1)


def test_a_resumed_run_reports_the_same_as_an_uninterrupted_one(tmp_path: Path) -> None:
    left(tmp_path, ROWS[0], "".join(LINES[:-3]))
    events = tmp_path / "events.jsonl"
    with events.open("a") as file:
        file.writelines(LINES[ENDS[0] :])
    whole, resumed = fold(EVENTS, num_spec_tokens=2), fold(read(events), num_spec_tokens=2)
    assert resumed.speculation == whole.speculation
    assert resumed.finish_reasons == whole.finish_reasons
    assert (resumed.num_prompt_tokens, resumed.num_unfinished) == (15, 0)
    assert resumed.wall_seconds > whole.wall_seconds, "what was done twice took its time twice"


def test_a_failed_request_has_no_completion_and_cuts_nothing(tmp_path: Path) -> None:
    lines = [*LINES[: ENDS[0]], *(to_line(event) + "\n" for event in refusal("b")), *LINES[ENDS[0] :]]
    assert left(tmp_path, "".join(ROWS), "".join(lines))[1] == lines


def test_the_first_line_may_be_the_cut(tmp_path: Path) -> None:
    assert left(tmp_path, "", LINES[ENDS[0] - 1] + LINES[0]) == ([], [])


def test_a_power_failure_costs_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, synced = [8.0], list[float]()
    monkeypatch.setattr(results.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(now[0]))
    with RunDirectory(tmp_path) as run:
        for now[0] in (8.25, 8.75, 9.0, 9.75, 10.0, 10.5):
            run.add_completion({"id": str(now[0])})
    assert synced == [9.0, 9.0, 10.0, 10.0, 10.5, 10.5], "events and completions, and both at the end"


def test_rows_are_found_by_id_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = RowFile(path)
    ids = ["a", 'with "quotes" and \\', "ünï", "line\nbreak", "a}", ""]
    for number, row_id in enumerate(ids):
        rows.add({"id": row_id, "number": number})
    rows.add({"id": "a", "number": 9})
    for found in (rows, RowFile(path)):
        assert {row_id: found[row_id]["number"] for row_id in found} == dict(
            zip(ids, (9, 1, 2, 3, 4, 5), strict=True)
        )
    assert '"ünï"' in path.read_text(encoding="utf-8"), "as people read it"
    for end in (rows.close, lambda: rows.arrange([*reversed(ids), "unknown"])):
        end()
        with pytest.raises(ValueError, match="closed"):
            rows.add({"id": "late"})
    assert [row["number"] for row in map(json.loads, path.read_text().splitlines())] == [5, 4, 3, 2, 1, 9]
    assert rows["ünï"]["number"] == 2
    rows = RowFile(path)
    rows.clear()
    assert not rows
    rows.add({"id": "new"})
    assert rows["new"] == {"id": "new"}
    assert path.read_text() == '{"id": "new"}\n'


def test_a_line_that_is_not_a_row_is_not_done(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": "a"}\n\0\0\0\n{"id": "b", "te\n{"id": "c"}\n{"id": "d"')
    rows = RowFile(path)
    assert list(rows) == ["a", "c"]
    rows.add({"id": "d"})
    assert path.read_bytes().endswith(b'{"id": "c"}\n{"id": "d"}\n')
