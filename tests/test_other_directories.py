"""`specgen report` of the directory of an evaluation or a bench."""

import json
import os
import re

import pytest

from specgen.experiments.output import BenchTable
from specgen.report.display import percent, thousandths
from specgen.report.table import Column
from tests.commands import specgen
from tests.test_paired_requests import row
from tests.test_tables import a_run


def call(*arguments):
    return specgen("report", *arguments)


@pytest.fixture
def evaluation(tmp_path):
    """An evaluation whose third arm has not begun."""
    arms = [{"name": name} for name in ("plain", "fast", "later")]
    (tmp_path / "study.json").write_text(json.dumps({"study": {"arms": arms}}))
    (tmp_path / "report.html").touch()
    for number, name in enumerate(("plain", "fast")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(a_run() | {"num_requests": 1}))
        (tmp_path / name / "manifest.json").write_text(json.dumps({"engine": {"num_spec_tokens": number}}))
        (tmp_path / name / "completions.jsonl").write_text(json.dumps(row("a", [1])) + "\n")
    return tmp_path


def test_the_arms_of_an_evaluation_stand_side_by_side(evaluation):
    text = " ".join(call(evaluation).stdout.split())
    assert f"run 1 {evaluation / 'plain'} run 2 {evaluation / 'fast'} The runs differ" in text
    assert "engine.num_spec_tokens 0 1" in text
    assert "1 of 1 texts identical" in text
    assert text.endswith(f"its scores and texts are in {evaluation / 'report.html'}.")
    assert list(json.loads(call(evaluation, "--json").stdout)) == [
        str(evaluation / name) for name in ("plain", "fast")
    ]
    assert "holds an evaluation" not in call(evaluation / "plain").stdout


def test_benches_are_printed_again(tmp_path):
    for name, number in (("one", 1.5), ("two", 2.5)):
        BenchTable(
            title=f"Bench {name}",
            name=name,
            conditions={"device": "a CPU"},
            columns=(
                Column(name="batch"),
                Column(name="time", unit="us"),
                Column(name="share", show=percent),
                Column(name="bound", show=thousandths),
            ),
            rows=({"batch": 8, "time": number, "share": 0.338, "bound": 0.004},),
            notes=("Two were not run.",),
        ).write(tmp_path)
    wide = tmp_path / "wide"
    BenchTable(
        title="Wide",
        name="wide",
        conditions={},
        columns=tuple(Column(name=f"column{n}") for n in range(12)),
        rows=({f"column{n}": 10**8 for n in range(12)},),
        num_keys=2,
    ).write(wide)
    assert len(re.findall(r"\bcolumn1\b", call(wide).stdout)) == 3, "both keys in all blocks"
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "list.json").write_text("[]")
    lines = [" ".join(line.split()) for line in call(tmp_path).stdout.splitlines() if line.strip()]
    assert lines == [
        part
        for name, number in (("one", "1.50"), ("two", "2.50"))
        for part in (
            *(f"Bench {name}", "device: a CPU"),
            *("batch time [us] share bound", f"8 {number} 33.8 % 0.004", "Two were not run."),
        )
    ]
    documents = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two")}
    assert json.loads(call(tmp_path, "--json").stdout) == documents, "one document"
    assert json.loads(call(wide, "--json").stdout)["title"] == "Wide"
    os.mkfifo(tmp_path / "large.json")  # which waits for ever if it is read
    assert json.loads(call(tmp_path, "--json").stdout) == documents
