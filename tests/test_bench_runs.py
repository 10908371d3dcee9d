"""Shared by the benches of the engine: latencies, windows of steps, and bounds."""

import csv
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import typer
from bench.step import Window, step_seconds
from bound import KVBytes, Seen, StepBytes, Work, copy_bandwidth, decode_steps, matrix_flops
from calibrated_shapes import MIXTURES, SHAPES
from programs import DeviceSpeed, publish

from specgen.config import UserError
from specgen.experiments.output import BenchTable, Plot
from specgen.experiments.turns import inter_token_seconds
from specgen.models import mixture_targets
from specgen.record import provenance
from specgen.record.record_rows import EngineRow, OutOfMemory, PassRow
from specgen.report import display
from specgen.report.charts import STYLES, Lines, Point, svg, ticks_to
from specgen.report.table import Column
from specgen.report.terminal import render
from tests.engines import config_of, load_pair, loaded
from tests.streams import pass_row, request


def kv(num_bytes: int) -> KVBytes:
    """One layer that sees all positions."""
    return KVBytes(layers=((num_bytes, Seen()),))


SIZES = StepBytes(
    target=1000, head_fill=100, head_pass=60, target_kv=kv(3), head_kv=kv(1), logits=7 * 2, bytes_per_value=2
)


def test_a_step_reads_weights_once_a_pass_and_the_cache_of_every_sequence() -> None:
    assert SIZES.step(0, batch=2, context=10.5) == 1000 + 2 * 10.5 * 3
    assert SIZES.step(1, batch=2, context=10.5) == 1000 + 2 * 10.5 * (3 + 1) + 100 + 60
    assert SIZES.step(4, batch=2, context=10.5) == 1000 + 2 * 10.5 * (3 + 4) + 100 + 4 * 60


def test_a_markov_head_reads_its_weights_for_every_draft_and_a_row_of_each_sequence() -> None:
    """Beside one pass, which drafts all: as much work as in a pass of its own for each draft."""
    one_pass, each = (replace(SIZES, head_in_parallel=parallel, head_draft=20) for parallel in (True, False))
    without = replace(SIZES, head_in_parallel=True).parts(4, 3, 0.0)["draft loop"]
    work = one_pass.parts(4, 3, 0.0)["draft loop"]
    assert work.num_bytes - without.num_bytes == 4 * 20
    assert work.flops - without.flops == 2 * (20 / 2) * 4 * 3
    assert work.flops == each.parts(4, 3, 0.0)["draft loop"].flops


def test_layers_with_a_window_read_no_more_than_that() -> None:
    windowed = Seen(window=8)
    sizes = replace(
        SIZES,
        target_kv=KVBytes(layers=((3, windowed), (3, Seen()), (3, windowed))),
        head_kv=KVBytes(layers=((1, windowed),)),
    )
    assert sizes.step(0, batch=2, context=5) == 1000 + 2 * 3 * 15
    assert sizes.step(0, batch=2, context=100) == 1000 + 2 * 3 * (8 + 100 + 8)
    assert sizes.step(4, batch=2, context=100) == 1000 + 2 * (3 * 116 + 4 * 8) + 100 + 4 * 60
    shape = MIXTURES["tiny-gpt-oss"]
    of_gpt_oss = KVBytes.of(mixture_targets.read_gpt_oss(shape.target_config()), 2)
    assert of_gpt_oss.at(1000) == 2 * 2 * shape.kv_size * 4 * (16 + 1000)


def test_the_bytes_of_a_pair_are_its_matrices(tiny_pair: Path) -> None:
    shape = SHAPES["tiny"]
    sizes = StepBytes.of(loaded(config_of(load_pair(tiny_pair), dtype="bfloat16")))
    hidden, inner, norms = shape.hidden_size, shape.intermediate_size, 2 * shape.hidden_size
    attention = 2 * hidden * shape.q_size + 2 * hidden * shape.kv_size
    layer = attention + 3 * hidden * inner + norms
    assert sizes.target == 2 * (shape.num_layers * layer + hidden + shape.vocab_size * hidden)
    wide = attention + hidden * (shape.q_size + 2 * shape.kv_size)  # q, k and v take two hidden states
    head = wide + 3 * hidden * inner + norms + hidden + hidden + shape.draft_vocab_size * hidden
    assert sizes.head_pass == 2 * head
    assert sizes.head_fill == 2 * (3 * hidden * hidden + 2 * shape.kv_size * 2 * hidden)
    assert sizes.target_kv.at(1) == 2 * 2 * shape.num_layers * shape.kv_size
    assert sizes.head_kv.at(1) == 2 * 2 * shape.kv_size
    assert (sizes.logits, sizes.bytes_per_value) == (2 * shape.vocab_size, 2)


def stepped(time: float, kind: str = "decode", num_sequences: int = 4) -> PassRow:
    return pass_row(kind, time=time, seconds=0.0, num_sequences=num_sequences)


def test_only_time_between_neighbouring_full_decode_steps_counts() -> None:
    events: list[EngineRow] = [
        stepped(0, "prefill"),
        stepped(1),
        stepped(3),
        OutOfMemory(time=3.0, max_batch_size=4, max_prefill_tokens=64),
        stepped(6),
        stepped(10, "prefill"),
        stepped(11),
        stepped(12, num_sequences=3),
        stepped(13, num_sequences=3),
    ]
    assert step_seconds(events, batch=4) == [2, 3]


def test_a_window_sees_full_decode_steps_only() -> None:
    seen: list[str] = []

    class Recorder:
        def start(self) -> None:
            seen.append("start")

        def stop(self) -> None:
            seen.append("stop")

    window = Window(4, Recorder(), skipped=2, num_steps=3)
    for time in range(4):
        window.update(stepped(time, "prefill"))
        window.update(stepped(time, num_sequences=3))
        window.update(stepped(time))
    assert seen == ["start"]
    assert not window.complete
    window.update(stepped(9))
    assert window.complete
    window.update(stepped(10))
    assert seen == ["start", "stop"]


def test_parts_do_together_what_the_step_does() -> None:
    for k in (0, 1, 4):
        parts = SIZES.parts(k, batch=2, context=10.5)
        assert list(parts) == ["verify", "accept", "KV fill", "draft loop"][: 4 if k else 2]
        assert parts.pop("accept") == Work(num_bytes=2 * (k + 1) * 7 * 2, flops=0)
        assert sum(work.num_bytes for work in parts.values()) == SIZES.step(k, batch=2, context=10.5)
        assert parts["verify"].cache_bytes == 2 * SIZES.target_kv.at(10.5), "and the rest is the weights"
    assert parts["verify"].flops == 2 * (1000 / 2) * 2 * 5
    assert parts["KV fill"].flops == 2 * (100 / 2) * 2 * 5  # for all rows of verification
    assert parts["draft loop"].flops == 2 * (4 * 60 / 2) * 2


def test_the_longer_of_reading_and_computing_is_the_bound() -> None:
    work = Work(num_bytes=30.0, flops=100.0)
    assert DeviceSpeed(bytes_per_second=10.0, flops_per_second=100.0).seconds(work) == 3.0
    assert DeviceSpeed(bytes_per_second=100.0, flops_per_second=10.0).seconds(work) == 10.0
    assert 1e8 < copy_bandwidth("cpu") < 1e13
    assert 1e8 < matrix_flops("cpu", torch.float32) < 1e14


def test_the_positions_of_a_step_are_those_of_the_sequences_in_it() -> None:
    """Not of sequences in prefill, waiting or finished."""
    (a,) = request("a", [(4, 2), (4, 1), (4, 0)], num_prompt_tokens=10)
    (b,) = request("b", [(4, 0)], num_prompt_tokens=10)
    (waiting,) = request("c", [], num_prompt_tokens=10)
    requests = [b.numbered(range(1, 9)), a.numbered(range(1, 9)), waiting]
    sizes = {0: 1, 1: 2, 2: 1, 3: 1}
    passes = [
        pass_row("decode" if number else "prefill", number=number, num_sequences=sizes[number])
        for number in sizes
    ]
    found = [(row.num_sequences, context) for row, context in decode_steps(requests, passes)]
    assert found == [(2, 11), (1, 14), (1, 16)]
    assert list(decode_steps(requests, passes[:1])) == []


def test_a_step_is_one_gap_however_many_tokens_it_emits() -> None:
    """Also where a preemption came between, and where the end of the text dropped all that a step gave."""
    times = (1.0, 1.5, 2.0, 3.0, 6.0)
    passes = [pass_row(number=number, time=time) for number, time in enumerate(times)]
    (a,) = request("a", [(2, 2), (2, 0)], first_token=1.0)
    (b,) = request("b", [(2, 1), (2, 0), (2, 0)], first_token=2.0, dropped=1)
    a, b = (
        replace(
            row, steps=[step._replace(number=at) for step, at in zip(row.steps or (), numbers, strict=True)]
        )
        for row, numbers in ((a, (1, 3)), (b, (3, 4, 4)))
    )
    assert list(inter_token_seconds([a, b], passes)) == [0.5, 1.5, 1.0, 3.0]


# --- what it prints and writes ---


COLUMNS = (
    Column(name="batch"),
    Column(name="mode"),
    Column(name="speed", unit="tokens/s", show=display.rate),
    Column(name="ratio", show=display.ratio),
)
VALUES = [(1, "<a>", 1234.56, None), (8, "<a>", 2000.0, 1.5), (1, "b, c", 0.25, 2.0), (8, "b, c", None, 3.0)]
NAMES = [column.name for column in COLUMNS]
TABLE = BenchTable(
    name="speeds",
    title="Speed & batch",
    conditions={"device": "a GPU", "weights": "synthetic", "repeats": 3},
    columns=COLUMNS,
    rows=tuple(dict(zip(NAMES, row, strict=True)) for row in VALUES),
    plots=(
        Plot(title="Speeds", x="batch", y="speed", series="mode"),
        Plot(title="Those of <a>", x="batch", y="ratio", series="mode", where={"mode": ("<a>",)}),
    ),
    notes=("batch 64 was not run: no memory",),
    num_keys=2,
)


def test_a_table_is_the_same_as_text_csv_and_json() -> None:
    lines = render(TABLE.parts()).splitlines()
    assert lines[:5] == ["Speed & batch", "device: a GPU", "weights: synthetic", "repeats: 3", ""]
    assert lines[5].split() == ["batch", "mode", "speed", "[tokens/s]", "ratio"]
    assert lines[6].split() == ["1", "<a>", "1,234.6", "-"]
    assert lines[-3].split() == ["8", "b,", "c", "-", "3.00x"]
    assert lines[-2:] == ["", "batch 64 was not run: no memory"]
    rows = list(csv.DictReader(TABLE.to_csv().splitlines()))
    assert [row["speed"] for row in rows] == ["1234.56", "2000.0", "0.25", ""], "in full"
    assert [row["mode"] for row in rows] == ["<a>", "<a>", "b, c", "b, c"]
    document = json.loads(json.dumps(TABLE.to_json()))
    assert document["rows"] == [dict(row) for row in TABLE.rows]
    assert document["columns"][2] == {"name": "speed", "unit": "tokens/s"}
    assert (document["head"], document["notes"]) == (dict(TABLE.conditions), list(TABLE.notes))


def test_a_plot_takes_the_rows_it_names_and_leaves_out_what_was_not_measured() -> None:
    everything, some = TABLE.plots

    def found(plot: Plot) -> dict[str, list[tuple[str, float | None]]]:
        lines = plot.points(TABLE.rows)
        return {name: [(point.name, point.number) for point in points] for name, points in lines.items()}

    assert found(everything) == {"<a>": [("1", 1234.56), ("8", 2000.0)], "b, c": [("1", 0.25)]}
    assert found(some) == {"<a>": [("8", 1.5)], "b, c": []}


def test_a_plot_has_whiskers_and_a_reference() -> None:
    plot = Plot(title="Range", x="batch", y="speed", series="mode", reference=3300.0)
    page = replace(TABLE, plots=(plot,)).to_html()
    assert page.count('class="reference"') == 1
    assert ">4000<" in page, "the axis has room for the reference"
    assert re.findall(r'<span class="entry">.*?</i>(.*?)</span>', page) == ["&lt;a&gt;", "b, c"]
    spread = Column(name="ratio", show=display.ratio, interval="ratio_ci95")
    rows = tuple({**row, "ratio_ci95": (0.5, 4.5) if row["ratio"] else None} for row in TABLE.rows)
    plots = (replace(plot, y="ratio", reference=None),)
    table = replace(TABLE, columns=(*COLUMNS[:3], spread), rows=rows, plots=plots)
    assert table.to_html().count('class="whisker"') == 3
    read = list(csv.DictReader(table.to_csv().splitlines()))
    assert [row["ratio_ci95_high"] for row in read] == ["", "4.5", "4.5", "4.5"]
    assert table.to_json()["columns"][-1]["interval"] == "ratio_ci95"


def test_answers_stand_first_on_the_page_and_after_the_table_on_a_terminal() -> None:
    table = replace(TABLE, answers=("Use batch 8.", "Or 1."))
    assert render(table.parts()).endswith("Use batch 8.\nOr 1.\nbatch 64 was not run: no memory\n")
    page = table.to_html()
    assert page.index("Use batch 8.\nOr 1.") < page.index("<svg") < page.index("batch 64 was not run")
    assert table.to_json()["notes"] == ["Use batch 8.", "Or 1.", *TABLE.notes]


def test_a_line_has_one_style_in_all_plots() -> None:
    """Even if an earlier line has no points, as K = 0 has no speedup over itself."""
    chart = _chart({"a": [], "b": [("1", 1.0)]})
    assert [group.get("class") for group in _marks(chart, "g")] == [STYLES[1]]


def test_rows_and_plots_must_name_the_columns() -> None:
    with pytest.raises(AssertionError):
        replace(TABLE, rows=({"batch": 1},))
    with pytest.raises(AssertionError):
        replace(TABLE, plots=(Plot(title="", x="batch", y="length", series="mode"),))


def _marks(chart: str, tag: str) -> list[ET.Element]:
    return ET.fromstring(chart).findall(f".//{tag}")


def _chart(lines: dict[str, list[tuple[str, float]]]) -> str:
    most = max((y for points in lines.values() for _, y in points), default=1.0)
    points = {name: [Point(name=x, number=y) for x, y in found] for name, found in lines.items()}
    shown = Lines(title="title", label="y over x", ticks=ticks_to(most), show=display.plain, lines=points)
    return str(svg(shown))


def test_lines_stand_at_their_numbers() -> None:
    chart = _chart({"one": [("1", 0.0), ("2", 4.0), ("4", 2.0)], "two": [("2", 1.0)]})
    (zero, four, two), (one,) = ([*group.iter("circle")] for group in _marks(chart, "g"))
    places = [[float(mark.get(side, "")) for side in ("cx", "cy")] for mark in (zero, four, two, one)]
    assert places[0][0] < places[1][0] < places[2][0]
    assert places[3][0] == pytest.approx(places[1][0] + 9)  # both at 2, side by side
    bottom, top = places[0][1], places[1][1]  # the axis ends at 4
    assert places[2][1] == pytest.approx((bottom + top) / 2)
    assert places[3][1] == pytest.approx(bottom + (top - bottom) / 4)
    assert [text.text for text in _marks(chart, "text")][:5] == ["0", "1", "2", "3", "4"]


def test_files_are_there_after_every_row_and_stdout_has_the_table_or_the_document(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(provenance, "datetime", Mock(now=lambda zone: datetime(2026, 1, 31, tzinfo=zone)))

    def growing():
        yield replace(TABLE, rows=TABLE.rows[:1])
        assert len((tmp_path / "out" / "speeds.csv").read_text().splitlines()) == 2
        yield TABLE

    publish("speeds", growing(), tmp_path / "out", as_json=True, config="x: 1\n", quiet=False)
    assert json.loads(capsys.readouterr().out) == TABLE.to_json()
    publish("speeds", [TABLE], None, as_json=False, config="x: 1\n", quiet=False)
    assert capsys.readouterr().out == render(TABLE.parts())
    assert json.loads((tmp_path / "out" / "speeds.json").read_text()) == TABLE.to_json()
    assert (tmp_path / "out" / "speeds.html").read_text() == TABLE.to_html()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="name a directory"):
        publish("speeds", growing(), tmp_path / "file", as_json=False, config="x: 1\n", quiet=False)
    with pytest.raises(UserError, match=r"out' holds an earlier speeds.json: name a new directory"):
        publish("speeds", growing(), tmp_path / "out", as_json=False, config="x: 1\n", quiet=False)


def test_a_bench_that_is_interrupted_says_what_it_leaves(tmp_path, capsys) -> None:
    def stopped(*tables: BenchTable):
        yield from tables
        raise KeyboardInterrupt

    for tables, kept in (((), "nothing is kept"), ((TABLE,), f"the rows so far are in {tmp_path}")):
        with pytest.raises(typer.Exit) as ended:
            publish("speeds", stopped(*tables), tmp_path, as_json=True, config="", quiet=True)
        assert ended.value.exit_code == 130
        assert capsys.readouterr() == ("", f"specgen: interrupted; {kept}\n")
