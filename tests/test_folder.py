"""`specgen report` of a folder of results: what it lists."""

import json
import os
import re
import socket
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from specgen.config import UserError
from specgen.experiments.output import BenchTable
from specgen.record.results import locked
from specgen.report.display import checkpoint_name, printable
from specgen.report.folder import listed
from tests.commands import specgen
from tests.test_report_html import a_run

ENGINE = {
    "model": "/models/org/target",
    "drafter": "/models/org/head",
    "drafter_batch": "padded",
    "num_spec_tokens": 4,
    "spec_length": "fixed",
}
CREATED = "2026-11-23T23:09:14+00:00"


def call(*arguments: object, width: int = 240) -> Result:
    return specgen("report", *arguments, columns=width)


def write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def a_directory(path: Path, *, created: str = CREATED, data: str = "gsm8k", **engine: Any) -> Path:
    """A finished run."""
    write(path / "report.json", a_run())
    write(
        path / "manifest.json",
        {"created": created, "engine": ENGINE | engine, "data": {"dataset": data, "shard": "0/1"}},
    )
    write(path / "status.json", {"state": "finished"})
    (path / "report.html").touch()
    return path


def of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["directory"]: dict(row) for row in listed(folder).rows}


def test_every_kind_of_result_has_a_row(tmp_path: Path) -> None:
    a_directory(tmp_path / "runs" / "a")
    a_directory(tmp_path / "plain", num_spec_tokens=0, drafter=None)
    a_directory(tmp_path / "auto", spec_length="auto", drafter="ngram:3")
    heads = tmp_path / "heads"
    write(heads / "compare.json", {"created": CREATED, "runs": ["gsm8k/x", "gsm8k/y"]})
    for head in "xy":
        a_directory(heads / "gsm8k" / head, drafter=head)
    study = {"study": {"arms": [{"name": "fast"}, {"name": "later"}], "tasks": ["gsm8k"]}}
    write(tmp_path / "eval" / "study.json", study)
    a_directory(tmp_path / "eval" / "fast")
    bench = BenchTable(
        title="A bench", name="one", conditions={}, columns=(), rows=(), notes=("BUSY: a load",)
    )
    bench.write(tmp_path / "bench")
    rows = of(tmp_path)
    report = a_run()
    assert rows["runs/a"] == {
        "directory": "runs/a",
        "what": "org/target with org/head (K 4, padded) on gsm8k",
        "state": "finished",
        "length": 1 + report["num_accepted_tokens"] / report["num_drafts"],
        "speed": report["output_tokens_per_second"],
        "alarming": False,
    }
    assert rows["plain"]["what"] == "org/target alone on gsm8k"
    assert rows["auto"]["what"] == "org/target with ngram:3 (K auto) on gsm8k"
    assert rows["heads"]["what"] == "comparison of 2 drafters on 1 data set"
    assert rows["heads"]["state"] == "not finished: 2 of 2 runs done", "comparison.json is not there"
    assert rows["heads/gsm8k/y"]["state"] == "finished"
    assert rows["eval"]["state"] == "not finished: 1 of 2 arms done"
    assert (rows["bench"]["what"], rows["bench"]["state"]) == ("bench: A bench", "finished, BUSY")
    shown = call(tmp_path)
    assert re.search(
        r"^runs/a +org/target with .* on gsm8k +finished +\d\.\d\d +[\d,.]+$", shown.stdout, re.MULTILINE
    )
    assert json.loads(call(tmp_path, "--json").stdout)["rows"] == [*rows.values()]
    assert not (tmp_path / "index.html").exists(), "a listing writes nothing"


def test_failed_requests_are_a_part_of_the_state(tmp_path: Path) -> None:
    run = a_directory(tmp_path / "a")
    write(
        run / "report.json",
        json.loads((run / "report.json").read_text()) | {"num_errors": 3, "busy": "a load"},
    )
    row = of(tmp_path)["a"]
    assert (row["state"], row["alarming"]) == ("finished, 3 failed, BUSY", True)


@pytest.mark.parametrize("state", ["interrupted", "running", "failed"])
def test_an_unfinished_run_says_how_far_it_is_and_has_no_numbers(tmp_path: Path, state: str) -> None:
    run = a_directory(tmp_path / "a")
    status = {"state": state, "done": 12, "total": 64, "updated": "2026-11-23T23:11:00+00:00"}
    write(run / "status.json", status)  # of a resumed run an earlier report.json is there
    row = of(tmp_path)["a"]
    assert row["state"] == f"not finished: {state}, 12 of 64 done"
    assert row["length"] is row["speed"] is None
    assert row["what"].startswith("org/target with")
    (run / "manifest.json").unlink()
    (run / "report.json").unlink()
    assert of(tmp_path)["a"]["state"].startswith(f"not finished: {state}")  # while rows are read


def test_a_run_whose_process_was_killed_is_stopped(tmp_path: Path) -> None:
    run, process = a_directory(tmp_path / "a"), subprocess.Popen(["true"])
    process.wait()
    host, own = socket.gethostname(), os.getpid()
    gone = f"not finished: stopped: process {process.pid} is gone, 12 of 64 done"
    running = "not finished: running, 12 of 64 done"
    status = {"state": "running", "done": 12, "total": 64, "updated": "2026-11-23T23:11:00+00:00"}
    for pid, where, held, said in (
        (process.pid, host, False, gone),
        (process.pid, host, True, running),  # of a container with numbers of its own
        (process.pid, "elsewhere", False, running),
        (own, host, True, running),
        (own, host, False, gone.replace(f"{process.pid}", f"{own}")),  # a number that is used again
        (None, None, False, running),
    ):
        write(run / "status.json", status | {"pid": pid, "host": where})
        with locked(run) if held else nullcontext():
            assert of(tmp_path)["a"]["state"].startswith(said)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("manifest.json", None, "manifest.json cannot be read"),
        ("report.json", "{", "is not valid JSON"),
        (
            "manifest.json",
            {"created": CREATED, "engine": [], "data": {}},
            "are not as specgen writes them (TypeError",
        ),
        (
            "report.json",
            a_run() | {"mean_acceptance_length": "many"},
            "report.json is not the report of a run (Expected `float | null`",
        ),
    ],
    ids=["none", "torn", "another shape", "words for numbers"],
)
def test_a_broken_run_is_a_row_with_the_reason(tmp_path: Path, name: str, content: Any, reason: str) -> None:
    a_directory(tmp_path / "good")
    spoilt = a_directory(tmp_path / "bad") / name
    spoilt.unlink()
    if content is not None:
        spoilt.write_text(content if isinstance(content, str) else json.dumps(content))
    rows = of(tmp_path)
    assert rows["good"]["state"] == "finished"
    assert rows["bad"]["state"].startswith("broken: ")
    assert reason in rows["bad"]["state"]
    found = call(tmp_path)
    assert found.exit_code == 0
    assert "broken: " in found.stdout


def test_names_are_escaped(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>\n\x1b[31m#?%"
    bad = b"\xff\xfe"
    a_directory(tmp_path / "javascript:x", model="<b>\n\x1b[31mmodel")
    a_directory(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + bad)))
    name = name.replace("/", "")
    a_directory(tmp_path / name)
    found = call(tmp_path)
    assert found.exit_code == 0, found.output
    assert "\x1b" not in found.output
    assert printable(name) in found.stdout
    assert len(json.loads(call(tmp_path, "--json").stdout)["rows"]) == 3


def test_nested_folders_are_followed_and_hidden_ones_and_links_are_not(tmp_path: Path) -> None:
    a_directory(tmp_path / "a" / "b" / "c" / "d")
    a_directory(tmp_path / ".trash" / "e")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert list(of(tmp_path)) == ["a/b/c/d"]


def test_a_directory_that_may_not_be_read_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_directory(tmp_path / "mine")
    a_directory(tmp_path / "closed")
    a_directory(tmp_path / "torn")
    monkeypatch.chdir(tmp_path)  # a user who is not root may not come here by its path
    call(".")  # imports what that user may not
    for path, mode in ((".", 0o755), ("mine", 0o755), ("closed", 0o600), ("torn/report.json", 0)):
        Path(path).chmod(mode)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        found = call(".")
    finally:
        if root:
            os.seteuid(0)
        Path("closed").chmod(0o700)
    assert found.exit_code == 0, found.output
    text = " ".join(found.stdout.split())
    assert text.count("Permission denied") == 2


def test_what_is_no_result_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "data.json").write_text("[1]")
    (tmp_path / "notes" / "other.json").write_text('{"title": "of another program"}')
    for name in ("data", "other"):
        (tmp_path / "notes" / f"{name}.csv").write_text("a bench has one, too")
    found = call(tmp_path)
    assert isinstance(found.exception, UserError)
    assert "cannot be read" in str(found.exception)


def test_a_run_itself_is_no_folder(tmp_path: Path) -> None:
    run = a_directory(tmp_path / "a")
    a_directory(run / "inner")
    assert "mean acceptance length" in call(run).stdout


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/model", "org/model"),
        ("gpt2", "gpt2"),
        ("/a/b/demo/target/", "demo/target"),
        ("/target", "target"),
        ("../target", "target"),
        ("/h/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a1", "meta-llama/Llama-3.1-8B"),
        ("/h/hub/models--gpt2/snapshots/0e9e39f249a1/", "gpt2"),
        ("ngram:3", "ngram:3"),
    ],
)
def test_checkpoints_have_names_that_say_which(path: str, name: str) -> None:
    assert checkpoint_name(path) == name
