"""The job that is measured: its parts add up to the wall time, its bound, its wrong tokens; vLLM is a fake."""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import whole_job
from beside_vllm import Text
from bound import ExpertSize, KVBytes, Seen, StepBytes
from whole_job import least, measure

from tests.streams import pass_row, request

pytestmark = pytest.mark.scripts
BANDWIDTH, FLOPS = 1000.0, 100.0
FAKE = '''"""Writes the pair's text, but for the first token of each answer."""
import json
from pathlib import Path
from types import SimpleNamespace as SamplingParams


class LLM:
    def __init__(self, model, **given):
        cycle = json.loads((Path(model).parent / "cycle.json").read_text())["tokens"]
        self._next = dict(zip(cycle, cycle[1:] + cycle[:1]))

    def generate(self, prompts, sampling, use_tqdm):
        return [self._answer(*each) for each in zip(prompts, sampling)]

    def _answer(self, prompt, asked):
        token, found = self._next[prompt["prompt_token_ids"][-1]], [-1]
        for _ in range(asked.max_tokens - 1):
            found.append(token := self._next[token])
        return SamplingParams(outputs=[SamplingParams(token_ids=found)])

    def get_metrics(self):
        return []
'''


def test_the_bound_is_that_of_full_batches_with_the_drafts_that_there_were() -> None:
    kv = KVBytes(layers=((3, Seen()),))
    sizes = StepBytes(
        target=1000, target_kv=kv, logits=14, bytes_per_value=2, lm_head=200, head_pass=60, head_fill=40
    )
    rows = [*request("a", [(1, 1), (0, 0)]), *request("b", [(1, 1)], num_cached_tokens=2)]
    both, one = (
        pass_row(number=0, num_sequences=2, num_spec_tokens=1, target_rows=4),
        pass_row(number=1, num_sequences=1, num_spec_tokens=0, target_rows=1),
    )
    # 6 tokens each, of which the first is the prefill's; then 8
    verify = max((1000 + 2 * 6 * 3) / BANDWIDTH, 4 * 1000 / FLOPS)
    fill, drafts = max(40 / BANDWIDTH, 4 * 40 / FLOPS), max(60 / BANDWIDTH, 2 * 60 / FLOPS)
    plain = max((1000 + 2 * 8 * 3) / BANDWIDTH, 2 * 1000 / FLOPS)  # of which a sequence is half
    found = least(rows, [pass_row("prefill"), both, one], sizes, BANDWIDTH, FLOPS)
    assert found == pytest.approx(
        {"prefill": (5 + 3) * 800 / FLOPS, "full": verify + fill + drafts + plain / 2}
    )
    fast = least(rows, [both, one], sizes, BANDWIDTH, 1e9)["full"]
    assert fast == pytest.approx((1000 + 36 + 40 + 60) / BANDWIDTH + (1000 + 48) / BANDWIDTH / 2)


def test_drafts_that_are_not_verified_take_no_time_of_the_bound() -> None:
    experts = ExpertSize(num_layers=1, num_experts=4, num_chosen=2, num_values=10, num_bytes=0)
    sizes = StepBytes(target=1000, target_kv=KVBytes(layers=()), logits=1, bytes_per_value=2, experts=experts)
    (row,) = request("a", [(3, 1)])
    step = pass_row(number=0, num_spec_tokens=3, target_rows=3)
    assert least([row], [step], sizes, 1e9, FLOPS)["full"] == pytest.approx(3 * (1000 + 2 * 10 * 2) / FLOPS)


@pytest.fixture(scope="module")
def written(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    shutil.copytree(tiny_pair, root, dirs_exist_ok=True)
    (root / "lengths.json").write_text(json.dumps({"prompts": [5, 9, 40], "answers": [2, 9, 20]}))
    return root


def asked(pair: Path, monkeypatch: pytest.MonkeyPatch, engine: str, more: str) -> argparse.Namespace:
    given = f"--max-batch-size 4 --prompts 12 --jobs 2 --kv-memory 0.1 --speed 1e10 1e11 {more}".split()
    argv = ["whole_job.py", engine, str(pair), "--lengths", str(pair / "lengths.json"), *given]
    monkeypatch.setattr(sys, "argv", argv)
    return whole_job.arguments()


@pytest.mark.slow
@pytest.mark.usefixtures("own_time")
def test_the_parts_of_a_job_add_up_to_its_time(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = asked(written, monkeypatch, "specgen", "--arms 2")
    began = time.time()
    row = measure(args, "2", began, False)
    taken = time.time() - began
    assert row["wrong_tokens"] == 0
    assert 1 < row["mean_acceptance_length"] < 3
    assert 0 < row["warm"]["ready"] < row["warm"]["first_token"]
    assert row["warm"]["first_token"] + sum(job["seconds"] for job in row["jobs"]) < taken
    assert [job["output_tokens"] for job in row["jobs"]] == row["job"]["output_tokens"]
    for job in row["jobs"]:
        parts, wall = job["parts"], job["seconds"]
        assert sum(parts.values()) == pytest.approx(wall, rel=0.01)
        assert min(parts.values()) >= 0
        assert parts["rest"] < 0.05 * wall  # passes and what lies between them leave little
        assert all(0 < job["least"][name] < parts[name] for name in ("prefill", "full"))
    speeds = [job["output_tokens"] / job["seconds"] for job in row["jobs"]]
    assert row["tokens_per_second"] == pytest.approx(sum(speeds) / 2)
    assert row["tokens_per_gpu_hour"] == pytest.approx(1800 * sum(speeds))


@pytest.mark.slow
def test_arms_of_both_engines_stand_in_one_table(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "vllm.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)  # which processes of arms have too
    rows = tmp_path / "rows.jsonl"
    for engine, more in (
        ("specgen", "--arms 0"),
        ("vllm", "--arms 0,2 --cold"),
        ("vllm", "--arms 0 --jobs 1"),
    ):
        asked(written, monkeypatch, engine, f"{more} --rows {rows}")
        whole_job.main()
    ours, theirs, _, other = (json.loads(each) for each in rows.read_text().splitlines())
    assert ours["job"] == theirs["job"] != other["job"]
    assert ours["wrong_tokens"] == 0
    # a wrong token is one, and so is the right one behind it, which does not follow it
    assert theirs["wrong_tokens"] == 2 * 2 * 12
    assert (set(theirs["cold"]), "cold" in ours) == ({"ready", "first_token"}, False)
    *_, before, last = capsys.readouterr().out.split(" prompts all handed over at once")
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in before.splitlines() if line[:1] == "|"
    ]
    assert cells[0] == ["", "specgen plain", "vllm plain", "vllm K = 2"]
    table = {name: values for name, *values in cells[2:]}
    assert table["wrong tokens"] == ["0", "48", "48"]
    assert table["filling, s"][1:] == ["-", "-"]
    assert [len(each) for each in table.values()] == [3] * len(table)
    assert "specgen" not in last.splitlines()[2]  # a row of another job


def test_what_cannot_be_measured_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "lengths.json").write_text('{"prompts": [5], "answers": [0]}')
    for engine, more, reason in (
        ("vllm", "--arms auto", "arms has 'auto': use numbers\n"),
        ("specgen", "--arms 2,x", "arms has 'x': use numbers, auto or uniform\n"),
        ("specgen", "--jobs 0", "jobs is 0: use at least 1\n"),
        ("specgen", "--arms 2", "an answer of no token: give lengths of at least 1\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            asked(tmp_path, monkeypatch, engine, more)
        assert (ended.value.code, capsys.readouterr().err.endswith(reason)) == (2, True)


def test_a_pair_without_a_known_text_has_random_prompts(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"vocab_size": 30}')
    job = whole_job.Job(tmp_path, whole_job.LENGTHS, 40)
    first, again, other = (job.draw(seed)[1:] for seed in (1, 1, 2))
    assert not job.is_known
    assert first == again != other
    assert isinstance(job.draw(1, 3)[0], Text)
    assert len(job.draw(1, 3)[1]) == 3
    assert {token for prompt in first[0] for token in prompt} == {*range(30)}
