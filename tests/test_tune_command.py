"""The command ``specgen tune``: what is given, printed and written."""

import json
import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path

from specgen.config import DraftLength, EngineConfig, UserError
from specgen.engine.arms import Arm
from specgen.experiments import plans
from specgen.experiments.tune import command
from specgen.experiments.tune_job import Workload, draft_lengths, seconds
from specgen.prompts.formats import Reading
from specgen.report.display import duration
from tests.commands import refused, specgen
from tests.timed_engines import install, job_of, usual


def invoke(tiny_pair: Path, *arguments: str):
    given = [
        "tune",
        "--model",
        str(tiny_pair / "target"),
        "--drafter",
        str(tiny_pair / "drafter"),
        "--device",
        "cpu",
    ]
    return specgen(*given, *arguments)


DATA = ("--dataset", "bundled", "--max-new-tokens", "6")


def test_a_dry_run_runs_nothing(tiny_pair: Path, monkeypatch, tmp_path: Path) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(plans, "load_models", forbidden)
    monkeypatch.setattr("specgen.checkpoints.tensor_reader.read_tensors", forbidden)
    timed = install(monkeypatch, usual)
    left = to_go(tiny_pair, "--repeats", "5", "--output", str(tmp_path / "out"))
    said = left.pop("")
    assert timed.built == []
    assert not (tmp_path / "out").exists()
    assert left == dict.fromkeys(("batch 4, plain", "batch 4, K 2, padded", "batch 4, K 4, padded"), "3 to 5")
    assert "Weights take 0.0" in said


def to_go(tiny_pair: Path, *arguments: str) -> dict[str, str]:
    """What a dry run says that is left of each arm; "" for its sentences."""
    done = invoke(
        tiny_pair, *DATA, "--batch", "4", "--k", "2,4", "--drafter-batch", "padded", *arguments, "--dry-run"
    )
    assert done.exit_code == 0, done.output
    rows = re.findall(r"^(batch .*?)  .*?  (\d+(?: to \d+)?)$", done.stdout, re.MULTILINE)
    return {**dict(rows), "": " ".join(done.stdout.split())}


def test_the_command_measures_real_engines_and_goes_on(tiny_pair: Path, tmp_path: Path) -> None:
    arguments = (*DATA, "--batch", "2", "--k", "2", "--drafter-batch", "padded", "--repeats", "2")
    done = invoke(tiny_pair, *arguments, "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "batch 2, K 2, padded: warmed up" in done.stderr
    assert re.search(
        r"\[\d+ s left\] batch 2, K 2, padded: [\d,.]+ tokens/s, repeat 1, \d.\d\dx of plain", done.stderr
    )
    document = json.loads((tmp_path / "tune.json").read_text())
    assert [(row["K"], row["repeats"], row["same_texts"]) for row in document["rows"]] == [
        (0, 2, 1),
        (2, 2, 1),
    ]
    assert [note.partition(":")[0] for note in document["notes"]] == ["At batch 2", "Most tokens per second"]
    assert document["rows"][1]["wrong_tokens"] == 0
    assert "Speed-up over plain decoding, padded" in (tmp_path / "tune.html").read_text()
    assert "x_plain_ci95_low" in (tmp_path / "tune.csv").read_text().splitlines()[0]
    settings = json.loads((tmp_path / "tune.settings.json").read_text())
    settings["data"]["dataset"] = settings["bench"]["workload"]["dataset"] = "elsewhere/the-same.jsonl"
    (tmp_path / "tune.settings.json").write_text(json.dumps(settings))
    again = invoke(tiny_pair, *arguments, "--output", str(tmp_path), "--json")
    assert "warmed up" not in again.stderr
    assert json.loads(again.stdout)["rows"] == document["rows"]
    refused = invoke(tiny_pair, *arguments, "--output", str(tmp_path), "--k", "1")
    assert isinstance(refused.exception, UserError)


def test_a_stop_says_what_is_kept(tiny_pair: Path, monkeypatch, tmp_path: Path) -> None:
    def stopped(config: EngineConfig, number: int) -> float:
        if number == last:
            signal.raise_signal(signal.SIGTERM)
        return 1.0

    last = 2

    install(monkeypatch, stopped)
    done = invoke(tiny_pair, *DATA, "--batch", "2", "--k", "2", "--output", str(tmp_path))
    assert done.exit_code == 75
    assert (
        f"specgen: interrupted; 1 whole round kept in {tmp_path}: the same command goes on\n" in done.stderr
    )
    done = invoke(tiny_pair, *DATA, "--batch", "2", "--k", "2")
    assert "specgen: interrupted; nothing is kept without --output\n" in done.stderr
    last = 1
    done = invoke(tiny_pair, *DATA, "--batch", "2", "--k", "2", "--output", str(tmp_path / "new"))
    assert "specgen: interrupted; no round was finished, so nothing is kept\n" in done.stderr


def test_quiet_prints_the_table_alone(tiny_pair: Path, monkeypatch, tmp_path: Path) -> None:
    install(monkeypatch, usual)
    arguments = (*DATA, "--batch", "2", "--k", "2,4", "--precision", "0.001", "--repeats", "4")
    loud = invoke(tiny_pair, *arguments, "--output", str(tmp_path / "loud"))
    assert "warmed up" in loud.stderr
    assert "Files are in " in loud.output
    quiet = invoke(tiny_pair, *arguments, "--output", str(tmp_path / "quiet"), "--quiet")
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    assert "At batch 2: " in quiet.stdout
    assert "Files are in " not in quiet.stdout


def test_rows_are_read_as_the_options_say(monkeypatch, tmp_path: Path) -> None:
    install(monkeypatch, usual)
    (tmp_path / "own.jsonl").write_text('{"task": {"words": "How many apples are there?"}, "prompt": "x"}\n')
    own = (
        "--dataset",
        str(tmp_path / "own.jsonl"),
        "--prompt-field",
        "task.words",
        "--batch",
        "2",
        "--k",
        "2",
    )
    seen = []
    made = plans.make_prompts
    monkeypatch.setattr(plans, "make_prompts", lambda *asked: seen.append(made(*asked)) or seen[-1])
    once = ["tune", "--device", "cpu", *own, "--repeats", "2"]  # of the bundled pair, which has a template
    done = [specgen(*once, *more) for more in (("--raw",), ("--chat",))]
    assert [each.exit_code for each in done] == [0, 0]
    raw, chat = (len(found.requests[0].prompt_token_ids) for found in seen)
    assert chat > raw > 3, "the template has tokens of its own"
    assert "--raw" in done[0].stdout
    words = shlex.split(done[1].stdout[done[1].stdout.index("specgen generate") :])
    assert words[words.index("--prompt-field") + 1] == "task.words"
    assert "--chat" in words
    refused = specgen("tune", "--dataset", "random", "--raw")
    assert str(refused.exception).startswith(
        "split, prompt-field, chat or raw is given but prompts are random"
    )


def test_the_time_that_is_left() -> None:
    shown = {1.4: "1 s", 99: "99 s", 100: "2 min", 3569: "59 min", 3590: "1 h 0 min", 7500: "2 h 5 min"}
    assert {seconds: duration(seconds) for seconds in shown} == shown


def test_lists_and_times_of_the_command_line() -> None:
    lengths = draft_lengths("0-2, 5,auto,1")
    assert lengths == (*(DraftLength(most=k) for k in (0, 1, 2, 5)), DraftLength(most=7, kind="auto"))
    assert [seconds(text) for text in ("90s", "1.5m", "2h")] == [90, 90, 7200]
    for wrong in ("", "x", "1-", "3-1", "auto-2"):
        with refused(f"k is {wrong!r}: "):
            draft_lengths(wrong)
    assert draft_lengths("16") == (DraftLength(most=16),)
    for wrong, part in (("17", "17"), ("1,9-17", "9-17"), ("99999999999", "99999999999")):
        with refused(f"^k is {wrong!r}: use at most 16 in {part}$"):
            draft_lengths(wrong)
    for wrong in ("", "10", "m", "0s", "-1s", "9" * 400 + "s"):
        with refused(f"budget is {wrong!r}: write a time such as"):
            seconds(wrong)


def test_the_command_to_run_is_one_of_generate(tiny_pair: Path) -> None:
    job = job_of(tiny_pair, workload=Workload(dataset="sharegpt", max_new_tokens=99))
    engine = replace(job.engine, max_prefill_tokens=8192)
    arm = Arm(name="x", changes={"batch": 8, "K": "auto", "drafter_batch": "non-padded"})
    words = shlex.split(command(arm, engine, replace(job.workload, data_path=Path("my file.json"))))
    assert words[:2] == ["specgen", "generate"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options == {
        "--model": str(tiny_pair / "target"),
        "--drafter": str(tiny_pair / "drafter"),
        "--dataset": "sharegpt",
        "--data-path": "my file.json",
        "--max-batch-size": "8",
        "--num-spec-tokens": "auto",
        "--drafter-batch": "non-padded",
        "--max-new-tokens": "99",
        "--device": "cpu",
        "--max-prefill-tokens": "8192",
    }
    with_template = replace(engine, chat_template_kwargs=json.dumps({"enable_thinking": False}))
    words = shlex.split(command(arm, with_template, job.workload))
    given = words[words.index("--chat-template-kwargs") + 1]
    assert json.loads(given) == {"enable_thinking": False}, "others are other prompts"
    assert f"--lora {tiny_pair}" in command(arm, replace(engine, lora=str(tiny_pair)), job.workload)
    for chat, flag in ((True, "--chat"), (False, "--raw")):
        read = replace(job.workload, how=Reading(chat=chat, prompt_field="q"))
        assert f"--prompt-field q {flag} --max-batch-size 8" in command(arm, engine, read)
    plain = command(Arm(name="x", changes={"batch": 8, "K": 0}), engine, job.workload)
    assert "--num-spec-tokens 0" in plain
    assert "drafter" not in plain.replace(str(tiny_pair), "")
