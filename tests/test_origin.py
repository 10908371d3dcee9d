"""A page that is passed on still says when, where and how its numbers were measured."""

import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specgen.config import EngineConfig
from specgen.experiments.output import BenchTable
from specgen.record import provenance
from specgen.record.provenance import (
    FREE_IN_A_RUN,
    busy,
    cpu_name,
    differences,
    machine_state,
    now,
    state_after,
)
from specgen.report.origin import origin, unlike_settings
from specgen.report.page import Page
from specgen.report.table import Column

RECORD = {
    "created": "2026-11-22T17:20:41+00:00",
    "argv": [".venv/bin/specgen", "generate", "--dataset", "my prompts.jsonl"],
    "versions": {"python": "3.11.7", "specgen": "0.1.0", "torch": "2.13.0", "lm-eval": "not installed"},
    "device": {"name": "x86_64", "host": "vm", "cpu": "A CPU <8>", "threads": 2},
    "state": {"load": 0.9, "cpus": 2},
}
SHOWN = {
    "date": "2026-11-22 17:20:41 UTC",
    "machine": "vm, A CPU <8>, 2 threads",
    "state": "load 0.9 on 2 CPUs at the start",
    "versions": "specgen 0.1.0, torch 2.13.0, Python 3.11.7",
    "command": "specgen generate --dataset 'my prompts.jsonl'",
}


def test_a_manifest_says_where_its_numbers_come_from():
    assert origin(RECORD) == SHOWN
    gpu = {"name": "NVIDIA H100", "cuda": "13.0", "host": "node7", "cpu": "A CPU"}
    assert origin({"device": gpu}) == {"machine": "node7, NVIDIA H100, CUDA 13.0, A CPU"}
    assert origin({"device": {"name": "x86_64", "threads": 1}}) == {"machine": "x86_64, 1 thread"}
    assert origin({}) == origin({"state": {}}) == {}
    doubtful = "at the start: BUSY, so speeds are doubtful"
    assert origin({"state": {"load": 1.1, "cpus": 2}})["state"].endswith(doubtful)
    assert "BUSY" in origin({"state": {"gpu_use_percent": 90.0}})["state"]
    assert origin({"argv": ["/lib/specgen/__main__.py", "eval"]})["command"] == "specgen eval", (
        "as it is typed"
    )


def test_a_page_ends_with_its_origin():
    text = Page(title="A run", settings={}, origin=SHOWN).to_html()
    assert re.findall("<dt>(.*?)</dt>", text) == list(SHOWN)
    assert "<dd>vm, A CPU &lt;8&gt;, 2 threads</dd>" in text
    assert "origin" not in re.sub("(?s)<style>.*</style>", "", Page(title="A run", settings={}).to_html())


def test_this_moment_is_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["/bin/specgen", "tune"])
    record = json.loads(json.dumps(now("cpu")))
    found = origin(record)
    assert list(found) == list(SHOWN)
    assert found["command"] == "specgen tune"
    assert record["device"]["cpu"] in found["machine"]
    assert record["device"]["host"] in found["machine"]
    bench = BenchTable(
        name="b", title="A bench", conditions={}, columns=(Column(name="n"),), rows=({"n": 1},)
    )
    assert "<dd>specgen tune</dd>" in bench.to_html()


def test_the_cpu_has_the_name_that_linux_gives_it(tmp_path: Path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.00GHz\n\nmodel name\t: Another\n")
    assert cpu_name(path) == "Some CPU @ 2.00GHz"
    path.write_text("model name\t: \n")
    assert cpu_name(path) == cpu_name(tmp_path / "none") != ""


def test_another_machine_may_resume_a_run():
    busy = {**RECORD, "state": {"load": 7, "cpus": 8}}
    assert differences(RECORD, busy) == [], "another load is no other run"
    other = busy | {"device": RECORD["device"] | {"host": "vm2", "cpu": "Another CPU"}}
    assert differences(RECORD, other) != []
    assert differences(RECORD, other, FREE_IN_A_RUN) == []


def test_prompts_are_compared_by_content() -> None:
    one = {"data": {"dataset": "a/d.jsonl", "data_path": None, "num_prompts": None, "sha256": "ab" * 32}}
    same = {"data": {"dataset": "gsm8k", "data_path": "/x/d.jsonl", "num_prompts": 6, "sha256": "ab" * 32}}
    assert differences(one, same) == []
    assert unlike_settings([one, same]) == {}
    other = {"data": {**same["data"], "sha256": "cd" * 32}}
    named = [
        "--dataset a/d.jsonl -> gsm8k",
        "--data-path not given -> /x/d.jsonl",
        "--num-prompts not given -> 6",
    ]
    assert differences(one, other) == named
    assert {"data.dataset", "data.sha256"} < set(unlike_settings([one, same, other]))
    for without in (
        {"tasks": ["gsm8k"], "data_path": "/x"},
        {"dataset": "gsm8k"},
    ):  # nothing else to judge by
        assert differences({"data": without}, {"data": dict.fromkeys(without, "b")}) != []
    bench, moved = ({"data": {"dataset": name, "requests": "ab" * 32}} for name in "ab")
    assert differences(bench, moved) == []


def test_the_load_is_that_of_other_programs(monkeypatch: pytest.MonkeyPatch):
    clock = iter((0.0, 60.0, 120.0, 180.0))
    used = iter((60.0, 60.0, 60.0))  # CPU seconds in the first minute, and none in the others
    monkeypatch.setattr(provenance.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(provenance.os, "times", lambda: (next(used), 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(provenance.os, "getloadavg", lambda: (1.0, 0.0, 0.0))
    own = provenance._OwnLoad()
    assert own.now() == pytest.approx(1 - math.exp(-1)), "the kernel's average has come as far"
    monkeypatch.setattr(provenance, "_OWN", own)
    assert machine_state()["load"] == round(1 - (1 - math.exp(-1)) * math.exp(-1), 2)
    monkeypatch.setattr(provenance.os, "sched_getaffinity", lambda process: {0})
    config = EngineConfig(model="a", drafter="b")
    assert state_after(config)["cpus"] == os.cpu_count(), "the load is not of the CPUs of this process alone"
    assert state_after(replace(config, tensor_parallel=2)) == {}, "ranks have a load of their own"
    assert busy({"load": 0.9, "cpus": 2}, {}) == ""
    assert busy({}, {"load": 1.1, "cpus": 2}) == "load 1.1 of other programs in the last minute on 2 CPUs"


def _nvidia_smi(path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program of that name that does what ``script`` says."""
    (path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:/bin:/usr/bin")


def test_the_state_of_a_gpu_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = "580.65.06, 1980, 1980, 700.00, 3"
    _nvidia_smi(tmp_path, monkeypatch, f'[ "$1" = --id=GPU-7 ] && echo "{said}"')
    found = machine_state("GPU-7")
    text = origin({"state": {**found, "load": 1, "cpus": 26}})["state"]
    assert text == (
        "driver 580.65.06, clock 1980 MHz, of at most 1980 MHz, power limit 700 W, GPU 3 % in use, "
        "load 1 on 26 CPUs at the start"
    )
    assert set(machine_state()) == {"load", "cpus"}


@pytest.mark.parametrize(
    ("script", "known"),
    [
        ("exit 9", []),
        ("echo No devices were found", []),
        ('echo "580.65.06, [N/A], N/A, [Not Supported], 0"', ["gpu_use_percent", "driver"]),
    ],
)
def test_what_cannot_be_read_of_a_gpu_is_left_out(
    script: str, known: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _nvidia_smi(tmp_path, monkeypatch, script)
    assert [name for name in machine_state("GPU-7") if name not in ("load", "cpus")] == known
