"""The three ways in which people come to specgen, typed word for word on real data, each to its answer."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specgen.config.bundled import data_directory
from tests.waiting import LIMIT, wait_until

SHARED = Path(os.environ.get("SPECGEN_DATASETS", Path(__file__).parents[2] / "shared" / "datasets"))
NUM_ROWS = 320  # of the batch file
PAIR = {name: str(data_directory() / "demo" / name) for name in ("target", "drafter", "drafter-two-layers")}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("walks"),  # which begins before the tests that are alone: these are long
    pytest.mark.skipif(not SHARED.is_dir(), reason="needs the public data sets; see SPECGEN_DATASETS"),
]


def typed(command: str, where: Path, **names: object) -> str:
    """What ``command`` prints on stdout, in the directory ``where``; it must succeed."""
    words = [word.format(**names) for word in shlex.split(command)]
    assert words[0] == "specgen"
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=where, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    return done.stdout


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_an_engineer_chooses_k_for_an_80_gb_gpu_and_sharegpt_traffic(tmp_path: Path) -> None:
    plan = typed("specgen inspect {target} {drafter} --gpu 80GiB", tmp_path, **PAIR)
    assert re.search(r"\b4\b.*GiB", one_line(plan))
    tune = (
        "specgen tune --dataset sharegpt --data-path {sharegpt} --output-lens data --batch 4 --k 2,4 "
        "--drafter-batch padded --num-prompts 4 --max-new-tokens 12 --repeats 2 --output tuned"
    )
    sharegpt = SHARED / "sharegpt" / "oasst_en_sharegpt.json"
    dry = typed(f"{tune} --dry-run", tmp_path, sharegpt=sharegpt)
    assert "Nothing was run" in dry
    assert not (tmp_path / "tuned").exists()
    found = one_line(typed(tune, tmp_path, sharegpt=sharegpt))
    assert re.search(r"At batch 4: (K [24]|plain)", found), found
    assert (tmp_path / "tuned" / "tune.html").is_file()
    advised = re.search(r"Most tokens per second: (specgen generate .*?)\.?$", found)
    typed(f"{advised[1]} --num-prompts 4 --output chosen", tmp_path)
    assert len((tmp_path / "chosen" / "completions.jsonl").read_text().splitlines()) == 4


def test_a_researcher_compares_two_heads_on_three_sets_for_a_paper(tmp_path: Path) -> None:
    files = {
        "mt": SHARED / "mt_bench" / "question.jsonl",
        "gsm8k": SHARED / "gsm8k" / "test.jsonl",
        "humaneval": SHARED / "humaneval" / "HumanEval.jsonl",
        "two": PAIR["drafter-two-layers"],
    }
    compare = (
        "specgen compare --model {target} --drafter {drafter} --drafter {two} --num-prompts 4 --max-new-tokens 32 "
        "--dataset mt-bench={mt},gsm8k={gsm8k},humaneval={humaneval} --repeats 0 --output heads"
    )
    found = one_line(typed(compare, tmp_path, **PAIR, **files))
    assert "mt-bench, by length: best " in found
    document = json.loads((tmp_path / "heads" / "comparison.json").read_text())
    lengths = {
        (run["data"], run["head"]): run["report"]["mean_acceptance_length"] for run in document["runs"]
    }
    assert len(lengths) == 6
    for (data, head), length in lengths.items():
        rows = (tmp_path / "heads" / data / head / "completions.jsonl").read_text().splitlines()
        assert len(rows) == (8 if data == "mt-bench" else 4)
        assert length == pytest.approx(acceptance_length(rows))
    latex = typed("specgen compare heads --export latex", tmp_path)
    assert latex.count(r"\begin{") == latex.count(r"\end{") > 0
    assert f"{lengths['gsm8k', 'drafter']:.2f}" in latex
    assert (tmp_path / "heads" / "compare.html").stat().st_size > 10_000


def acceptance_length(rows: list[str]) -> float:
    """The mean number of tokens per step with drafts, from the rows of a run."""
    histograms = [json.loads(row)["record"]["counts"]["histogram"] for row in rows]
    steps = sum(map(sum, histograms))
    return 1 + sum(at * number for each in histograms for at, number in enumerate(each)) / steps


def test_a_data_engineer_trusts_a_batch_file_to_a_machine_that_stops(tmp_path: Path) -> None:
    questions = [json.loads(line)["question"] for line in (SHARED / "gsm8k" / "test.jsonl").open()][:160]
    rows = [batch_row(f"request-{number}", questions[number % 160]) for number in range(NUM_ROWS)]
    (tmp_path / "batch.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["generate", "--dataset", "batch.jsonl", "--output", "out", "--no-steps", "--format", "openai"]
    command = [sys.executable, "-m", "specgen", *words]
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        status = tmp_path / "out" / "status.json"

        def has_begun() -> bool:
            assert first.poll() is None, (tmp_path / "log").read_text()[-1500:]
            return status.exists() and json.loads(status.read_text())["done"] >= 60

        wait_until(has_begun)
        first.send_signal(signal.SIGTERM)
        assert first.wait(LIMIT) == 75
    log_text = (tmp_path / "log").read_text()
    assert "the same command resumes the run" in log_text
    assert "\r" not in log_text
    stopped = json.loads(status.read_text())
    assert stopped["state"] != "finished"
    assert 60 <= stopped["done"] < NUM_ROWS
    typed(f"specgen {' '.join(words)}", tmp_path)
    assert json.loads(status.read_text())["state"] == "finished"
    answers = [json.loads(line) for line in (tmp_path / "out" / "batch_output.jsonl").open()]
    assert [answer["custom_id"] for answer in answers] == [row["custom_id"] for row in rows]
    by_question: dict[str, str] = {}
    for row, answer in zip(rows, answers, strict=True):  # greedy: the same question, the same answer
        text = answer["response"]["body"]["choices"][0]["message"]["content"]
        assert by_question.setdefault(row["body"]["messages"][0]["content"], text) == text
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["num_requests"] == NUM_ROWS
    assert report["num_errors"] == 0
    tokens = sum(answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers)
    assert report["total_num_output_tokens"] == tokens


def batch_row(custom_id: str, question: str) -> dict[str, Any]:
    body = {"model": "any", "max_tokens": 4, "messages": [{"role": "user", "content": question}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
