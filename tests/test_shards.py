"""Shards of a run, merged, are the run that one process would have made; nothing else is merged."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.config import UserError
from specgen.jobs.job import Job
from specgen.jobs.merge import merge
from specgen.jobs.run import run
from specgen.jobs.shards import Shard, parse_shard, scheduled_shard
from specgen.record import files as run_files
from specgen.record.interrupt import StoppedError
from tests.commands import printed, refused, specgen
from tests.jobs import Silent, conversations, files, keep_in_memory, untimed
from tests.tiny_checkpoints import change_json

pytestmark = pytest.mark.xdist_group("shards")  # the runs of all shards for all

COUNT = 3
PLAIN = {"output_tokens_per_second": 9.0, "ratio": 2.0, "identical": 1.0, "num_compared": 8}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Conversations of two turns, broken rows, all of one shard among them, and a second turn that is too long."""
    turns = [[f"Describe {n} castles beside {2 * n} rivers.", "And now?"] for n in range(1, 5)]
    rows = [{"question_id": f"q{n}", "category": "ab"[n % 2], "turns": each} for n, each in enumerate(turns)]
    rows[1:1] = [{"question_id": "broken"}, {"question_id": "long", "turns": ["Stop", "Tom has " * 2000]}]
    rows[4:4] = [{}]
    job = conversations(tmp_path_factory.mktemp("shards"), rows, baseline=True)
    return replace(job, sampling=replace(job.sampling, max_tokens=9))


@pytest.fixture(autouse=True)
def _loaded(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in_memory(monkeypatch, job.engine)


def run_shards(job: Job, path: Path) -> list[Path]:
    """The directories of all shards, the last one first."""
    directories = [path / f"shard {index}" for index in range(COUNT)]
    for index, directory in enumerate(directories):
        run(replace(job, shard=Shard(index=index, count=COUNT)), directory, Silent())
    return directories[::-1]


def stopped_shard(job: Job, path: Path, index: int) -> Path:
    """The directory of a shard that is stopped when a request is done."""
    directory = path / f"shard {index}"
    with pytest.raises(StoppedError):
        run(
            replace(job, shard=Shard(index=index, count=COUNT)),
            directory,
            Silent(),
            until=lambda: (rows := directory / "completions.jsonl").exists() and rows.stat().st_size > 0,
        )
    return directory


def outcome(directory: Path) -> dict[str, Any]:
    """What there is to compare: the header of the report says that there were shards."""
    found = files(directory)
    found["manifest.json"]["settings"].pop("shards", None)
    baseline = found["report.json"].pop("baseline")
    kept = found["manifest.json"], found["report.json"], baseline["identical"], baseline["num_compared"]
    rows = [untimed(directory / name / "completions.jsonl") for name in ("", "baseline")]
    names = {path.relative_to(directory) for path in directory.rglob("*")}
    counts = {name: found["status.json"][name] for name in ("state", "total", "done", "failed")}
    return {"kept": kept, "rows": rows, "errors": found["errors.jsonl"], "names": names, "counts": counts}


@pytest.mark.parametrize(
    "sampling",
    [{}, pytest.param({"temperature": 0.8, "seed": 7}, marks=pytest.mark.slow)],
    ids=["greedy", "sampled"],
)
def test_merged_shards_are_the_run_of_one_process(job: Job, tmp_path: Path, sampling: dict[str, Any]) -> None:
    job = replace(job, sampling=replace(job.sampling, **sampling))
    run(job, tmp_path / "whole", Silent())
    stopped = stopped_shard(job, tmp_path, 2)
    with refused(
        r"shard 2' is not finished \(interrupted, \d of [34] requests done\): run its `specgen generate` again"
    ):
        merge(tmp_path / "merged", [stopped], "jsonl")
    whole, shards = outcome(tmp_path / "whole"), run_shards(job, tmp_path)
    report = whole["kept"][1]
    assert all(report["acceptance_histogram"]), "drafts are accepted, and not, at every place"
    assert whole["counts"] == {"state": "finished", "total": 12, "done": 9, "failed": 3}
    failed = [json.loads(line)["id"] for line in whole["errors"].splitlines()]
    assert failed[:2] == ["broken", "long/turn-2"]
    assert json.loads((shards[-2] / "report.json").read_text())["num_requests"] == 0, "a shard of broken rows"
    change_json(shards[1] / "report.json", busy="load 9")
    merge(tmp_path / "merged", shards, "jsonl")
    assert outcome(tmp_path / "merged") == whole
    assert json.loads((tmp_path / "merged" / "report.json").read_text())["busy"] == "load 9"
    slowest = max(json.loads((shard / "report.json").read_text())["wall_seconds"] for shard in shards)
    assert json.loads((tmp_path / "merged" / "report.json").read_text())["wall_seconds"] == slowest
    run(job, tmp_path / "merged", Silent())  # tries what has failed again, like any run
    assert json.loads((tmp_path / "merged" / "report.json").read_text())["wall_seconds"] >= slowest
    assert outcome(tmp_path / "merged") == whole


@pytest.mark.slow
def test_a_killed_merge_leaves_no_output(job: Job, tmp_path: Path) -> None:
    shards = run_shards(job, tmp_path)
    merge(tmp_path / "whole", shards, "jsonl")
    whole = outcome(tmp_path / "whole")
    for number in range(20):
        child = os.fork()
        if child == 0:
            kill_at(number)
            merge(tmp_path / "merged", shards, "jsonl")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        assert not (tmp_path / "merged").exists()
    assert number > 8, "it was killed before each of its files"
    assert outcome(tmp_path / "merged") == whole


def kill_at(number: int) -> None:
    """Let this process die in place of replacing a file for the ``number``-th time."""
    visits, original = iter(range(number, -1, -1)), run_files.os.replace

    def visited(*paths: Any) -> None:
        if next(visits) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*paths)

    run_files.os.replace = visited  # type: ignore[assignment]


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def cut(path: Path, lines: int, more: int) -> None:
    """What a copy that was broken off leaves: so many lines, and bytes of the next."""
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:lines]) + whole[lines][:more])


@pytest.fixture(scope="module")
def finished(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards, and a whole run beside them."""
    path = tmp_path_factory.mktemp("finished")
    job = replace(job, baseline=False)
    run_shards(job, path)
    run(job, path / "whole", Silent())
    return path


@pytest.mark.parametrize(
    ("names", "damage", "words"),
    [
        ("0", None, "shard 1/3, 2/3 is missing: give the directories of all 3"),
        ("0 1 2 1", None, "are both shard 1/3: give it once"),
        ("0 1 2 whole", None, "is not a shard but a whole run"),
        ("whole", None, "is not a shard but a whole run"),
        ("0 1 2 3", None, "report.json cannot be read"),
        ("0 1 2", lambda p: edit(p / "manifest.json", lambda m: m["sampling"].update(seed=5)), "--seed 0 -> 5"),
        ("0 1 2", lambda p: edit(p / "manifest.json", lambda m: m["data"].update(sha256="x")), "the prompts: other"),
        ("0 1 2", lambda p: edit(p / "status.json", lambda s: s.update(state="running")), "is not finished (stopped: "),
        ("0 1 2", lambda p: edit(p / "report.json", lambda r: r.update(baseline=PLAIN)), "--baseline False -> True"),
        ("0 1 2", lambda p: edit(p / "manifest.json", lambda m: m["data"].update(shard="2/4")), "shards 3 -> 4"),
        ("0 1 2", lambda p: (p / "requests.jsonl").unlink(), "has no requests.jsonl: copy the directory"),
        ("0 1 2", lambda p: (p / "requests.jsonl").write_text("{"), "is not JSON lines (Expecting"),
        ("0 1 2", lambda p: (p / "completions.jsonl").write_text(""), "rows for 12 requests"),
        ("0 1 2", lambda p: cut(p / "requests.jsonl", lines=1, more=0), "is not the next of requests.jsonl: copy"),
        ("0 1 2", lambda p: cut(p / "passes.jsonl", lines=1, more=9), "passes.jsonl ends within a row: copy"),
    ],
)  # fmt: skip
def test_wrong_sets_of_shards_are_refused(
    finished: Path, tmp_path: Path, names: str, damage: Any, words: str
) -> None:
    shards = [finished / (name if name == "whole" else f"shard {name}") for name in names.split()]
    if damage is not None:
        shards[2] = Path(shutil.copytree(shards[2], tmp_path / "damaged"))
        damage(shards[2])
    with refused(re.escape(words)):
        merge(tmp_path / "merged", shards, "jsonl")
    assert [each.name for each in tmp_path.iterdir()] == ["damaged"][: damage is not None]


def test_shards_of_equal_prompts_are_merged_whatever_their_path_is_called(
    finished: Path, tmp_path: Path
) -> None:
    shards = [Path(shutil.copytree(finished / f"shard {i}", tmp_path / str(i))) for i in range(COUNT)]
    edit(shards[1] / "manifest.json", lambda m: m["data"].update(data_path="question.jsonl"))
    edit(
        shards[2] / "manifest.json", lambda m: m["data"].update(dataset="/mnt/question.jsonl", data_path=None)
    )
    assert merge(tmp_path / "merged", shards, "jsonl").report.num_requests > 0


def test_some_of_many_missing_shards_are_named(finished: Path, tmp_path: Path) -> None:
    shard = Path(shutil.copytree(finished / "shard 0", tmp_path / "shard"))
    for count, words in (
        (9, "5/9 and 3 more is missing: "),
        (6, "shard 1/6, 2/6, 3/6, 4/6, 5/6 is missing: "),
    ):
        edit(shard / "manifest.json", lambda m, count=count: m["data"].update(shard=f"0/{count}"))
        with pytest.raises(ValueError, match=re.escape(words)):
            merge(tmp_path / "merged", [shard], "jsonl")


def test_what_another_killed_merge_left_is_removed(finished: Path, tmp_path: Path) -> None:
    partial = tmp_path / "merged.partial"
    (partial / "baseline").mkdir(parents=True)
    for name in ("manifest.json", "baseline/passes.jsonl", "batch_output.jsonl", "completions.parquet"):
        (partial / name).write_text("{}")
    merge(tmp_path / "merged", [finished / f"shard {index}" for index in range(COUNT)], "jsonl")
    assert (tmp_path / "merged" / "report.json").exists()
    left = {file.name for file in (tmp_path / "merged").iterdir()}
    assert left.isdisjoint({"baseline", "batch_output.jsonl", "completions.parquet"})


def test_the_command_prints_the_report_and_says_what_failed(finished: Path, tmp_path: Path) -> None:
    shards = [str(finished / f"shard {index}") for index in range(COUNT)]
    result = specgen("merge", str(tmp_path / "all"), *shards, "--format", "parquet")
    assert result.exit_code == 3
    assert "shards 3, each in its own process; the time is the slowest one's" in result.stdout
    assert result.stderr.count("specgen: failed: ") == 3
    remedy = f"--output {tmp_path / 'all'} and without --shard, tries failed rows again; with"
    assert remedy in result.stderr.splitlines()[-1]
    assert (tmp_path / "all" / "completions.parquet").exists()
    with refused("exists: name a new directory"):
        printed("merge", finished / "whole", *shards)


@pytest.mark.parametrize("text", ["4/4", "0/0", "-1/4", "1", "a/b", "1/2/3", "1.0/2", ""])
def test_invalid_shards_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="shard is "):
        parse_shard(text)


def array(task: int, first: int, last: int, step: int, count: int) -> dict[str, str]:
    """What Slurm sets for a task of an array."""
    values = {"ID": task, "MIN": first, "MAX": last, "STEP": step, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


STEP = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}  # of a batch job, outside of srun
ONE_NODE = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"}
ONE_JOB = {"SKYPILOT_JOB_RANK": "0", "SKYPILOT_NUM_JOBS": "1"}
RANKS = {"RANK": "2", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("variables", "shard"),
    [
        (array(0, 0, 3, 1, 4) | SCRIPT, "0/4"),
        (array(4, 1, 4, 1, 4) | SCRIPT, "3/4"),
        (array(9, 1, 13, 4, 4) | SCRIPT, "2/4"),
        (array(7, 7, 7, 1, 1), "0/1"),
        (array(2, 0, 3, 1, 4) | SCRIPT | {"SLURM_NTASKS": "8"}, "2/4"),  # tasks that srun does not start
        (array(1, 0, 1, 1, 2) | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "1/2"),
        (STEP, "2/4"),
        (STEP | RANKS, "2/4"),
        ({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "3"} | ONE_JOB, "1/3"),
        ({"SKYPILOT_JOB_RANK": "4", "SKYPILOT_NUM_JOBS": "9"} | ONE_NODE, "4/9"),
        (ONE_NODE | ONE_JOB, "0/1"),
        ({"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2"}, "1/2"),
        (RANKS, "2/4"),
    ],
)
def test_a_scheduler_says_the_shard(variables: dict[str, str], shard: str) -> None:
    assert str(scheduled_shard({"HOME": "/", **variables})) == shard


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "no scheduler says which one (SLURM_ARRAY_TASK_ID, SLURM_PROCID, SKYPILOT_JOB_RANK, "),
        (SCRIPT, "no scheduler says which one"),
        (SCRIPT | {"SLURM_NTASKS": "4"}, "in a Slurm job of 4 tasks, but outside of srun, which starts them: put "),
        (array(5, 1, 7, 1, 3), "have holes (3 from 1 to 7 with step 1): submit one without, such as --array=0-2"),
        (array(5, 1, 8, 2, 4), "have holes (4 from 1 to 8 with step 2)"),
        (array(2, 1, 7, 2, 4), "have holes (4 from 1 to 7 with step 2)"),
        (array(9, 1, 7, 2, 4), "have holes"),
        (array(1, 1, 7, 0, 4), "have holes"),
        (array(1, 0, 3, 1, 4) | STEP, "but Slurm's srun says 2/4 and Slurm's array says 1/4: write --shard I/N"),
        (STEP | {"RANK": "9", "WORLD_SIZE": "32"}, "but Slurm's srun says 2/4 and torchrun says 9/32"),
        ({"RANK": "1"}, "WORLD_SIZE is not set, unlike others of its scheduler"),
        ({"SKYPILOT_JOB_RANK": "1"} | ONE_NODE, "SKYPILOT_NUM_JOBS is not set"),
        ({"SLURM_ARRAY_TASK_ID": "1"}, "SLURM_ARRAY_TASK_MIN is not set"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK is 'x' and no number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "shard is 4/4: of 4 shards, use 0/4 to 3/4"),
    ],
)  # fmt: skip
def test_what_schedulers_cannot_say_is_refused(variables: dict[str, str], words: str) -> None:
    with refused(re.escape(words)):
        scheduled_shard(variables)


def test_a_scheduled_shard_has_its_own_directory_and_resumes_anywhere(
    job: Job, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in array(9, 5, 13, 4, 3).items():
        monkeypatch.setenv(name, value)
    command = ["generate", "--dataset", "mt-bench", "--data-path", job.data.data_path]
    command += ["--output", tmp_path / "all"]
    command += ["--num-spec-tokens", 3, "--max-new-tokens", 14, "--max-batch-size", 4, "--device", "cpu"]
    result = specgen(*command, "--shard", "auto")
    mine = tmp_path / "all" / "1-of-3"
    assert f"shard 1/3 in {mine}" in result.stderr
    assert untimed(mine / "completions.jsonl") == untimed(finished / "shard 1" / "completions.jsonl")
    assert json.loads((mine / "manifest.json").read_text())["data"]["shard"] == "1/3"
    passes = (mine / "passes.jsonl").read_bytes()
    for name in array(0, 0, 0, 1, 1):
        monkeypatch.delenv(name)
    again = specgen("generate", "--config", mine / "config.yaml")
    assert again.exit_code == result.exit_code
    assert (mine / "passes.jsonl").read_bytes().startswith(passes)
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["1-of-3"]
    assert "no scheduler says" in str(specgen(*command, "--shard", "auto").exception)


def test_every_row_is_in_one_shard() -> None:
    shards = [parse_shard(f"{index}/3") for index in range(3)]
    assert [[n for n in range(7) if shard.holds(n)] for shard in shards] == [[0, 3, 6], [1, 4], [2, 5]]
