"""The parts of the GPU benchmark that need no GPU, and all of it on a CPU with a tiny pair."""

import json
import sys
from pathlib import Path

import bench_gpu
import pytest
from bench_table import VLLM, times_vllm
from bench_workload import Workload, group_sizes, num_wrong, prompt_lengths
from calibrated_cycle import Cycle
from calibrated_shapes import SHAPES
from calibrated_weights import Source
from make_calibrated_pair import write_pair

from specgen.bench.bandwidth import copy_bandwidth
from specgen.core.sequence import Completion

CYCLE = Cycle.draw(100, 60, 0.75, seed=0)


def test_groups_are_those_of_the_reference_runs() -> None:
    sizes = {batch: group_sizes(batch) for batch in (1, 8, 64, 128, 256)}
    assert sizes == {1: [1] * 6, 8: [8, 8], 64: [64, 64], 128: [256], 256: [512]}


def test_a_workload_is_slices_of_the_text_and_the_same_every_time() -> None:
    workload = Workload.draw(8, CYCLE, [4, 9, 30], 16, seed=1)
    assert [len(group) for group in workload.groups] == [8, 8]
    assert len({request.id for request in workload.requests}) == 16
    for request in workload.requests:
        prompt = request.prompt_token_ids
        assert prompt == (prompt[0], *CYCLE.after(prompt[0], len(prompt) - 1))
        assert len(prompt) in (4, 9, 30)
        assert request.sampling.ignore_eos
        assert request.sampling.max_tokens == 16
    assert workload == Workload.draw(8, CYCLE, [4, 9, 30], 16, seed=1)
    assert workload != Workload.draw(8, CYCLE, [4, 9, 30], 16, seed=2)
    total = sum(len(request.prompt_token_ids) for request in workload.requests)
    assert workload.mean_context == total / 16 + 8


def test_prompt_lengths_are_first_turns_at_four_characters_a_token(tmp_path: Path) -> None:
    turns = ["a" * 400, "b", "c" * 9000]
    rows = [{"conversations": [{"from": "human", "value": turn}, {"value": "x" * 99}]} for turn in turns]
    assert prompt_lengths(_written(tmp_path, [*rows, {"conversations": []}])) == [100, 4, 1024]
    for content, reason in (([{"text": "a"}], "not in ShareGPT's format"), ([], "no conversations")):
        with pytest.raises(ValueError, match=reason):
            prompt_lengths(_written(tmp_path, content))


def _written(folder: Path, content: object) -> Path:
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(content))
    return path


def test_wrong_missing_and_surplus_tokens_are_counted() -> None:
    request = Workload.draw(1, CYCLE, [4], 5, seed=0).requests[0]
    text = CYCLE.after(request.prompt_token_ids[-1], 5)

    def wrong(*token_ids: int) -> int:
        done = Completion(request=request, token_ids=token_ids, finish_reason="length")
        return num_wrong(CYCLE, [done, done])

    assert wrong(*text) == 0
    assert wrong(*text[:3]) == 4
    assert wrong(*text, text[0]) == 2
    assert wrong(text[1], *text[1:]) == 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, shape = tmp_path_factory.mktemp("tiny"), SHAPES["tiny"]
    cycle = Cycle.draw(shape.num_plain_tokens, shape.draft_vocab_size, 0.75, seed=0)
    write_pair(path, shape, cycle, Source("cpu", 0))
    return path


def test_copy_bandwidth_is_that_of_memory() -> None:
    assert 1e8 < copy_bandwidth("cpu") < 1e13


def test_vllm_is_compared_under_its_own_conditions_only() -> None:
    same = VLLM["conditions"]
    assert times_vllm(302.0, 1, "plain", same) == 2.0
    assert times_vllm(724.0, 1, "non-padded", same) == 2.0
    assert times_vllm(302.0, 64, "plain", same) is None
    assert times_vllm(302.0, 1, "plain", same | {"device": "another"}) is None


@pytest.mark.slow
def test_the_whole_command_on_a_cpu(tiny: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    data = _written(tmp_path, [{"conversations": [{"value": "a" * length}]} for length in (20, 100)])
    arguments = [tiny, "--data-path", data, "--batches", "1,2", "--repeats", "1", "--new-tokens", "24"]
    monkeypatch.setattr(
        sys, "argv", ["bench_gpu.py", *map(str, arguments), "--json", str(tmp_path / "out.json")]
    )
    with pytest.raises(SystemExit) as ended:
        bench_gpu.main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "synthetic weights" in printed
    document = json.loads(printed.splitlines()[-1])
    assert document == json.loads((tmp_path / "out.json").read_text())
    rows = document["rows"]
    assert [(row["batch"], row["mode"]) for row in rows] == [
        (b, mode) for b in (1, 2) for mode in bench_gpu.MODES
    ]
    assert all(row["figures"]["num_wrong"] == 0 and row["times_vllm"] is None for row in rows)
    assert {row["figures"]["num_tokens"] for row in rows} == {6 * 24, 4 * 24}
    padded, non_padded = ([row for row in rows if row["mode"] == mode] for mode in ("padded", "non-padded"))
    for one, other in zip(padded, non_padded, strict=True):
        assert one["figures"]["acceptance"] == other["figures"]["acceptance"]
        assert 0.5 < one["figures"]["acceptance"][0] < 1
        assert one["times_plain"] > 0
        assert one["times_bound"] > 1


def test_a_row_that_breaks_does_not_cost_the_others(tiny: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    data = _written(tmp_path, [{"conversations": [{"value": "a" * 20}]}])
    arguments = [tiny, "--data-path", data, "--batches", "2", "--repeats", "1", "--new-tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", *map(str, arguments)])
    monkeypatch.setitem(bench_gpu.MODES, "plain", {"kv_memory": 1})
    with pytest.raises(SystemExit) as ended:
        bench_gpu.main()
    assert ended.value.code == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["mode"] for row in document["rows"]] == ["padded", "non-padded"]
    assert document["failures"][0].startswith("batch 2, plain: UserError: ")
