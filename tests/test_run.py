"""The whole job through the command line, on a random pair with a tokenizer: files, numbers, refusals."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from specgen.cli import main as cli
from specgen.config import VLLM_NAMES, UserError
from specgen.jobs import run as job
from specgen.prompts.load import RAW
from tests.commands import printed, refused, rows, specgen, write_rows
from tests.fixtures import FinishedRuns
from tests.jobs import untimed
from tests.marks import mostly_slow
from tests.tiny_checkpoints import write_head, write_target
from tests.tiny_tokenizers import write_byte_level

CONTEXT = 128
TURNS = [
    {"question_id": 1, "category": "math", "turns": ["Tom has 12 apples.", "And now?"]},
    {"question_id": 2, "category": "writing", "turns": ["Please stop here.", "Why?"]},
    {"question_id": 3, "category": "math", "turns": ["5 bags", "6 bags"]},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    target = write_target(path / "target", vocab_size=352, max_positions=CONTEXT)
    write_head(path / "drafter", target, draft_vocab_size=100)
    write_byte_level(path / "target")
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "question.jsonl", TURNS)


def run(pair: Path, *arguments: object) -> Result:
    """``specgen generate`` on the pair."""
    models = ["--model", pair / "target", "--drafter", pair / "drafter"]
    return specgen("generate", *models, "--max-new-tokens", 12, *arguments)


def test_a_run_leaves_its_files_and_its_numbers_agree(pair: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(
        pair, "--dataset", "mt-bench", "--data-path", data, "--output", out, "--baseline", "--ignore-eos"
    )
    assert result.exit_code == 0, result.output
    completions = rows(out / "completions.jsonl")
    assert [row["id"] for row in completions] == ["1", "1/turn-2", "2", "2/turn-2", "3", "3/turn-2"]
    assert {len(row["token_ids"]) for row in completions} == {12}
    first, second = completions[:2]
    assert first["prompt"] + first["text"] in second["prompt"], "the second turn sees the first answer"
    assert "And now?" in second["prompt"].split(first["text"])[-1]
    assert (first["turn"], second["turn"]) == (1, 2)
    report = json.loads((out / "report.json").read_text())
    assert report["total_num_output_tokens"] == 72
    totals = {"num_draft_tokens": "num_draft_tokens", "num_accepted_draft_tokens": "num_accepted_tokens"}
    for name, total in (totals | {"num_spec_steps": "num_drafts"}).items():
        assert sum(row["metrics"][name] for row in completions) == report[total]
    assert report["num_draft_tokens"] == 4 * report["num_drafts"]
    assert set(report["categories"]) == {"math", "writing"}
    assert set(report["turns"]) == {"1", "2"}
    assert report["baseline"]["identical"] == 1.0
    assert report["baseline"]["num_compared"] == 6
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["done"], status["output_tokens"]) == ("finished", 6, 72)
    assert status["output_tokens_per_second"] == report["output_tokens_per_second"], "not the baseline's"
    assert status["acceptance_length"] == report["mean_acceptance_length"]
    passes = rows(out / "passes.jsonl")
    assert [each["row"] for each in passes] == ["session"] + ["pass"] * (len(passes) - 1)
    assert [each["number"] for each in passes[1:]] == list(range(len(passes) - 1)), "nothing of the warm-up"
    for row in completions:
        steps = row["record"]["steps"]
        assert {passes[1 + number]["kind"] for number in steps["pass"]} <= {"decode"}
        assert len({*steps["pass"]}) == len(steps["pass"]) == len(steps["drafts"])
        assert sum(steps["accepted"]) == row["metrics"]["num_accepted_draft_tokens"]
        assert not any(isinstance(each, list) for each in row["metrics"].values()), "these are in record"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["engine"]["device"] in ("cpu", "cuda")
    assert len(manifest["fingerprints"]["model"]) == 64
    page = (out / "report.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    titles = re.findall("<dt>(date|machine|versions|command)</dt>", page)
    assert titles == ["date", "machine", "versions", "command"]
    assert not list(out.glob("*.partial"))
    assert "1.0" in result.stdout
    assert "token 0" in result.stdout
    assert "acceptance at token" not in result.stdout, "the page says what names mean"
    assert "acceptance at token" in page
    figures, _, _ = specgen("report", out).stdout.partition("\n\nmean acceptance length =")
    assert figures in result.stdout


def test_a_busy_machine_is_named_where_the_speed_is(
    pair: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It became busy after the run had begun."""
    loads = iter((0.0,))  # for the manifest
    monkeypatch.setattr("os.getloadavg", lambda: (next(loads, 99.0), 0.0, 0.0))
    out = tmp_path / "run"
    done = run(pair, "--dataset", "mt-bench", "--data-path", data, "--output", out, "--baseline")
    for text in (done.stdout, printed("report", out)):
        assert re.search(r"output tokens/s .*\); BUSY$", text, re.MULTILINE)
        assert re.search(
            r"BUSY: load 9\d\S* of other programs in the last minute on \d+ CPUs, so speeds are doubtful",
            text,
        )
        assert re.search(r"plain decoding \(.* texts identical; BUSY", " ".join(text.split()))
    tile = '<div class="card">against plain decoding<b>.*identical; BUSY'
    assert re.search(tile, (out / "report.html").read_text())
    assert "finished, BUSY" in printed("report", tmp_path)


@pytest.mark.parametrize("kept", mostly_slow([[], ["--no-steps"]], []))
def test_a_text_that_fills_the_context_says_so(pair: Path, tmp_path: Path, kept: list[str]) -> None:
    own, out = tmp_path / "own.jsonl", tmp_path / "run"
    own.write_text('{"id": "a", "prompt": "Tom has"}\n{"id": "b", "prompt": "Tom has", "max_tokens": 3}\n')
    arguments = ("--max-new-tokens", 5000, "--ignore-eos", "--output", out, *kept, "--quiet")
    result = run(pair, "--dataset", own, *arguments, "--format", "openai")
    assert result.exit_code == 0, result.output
    filled, short = rows(out / "completions.jsonl")
    assert filled["num_prompt_tokens"] + len(filled["token_ids"]) == CONTEXT
    assert (filled["finish_reason"], filled["ended_by"]) == ("length", "context")
    assert (short["finish_reason"], "ended_by" in short) == ("length", False)
    report = json.loads((out / "report.json").read_text())
    assert report["finish_reasons"] == {"context": 1, "length": 1}
    sentence = " ".join(result.output.split())
    assert "ended by 1 context, 1 length" in sentence
    assert "1 of 2 texts ended where the model's context was full" in sentence
    bodies = [row["response"]["body"]["choices"][0] for row in rows(out / "batch_output.jsonl")]
    assert [body["finish_reason"] for body in bodies] == ["length", "length"]


def test_a_bad_row_is_a_record_and_the_rest_runs(pair: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(
        '{"id": "a", "prompt": "Tom has"}\n'
        "{bad\n"
        '{"id": "b"}\n'
        '{"id": "c", "prompt_token_ids": [5, 6, 400]}\n'
        f'{{"id": "d", "prompt": "{"Tom " * 300}"}}\n'
        '{"id": "e", "messages": [{"role": "user", "content": "Stop here"}]}\n'
    )
    out = tmp_path / "run"
    result = run(pair, "--dataset", own, "--output", out, "--json")
    assert result.exit_code == 3, result.output
    report = json.loads(result.stdout)
    assert (report["num_errors"], report["num_preemptions"]) == (4, 0), "nothing of the warm-up"
    *_, remedy = result.stderr.splitlines()
    assert "correct them in the prompts and add --retry-errors" in remedy
    assert [row["id"] for row in rows(out / "completions.jsonl")] == ["a", "e"]
    reasons = {row["id"]: row["error"] for row in rows(out / "errors.jsonl")}
    assert list(reasons) == ["line 2", "b", "c", "d"]
    assert reasons["b"].startswith("line 3: no prompt")
    assert reasons["c"].startswith("line 4: token id 400")
    assert str(CONTEXT) in reasons["d"]
    said = [line for line in result.stderr.splitlines() if line.startswith("specgen: failed: ")]
    assert len(said) == 3, "and the file has them all"
    assert said[0].startswith("specgen: failed: line 2: not valid JSON"), "which names its line once"
    assert said[1].startswith("specgen: failed: b: line 3: no prompt")


BATCH = (
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Tom", "max_tokens": 3}}\n'
    '{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": 7}}\n'
)


def test_a_batch_comes_back_as_a_batch(pair: Path, tmp_path: Path) -> None:
    own, out = tmp_path / "own.jsonl", tmp_path / "run"
    own.write_text(BATCH)
    named = ("--dataset", own, "--output", out, "--ignore-eos", "--served-model-name", "llama", "--format")
    assert run(pair, *named, "openai").exit_code == 3
    (answer,), (error,) = rows(out / "batch_output.jsonl"), rows(out / "batch_errors.jsonl")
    body = answer["response"]["body"]
    assert (answer["custom_id"], body["usage"]["completion_tokens"], body["model"]) == ("a", 3, "llama")
    assert (error["custom_id"], error["response"]) == ("b", None)
    page = (out / "report.html").read_text()
    assert "llama" in page
    assert str(pair / "target") not in page.partition("<dt>command</dt>")[0]
    for name, reason in (("other", "--served-model-name llama -> other"), ("", "served-model-name is empty")):
        assert reason in str(run(pair, *named, "openai", "--served-model-name", name).exception)
    assert run(pair, *named, "parquet").exit_code == 3
    made = (out / "batch_output.jsonl").read_bytes()
    (out / "batch_output.jsonl").unlink()  # a copy of the texts that is made again where nobody needs it now
    assert run(pair, *named, "openai").exit_code == 3
    assert (out / "batch_output.jsonl").read_bytes() == made
    from pyarrow import parquet

    assert parquet.read_table(out / "completions.parquet").column("id").to_pylist() == ["a"]
    assert "no file is kept" in str(run(pair, "--dataset", own, "--format", "openai").exception)


def two_rows(path: Path) -> Path:
    return write_rows(path / "own.jsonl", [{"id": each, "prompt": f"Tom has {each}"} for each in "ab"])


def fail_b(patch: pytest.MonkeyPatch, runs: set[str]) -> None:
    """The request ``b`` fails in these directories."""
    keep = job._Work._keep

    def fails(self: Any, output: Any, files: Any) -> None:
        is_meant = output.id == "b" and files.path.name in runs
        keep(self, replace(output, error="no luck") if is_meant else output, files)

    patch.setattr(job._Work, "_keep", fails)


def test_exports_have_what_a_later_command_has_answered(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out = two_rows(tmp_path), tmp_path / "run"
    named = ("--dataset", own, "--output", out)
    with monkeypatch.context() as patch:
        fail_b(patch, {"run"})
        assert run(pair, *named, "--format", "openai").exit_code == 3
        assert run(pair, *named, "--format", "parquet").exit_code == 3
    assert len(rows(out / "batch_errors.jsonl")) == 1
    assert run(pair, *named).exit_code == 0
    from pyarrow import parquet

    assert parquet.read_table(out / "completions.parquet").column("id").to_pylist() == ["a", "b"]
    assert [row["custom_id"] for row in rows(out / "batch_output.jsonl")] == ["a", "b"]
    assert rows(out / "batch_errors.jsonl") == []


def test_an_input_that_changes_under_a_run_ends_it(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out = write_rows(tmp_path / "own.jsonl", [{"prompt": "Tom has"}]), tmp_path / "run"
    engine = job._Work._engine

    def changed(self: Any, *arguments: Any) -> Any:
        write_rows(own, [{"prompt": "Ann has"}])
        return engine(self, *arguments)

    monkeypatch.setattr(job._Work, "_engine", changed)
    error = run(pair, "--dataset", own, "--output", out, "--baseline").exception
    assert isinstance(error, UserError)
    assert f"{own} has changed since this run has read it" in str(error)
    assert not (out / "completions.jsonl").exists() or rows(out / "completions.jsonl") == []


@pytest.mark.parametrize(
    "change", [lambda own: own.write_text(own.read_text().replace("Tom", "Ann")), Path.unlink]
)
def test_a_change_while_texts_are_generated_is_said(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    own, out, keep = two_rows(tmp_path), tmp_path / "run", job._Work._keep

    def changed(self: Any, output: Any, files: Any) -> None:
        if own.exists():
            change(own)
        keep(self, output, files)

    monkeypatch.setattr(job._Work, "_keep", changed)
    said = run(pair, "--dataset", own, "--output", out).stderr
    assert f"{own} has changed under this run: answers may be of other rows" in said


def test_a_baseline_that_failed_is_said_and_tried_again(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out = two_rows(tmp_path), tmp_path / "run"
    named = ("--dataset", own, "--output", out, "--baseline")
    with monkeypatch.context() as patch:
        fail_b(patch, {"baseline"})
        first = run(pair, *named)
    assert first.exit_code == 3
    assert "1 request failed in plain decoding" in " ".join(first.stdout.split())
    assert (
        f"requests that failed in plain decoding: 1 (see {out / 'baseline' / 'errors.jsonl'})" in first.stderr
    )
    second = run(pair, *named)
    assert second.exit_code == 0
    assert "2 of 2 texts identical" in " ".join(second.stdout.split())


def test_what_rows_set_themselves_is_said(pair: Path, tmp_path: Path) -> None:
    asked = [{"prompt": "Tom", "temperature": 1.0}, {"prompt": "Ann", "max_tokens": 3}, {"prompt": "Bob"}]
    out = tmp_path / "run"
    result = run(pair, "--dataset", write_rows(tmp_path / "own.jsonl", asked), "--output", out)
    assert "seed 0 · rows set their own max_tokens, temperature" in " ".join(result.stdout.split())
    refused = specgen("report", out, "--against", "dspark-qwen3-4b-eagle3").exception
    assert "rows of this run set their own temperature" in str(refused)


def test_log_probabilities_come_back_in_the_form_of_their_endpoint(pair: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    asked = {"/v1/chat/completions": chat, "/v1/completions": {"prompt": "Tom has", "logprobs": 2}}
    batch = [{"custom_id": url, "url": url, "body": body} for url, body in asked.items()]
    own, out = tmp_path / "own.jsonl", tmp_path / "run"
    write_rows(own, [*batch, {"id": "none", "prompt": "Tom"}])
    assert run(pair, "--dataset", own, "--output", out, "--format", "openai", "--ignore-eos").exit_code == 0
    chat_row, text_row, unasked = rows(out / "completions.jsonl")
    of_chat, of_text, nothing = (
        line["response"]["body"]["choices"][0]["logprobs"] for line in rows(out / "batch_output.jsonl")
    )
    assert ("logprobs" in unasked, nothing) == (False, None)
    by_token = [(each["logprob"], each["top_logprobs"]) for each in of_chat["content"]]
    assert [(chosen, [each["logprob"] for each in top]) for chosen, top in by_token] == top_logprobs(chat_row)
    assert of_text["token_logprobs"] == [chosen for chosen, _ in top_logprobs(text_row)]
    # Two parts of characters have no text that tells them apart, and stand there as one.
    for by_name, (_, top) in zip(of_text["top_logprobs"], top_logprobs(text_row), strict=True):
        assert list(by_name.values()) == top[: len(by_name)]
    assert max(map(len, of_text["top_logprobs"])) == 2


def top_logprobs(row: dict[str, Any]) -> list[tuple[float, list[float]]]:
    """The log-probability of each greedy token of a row of ``completions.jsonl``, and of the top two there."""
    found = [(each["chosen"], [value for _, value in each["top"]]) for each in row["logprobs"]]
    assert len(found) == len(row["token_ids"]) == 12
    assert all(chosen == top[0] >= top[1] and len(top) == 2 for chosen, top in found)
    assert [each["top"][0][0] for each in row["logprobs"]] == row["token_ids"]
    return found


def test_rows_alone_go_to_stdout(pair: Path, tmp_path: Path) -> None:
    own, out = tmp_path / "own.jsonl", tmp_path / "run"
    own.write_text('{"id": "a", "prompt": "Tom"}\n{"id": "b", "prompt": "Stop"}\n')
    assert run(pair, "--dataset", own, "--output", out).exit_code == 0
    result = run(pair, "--dataset", own, "--output", "-")
    assert result.exit_code == 0, result.output
    (tmp_path / "printed.jsonl").write_text(result.stdout)
    assert untimed(tmp_path / "printed.jsonl") == untimed(out / "completions.jsonl")
    assert "acceptance at token" in result.stderr
    assert not Path("-").exists()


def test_a_stop_string_ends_the_text(pair: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"id": "a", "prompt": "Tom has 12 apples"}\n')
    free, stopped = tmp_path / "free", tmp_path / "stopped"
    assert run(pair, "--dataset", own, "--output", free, "--ignore-eos").exit_code == 0
    text = rows(free / "completions.jsonl")[0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    run(pair, "--dataset", own, "--output", stopped, "--ignore-eos", "--stop", stop)
    row = rows(stopped / "completions.jsonl")[0]
    assert row["text"] == text[: text.index(stop)]
    assert row["finish_reason"] == "stop"


def test_reports_of_runs_are_compared(finished: FinishedRuns) -> None:
    runs = (finished.non_padded, finished.padded)
    shown = printed("report", *runs)
    assert ["engine.drafter_batch", "non-padded", "padded"] in map(str.split, shown.splitlines())
    assert "the acceptance of every request is the same" in " ".join(shown.split())
    non_padded, padded = json.loads(printed("report", "--json", *runs)).values()
    assert padded["acceptance"] == non_padded["acceptance"]
    against = padded["against_first"]
    assert against["settings"] == {"engine.drafter_batch": ["non-padded", "padded"]}
    assert against["shared"]["num_identical"] == against["shared"]["num_requests"] == padded["num_requests"]
    assert "against_first" not in non_padded
    assert padded["rows"]["first_pass_wasted"] > non_padded["rows"]["first_pass_wasted"] == 0


@pytest.mark.slow
def test_the_draft_length_may_be_chosen_by_cost(pair: Path, data: Path, tmp_path: Path) -> None:
    for k in ("auto", "2"):
        arguments = ("--dataset", "mt-bench", "--data-path", data, "--num-spec-tokens", k)
        result = run(pair, *arguments, "--output", tmp_path / k)
        assert result.exit_code == 0, result.output
        assert ("draft tokens (K) auto, up to 7" in result.stdout) == (k == "auto")
    auto, fixed = (
        {row["id"]: row["token_ids"] for row in rows(tmp_path / k / "completions.jsonl")}
        for k in ("auto", "2")
    )
    assert auto == fixed
    report = json.loads((tmp_path / "auto" / "report.json").read_text())
    decode = report["steps"]["decode"]
    assert sum(decode["by_num_spec_tokens"].values()) == decode["num_steps"]
    assert {int(k) for k in decode["by_num_spec_tokens"]} <= set(range(8))
    drafted = [
        len(drafts)
        for row in rows(tmp_path / "auto" / "completions.jsonl")
        for drafts in row["record"]["steps"]["drafts"]
    ]
    assert [row["drafted"] for row in report["acceptance"]] == [
        sum(many > i for many in drafted) for i in range(7)
    ]
    printed("report", tmp_path / "auto", tmp_path / "2")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--temperature", "inf"], "temperature is inf: use a finite number"),
        (["--min-p", "2"], r"min-p is 2.0: use a share in \[0, 1\]; 0 switches it off"),
        (["--seed", "-1"], "seed is -1.*a resumed run must give the same texts"),
        (["--seed", str(2**70)], f"seed is {2**70}.*64 bits"),
        (["--stop", "\udcff"], r"stop is '\\udcff': it holds a lone surrogate"),
        (["--num-spec-tokens", "99"], "num-spec-tokens is 99"),
        (["--num-spec-tokens", "some"], "num-spec-tokens is 'some'.*auto or uniform"),
        (["--kv-memory", "lots"], "'lots'.*512MiB"),
        (["--kv-memory", "²MiB"], "'²MiB'.*512MiB"),
        (["--kv-memory", "1KiB"], "1024 bytes.*raise"),
        (["--kv-memory", "900TiB"], "kv-memory is 921,600.0 GiB and cpu has "),
        (["--num-prompts", "0"], "num-prompts is 0"),
        (["--dataset", "nothing-here"], "nothing-here.*mt-bench"),
        (["--dataset", "gsm8k"], r"none of the 3 rows of .*question.jsonl, read as gsm8k, can be run"),
        (["--device", "tpu"], "'tpu'.*cpu"),
        (["--model", "no/such/dir/here"], "no/such/dir/here"),
        (["--retry-errors", "--restart"], "restart and retry-errors are both given: .*choose one"),
        (
            ["--retry-errors", "--output", "-"],
            "retry-errors is about the failed rows .*: add --output DIR, or leave out --retry-errors",
        ),
        (["--output", "/"], "holds no run: name a new or an empty directory$"),  # not: remove it
        (["--output", "."], "holds no run: name a new or an empty directory$"),
    ],
)
def test_bad_input_is_one_line(
    pair: Path, data: Path, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    out, which = tmp_path / "run", ("--dataset", "mt-bench", "--data-path", data)
    with refused(reason):
        raise run(pair, "--output", out, *which, *arguments).exception or AssertionError
    assert not out.exists(), "nothing is in the way of the next command"


def test_the_target_and_the_drafter_are_told_apart(pair: Path, data: Path) -> None:
    with refused("drafter is a draft head and no target: name it with --drafter"):
        raise (
            specgen("generate", "--model", pair / "drafter", "--drafter", pair / "target").exception
            or AssertionError
        )
    plain = ("--model", pair / "target", "--num-spec-tokens", 0, "--max-new-tokens", 4, "--json")
    shown = printed("generate", *plain, "--dataset", "mt-bench", "--data-path", data)
    assert json.loads(shown)["num_drafts"] == 0, "plain decoding needs no drafter"


@pytest.mark.parametrize("k", mostly_slow([4, "auto"], 4))
def test_more_rows_than_any_machine_has_are_as_many_as_there_are_prompts(
    pair: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: object
) -> None:
    which = ("--dataset", "mt-bench", "--data-path", data)
    many = ("--max-batch-size", 10**12, "--num-prompts", 2, "--num-spec-tokens", k)
    assert run(pair, *which, "--output", tmp_path / "run", *many).exit_code == 0
    monkeypatch.setattr("specgen.jobs.run.load_models", None)  # refused before any weight
    monkeypatch.setattr("specgen.engine.build.total_memory", lambda device: 50_000)
    with refused("max-batch-size is 3, whose rows take"):
        raise run(pair, *which, "--max-batch-size", 3).exception or AssertionError


def test_the_options_are_a_decision() -> None:
    """A new option is added here as well."""
    command = next(c for c in cli.app.registered_commands if c.callback is cli.generate)
    names = (
        "ctx config model lora drafter generation_config chat_template_kwargs dataset data_path "
        "num_prompts split prompt_field chat shard num_spec_tokens drafter_batch draft_sampling draft_lm_head "
        "verification learn_from max_new_tokens temperature top_p top_k min_p repetition_penalty presence_penalty "
        "frequency_penalty seed n stop ignore_eos stop_token_ids min_tokens bad_word json_schema regex choice "
        "max_batch_size max_prefill_tokens kv_memory device tensor_parallel dtype kv_dtype attention cuda_graphs "
        "gpu_memory_utilization prefix_cache "
        "executor num_workers address output restart retry_errors format served_model_name no_steps max_failures "
        "baseline as_json quiet return"
    )
    assert sorted(command.callback.__annotations__) == sorted(names.split())
    theirs = {"num_speculative_tokens", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"}
    assert set(VLLM_NAMES) == theirs


def test_only_what_ran_is_compared_with_the_baseline(pair: Path, tmp_path: Path) -> None:
    own, out = tmp_path / "own.jsonl", tmp_path / "run"
    end = json.loads((pair / "target" / "config.json").read_text())["eos_token_id"]
    asked = [{"id": "a", "prompt": "Tom has"}, {"id": "a", "prompt": "Tom has 5"}, {"id": "b", "prompt": ""}]
    asked += [{"id": "c", "prompt": "5 bags", "logit_bias": {str(end): 100}}]
    result = run(pair, "--dataset", write_rows(own, asked), "--output", out, "--baseline")
    assert result.exit_code == 3
    report = json.loads((out / "report.json").read_text())
    assert (report["baseline"]["identical"], report["baseline"]["num_compared"]) == (1.0, 2)
    assert report["num_empty"] == 1
    assert "1 of 2 texts are empty" in result.stdout


def warnings(result: Result) -> list[str]:
    marker = "specgen: warning: "
    return [line.removeprefix(marker) for line in result.stderr.splitlines() if line.startswith(marker)]


def test_fields_that_look_misspelt_are_reported_once_with_a_count(pair: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "Tom has", "temprature": 0.9, "reference": "x", "category": "c", "prompt_id": 1},
        {"prompt": "5 bags", "temprature": 0.9, "Max_Token": 3, "metadata": {}, "temperature": 0},
    ]
    write_rows(own, lines)
    result = run(pair, "--dataset", own)
    assert result.exit_code == 0, result.output
    assert warnings(result)[:-1] == [
        "2 rows have a field 'temprature', which is ignored: did you mean temperature?",
        "1 row has a field 'Max_Token', which is ignored: did you mean max_tokens?",
    ]
    assert warnings(result)[-1] == RAW, "before the run"
    own.write_text('{"question": "5 bags", "temprature": 1}\n')  # another's row has its own fields
    assert warnings(run(pair, "--dataset", "gsm8k", "--data-path", own)) == []


GREEDY = "nothing at temperature 0, which is greedy: set --temperature"
PROBABILISTIC = ("--draft-sampling", "probabilistic")


@pytest.mark.parametrize(
    ("row", "options", "lines"),
    [
        ({}, (), []),
        ({}, ("--top-p", 0.5), [f"top-p changes {GREEDY}"]),
        (
            {},
            ("--top-k", 5, "--min-p", 0.1, *PROBABILISTIC),
            [f"top-k and min-p and draft-sampling change {GREEDY}"],
        ),
        ({}, ("--top-p", 0.5, *PROBABILISTIC, "--temperature", 1), []),
        ({"temperature": 1.0}, ("--top-p", 0.5), []),
        (
            {},
            ("--drafter", "ngram", *PROBABILISTIC),
            ["draft-sampling changes nothing without a head that drafts: leave it out"],
        ),
        (
            {},
            ("--drafter", "ngram", "--draft-lm-head", "fp8"),
            ["draft-lm-head changes nothing without a head that drafts: leave it out"],
        ),
        ({}, ("--draft-lm-head", "fp8"), []),
        (
            {},
            (*PROBABILISTIC, "--verification", "block"),
            [f"draft-sampling and verification change {GREEDY}"],
        ),
        (
            {},
            ("--verification", "block", "--temperature", 1),
            [
                "verification block accepts no more than token where drafts are chosen outright: set --draft-sampling "
                "probabilistic, with a head that drafts"
            ],
        ),
    ],
)
def test_options_without_effect_are_said(
    pair: Path, tmp_path: Path, row: dict[str, Any], options: tuple[object, ...], lines: list[str]
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"prompt": "Tom has", **row}) + "\n")
    found = warnings(run(pair, "--dataset", own, "--raw", *options))
    # ``run`` has options of its own
    assert [each for each in found if "is given 2 times" not in each] == lines


@pytest.mark.slow
def test_reasons_that_no_file_keeps_are_all_shown(pair: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "Tom has"}\n' + "".join(f'{{"id": "b{i}"}}\n' for i in range(5)))

    def printed(output: object) -> list[str]:
        result = run(pair, "--dataset", own, *(() if output is None else ("--output", output)))
        assert result.exit_code == 3
        return [
            line
            for line in result.stderr.splitlines()
            if line.startswith(("specgen: failed", "specgen: and"))
        ]

    assert [line.split(":")[2] for line in printed("-")] == [f" b{i}" for i in range(5)]
    assert printed(None) == printed("-")
    out = tmp_path / "out"
    assert printed(out)[3:] == [f"specgen: and 2 more; {out / 'errors.jsonl'} has them all"]
