"""The start of a run over many rows: what is on disk while they are read, and how long a row takes."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.jobs import run
from specgen.jobs.job import Job
from specgen.jobs.prompt_index import index_prompts
from specgen.jobs.shards import WHOLE, Shard
from specgen.prompts import DataSource
from specgen.record.interrupt import StoppedError
from specgen.record.results import LOCK, locked
from tests.commands import refused, write_rows
from tests.jobs import Silent, conversations, keep_in_memory, of_field_q

NUM_ROWS = 20_000


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OpenAI batch of many rows."""
    path = tmp_path_factory.mktemp("large") / "batch.jsonl"
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "How many are there? " * 4}],
        "max_tokens": 256,
    }
    row = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    return write_rows(path, ({"custom_id": f"r{n}", **row} for n in range(NUM_ROWS)))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    job = replace(conversations(tmp_path, []), data=DataSource(dataset=str(tmp_path / "own.jsonl")))
    write(job, "abc")
    keep_in_memory(monkeypatch, job.engine)
    return job


def write(job: Job, names: str) -> None:
    write_rows(Path(job.data.dataset), ({"id": name, "prompt": name} for name in names))


def status(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "status.json").read_text())
    return found


def test_a_row_takes_few_calls(batch: Path) -> None:
    """As time would say, on any machine: 125 when this was written."""
    prompts = DataSource(dataset=str(batch), num_prompts=2000).open()
    num_calls, warnings = 0, list[int]()

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        index = index_prompts("batch", prompts, WHOLE, warnings.append)
    finally:
        sys.setprofile(None)
    assert num_calls / 2000 < 150, num_calls
    assert warnings == [1000, 2000]
    assert (index.num_requests, index.rows[7], index.has_chats) == (2000, ("r7",), True)


def test_the_digest_is_of_what_is_asked_and_not_of_the_order_of_its_fields(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        (tmp_path / "a.jsonl").write_text(text)
        return index_prompts("a", DataSource(dataset=str(tmp_path / "a.jsonl")).open(), WHOLE).digest

    asked = digest('{"id": "a", "prompt": "x", "seed": 1, "top_p": 0.5}\n')
    assert digest('{"top_p": 0.5, "prompt": "x", "id": "a", "seed": 1}\n') == asked
    others = (
        '"seed": 2, "top_p": 0.5',
        '"seed": 1, "top_p": 0.25',
        '"seed": 1',
        '"seed": 1, "top_p": 0.5, "max_tokens": 3',
    )
    assert asked not in {digest('{"id": "a", "prompt": "x", ' + each + "}\n") for each in others}
    assert asked != digest('{"id": "a", "prompt": "y", "seed": 1, "top_p": 0.5}\n')


def test_the_key_is_of_the_content_and_of_how_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')

    def key(name: str = "a.jsonl", num_prompts: int | None = None) -> str | None:
        return DataSource(dataset=str(tmp_path / name), num_prompts=num_prompts).open().key()

    first = key()
    assert first is not None
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n')
    assert key("b.jsonl") == first
    (tmp_path / "a.json").write_text('{"prompt": "x"}\n')
    assert key("a.json") != first
    assert key(num_prompts=1) != first
    (tmp_path / "a.jsonl").write_text('{"prompt": "y"}\n')
    assert key() != first


def test_lock_and_status_are_there_while_rows_are_read_and_a_signal_ends_it(
    batch: Path, job: Job, tmp_path: Path
) -> None:
    out, seen = tmp_path / "run", list[str]()

    def until() -> bool:
        seen.append(status(out)["state"])
        with refused("is in use"), locked(out):
            pass
        return len(seen) == 3

    with pytest.raises(StoppedError, match="interrupted after 3,000 rows were read"):
        run.run(replace(job, data=replace(job.data, dataset=str(batch))), out, Silent(), until)
    assert seen == ["reading"] * 3
    assert status(out)["state"] == "interrupted"
    assert status(out)["rows_read"] >= 1000
    assert {path.name for path in out.iterdir()} == {LOCK, "status.json"}
    run.run(job, out, Silent())  # another job may have the directory: nothing was begun
    assert status(out)["state"] == "finished"


def test_a_kill_while_a_finished_run_is_read_again_leaves_it_finished(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "run", list[bytes]()
    run.run(job, out, Silent())
    before = (out / "status.json").read_bytes()
    for name in (
        "open_checkpoints",
        "require_same",
        "complete_run",
    ):  # before, while and after it is compared
        original = getattr(run, name)

        def looked(*arguments: Any, original: Any = original, **named: Any) -> Any:
            seen.append((out / "status.json").read_bytes())
            return original(*arguments, **named)

        monkeypatch.setattr(run, name, looked)
    run.run(job, out, Silent())
    assert seen == [before] * 3


def test_a_mistake_in_the_rows_leaves_no_directory_and_no_change(job: Job, tmp_path: Path) -> None:
    with refused("none of the 3 rows"):
        run.run(of_field_q(job), tmp_path / "r", Silent())
    assert not (tmp_path / "r").exists()
    run.run(job, tmp_path / "r", Silent())
    before = {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir() if path.name != LOCK}
    with refused("none of the 3 rows"):
        run.run(of_field_q(job), tmp_path / "r", Silent())
    assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir() if p.name != LOCK} == before


@pytest.mark.parametrize("shard", [WHOLE, Shard(index=1, count=2)])
def test_a_resume_reads_the_same_rows(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: Shard
) -> None:
    rows = [
        {"id": "a", "prompt": "a"},
        [1],
        {"id": "a", "prompt": "again"},
        {"id": "d", "prompt": "", "temprature": 1},
    ]
    write_rows(Path(job.data.dataset), [*rows, {"id": "e", "prompt": "e"}])
    job = replace(job, shard=shard)
    if shard != WHOLE:
        write(job, "abcd")
    first = run.run(job, tmp_path / "run", Silent())
    read = (tmp_path / "run" / "errors.jsonl").read_bytes()
    warnings = list[str]()
    progress = Silent()
    monkeypatch.setattr(progress, "warn", warnings.append)
    again = run.run(job, tmp_path / "run", progress)
    assert again.report.num_requests == first.report.num_requests == 2
    assert (tmp_path / "run" / "errors.jsonl").read_bytes() == read, "a duplicate does not become a prompt"
    assert len([each for each in warnings if "temprature" in each]) == (shard == WHOLE)
    write(job, "abcx")
    with refused(r"differs in (files of the prompts: .*\(|the prompts: other rows)"):
        run.run(job, tmp_path / "run", Silent())
