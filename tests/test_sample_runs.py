"""Runs with several samples a prompt: resumed, cut anywhere, in shards, on Ray, in pipelines, as OpenAI's choices."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import pytest

from specgen import BatchGenerator, Engine, Message, Prompt, SamplingParams
from specgen.config import Cluster
from specgen.engine.conversations import summarize
from specgen.experiments import study
from specgen.jobs import ray_engine
from specgen.jobs.job import Job
from specgen.jobs.merge import merge
from specgen.jobs.run import run
from specgen.jobs.run_output import FinishedRun
from specgen.jobs.shards import Shard
from specgen.prompts.load import DataSource
from specgen.record import columns
from specgen.record.files import Rows
from tests.commands import printed, refused, rows, specgen, write_rows
from tests.engines import engine_config
from tests.jobs import Silent, keep_in_memory, untimed
from tests.test_ray import InProcess

pytestmark = pytest.mark.xdist_group("sample-runs")
TOLD = [f"Tom has {n} apples, buys {2 * n} more and eats three of them. Now he has" for n in range(3, 6)]
Texts = dict[tuple[str, int], str]


def texts(out: Path) -> Texts:
    """By id and sample, in the order of the file."""
    return {(row["id"], row.get("sample", 0)): row["text"] for row in rows(out / "completions.jsonl")}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, demo_path: Path) -> Job:
    """The second row has its own number of samples; a broken one is none's."""
    asked: list[Any] = [{"id": f"q{n}", "prompt": text} for n, text in enumerate(TOLD)]
    asked[1:2] = [asked[1] | {"n": 3}, {"id": "broken"}]
    data = write_rows(tmp_path_factory.mktemp("samples") / "rows.jsonl", asked)
    return Job(
        engine=engine_config(demo_path, num_spec_tokens=3, max_batch_size=4, page_size=4),
        sampling=SamplingParams(max_tokens=8, temperature=0.9, seed=4),
        data=DataSource(dataset=str(data)),
    )


@pytest.fixture(autouse=True)
def _loaded(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in_memory(monkeypatch, job.engine)


def of(job: Job, n: int) -> Job:
    return replace(job, sampling=replace(job.sampling, n=n))


@pytest.fixture(scope="module")
def four(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four samples."""
    out = tmp_path_factory.mktemp("four") / "run"
    run(of(job, 4), out, Silent())
    return out


NAMES = [("q0", 0), ("q0", 1), ("q0", 2), ("q0", 3), ("q1", 0), ("q1", 1), ("q1", 2)]
NAMES += [("q2", 0), ("q2", 1), ("q2", 2), ("q2", 3)]


def test_samples_are_rows_of_their_own(four: Path) -> None:
    found = texts(four)
    assert list(found) == NAMES
    assert len({*found.values()}) > 8, "samples differ"
    assert [row["id"] for row in rows(four / "errors.jsonl")] == ["broken"]
    status = json.loads((four / "status.json").read_text())
    assert (status["total"], status["done"], status["failed"]) == (12, 11, 1)
    assert "4 samples a prompt" in json.loads((four / "manifest.json").read_text())["settings"]["sampling"]


def test_a_run_goes_on_with_more_samples(job: Job, four: Path, tmp_path: Path) -> None:
    """And the first ones are those of a run with fewer, which are kept as they are."""
    whole, before = texts(four), list[str]()
    for n, kept in ((1, 0), (2, 5), (4, 7)):
        run(of(job, n), tmp_path, Silent())
        found, lines = texts(tmp_path), (tmp_path / "completions.jsonl").read_text().splitlines()
        assert found == {name: whole[name] for name in NAMES if name[0] == "q1" or name[1] < n}
        assert len(before) == kept
        assert {*before} < {*lines}
        before = lines
    settings = json.loads((tmp_path / "manifest.json").read_text())["settings"]
    assert settings == json.loads((four / "manifest.json").read_text())["settings"]
    with refused(r"differs in --n 4 -> 2: "):
        run(of(job, 2), tmp_path, Silent())
    assert texts(tmp_path) == whole


def test_a_row_that_asks_for_more_goes_on_and_for_fewer_loses_none(
    job: Job, four: Path, tmp_path: Path
) -> None:
    asked = rows(Path(job.data.dataset))
    asked.pop(2)

    def answered(n: int) -> Texts:
        asked[1]["n"] = n
        write_rows(tmp_path / "rows.jsonl", asked)
        run(
            replace(of(job, 4), data=DataSource(dataset=str(tmp_path / "rows.jsonl"))),
            tmp_path / "out",
            Silent(),
        )
        return texts(tmp_path / "out")

    whole = texts(four)
    assert answered(2) == {name: text for name, text in whole.items() if name != ("q1", 2)}
    assert answered(3) == whole
    (tmp_path / "out" / "report.json").unlink()  # not finished
    with refused("has an answer to 'q1/sample-2', which no row asks for any more: put its n back"):
        answered(2)
    assert texts(tmp_path / "out") == whole


def test_what_a_kill_leaves_anywhere_is_completed(job: Job, four: Path, tmp_path: Path) -> None:
    lines = (four / "completions.jsonl").read_bytes().splitlines(keepends=True)
    for number, kept in enumerate(([0, 1], [3, 5, 9], [2, 4, 7, 8, 10])):
        out = tmp_path / str(number)
        shutil.copytree(four, out)
        for name in ("report.json", "report.html"):
            (out / name).unlink()
        torn = lines[1][: len(lines[1]) // 2]
        (out / "completions.jsonl").write_bytes(b"".join(lines[at] for at in kept) + torn)
        run(of(job, 4), out, Silent())
        assert untimed(out / "completions.jsonl") == untimed(four / "completions.jsonl")
        assert [row["id"] for row in rows(out / "errors.jsonl")] == ["broken"]


def test_merged_shards_are_the_whole(job: Job, four: Path, tmp_path: Path) -> None:
    paths = [tmp_path / str(index) for index in range(2)]
    for index, path in enumerate(paths):
        run(replace(of(job, 4), shard=Shard(index=index, count=2)), path, Silent())
    merge(tmp_path / "merged", paths, "openai")
    assert untimed(tmp_path / "merged" / "completions.jsonl") == untimed(four / "completions.jsonl")
    run(replace(of(job, 3), shard=Shard(index=1, count=2)), tmp_path / "fewer", Silent())
    with refused(r"differ in --n 4 -> 3"):
        merge(tmp_path / "mixed", [paths[0], tmp_path / "fewer"], "jsonl")
    (first, second, third) = rows(tmp_path / "merged" / "batch_output.jsonl")
    assert [first["custom_id"], second["custom_id"], third["custom_id"]] == ["q0", "q1", "q2"]


def test_samples_are_the_choices_of_one_line(four: Path, tmp_path: Path) -> None:
    shutil.copytree(four, tmp_path / "run")
    FinishedRun(tmp_path / "run").export("openai")
    found = {
        line["custom_id"]: line["response"]["body"] for line in rows(tmp_path / "run" / "batch_output.jsonl")
    }
    chosen = {
        (name, choice["index"]): choice["message"]["content"]
        for name, body in found.items()
        for choice in body["choices"]
    }
    assert chosen == texts(four)
    samples = [row for row in rows(four / "completions.jsonl") if row["id"] == "q0"]
    tokens, prompt = sum(len(row["token_ids"]) for row in samples), samples[0]["num_prompt_tokens"]
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    assert found["q0"]["usage"] == usage
    speculation = found["q0"]["metrics"]["speculative_decoding"]
    accepted = sum(row["metrics"]["num_accepted_draft_tokens"] for row in samples)
    steps = sum(row["metrics"]["num_spec_steps"] for row in samples)
    assert speculation["num_accepted_draft_tokens"] == accepted == sum(speculation["per_step_accepted"])
    assert speculation["num_spec_steps"] == steps == sum(speculation["acceptance_histogram"])
    assert speculation["mean_acceptance_length"] == 1 + accepted / steps


def test_a_request_with_a_failed_sample_has_failed(four: Path, tmp_path: Path) -> None:
    """As nobody looks for a choice that is not there; its other samples are in completions.jsonl."""
    shutil.copytree(four, tmp_path / "run")
    lines = (four / "completions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "completions.jsonl").write_text("".join(lines[:2] + lines[3:]))
    failed = {"id": "q0", "sample": 2, "error": "the device failed", "turn": 1}
    write_rows(tmp_path / "run" / "errors.jsonl", [failed])
    FinishedRun(tmp_path / "run").export("openai")
    assert [line["custom_id"] for line in rows(tmp_path / "run" / "batch_output.jsonl")] == ["q1", "q2"]
    (error,) = rows(tmp_path / "run" / "batch_errors.jsonl")
    assert (error["custom_id"], error["error"]["message"]) == ("q0", "sample 2: the device failed")


def test_a_prompt_is_one_unit_of_a_report(four: Path, tmp_path: Path) -> None:
    assert len({*columns.read(four, 4).unit.tolist()}) == 3
    untold = [{**row, "prompt": ""} for row in rows(four / "completions.jsonl")]
    for row in untold:
        del row["prompt"]
    write_rows(tmp_path / "completions.jsonl", untold)
    found = columns.read(tmp_path, 4)
    assert len({*found.unit.tolist()}) == 3, "also of rows that do not say their prompt"
    assert found.names == list(Rows(four / "completions.jsonl"))
    assert found.names[:3] == ["q0", "q0/sample-1", "q0/sample-2"]


def test_the_command_refuses_what_has_no_samples(tmp_path: Path) -> None:
    turns = write_rows(tmp_path / "turns.jsonl", [{"question_id": 1, "turns": ["a", "b"]}])
    raw = write_rows(
        tmp_path / "raw.jsonl", [{"id": "a", "prompt": "x"}, {"id": "a/sample-1", "prompt": "y"}]
    )
    for asked, reason in (
        (["--n", 2], "n is 2: samples at temperature 0 are all the same: set a temperature, or leave n out"),
        (["--n", 0, "--temperature", 1], "n is 0: ask for 1 to 10000 samples of a prompt"),
        (
            ["--n", 2, "--temperature", 1, "--dataset", turns],
            "line 1: n is 2 and there are follow-up turns, which follow one answer: leave n out, or give single turns",
        ),
        (
            ["--n", 2, "--temperature", 1, "--dataset", raw],
            f"'a/sample-1' is a row of {raw} and sample 1 of 'a': give the row another id",
        ),
    ):
        found = specgen("generate", *asked, "--output", tmp_path / "out")
        assert (found.exit_code, str(found.exception)) in ((1, reason), (2, reason)), (
            found.exception,
            reason,
        )
        assert not (tmp_path / "out").exists()


def test_samples_in_python(job: Job, four: Path) -> None:
    prompts = [Prompt(id="q0", text=TOLD[0]), Prompt(id="q1", text=TOLD[1], sampling={"n": 3})]
    with Engine(replace(job.engine, prefix_cache=False)) as engine:
        found = list(engine.generate(prompts, replace(job.sampling, n=4)))
        mistaken = [
            Prompt(id="greedy", text="x", sampling={"temperature": 0}),
            Prompt(id="turns", messages=(Message(role="user", content="a"),), follow_ups=("b",)),
        ]
        errors = {each.id: each.error for each in engine.generate(mistaken, replace(job.sampling, n=2))}
    assert {(each.id, each.sample): each.text for each in found} == {
        name: text for name, text in texts(four).items() if name[0] != "q2"
    }
    assert {each.num_samples for each in found if each.id == "q1"} == {3}
    assert sum(each.record is not None and each.record.num_cached_tokens > 0 for each in found) == 3 + 2
    assert "sample=1" in repr(next(each for each in found if each.name == "q0/sample-1"))
    length = summarize(found).mean_acceptance_length_ci95
    alone = [replace(each, prompt=f"{number}") for number, each in enumerate(found)]
    assert length != summarize(alone).mean_acceptance_length_ci95
    assert (
        errors["greedy"]
        == "n is 2: samples at temperature 0 are all the same: set a temperature, or leave n out"
    )
    assert str(errors["turns"]).startswith("n is 2 and there are follow-up turns")
    assert errors["turns/turn-2"] == "turn 1 before it has no answer"


def test_a_batch_of_a_pipeline_has_a_row_for_each_sample(job: Job) -> None:
    alone = BatchGenerator(job.engine, job.sampling)({"prompt": TOLD})
    generator = BatchGenerator(job.engine, replace(job.sampling, n=2))
    own = [{"n": 3}, None, {"n": 0}]
    found = generator({"prompt": TOLD, "number": [0, 1, 2], "sampling_params": own})
    assert found["number"] == [0, 0, 0, 1, 1, 2]
    assert found["sample"] == [0, 1, 2, 0, 1, 0]
    assert [each is None for each in found["error"]] == [True] * 5 + [False]
    assert [found["generated_text"][row] for row in (0, 3)] == alone["generated_text"][:2]
    assert len({*found["generated_text"]}) == 6
    again = generator({"prompt": TOLD[1:2]})
    assert again["generated_text"] == found["generated_text"][3:5], "whatever else is asked"
    assert generator({"prompt": TOLD[1:2], "sampling_params": [{"n": 1}]})["prompt"] == TOLD[1:2]


@pytest.mark.slow
def test_a_run_on_ray_is_that_of_one_process(
    job: Job, four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers are threads of this process: in processes of Ray it is tested elsewhere."""
    monkeypatch.setattr(ray_engine, "_connected", lambda cluster: nullcontext())
    monkeypatch.setattr("specgen.jobs.run.RayEngine", InProcess)
    cluster = Cluster(num_workers=2)
    run(replace(of(job, 2), cluster=cluster), tmp_path, Silent())
    run(replace(of(job, 4), cluster=cluster), tmp_path, Silent())
    assert texts(tmp_path) == texts(four)


def test_a_request_that_the_device_was_lost_with_is_one_sample(job: Job, four: Path, tmp_path: Path) -> None:
    """Lost twice, it has failed; the other samples of its prompt have not."""
    shutil.copytree(four, tmp_path / "run")
    (tmp_path / "run" / "completions.jsonl").write_bytes(b"")
    for name in ("report.json", "report.html"):
        (tmp_path / "run" / name).unlink()
    write_rows(tmp_path / "run" / "lost.jsonl", [{"id": "q0/sample-1", "reason": "gone", "time": ""}] * 2)
    run(of(job, 4), tmp_path / "run", Silent())
    assert texts(tmp_path / "run") == {name: text for name, text in texts(four).items() if name != ("q0", 1)}
    errors = {(row["id"], row.get("sample")): row["error"] for row in rows(tmp_path / "run" / "errors.jsonl")}
    assert errors[("q0", 1)] == "line 1: the device was lost while it ran alone: gone"
    assert len(errors) == 2


def pass_at_k(references: list[str], predictions: list[list[str]], k: list[int]) -> dict[str, float]:
    """As lm-eval's humaneval has it, of texts with an even number of characters: 1 - C(n - c, k) / C(n, k)."""
    (texts,) = predictions
    n, right = len(texts), sum(len(text) % 2 == 0 for text in texts)
    return {f"pass@{each}": 1 - comb(n - right, each) / comb(n, each) for each in k}


@pytest.fixture
def code_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """``word_problems`` with such a metric, as a task that runs code."""
    task = study.word_problems_task() | {"unsafe_code": True}
    every = {"function": "custom", "filter_fn": lambda resps, docs: resps}
    task["filter_list"] = [{"name": "every", "filter": [every]}]
    task["metric_list"] = [
        {"metric": pass_at_k, "aggregation": "mean", "higher_is_better": True, "k": [1, 2]}
    ]
    monkeypatch.setattr(study, "word_problems_task", lambda: task)


@pytest.mark.slow
@pytest.mark.usefixtures("code_task")
def test_pass_at_k_is_of_all_samples_of_a_question(tmp_path: Path) -> None:
    """Which share its prefill, are one unit, and are not asked again."""
    arms = [{"name": f"K{k}", "num_spec_tokens": k, "temperature": 0.9} for k in (2, 0)]
    asked = write_rows(tmp_path / "s.json", [{"tasks": ["word_problems"], "arms": arms, "limit": 3}])
    options = ["eval", "--study", asked, "--apply-chat-template", "--max-new-tokens", 24]
    with refused(
        "runs code that a model has written, on this machine: .* say so with --confirm-run-unsafe-code"
    ):
        printed(*options)
    with refused("n is 4 and 'word_problems' is answered greedily, each time alike"):
        printed("eval", "word_problems", "--confirm-run-unsafe-code", "--n", 4)
    out = tmp_path / "out"
    options += ["--confirm-run-unsafe-code", "--n", 4, "--output", out, "--log-samples"]
    specgen(*options)
    found = rows(out / "K2" / "completions.jsonl")
    assert [row["sample"] for row in found] == [0, 1, 2, 3] * 3
    assert len({row["id"] for row in found}) == 3 == len({*columns.read(out / "K2", 2).unit.tolist()})
    assert len({row["text"] for row in found}) > 4
    assert sum(row["record"].get("num_cached_tokens", 0) > 0 for row in found) == 9
    (logged,) = (out / "K2").glob("samples_*.json")
    for number, sample in enumerate(json.loads(logged.read_text())):
        texts = [row["text"] for row in found[4 * number : 4 * number + 4]]
        assert sample["resps"] == [texts]
        assert {name: sample[name] for name in ("pass@1", "pass@2")} == pass_at_k([], [texts], [1, 2])
    again = specgen(*options)
    assert "pass@2" in again.output
    assert rows(out / "K2" / "completions.jsonl") == found
