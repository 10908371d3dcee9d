"""The parts of the GPU benchmark that need no GPU, and all of it on a CPU with a tiny pair."""

import json
import sys
from pathlib import Path

import bench_gpu
import pytest
from bench_bound import StepBytes
from bench_profile import Span, Window, busy, summarize
from bench_runs import joint_acceptance, step_seconds
from bench_table import VLLM, times_vllm
from bench_workload import Workload, group_sizes, num_wrong, prompt_lengths
from calibrated_cycle import Cycle
from calibrated_shapes import SHAPES
from calibrated_weights import Source
from make_calibrated_pair import write_pair

from specgen.bench.bandwidth import copy_bandwidth
from specgen.build import load_models
from specgen.events import Event, Finished, Stepped
from specgen.sequence import Completion
from tests.engines import config_of, load_pair

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


def test_a_step_reads_weights_once_a_pass_and_the_cache_of_every_sequence() -> None:
    sizes = StepBytes(target=1000, head_first=100, head_later=60, target_kv=3, head_kv=1)
    assert sizes.step(0, batch=2, context=10.5) == 1000 + 2 * 10.5 * 3
    assert sizes.step(1, batch=2, context=10.5) == 1000 + 2 * 10.5 * (3 + 1) + 100
    assert sizes.step(4, batch=2, context=10.5) == 1000 + 2 * 10.5 * (3 + 4) + 100 + 3 * 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, shape = tmp_path_factory.mktemp("tiny"), SHAPES["tiny"]
    cycle = Cycle.draw(shape.num_plain_tokens, shape.draft_vocab_size, 0.75, seed=0)
    write_pair(path, shape, cycle, Source("cpu", 0))
    return path


def test_the_bytes_of_a_pair_are_its_matrices(tiny: Path) -> None:
    shape = SHAPES["tiny"]
    sizes = StepBytes.of(load_models(config_of(load_pair(tiny))), 2)
    hidden, inner, norms = shape.hidden_size, shape.intermediate_size, 2 * shape.hidden_size
    attention = 2 * hidden * shape.q_size + 2 * hidden * shape.kv_size
    layer = attention + 3 * hidden * inner + norms
    assert sizes.target == 2 * (shape.num_layers * layer + hidden + shape.vocab_size * hidden)
    wide = attention + hidden * (shape.q_size + 2 * shape.kv_size)  # q, k and v read two states
    head = wide + 3 * hidden * inner + norms + hidden + hidden + shape.draft_vocab_size * hidden
    assert sizes.head_later == 2 * head
    assert sizes.head_first == 2 * (head + 3 * hidden * hidden)
    assert sizes.target_kv == 2 * 2 * shape.num_layers * shape.kv_size
    assert sizes.head_kv == 2 * 2 * shape.kv_size


def test_copy_bandwidth_is_that_of_memory() -> None:
    assert 1e8 < copy_bandwidth("cpu") < 1e13


def span(start: float, end: float, name: str = "a") -> Span:
    return Span(name=name, start=start, end=end)


@pytest.mark.parametrize(
    ("spans", "time"),
    [
        ([span(0, 2), span(3, 5)], 4),
        ([span(3, 5), span(0, 2)], 4),
        ([span(0, 2), span(1, 3)], 3),
        ([span(0, 9), span(1, 3), span(4, 5)], 9),
        ([span(0, 2), span(2, 3)], 3),
        ([], 0),
    ],
)
def test_busy_time_counts_overlaps_once(spans: list[Span], time: float) -> None:
    assert busy(spans) == time


def test_a_profile_has_the_idle_share_and_the_longest_kernels_first() -> None:
    spans = [span(10, 20, "gemm"), span(20, 21, "norm"), span(25, 34, "gemm"), span(34, 35, "norm")]
    profile = summarize(spans, num_steps=2, num_kernels=1)
    assert profile.idle_share == pytest.approx(4 / 25)
    assert profile.ms_per_step == pytest.approx(0.0125)
    (kernel,) = profile.kernels
    assert (kernel.name, kernel.launches_per_step, kernel.us_per_step) == ("gemm", 1, 9.5)
    assert kernel.share == pytest.approx(19 / 21)


def stepped(time: float, kind: str = "decode", num_sequences: int = 4) -> Stepped:
    return Stepped(
        kind=kind,
        time=time,
        seconds=0.0,
        num_sequences=num_sequences,
        num_spec_tokens=0,
        target_rows=0,
        first_pass_rows=0,
        first_pass_kept=0,
        loop_rows=0,
    )


def test_only_time_between_neighbouring_full_decode_steps_counts() -> None:
    events: list[Event] = [
        stepped(0, "prefill"),
        stepped(1),
        stepped(3),
        Finished(sequence="a", time=3, reason="length", num_output_tokens=1),
        stepped(6),
        stepped(10, "prefill"),
        stepped(11),
        stepped(12, num_sequences=3),
        stepped(13, num_sequences=3),
    ]
    assert step_seconds(events, batch=4) == [2, 3]


def test_a_window_sees_full_decode_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    window, seen = Window(4, skipped=2, num_steps=3), []

    class Profiler:
        def start(self) -> None:
            seen.append("start")

        def stop(self) -> None:
            seen.append("stop")

        def events(self) -> list[object]:
            return []

    monkeypatch.setattr(window, "_profiler", Profiler())
    for time in range(4):
        window.see(stepped(time, "prefill"))
        window.see(stepped(time, num_sequences=3))
        window.see(stepped(time))
    assert seen == ["start"]
    assert window.result() is None
    window.see(stepped(9))
    window.see(stepped(10))
    assert seen == ["start", "stop"]


def test_joint_acceptance_is_the_share_that_accepted_more() -> None:
    assert joint_acceptance([0, 1, 1, 3], 3) == (0.75, 0.25, 0.25)
    assert joint_acceptance([], 2) == (0, 0)


def test_vllm_is_compared_under_its_own_conditions_only() -> None:
    same = VLLM["conditions"]
    assert times_vllm(302.0, 1, "plain", same) == 2.0
    assert times_vllm(724.0, 1, "non-padded", same) == 2.0
    assert times_vllm(302.0, 64, "plain", same) is None
    assert times_vllm(302.0, 1, "plain", same | {"device": "another"}) is None


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
    assert document["failures"][0].startswith("batch 2, plain: ValueError: ")
