"""`specgen report` of a run that has not finished: computed from its events, and called so."""

import json

import pytest

from specgen.config import UserError
from specgen.events import Resumed, to_line
from specgen.report.paired_requests import shared_requests
from specgen.report.report import fold
from specgen.report.side_by_side import of_runs
from specgen.report.tables import of_run
from specgen.report.terminal import render
from specgen.report.unfinished import load_so_far
from tests.streams import begun, request

EVENTS = [*request("a", [(3, 2), (3, 1)]), *begun("b")]


@pytest.fixture
def stopped(tmp_path):
    """A run of 9 requests that a kill has stopped, one request done and one begun."""
    torn = to_line(EVENTS[0])[:20]
    (tmp_path / "events.jsonl").write_text("".join(to_line(event) + "\n" for event in EVENTS) + torn)
    (tmp_path / "manifest.json").write_text(json.dumps({"engine": {"num_spec_tokens": 3}}))
    (tmp_path / "status.json").write_text(json.dumps({"state": "interrupted", "total": 9, "done": 1}))
    return tmp_path


def test_a_stopped_run_is_reported_from_its_events(stopped):
    report, manifest = load_so_far(stopped)
    expected = fold(EVENTS, num_spec_tokens=3).to_json()
    assert report == {**expected, "state": "interrupted", "num_expected": 9}
    assert (report["num_drafts"], report["num_accepted_tokens"], report["num_unfinished"]) == (2, 3, 1)
    assert manifest["engine"] == {"num_spec_tokens": 3}
    text = " ".join(render(of_run(report, {})).split())
    assert "This run is not finished (interrupted, 1 of 9 requests done)" in text
    both = render(of_runs([("run", report), ("again", report)], {}, shared_requests([stopped, stopped])))
    assert both.count("not finished") == 2


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
    (stopped / "events.jsonl").write_text("".join(to_line(e) + "\n" for e in (*EVENTS, Resumed(time=0.0))))
    assert load_so_far(stopped)[0]["num_requests"] == 1
    (stopped / "status.json").write_text(json.dumps({"state": "finished"}))
    assert load_so_far(stopped)[0] == {"acceptance": [], "old": True}


@pytest.mark.parametrize("missing", ["events.jsonl", "manifest.json"])
def test_a_directory_of_something_else_is_refused(stopped, missing):
    (stopped / missing).unlink()
    with pytest.raises(UserError, match=r"report\.json cannot be read .*: give a directory that"):
        load_so_far(stopped)
