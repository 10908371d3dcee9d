"""`specgen report` of a run that has not finished: computed from its rows, and called so."""

import json

import pytest

from specgen.config import UserError
from specgen.record.results import RunDirectory
from specgen.report.paired_requests import shared_requests
from specgen.report.report import load_so_far
from specgen.report.side_by_side import of_runs
from specgen.report.tables import of_run
from specgen.report.terminal import render
from tests.streams import decode_steps, fold, request, write_session

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
    assert report == {**expected, "state": "interrupted", "num_expected": 9, "num_unfinished": 8}
    assert (report["num_requests"], report["num_drafts"], report["num_accepted_tokens"]) == (1, 2, 3)
    assert manifest["engine"] == {"num_spec_tokens": 3}
    text = " ".join(render(of_run(report, {})).split())
    assert "This run is not finished (interrupted, 1 of 9 requests done)" in text
    both = render(of_runs([("run", report), ("again", report)], {}, shared_requests([stopped, stopped])))
    assert both.count("not finished") == 2


def test_a_run_of_an_earlier_version_is_refused_in_one_line(stopped):
    (stopped / "events.jsonl").touch()
    reason = r"^'.*' holds a run of an earlier version, .*: name a new directory, or move this one away$"
    for read in (load_so_far, RunDirectory):
        with pytest.raises(UserError, match=reason):
            read(stopped)
    (stopped / "status.json").unlink()
    (stopped / "report.json").write_text(json.dumps({"acceptance": []}))
    assert load_so_far(stopped)[0] == {"acceptance": []}, "what it has reported is shown"


@pytest.mark.parametrize("status", [None, "", '{"state": "preparing", "total": 0}'])
def test_the_number_of_requests_may_be_unknown(stopped, status):
    (stopped / "status.json").unlink()
    if status is not None:
        (stopped / "status.json").write_text(status)
    report, _ = load_so_far(stopped)
    assert report["num_expected"] is None
    assert ", 1 done)" in " ".join(render(of_run(report, {})).split())


def test_a_resumed_run_is_not_reported_by_its_old_file(stopped):
    """Failed requests are tried again, in a directory that has a report."""
    (stopped / "report.json").write_text(json.dumps({"acceptance": [], "old": True}))
    write_session(stopped, [])
    assert load_so_far(stopped)[0]["num_requests"] == 1
    (stopped / "status.json").write_text(json.dumps({"state": "finished"}))
    assert load_so_far(stopped)[0] == {"acceptance": [], "old": True}


@pytest.mark.parametrize("missing", ["passes.jsonl", "manifest.json"])
def test_a_directory_of_something_else_is_refused(stopped, missing):
    (stopped / missing).unlink()
    with pytest.raises(UserError, match=r"report\.json cannot be read .*: give a directory that"):
        load_so_far(stopped)
