"""The kernel bench on a CPU: what is timed, and that results are checked."""

import json
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import layer_timing
import pytest
import torch
from bench import kernels
from bench.kernels import Cell, KernelJob, measure, queries
from layer_timing import COLD_BYTES, MOST_LAYERS, num_layers, relative_error, time_layers

from specgen.attention import Heads
from specgen.attention.sdpa import SdpaBackend
from specgen.engine.choices import choose_device
from specgen.kv.layout import Layout
from specgen.report.terminal import render
from tests.commands import printed, refused

pytestmark = pytest.mark.scripts

CPU = torch.device("cpu")
HEADS = Heads(
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    page_size=4,
    max_query_len=4,
)
CELL = Cell(num_seqs=5, max_seq_len=30, heads=HEADS, device=CPU)
JOB = KernelJob(heads=HEADS, num_seqs=(1, 3), max_seq_lens=(16, 9), num_spec_tokens=3, repeats=2, device=CPU)


def test_lengths_are_random_and_pages_lie_anywhere() -> None:
    many = replace(CELL, num_seqs=200)
    assert many.kv_lens[-1] == max(many.kv_lens) == 30
    assert set(many.kv_lens) == set(range(4, 31))
    assert many.kv_lens == replace(CELL, num_seqs=200).kv_lens
    assert many.bytes_read == sum(many.kv_lens) * 2 * 2 * 8 * 4
    tables = CELL.block_tables()
    pages = tables[tables > 0].tolist()
    assert sorted(pages) == list(range(1, CELL.num_pages + 1)), "none is shared"
    steps = {after - before for before, after in pairwise(pages)}
    assert len(steps) > 3, "neither upwards nor downwards"
    assert [(row > 0).sum().item() for row in tables] == [-(-length // 4) for length in CELL.kv_lens]
    keys, values = CELL.cache().pages(CELL.num_layers - 1)
    assert keys.shape == (CELL.num_pages + 1, 4, 2, 8)
    assert values.std().item() == pytest.approx(1, abs=0.1)


def test_passes_end_where_the_context_does() -> None:
    plain, padded, ragged = (query.layout(CELL, CELL.block_tables()) for query in queries(3))
    for layout in (plain, padded, ragged):
        assert layout.kv_lens.tolist() == list(CELL.kv_lens)
        assert layout.host is None  # as in decoding, lengths are not on the host
    assert (plain.uniform_q, padded.uniform_q, ragged.uniform_q) == (1, 4, None)
    lens = next(query for query in queries(3) if "ragged" in query.name).layout(
        many := replace(CELL, num_seqs=200), many.block_tables()
    )
    assert set(lens.query_lens.tolist()) == {1, 2, 3, 4}
    assert [query.name for query in queries(0)] == ["1"]


def test_every_repeat_calls_each_layer_once(monkeypatch) -> None:
    assert num_layers(1, CPU) == MOST_LAYERS, "small contexts are spread over many layers"
    assert num_layers(COLD_BYTES["cpu"] // 4 - 1, CPU) == 5
    assert num_layers(COLD_BYTES["cpu"] * 3, CPU) == 1
    clock = count(0.0, 6.0)  # seconds between two readings
    monkeypatch.setattr(layer_timing.time, "perf_counter", lambda: next(clock))
    called: list[int] = []
    measured = time_layers(lambda layer: called.append(layer) or torch.tensor(float(layer)), 3, 2, CPU)
    assert called == [0, 0, 1, 2, 0, 1, 2]
    assert (measured.mean, measured.std, measured.output.item()) == (2.0, 0.0, 2.0)
    expected = torch.tensor([[3.0, 4.0], [100.0, 0.0]])
    error = relative_error(expected + torch.tensor([[0.5, 0.0], [0.0, 1.0]]), expected)
    assert error == pytest.approx(0.1), "relative to its row"


def test_the_table_has_every_combination_in_order_and_grows() -> None:
    tables = list(measure(JOB))
    assert [len(table.rows) for table in tables] == [3, 6, 9, 12]
    cells = [(1, 9), (3, 9), (1, 16), (3, 16)]
    assert [(row["query"], row["num_seqs"], row["max_seq_len"]) for row in tables[-1].rows] == [
        (query, *cell) for query in ("1", "4 padded", "1-4 ragged") for cell in cells
    ]
    for row in tables[-1].rows:
        assert row["sdpa_over_bound"] == pytest.approx(row["sdpa_mean"] / row["bound"])
        assert row["difference"] < 1e-5
    assert not any("speedup" in column.name for column in tables[-1].columns)
    assert all(any(plot.points(tables[-1].rows).values()) for plot in tables[-1].plots)


@pytest.mark.slow
def test_fp8_pages_are_a_quarter_of_the_bytes_of_float32() -> None:
    heads = replace(HEADS, kv_dtype=torch.float8_e4m3fn)
    *_, table = measure(replace(JOB, heads=heads))
    *_, plain = measure(JOB)
    assert "float32 with an FP8 KV cache" in table.conditions["shape"]
    assert len(table.rows) == len(plain.rows) == 12
    for row in table.rows:
        assert row["difference"] < 1e-5
    assert replace(CELL, heads=heads).bytes_read == CELL.bytes_read // 4


@pytest.mark.slow
def test_two_backends_are_checked_and_compared_with_each_other(monkeypatch) -> None:
    monkeypatch.setitem(kernels._TIMED, "cpu", (SdpaBackend, kernels.StaticSdpaBackend))
    *_, table = measure(JOB)
    assert max(map(len, render(table.parts(), 80).splitlines())) <= 80
    row = table.rows[-1]
    assert row["sdpa_speedup"] == pytest.approx(row["sdpa-static_mean"] / row["sdpa_mean"])
    assert row["kernels"] == "PyTorch SDPA, PyTorch SDPA"
    assert table.conditions["difference"].endswith("of a row against sdpa")
    assert {plot.y for plot in table.plots} == {"sdpa_speedup", "sdpa_over_bound"}


class Second(SdpaBackend):
    """As right as the first."""

    name = "second"


class Third(Second):
    """And this."""

    name = "third"


class Shortsighted(SdpaBackend):
    """Attends to one position too few."""

    name = "sdpa"

    def plan(self, layout: Layout):
        return super().plan(replace(layout, starts=layout.starts - (layout.starts > 0).long()))


class NotANumber(SdpaBackend):
    """Of which Python's ``max`` would say nothing, behind a finite error."""

    name = "nan"

    def plan(self, layout: Layout):
        right = super().plan(layout)
        return lambda *given: torch.full_like(right(*given), torch.nan)


@pytest.mark.parametrize(
    ("backends", "num_rows"),
    [
        ((SdpaBackend, Second, Third), 3),
        ((Shortsighted,), 0),
        ((SdpaBackend, Second, NotANumber), 0),
        ((SdpaBackend, NotANumber, Second), 0),
    ],
)
def test_where_any_backend_is_wrong_there_is_no_row(monkeypatch, backends, num_rows: int) -> None:
    monkeypatch.setitem(kernels._TIMED, "cpu", backends)
    *_, table = measure(replace(JOB, num_seqs=(3,), max_seq_lens=(9,)))
    assert (len(table.rows), len(table.notes)) == (num_rows, 3 - num_rows)
    assert all({"sdpa_speedup", "second_speedup"} <= row.keys() for row in table.rows)
    assert all("differ" in note for note in table.notes)


def test_what_does_not_fit_is_left_out_and_named(flashinfer_installed, monkeypatch) -> None:
    *_, table = measure(replace(JOB, max_seq_lens=(9, 1 << 25), num_seqs=(1,)))
    assert {row["max_seq_len"] for row in table.rows} == {9}
    assert table.notes == (
        "not measured: 1 sequences of up to 33554432 take 4.00 GiB of KV, and there is room for 0.25",
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with refused(r"trtllm does not support GPUs.* 7.x.*; flashinfer does not"):
        next(measure(replace(JOB, device=torch.device("cuda"))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 1}, "repeats is 1"),
        ({"max_seq_lens": (16, 3)}, "max-seq-lens has 3, too short for 4 rows"),
        ({"heads": replace(HEADS, num_heads=3)}, "num-heads is 3 for 2 KV heads"),
        ({"num_spec_tokens": -1}, "num-spec-tokens is -1"),
    ],
)
def test_invalid_jobs_are_refused(changes, message) -> None:
    with refused(message):
        replace(JOB, **changes)


def test_the_command_leaves_table_document_and_files(tmp_path) -> None:
    sizes = ["--num-seqs", "2", "--max-seq-lens", "16", "--num-spec-tokens", "1", "--page-size", "4"]
    heads = ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "8"]
    options = ["--device", "cpu", "--repeats", "2", "--output", str(tmp_path / "out")]
    done = printed(*sizes, *heads, *options, "--json", program=kernels.app)
    document = json.loads(done)
    assert [row["query"] for row in document["rows"]] == ["1", "2 padded", "1-2 ragged"]
    assert document["head"]["repeats"] == 2
    assert "2 heads, 1 KV heads of 8, float32, pages of 4" in document["head"]["shape"]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {f"kernels.{kind}" for kind in ("csv", "html", "json", "yaml")}


@pytest.mark.slow
def test_latents_take_the_place_of_keys_and_values() -> None:
    options = ("--latents", "--num-heads=2", "--num-seqs=1,3", "--max-seq-lens=70")
    document = json.loads(printed(*options, "--device=cpu", "--repeats=2", "--json", program=kernels.app))
    assert document["head"]["shape"].startswith("2 heads, latents of 512 + 64, float32")
    assert "attend, absorbed" in document["head"]["time"]
    assert len(document["rows"]) == 6
    for row in document["rows"]:
        assert row["difference"] < 1e-5
    for wrong, line in (
        ("--head-dim=64", "latents are for all"),
        ("--page-size=0", "page-size is '0': use at"),
    ):
        with refused(f"^{line}"):
            printed(*options, wrong, program=kernels.app)


def test_a_position_of_latents_is_read_once_for_all_heads() -> None:
    heads = replace(HEADS, num_heads=20, num_kv_heads=1, head_dim=576, latent=kernels.LATENT)
    cell = replace(CELL, heads=heads)
    assert cell.bytes_read == sum(cell.kv_lens) * 576 * 4
    assert cell.rows(Layout.uniform(cell.block_tables(), torch.tensor([1, 2]), 3, 4)).shape == (6, 20, 576)
    (pages,) = cell.cache().pages(0)
    assert pages.shape[2:] == (1, 576)


def gpu_job(num_seqs: tuple[int, ...], max_seq_lens: tuple[int, ...], **changes: Any) -> KernelJob:
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "page_size": 64}
    return KernelJob(
        heads=Heads(**shape | {"kv_dtype": torch.bfloat16, "max_query_len": 5} | changes),
        num_seqs=num_seqs,
        max_seq_lens=max_seq_lens,
        num_spec_tokens=4,
        repeats=5,
        device=choose_device("cuda"),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_latents_are_right_and_do_not_beat_the_memory() -> None:
    shape: dict[str, Any] = {"num_heads": 20, "num_kv_heads": 1, "head_dim": 576, "latent": kernels.LATENT}
    *_, table = measure(gpu_job((1, 32, 128), (1024, 8192), **shape))
    assert table.notes == tuple(
        f"not timed: {name} does not support latent attention: use --attention auto"
        for name in ("trtllm", "flashinfer")
    )
    assert len(table.rows) == 18
    assert all(0.8 < row["hopper_over_bound"] < 100 for row in table.rows), table.rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_on_a_gpu_two_backends_agree_and_neither_beats_the_memory(kv_dtype: torch.dtype) -> None:
    *_, table = measure(gpu_job((1, 32), (1024, 4096), kv_dtype=kv_dtype))
    assert (table.notes, len(table.rows)) == ((), 12)
    for row in table.rows:
        assert 0.8 < row["trtllm_over_bound"] < 100
        assert all(0.2 < row[name] < 20 for name in ("hopper_speedup", "trtllm_speedup"))
        assert row["trtllm_std"] < 0.3 * row["trtllm_mean"]
