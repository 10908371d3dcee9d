"""The step bench: marks separate the parts, the parts add up, and a slow part is found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import step as bench
from bench.step import (
    PARTS,
    HostMarker,
    KernelTime,
    Span,
    StepJob,
    StepTime,
    context_at,
    kind_of,
    kind_rows,
    split,
    step_rows,
    step_table,
)
from bound import Work
from programs import DeviceSpeed

from specgen.config import EngineConfig
from specgen.config.bundled import pair
from specgen.core import step as step_module
from specgen.core.graphs import Runner
from specgen.core.running_batch import Columns
from specgen.decoding.drafting import HeadDrafter
from specgen.engine import choices
from specgen.models.llama import Llama
from specgen.report.display import DASH
from specgen.report.terminal import render
from tests.commands import printed, refused
from tests.engines import engine_config
from tests.streams import pass_row, request
from tests.test_prompt_blocks import Capturing

pytestmark = pytest.mark.scripts

DEVICE = DeviceSpeed(bytes_per_second=1e4, flops_per_second=1e3)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch) -> None:
    monkeypatch.setattr(bench, "_SKIPPED", 2)
    monkeypatch.setattr(bench, "_STEPS", 4)
    monkeypatch.setattr(bench, "_MORE", 4)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 1e10)


def spans_of_a_step(at: float) -> list[Span]:
    """Six marks of 1 us, and 10, 0, 20, 3, 5 and 2 us of work after them, each 1 us later."""
    spans = []
    for work in (10, 0, 20, 3, 5, 2):
        spans.append(Span(name="mark", start=at, end=at + 1))
        if work:
            spans.append(Span(name=f"kernel {work}", start=at + 2, end=at + 2 + work))
        at += 3 + work
    return spans


def test_work_belongs_to_the_mark_before_it_and_the_rest_is_idle() -> None:
    spans = [*spans_of_a_step(100.0), *spans_of_a_step(200.0)]
    found = split(list(reversed(spans)), 2)
    assert found.parts == pytest.approx(
        {"draft loop": 10e-6, "verify": 20e-6, "accept": 3e-6, "KV fill": 5e-6, "engine": 2e-6}
    )
    length = max(span.end for span in spans) - 100.0
    assert found.total == pytest.approx(length / 2 * 1e-6)
    assert found.idle == pytest.approx(found.total - 40e-6)
    kernels = [(each.part, each.name, round(1e6 * each.seconds, 6), each.calls) for each in found.kernels]
    slowest = (("verify", 20), ("draft loop", 10), ("KV fill", 5), ("accept", 3), ("engine", 2))
    assert kernels == [(part, f"kernel {micros}", micros, 1) for part, micros in slowest]


def test_kernels_of_one_name_are_counted_together() -> None:
    spans, names = (
        spans_of_a_step(0.0),
        ("void (anonymous namespace)::f<true, 1>(int)", "f", "void a::g<2>(x)"),
    )
    spans += [Span(name=name, start=16 + at, end=17 + at) for at, name in zip((0, 2, 4), names, strict=True)]
    spans = [span for span in spans if span.name != "kernel 20"]
    verify = {each.name: each for each in split(spans, 1).kernels if each.part != "draft loop"}
    assert (verify["f"].calls, verify["a::g"].calls) == (2, 1)
    works = {"verify": Work(num_bytes=1.0, flops=0.0)}
    table = step_table({}, 4, [(8, split(spans, 1), works)], DEVICE)
    (kernels,) = table.details
    row = next(row for row in kernels.rows if row["kernel"] == "f")
    assert (row["batch"], row["time"], row["each"]) == (8, pytest.approx(2.0), pytest.approx(1.0))
    both = step_table({}, 4, [(batch, split(spans, 1), works) for batch in (8, 16)], DEVICE)
    assert len(both.details[0].rows) == 2 * len(kernels.rows)
    assert "By kernel" in table.to_html()
    assert table.to_json()["details"]["By kernel"][0]["kernel"] == "kernel 10"


def test_work_before_the_first_mark_is_the_engines_and_overlaps_count_once() -> None:
    spans = spans_of_a_step(100.0)
    spans.append(Span(name="copy", start=96.0, end=99.0))
    spans.append(Span(name="beside", start=104.0, end=113.5))  # begins in the first part, which ends at 112
    found = split(spans, 1)
    assert found.parts["engine"] == pytest.approx(5e-6)
    assert found.parts["draft loop"] == pytest.approx(11.5e-6)
    assert found.total == pytest.approx((max(span.end for span in spans) - 96.0) * 1e-6)
    with pytest.raises(RuntimeError, match="the profiler saw 5 of 6 marks"):
        split(spans_of_a_step(0.0)[1:], 1)


def test_the_hosts_clock_leaves_nothing_idle(monkeypatch) -> None:
    moments = iter([1.0, 1.5, 2.0, 4.0, 4.25, 5.0, 6.0, 8.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(moments))
    marker = HostMarker()
    runner = Runner()
    runner.mark = marker.mark

    def step() -> int:
        names = ("propose", "verify", "observe")
        assert [runner.piece((name, 1, 1, "greedy"), lambda: 3) for name in names] == [3, 3, 3]
        return 7

    assert runner.step(("step", 1, 1, "greedy"), step) == 7  # nothing is recorded before start
    marker.start()
    runner.step(("step", 1, 1, "greedy"), step)
    marker.stop()
    found = split(marker.spans(), 1)
    assert found == StepTime(
        parts=pytest.approx(
            {"draft loop": 0.5, "verify": 0.25, "accept": 0.75, "KV fill": 1.0, "engine": 4.5}
        ),
        idle=pytest.approx(0),
    )
    assert found.total == pytest.approx(7.0)


def test_rows_add_up_to_the_step() -> None:
    found = StepTime(parts={part: 0.001 * (i + 1) for i, part in enumerate(PARTS)}, idle=0.005)
    nothing = Work(num_bytes=0.0, flops=0.0)  # an assistant's KV fill, made a draft loop's here
    works = {
        "draft loop": nothing,
        "verify": Work(num_bytes=10.0, flops=0.0),
        "KV fill": Work(num_bytes=0.0, flops=3.0),
    }
    rows = step_rows(8, found, works, DEVICE)
    assert [row["part"] for row in rows] == [*PARTS, "idle", "step"]
    times = [row["time"] for row in rows]
    assert sum(times[:-1]) == pytest.approx(times[-1]) == pytest.approx(20.0)
    assert sum(row["share"] for row in rows[:-1]) == pytest.approx(1)
    verify, first = rows[1], rows[3]
    assert (verify["bound"], verify["over_bound"], verify["bound_by"]) == pytest.approx((1.0, 2.0, "memory"))
    assert (first["bound"], first["bound_by"]) == (3.0, "arithmetic")
    assert rows[0]["bound"] is rows[0]["over_bound"] is None
    assert rows[0]["bound_by"] == rows[2]["bound_by"] == DASH
    assert rows[-1]["bound"] == pytest.approx(4.0)
    assert [row["excess"] for row in rows] == pytest.approx(
        [1 / 16, 1 / 16, 3 / 16, 1 / 16, 5 / 16, 5 / 16, 1]
    )


def test_the_context_is_that_after_so_many_whole_steps() -> None:
    passes = [pass_row(number=number, num_sequences=size) for number, size in enumerate((1, 2, 2))]
    (a,) = request("a", [(2, 1), (2, 2), (2, 2)], num_prompt_tokens=10)
    (b,) = request("b", [(2, 0), (2, 2)], num_prompt_tokens=10)
    requests = [a, b.numbered(range(1, 9))]
    assert context_at(requests, passes, 2, 1) == (20 + 2 + 6) / 2
    assert context_at(requests, passes, 2, 2) == (20 + 2 + 12) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "owner", "name"),
    [
        ("draft loop", HeadDrafter, "propose"),
        ("verify", Llama, "forward"),
        ("accept", step_module, "accept_greedy"),
        ("KV fill", HeadDrafter, "observe"),
        ("engine", Columns, "advance"),
    ],
)
def test_a_slow_part_is_found(
    demo_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_time: Callable[[float], None],
    part: str,
    owner: object,
    name: str,
) -> None:
    function = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: (own_time(1.0), function(*given))[1])
    engine = engine_config(demo_path, num_spec_tokens=2, prefix_cache=False)
    (table,) = bench.explain(StepJob(engine=engine, batch_sizes=(2,), prompt_tokens=5))
    assert max(map(len, render(table.parts(), 80).splitlines())) <= 80
    rows = {str(row["part"]): row for row in table.rows}
    slowest = max(PARTS, key=lambda each: rows[each]["time"])
    assert slowest == part
    assert rows[part]["time"] > 1000
    assert rows["idle"]["time"] == pytest.approx(0, abs=1e-6)


def test_plain_steps_are_explained_too() -> None:
    """Without a drafter: nothing but the target is bound."""
    asked = ["--device", "cpu", "--model", pair()[0], "--batch-sizes", "2", "--prompt-tokens", "4"]
    found = json.loads(printed(*asked, "--num-spec-tokens", "0", "--json", program=bench.app))
    assert found["title"] == "A plain decode step"
    assert [row["part"] for row in found["rows"] if row["bound"]] == ["verify", "accept", "step"]
    for wrong, message in (
        ([], "use --num-spec-tokens 0"),
        (["--prompt-tokens", "2048", "--num-spec-tokens", "0"], "prompt-tokens is 2048: with "),
        (["--batch-sizes", "0", "--num-spec-tokens", "0"], "batch-sizes is '0'"),
    ):
        with refused(message):
            printed(*asked, *wrong, program=bench.app)
    said = printed("--help", program=bench.app)
    assert "--num-spec-tokens <int>" in said
    assert "auto: at every step" not in " ".join(said.split()), "which is refused"


@pytest.mark.slow
def test_a_batch_that_fails_is_a_note(tmp_path: Path, monkeypatch) -> None:
    explained = bench._explained

    def broken(job: StepJob, config: EngineConfig, *others: Any) -> Any:
        if config.max_batch_size == 2:
            raise RuntimeError("no kernel")
        return explained(job, config, *others)

    monkeypatch.setattr(bench, "_explained", broken)
    arguments = ["--batch-sizes", "1,2", "--prompt-tokens", "4", "--output", str(tmp_path), "--json"]
    done = printed("--device", "cpu", *arguments, program=bench.app)
    document = json.loads(done)
    assert document == json.loads((tmp_path / "step.json").read_text())
    assert {row["batch"] for row in document["rows"]} == {1}
    assert document["notes"][1] == "batch 2 is not explained: RuntimeError: no kernel"


def test_a_step_is_explained_as_it_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs for prompts too: other ranks have them, and a rank of another number of rows waits without end."""
    monkeypatch.setattr(Capturing, "made", [])
    monkeypatch.setitem(choices.RUNNERS, "off", Capturing)
    arguments = ("--batch-sizes", "1", "--num-spec-tokens", "0", "--json")
    done = printed("--device", "cpu", *arguments, "--prompt-tokens", "186", program=bench.app)
    assert Capturing.made[-1].kept
    assert {row["batch"] for row in json.loads(done)["rows"]} == {1}, "its blocks had no room in the cache"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("graphs", ["step", "pass", "off"])
def test_parts_are_told_apart_on_a_gpu(graphs: str) -> None:
    arguments = ["--batch-sizes", "1,4", "--cuda-graphs", graphs, "--num-spec-tokens", "3", "--json"]
    done = printed("--device", "cuda", *arguments, program=bench.app)
    document = json.loads(done)
    for batch in (1, 4):
        times = {row["part"]: row["time"] for row in document["rows"] if row["batch"] == batch}
        assert sum(times.values()) == pytest.approx(2 * times["step"])
        assert all(times[part] > 0 for part in PARTS)
        assert times["verify"] > times["KV fill"]
        kinds = [row for row in document["details"]["By kind of kernel"] if row["batch"] == batch]
        verify = {row["kind"]: row for row in kinds if row["part"] == "verify"}
        assert 1e-3 * sum(row["time"] for row in verify.values()) == pytest.approx(times["verify"])
        assert {kind for kind, row in verify.items() if row["bound"]} == {"GEMM", "attention"}


# --- kinds of kernels ---


FAST = DeviceSpeed(bytes_per_second=1e12, flops_per_second=1e14)
WORKS = {"verify": Work(num_bytes=5e9, flops=4e11, cache_bytes=1e9), "accept": Work(num_bytes=1e6, flops=0.0)}


def step(*, kernels: bool) -> StepTime:
    names = {"_skinny_kernel": 4e-3, "nvjet_tst_64x8": 1e-3, "kernel_mha": 2e-3, "_add_norm_kernel": 1e-3}
    found = tuple(KernelTime(part="verify", name=name, seconds=time, calls=1) for name, time in names.items())
    parts = {**dict.fromkeys(PARTS, 0.0), "verify": 8e-3, "accept": 1e-3}
    return StepTime(parts=parts, idle=0.0, kernels=found if kernels else ())


def test_each_kind_has_the_bound_of_what_it_reads() -> None:
    rows = {row["kind"]: row for row in kind_rows(8, step(kernels=True), WORKS, FAST)}
    found = {
        kind: (row["time"], row["bound"], row["over_bound"], row["bound_by"]) for kind, row in rows.items()
    }
    assert found["GEMM"] == pytest.approx((5000.0, 4000.0, 1.25, "memory"))
    assert found["attention"] == pytest.approx((2000.0, 1000.0, 2.0, "memory"))
    assert sum(row["time"] for row in rows.values()) == pytest.approx(8000.0), "the whole part"
    assert (rows["other"]["time"], rows["other"]["bound"]) == (pytest.approx(1000.0), None)
    assert kind_rows(8, step(kernels=False), WORKS, FAST) == []


def test_the_details_have_every_batch() -> None:
    table = step_table({}, 4, [(batch, step(kernels=True), WORKS) for batch in (8, 16)], FAST)
    assert {each.title: len(each.rows) for each in table.details} == {"By kernel": 8, "By kind of kernel": 6}
    unknown = step_table({}, 4, [(8, step(kernels=False), WORKS)], FAST)
    assert unknown.details == ()


KINDS = {
    "GEMM": ("_fp8_kernel", "_gate_up_kernel", "cublasLt::splitKreduce_kernel", "linear_kernel"),
    "attention": (
        *("flashinfer::BatchPrefillWithPagedKVCacheKernel", "kernel_mha", "hopper_decode"),
        *("_recur_kernel", "_recur_chunks_kernel", "_attend_kernel", "_add_kernel"),
    ),
    "other": (
        *("_chunk_kernel", "_add_norm_kernel", "_silu_mul_kernel", "_rope_store_kernel", "_round_kernel"),
        "at::native::elementwise_kernel",
    ),
}


def test_kinds_are_recognised_by_name() -> None:
    assert {
        kind: tuple(filter(lambda name: kind_of(name) == kind, names)) for kind, names in KINDS.items()
    } == KINDS
