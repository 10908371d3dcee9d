"""A run in an object store: parts that a kill leaves are resumed, and the end is that of a run on a disk."""

import gc
import json
import os
import random
import re
import shutil
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from specgen.config import UserError
from specgen.config.urls import Url
from specgen.jobs.job import Job
from specgen.jobs.run import run
from specgen.jobs.shards import Shard
from specgen.record import mirror
from specgen.record.interrupt import StoppedError
from specgen.record.mirror import fetched
from specgen.storage import Store
from tests.commands import printed, refused, rows, specgen, write_rows
from tests.jobs import Silent, conversations, files, keep_in_memory, untimed
from tests.object_server import BUCKET, KEY, SECRET, S3Server, s3_server
from tests.waiting import wait_until

S3 = Url(f"s3://{BUCKET}/nightly/run")
MEMORY = Url("memory://bucket/run")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Conversations of two turns with the bundled pair, and a broken row."""
    turns = [[f"Describe {n} castles beside {2 * n} rivers.", "And " * n + "now?"] for n in range(1, 5)]
    asked = [{"question_id": f"q{n}", "category": "ab"[n % 2], "turns": each} for n, each in enumerate(turns)]
    return conversations(
        tmp_path_factory.mktemp("buckets"), [*asked[:3], {"question_id": "broken"}, *asked[3:]]
    )


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the disk."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        keep_in_memory(patch, job.engine)
        run(job, out, Silent())
    return out


@pytest.fixture(autouse=True)
def _loaded(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are in memory, the cache is the test's, and parts are small."""
    keep_in_memory(monkeypatch, job.engine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mirror, "_INTERVAL", 0.03)
    monkeypatch.setattr(mirror, "_POLL", 0.01)
    monkeypatch.setattr(mirror, "_MOST", 3000)
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as server:
        yield server


def result(url: Url, tmp_path: Path) -> dict[str, Any]:
    """The files of a finished run at ``url``, without times."""
    store = Store.at(url)
    assert json.loads(store.read("parts.json"))["state"] == "finished"
    names = set(store.names())
    assert not [name for name in names if name.startswith("parts/")], "parts are removed"
    here = tmp_path / "result"
    shutil.rmtree(here, ignore_errors=True)
    with fetched(url) as found:
        assert {file.name for file in found.iterdir()} == names - {"parts.json"}
        shutil.copytree(found, here)
    return files(here)


def completions(tmp_path: Path) -> list[bytes]:
    """Of the last ``result``."""
    return (tmp_path / "result" / "completions.jsonl").read_bytes().splitlines(keepends=True)


def expected(whole: Path) -> dict[str, Any]:
    """Those of a run on a disk, but for what a resume on this machine needs."""
    return {name: each for name, each in files(whole).items() if not name.startswith(".")}


def published(url: Url) -> list[bytes]:
    """The whole completions that a run which has not finished has in its store."""
    try:
        with fetched(url) as found:
            path = found / "completions.jsonl"
            return path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except Exception:
        return []


def work(job: Job, url: Url, server: S3Server, tmp_path: Path) -> bool:
    """Run ``job`` in a child; whether the server killed it."""
    go, ready = os.pipe()
    child = os.fork()
    if child == 0:
        gc.freeze()
        code = 1
        try:
            os.read(go, 1)
            run(job, url, Silent())
            code = 0
        except BaseException:
            (tmp_path / "traceback").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    server.child = child
    os.write(ready, b"x")
    _, status = os.waitpid(child, 0)
    server.child = None
    os.close(go)
    os.close(ready)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, (tmp_path / "traceback").read_text()
    return False


def kill_at(server: S3Server, number: int, when: str) -> None:
    """Kill the client at its write of that number, done or not."""
    left = number

    def fault(method: str, key: str) -> str | None:
        nonlocal left
        left -= method in ("PUT", "POST", "DELETE")
        return f"kill {when}" if left == -1 and method in ("PUT", "POST", "DELETE") else None

    server.fault = fault


@pytest.mark.slow
def test_a_run_killed_at_any_write_ends_as_one_on_a_disk(
    job: Job, whole: Path, s3: S3Server, tmp_path: Path
) -> None:
    assert not work(job, S3, s3, tmp_path)
    num_writes = sum(method in ("PUT", "POST", "DELETE") for method, *_ in s3.requests)
    rng, num_killed = random.Random(3), 0
    places = range(0, num_writes + 1, max(1, num_writes // 5))
    for place in places:
        url = S3 / str(place)
        kill_at(s3, place, rng.choice(["before", "after"]))
        num_killed += work(job, url, s3, tmp_path)
        s3.fault = lambda method, key: None
        kept = published(url)
        assert not work(job, url, s3, tmp_path)
        assert result(url, tmp_path) == expected(whole)
        assert set(kept) <= set(completions(tmp_path)), "what was published is not generated again"
    assert num_killed >= len(places) * 0.6


# --- what a store can do wrong ------------------------------------------------------------------


def stopping_at(url: Url, number: int) -> Any:
    """Stops a run once so many completions of it are published."""
    return lambda: len(published(url)) >= number


def interrupted(job: Job, url: Url, number: int = 2) -> list[bytes]:
    """What is published of a run that a signal stops."""
    with pytest.raises(StoppedError):
        run(job, url, Silent(), stopping_at(url, number))
    found = published(url)
    assert number <= len(found) < 8
    return found


def test_a_stopped_run_goes_on_where_it_was(job: Job, whole: Path, tmp_path: Path) -> None:
    kept = interrupted(job, MEMORY)
    assert json.loads(Store.at(MEMORY).read("status.json"))["state"] == "interrupted"
    run(job, MEMORY, Silent())
    assert result(MEMORY, tmp_path) == expected(whole)
    assert {*kept} <= {*completions(tmp_path)}


def elsewhere(patch: pytest.MonkeyPatch, tmp_path: Path, job: Job, url: Url) -> None:
    """Run ``job`` on a machine with another cache."""
    with patch.context() as other:
        other.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        run(job, url, Silent())


def test_a_run_that_is_taken_over_ends(
    job: Job, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not heard of, as its machine was asleep, changes nothing of what another one has done since."""
    monkeypatch.setattr(mirror, "_INTERVAL", 1e9)
    steps = []

    def until() -> bool:
        steps.append(True)
        if len(steps) == 5:
            elsewhere(monkeypatch, tmp_path, job, MEMORY)
            steps.append(result(MEMORY, tmp_path))
        return False

    monkeypatch.setattr(mirror, "_MOST", 1 << 30)
    with refused(
        rf"^output {MEMORY} is in use by process \d+ on \S+, which has changed it meanwhile: wait for it"
    ):
        run(job, MEMORY, Silent(), until)
    assert result(MEMORY, tmp_path) == steps[5] == expected(whole)


def test_a_url_in_use_on_this_machine_is_refused(job: Job, tmp_path: Path) -> None:
    def until() -> bool:
        with refused(rf"^output '{MEMORY}' is in use by process {os.getpid()} on "):
            run(job, MEMORY, Silent())
        return True

    with pytest.raises(StoppedError):
        run(job, MEMORY, Silent(), until)


@pytest.mark.slow
def test_errors_that_the_server_gives_for_a_while_change_nothing(
    job: Job, whole: Path, s3: S3Server, tmp_path: Path
) -> None:
    """Such as 503 for a part, for the manifest and for a file of the end; it is slow as well."""
    left = ["completions.jsonl", "parts.json", "report.json"]

    def fault(method: str, key: str) -> str | None:
        if left and method == "PUT" and key.endswith(left[0]):
            left.pop(0)
            return "503"
        return None

    s3.fault, s3.slow = fault, 0.01
    run(job, S3, Silent())
    assert not left
    assert result(S3, tmp_path) == expected(whole)


@pytest.mark.slow
def test_a_store_that_is_away_ends_the_run_in_one_line_and_the_command_resumes_it(
    job: Job, whole: Path, s3: S3Server, tmp_path: Path
) -> None:
    def fault(method: str, key: str) -> str | None:
        return "503" if sum(each[0] == "PUT" for each in s3.requests) >= 12 else None

    s3.fault = fault
    with refused(
        rf"^{S3} cannot be reached \(.*(busy|503).*\): check the address, your rights and the network, then"
    ):
        run(job, S3, Silent(), lambda: time.sleep(0.01) is not None)
    s3.fault = lambda method, key: None
    assert json.loads(Store.at(S3).read("parts.json"))["state"] == "unfinished"
    run(job, S3, Silent())
    assert result(S3, tmp_path) == expected(whole)


def test_the_engine_does_not_wait_for_a_slow_store(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on while a part is written."""
    write, waited, steps = Store.write, [], [0]

    def slow(self: Store, name: str, content: bytes) -> None:
        if steps[0] and not waited:
            began = steps[0]
            waited.append(wait_until(lambda: steps[0] >= began + 4))
        write(self, name, content)

    def until() -> bool:
        steps[0] += 1
        return False

    monkeypatch.setattr(Store, "write", slow)
    run(job, MEMORY, Silent(), until)
    assert waited == [True]


def test_credentials_are_in_no_file_and_in_no_line(
    job: Job, s3: S3Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor are they where a run fails."""
    command = [f"--data-path={job.data.data_path}", "--dataset=mt-bench", "--num-prompts=1", "--quiet"]
    seen = [specgen("generate", *command, "--max-new-tokens", "3", "--output", S3).output]
    secret = f"s3://{KEY}:{SECRET}@{BUCKET}/run"
    for name in ("--output", "--dataset", "--data-path", "--model", "--drafter"):
        seen.append(specgen("generate", name, secret).output)
        seen.append(specgen("generate", f"{name}=s3://{BUCKET}/run?X-Amz-Signature={SECRET}").output)
    seen += [specgen(name, secret, secret).output for name in ("report", "merge", "inspect")]
    seen += [specgen("generate", "--output", secret, "--output", f"{secret}2").output]
    failed = specgen("generate", *command, "--output", "s3://no-such-bucket/run")
    assert re.match(
        "s3://no-such-bucket/run cannot be reached .The specified bucket does not", str(failed.exception)
    )
    seen += [failed.output, str(failed.exception), *capfd.readouterr()]
    objects = [Store.at(Url(f"s3://{BUCKET}")).read(name).decode() for name in s3.names()]
    here = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(objects) == 9
    for text in (*seen, *objects, *here):
        assert KEY not in text
        assert SECRET not in text


# --- as with a directory ------------------------------------------------------------------------


def test_a_finished_run_is_left_as_it_is_and_other_settings_are_refused(job: Job, tmp_path: Path) -> None:
    job = replace(job, data=replace(job.data, num_prompts=2))
    first, store = run(job, MEMORY, Silent()), Store.at(MEMORY)
    before = {each.url: each.version for each in store.objects()}
    again = run(job, MEMORY, Silent())
    assert again.report.to_json() == first.report.to_json()
    assert again.samples == first.samples
    with refused(rf"^output '{MEMORY}' holds a run that differs in --max-new-tokens 14 -> 9: name another"):
        run(replace(job, sampling=replace(job.sampling, max_tokens=9)), MEMORY, Silent())
    assert {each.url: each.version for each in store.objects()} == before
    run(replace(job, format="parquet"), MEMORY, Silent())
    more = {each.url: each.version for each in store.objects()}
    assert {name for name in more if more[name] != before.get(name)} == {
        MEMORY / "completions.parquet",
        MEMORY / "parts.json",
    }
    with fetched(MEMORY) as found:
        assert (found / "completions.parquet").stat().st_size > 0


@pytest.mark.slow
def test_a_finished_run_with_failures_does_them_again(
    job: Job, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects of the first end stay whole until the second."""
    run(job, MEMORY, Silent())
    kept = {name: Store.at(MEMORY).read(name) for name in ("completions.jsonl", "passes.jsonl")}
    for left in (4, 2):
        upload = Store.upload

        def fail(self: Store, name: str, file: Path, left: list[int] = [left], upload: Any = upload) -> None:  # noqa: B006
            left[0] -= 1
            if left[0] < 0:
                raise UserError("no answer")
            upload(self, name, file)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "upload", fail)
            with refused("no answer"):
                run(job, MEMORY, Silent())
            with fetched(MEMORY) as found:
                assert untimed(found / "completions.jsonl") == untimed(whole / "completions.jsonl")
    run(job, MEMORY, Silent())
    assert result(MEMORY, tmp_path)["completions.jsonl"] == expected(whole)["completions.jsonl"]
    assert (tmp_path / "result" / "completions.jsonl").read_bytes() == kept["completions.jsonl"]


@pytest.mark.slow
def test_a_corrected_row_is_mended_at_a_url(job: Job, tmp_path: Path) -> None:
    run(job, MEMORY, Silent())
    assert job.data.data_path is not None
    asked = rows(Path(job.data.data_path))
    asked[3]["turns"] = ["Describe a castle."]
    mended = replace(job.data, data_path=write_rows(tmp_path / "mended.jsonl", asked))
    follower = Counted()
    report = run(replace(job, data=mended, retry_errors=True), MEMORY, follower).report
    assert (report.num_errors, report.num_requests, follower.count) == (0, 9, 1)
    again = replace(job, data=mended)
    assert run(again, MEMORY, follower).report.num_requests == 9
    assert follower.count == 1


class Counted(Silent):
    count = 0

    def advance(self) -> None:
        self.count += 1


@pytest.mark.slow
def test_a_run_with_a_baseline(job: Job, tmp_path: Path) -> None:
    job = replace(job, baseline=True, data=replace(job.data, num_prompts=3))
    run(job, tmp_path / "whole", Silent())

    def until() -> bool:
        names = Store.at(MEMORY).names()
        return any(name.startswith("parts/") for name in names) and _baseline_rows() >= 2

    with pytest.raises(StoppedError):
        run(job, MEMORY, Silent(), until)
    run(job, MEMORY, Silent())
    with fetched(MEMORY) as found:
        for name in ("completions.jsonl", "baseline/completions.jsonl"):
            assert untimed(found / name) == untimed(tmp_path / "whole" / name)
        assert json.loads((found / "report.json").read_text())["baseline"]


def _baseline_rows() -> int:
    try:
        with fetched(MEMORY) as found:
            return len(rows(found / "baseline" / "completions.jsonl"))
    except (UserError, FileNotFoundError):
        return 0


@pytest.mark.slow
def test_starting_over_keeps_what_is_there(job: Job, whole: Path, tmp_path: Path) -> None:
    job = replace(job, restart=True)
    interrupted(job, MEMORY)
    kept = interrupted(job, MEMORY, 3)
    run(job, MEMORY, Silent())
    assert result(MEMORY, tmp_path) == expected(whole)
    assert published(Url("memory://bucket/run.2")) == kept
    run(replace(job, restart=False), Url("memory://bucket/run.2"), Silent())
    assert result(Url("memory://bucket/run.2"), tmp_path) == expected(whole)


def test_a_url_with_something_else_is_refused(job: Job) -> None:
    Store.at(MEMORY).write("model.bin", b"weights")
    with refused(rf"^output {MEMORY} is not empty and holds no run \(it has model.bin\): name another URL"):
        run(job, MEMORY, Silent())
    assert Store.at(MEMORY).names() == ["model.bin"]


def test_a_mistake_before_the_first_answer_leaves_nothing_there(job: Job, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("{}\n")
    nothing = replace(job, data=replace(job.data, dataset=str(tmp_path / "none.jsonl"), data_path=None))
    with refused("none of the 1 rows of"):
        run(nothing, MEMORY, Silent())
    assert Store.at(MEMORY).names() == []
    assert list((tmp_path / "cache" / "specgen" / "runs").glob("*/run/*")) == []


@pytest.mark.slow
def test_runs_at_urls_are_reported_and_merged(job: Job, tmp_path: Path) -> None:
    job = replace(job, data=replace(job.data, num_prompts=3))
    run(job, tmp_path / "whole", Silent())
    shards = [MEMORY / str(at) for at in range(2)]
    for at, url in enumerate(shards):
        run(replace(job, shard=Shard(index=at, count=2)), url, Silent())
    there = MEMORY / "all"
    assert "mean acceptance length" in specgen("merge", there, *shards).stdout
    with fetched(there) as found:
        assert untimed(found / "completions.jsonl") == untimed(tmp_path / "whole" / "completions.jsonl")
    Store.at(there).write("completions.jsonl", b"not read")
    numbers = json.loads(printed("report", there, "--json"))
    assert numbers["num_requests"] == 6
    assert f"run 2  {shards[1]}\n" in printed("report", *shards)
    assert "is not as it was written" in str(specgen("merge", there, *shards).exception)
    assert f"output '{shards[0]}' exists" in str(specgen("merge", shards[0], *shards).exception)
    one = Url("memory://bucket/stopped")
    interrupted(replace(job, shard=Shard()), one)
    assert json.loads(printed("report", one, "--json"))["num_unfinished"] >= 1
    with refused("memory://bucket/none holds no run"):
        printed("report", "memory://bucket/none")


def test_a_schedulers_shard_is_below_the_url(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = ["--dataset", "mt-bench", "--data-path", job.data.data_path, "--num-prompts", "2"]
    done = specgen(
        "generate", *data, "--max-new-tokens", "2", "--shard", "auto", "--output", MEMORY, "--quiet"
    )
    assert done.exit_code == 0, done.output
    there = MEMORY / "1-of-2"
    assert f"output: {there}\n" in Store.at(there).read("config.yaml").decode()
