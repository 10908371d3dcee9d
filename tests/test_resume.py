"""What a kill leaves is cut to what is whole: torn lines go."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specgen.record import columns, results
from specgen.record.files import RowFile, Rows
from specgen.record.record_rows import Session, read_passes
from specgen.record.results import RunDirectory
from specgen.report.paired_requests import shared_requests
from specgen.report.report import load_so_far, report_of
from specgen.report.side_by_side import of_runs
from specgen.report.tables import of_run
from specgen.report.terminal import render
from tests.commands import refused
from tests.streams import decode_steps, fold, refusal, request, write_session

FIRST = [*request("a", [(2, 1), (2, 2)]), *decode_steps(2, 2), *refusal("bad")]
SECOND = [*request('{"row":"session"', [(2, 0)]), *decode_steps(2)]


def report_in(path: Path) -> dict[str, object]:
    run = RunDirectory(path)
    with run:
        pass
    return report_of(columns.read(path, 2), run.passes()).to_json()


def test_a_resumed_run_reports_the_same_as_an_uninterrupted_one(tmp_path: Path) -> None:
    for rows in (FIRST, SECOND):
        write_session(tmp_path, rows)
    found, whole = report_in(tmp_path), fold([*FIRST, *SECOND], num_spec_tokens=2).to_json()
    names = [row.name for row in read_passes(tmp_path / "passes.jsonl") if isinstance(row, Session)]
    assert names == ["0/1-0", "0/1-1"]
    assert found["wall_seconds"] == 3.0 + 2.0, "the sessions came after each other"
    for name in ("wall_seconds", "output_tokens_per_second", "wall", "num_errors"):
        del found[name], whole[name]
    assert found == whole


@pytest.mark.parametrize("name", ["completions.jsonl", "passes.jsonl"])
def test_a_torn_line_goes_wherever_it_is_torn(tmp_path: Path, name: str) -> None:
    write_session(tmp_path, FIRST)
    file = tmp_path / name
    content = file.read_bytes()
    for cut in range(0, len(content), 23):
        file.write_bytes(content[:cut])
        with RunDirectory(tmp_path):
            pass
        assert file.read_bytes() == content[: content.rfind(b"\n", 0, cut) + 1]
        report_in(tmp_path)


def test_steps_are_left_out_of_rows_and_the_report_is_the_same(tmp_path: Path) -> None:
    write_session(tmp_path / "whole", SECOND)
    with RunDirectory(tmp_path / "less", with_steps=False) as less:
        (record, *passes) = SECOND
        for each in passes:
            less.record(each)
        for row in RowFile(tmp_path / "whole" / "completions.jsonl").values():
            less.add_completion(row, record)
    (row,) = less.completions.values()
    assert "steps" not in row["record"]
    assert report_in(tmp_path / "less") == report_in(tmp_path / "whole")


def test_a_power_failure_costs_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, synced = [8.0], list[float]()
    monkeypatch.setattr(results.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(now[0]))
    with RunDirectory(tmp_path) as run:
        for now[0] in (8.25, 8.75, 9.0, 9.75, 10.0, 10.5):
            run.add_completion({"id": str(now[0])})
    assert synced == [9.0, 9.0, 10.0, 10.0, 10.5, 10.5], "passes and completions, and both at the end"


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


@pytest.mark.parametrize(
    ("content", "done"),
    [
        (b'{"id": "a"}\n\0\0\0\n{"id": "b", "te\n{"id": "c"}\n{"id": "d"', ["a", "c"]),
        # as another program may write them
        (
            b'{"id":"a","n":1}\n{"a": 0, "id": "b"}\n { "n": 3, "id": "c" }\n[1, {}]\n{"id": 4}\n{}\n',
            ["a", "b", "c"],
        ),
    ],
)
def test_a_line_that_is_not_a_row_is_not_done(tmp_path: Path, content: bytes, done: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    rows = RowFile(path)
    assert list(rows) == [row["id"] for row in rows.values()] == done
    rows.add({"id": "d"})
    assert path.read_bytes().endswith(b'}\n{"id": "d"}\n')


REWRITTEN = {
    "line breaks of Windows": lambda lines: "".join(f"{line}\r\n" for line in lines),
    "a byte order mark": lambda lines: "\ufeff" + "".join(f"{line}\n" for line in lines),
    "blank lines": lambda lines: "\n" + "".join(f"{line}\n\n" for line in lines),
    "no last line break": "\n".join,
    "spaces": lambda lines: "".join(f" {json.dumps(json.loads(line), indent=None)} \n" for line in lines),
}


@pytest.mark.parametrize("how", REWRITTEN)
def test_files_that_another_program_has_rewritten_are_the_same_run(tmp_path: Path, how: str) -> None:
    write_session(tmp_path, [*FIRST, *request("z", [(2, 1)])])
    expected, shared = report_in(tmp_path), shared_requests([columns.read(tmp_path, 2)] * 2)
    for name in ("completions.jsonl", "passes.jsonl"):
        lines = (tmp_path / name).read_text(encoding="utf-8").splitlines()
        (tmp_path / name).write_text(REWRITTEN[how](lines), encoding="utf-8", newline="")
    assert shared_requests([columns.read(tmp_path, 2)] * 2) == shared
    assert len(Rows(tmp_path / "completions.jsonl")) == 2, "also before a process repairs it"
    assert report_in(tmp_path) == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.update(counts={"num_steps": 3}),
        lambda record: record["counts"].update(more=1),
        lambda record: record["counts"].pop("histogram"),
        lambda record: record["counts"]["accepted"].append(1),
        lambda record: record["counts"]["accepted"].__setitem__(0, "1"),
        lambda record: record["counts"].update(without_drafts=None),
        lambda record: record.pop("arrival"),
        lambda record: record.update(ended="now"),
        lambda record: record.update(session=None),
    ],
)
def test_a_record_that_another_program_has_damaged_is_named(tmp_path: Path, damage: Any) -> None:
    write_session(tmp_path, FIRST)
    path = tmp_path / "completions.jsonl"
    row = json.loads(path.read_text())
    damage(row["record"])
    path.write_text(json.dumps(row) + "\n")
    with refused("completions.jsonl: the row of 'a' is damaged .*: remove that line, and run the same"):
        report_in(tmp_path)


# --- reports of runs that have not finished ---


ROWS = [*request("a", [(3, 2), (3, 1)]), *decode_steps(3, 3)]


@pytest.fixture
def stopped(tmp_path):
    """A run of 9 requests that a kill has stopped, one request done and one begun."""
    write_session(tmp_path, ROWS)
    for name in ("completions.jsonl", "passes.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"id": "b", "te')
    (tmp_path / "manifest.json").write_text(json.dumps({"engine": {"num_spec_tokens": 3}}))
    (tmp_path / "status.json").write_text(json.dumps({"state": "interrupted", "total": 9, "done": 1}))
    return tmp_path


def test_a_stopped_run_is_reported_from_the_requests_that_are_done(stopped):
    report, manifest = load_so_far(stopped)
    expected = fold(ROWS, num_spec_tokens=3).to_json()
    of_unfinished = {"state": "interrupted", "num_expected": 9, "num_unfinished": 8}
    assert report.to_json() == {**expected, **of_unfinished}
    assert (report.num_requests, report.num_drafts, report.num_accepted_tokens) == (1, 2, 3)
    assert manifest["engine"] == {"num_spec_tokens": 3}
    text = " ".join(render(of_run(report, {})).split())
    assert "This run is not finished (interrupted, 1 of 9 requests done)" in text
    both = render(
        of_runs([("run", report), ("again", report)], {}, shared_requests([columns.read(stopped, 3)] * 2))
    )
    assert both.count("not finished") == 2
    (stopped / "status.json").write_text(json.dumps({"state": "finished", "total": 9, "done": 9}))
    assert load_so_far(stopped)[0].state == "its report.json is missing"


def test_a_run_of_an_earlier_version_is_refused_in_one_line(stopped):
    (stopped / "events.jsonl").touch()
    reason = r"^'.*' holds a run of an earlier version, .*: name a new directory, or move this one away$"
    for read in (load_so_far, RunDirectory):
        with refused(reason):
            read(stopped)
    (stopped / "status.json").unlink()
    earlier = {**fold(ROWS, num_spec_tokens=3).to_json(), "of_earlier": True}
    (stopped / "report.json").write_text(json.dumps(earlier))
    assert load_so_far(stopped)[0].num_drafts == 2, "what it has reported is shown"


@pytest.mark.parametrize("status", [None, "", '{"state": "preparing", "total": 0}'])
def test_the_number_of_requests_may_be_unknown(stopped, status):
    (stopped / "status.json").unlink()
    if status is not None:
        (stopped / "status.json").write_text(status)
    report, _ = load_so_far(stopped)
    assert report.num_expected is None
    assert ", 1 done)" in " ".join(render(of_run(report, {})).split())


def test_a_resumed_run_is_not_reported_by_its_old_file(stopped):
    """Failed requests are tried again, in a directory that has a report."""
    old = fold(request("a", [(3, 2)]), num_spec_tokens=3)
    (stopped / "report.json").write_text(json.dumps(old.to_json()))
    write_session(stopped, [])
    assert load_so_far(stopped)[0].num_drafts == 2
    (stopped / "status.json").write_text(json.dumps({"state": "finished"}))
    assert load_so_far(stopped)[0] == old


@pytest.mark.parametrize("missing", ["passes.jsonl", "manifest.json"])
def test_a_directory_of_something_else_is_refused(stopped, missing):
    (stopped / missing).unlink()
    with refused(r"report\.json cannot be read .*: give a directory that"):
        load_so_far(stopped)
