"""The pages of runs, comparisons, tunes and evaluations fit phones and desktops: in a browser, and by rule."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.experiments.head_figures import compare_runs
from specgen.experiments.heads_tables import page as compare_page
from specgen.experiments.output import BenchTable
from specgen.experiments.rounds import PLAIN
from specgen.experiments.study_tables import page as eval_page
from specgen.experiments.tune import COLUMNS, _plots
from specgen.report.charts import Lines, svg
from specgen.report.display import value
from specgen.report.origin import run_title
from specgen.report.page import Page as Content
from specgen.report.page import width_class
from specgen.report.report import Report
from specgen.report.table import Column, Table, keys, pairs
from specgen.report.tables import page as run_page
from tests import browser
from tests.test_compare import a_study
from tests.test_compare import compare as compare_arms
from tests.test_compare_heads import a_run as a_head
from tests.test_compare_heads import simulated
from tests.test_folder import a_directory
from tests.test_report_html import Page, a_run
from tests.timed_engines import rounds_of

pytestmark = pytest.mark.xdist_group("pages")  # one browser for all

SMALL_PHONE, PHONE, DESKTOP = 360, 390, 1280
HEADS = {"drafter": "a", "drafter-two-layers": "b", "drafter-eagle1": "c", "another-head": "d"}


def of_a_run() -> str:
    groups = (
        "coding",
        "extraction",
        "humanities",
        "a category of several words: the longest of all",
        "x" * 60,
    )
    report = a_run(groups) | {"num_draft_tokens": 10**12, "num_accepted_tokens": 10**12}
    return run_page(Report.from_json(report), {"model": "/models/" + "deep/" * 30 + "target"}, "A run")


def of_a_comparison(root: Path) -> str:
    paths = []
    for data in ("mt-bench", "humaneval-with-a-long-name-of-its-own"):
        for seed, (head, digest) in enumerate(HEADS.items()):
            path = a_head(root / data / head, digest, simulated(0.3 + 0.1 * seed, seed), data)
            manifest = json.loads((path / "manifest.json").read_text())
            manifest["engine"]["drafter"] = f"heads/{head}"
            (path / "manifest.json").write_text(json.dumps(manifest))
            paths.append(path)
    rounds = [{PLAIN: 1000.0, **dict.fromkeys(HEADS, 1234.5 * turn)} for turn in (1, 2, 3)]
    speeds = {"mt-bench": rounds_of(rounds)}
    return compare_page(compare_runs(paths, speeds), {}, root)


def of_a_tune() -> str:
    measured: dict[str, Any] = {"speed": 1234.5, "x_plain": 2.85, "x_plain_ci95": (2.54, 3.21)}
    measured |= {"x_best": 0.83, "x_best_ci95": (0.77, 0.91), "tpot": 12.34, "acceptance_length": 2.41}
    measured |= {
        "in_batch": 120.4,
        "repeats": 10,
        "same_texts": 1.0,
        "wrong_tokens": 0,
        "verdict": "no different",
    }
    rows = [
        {"batch": batch, "K": k, "drafter_batch": mode} | measured
        for batch in (1, 8, 128)
        for k, mode in ((0, "-"), (3, "padded"), (3, "non-padded"), ("auto", "padded"))
    ]
    table = BenchTable(
        name="tune",
        title="K, drafter batch and batch size",
        conditions={"device": "a CPU", "repeats": "in turns"},
        columns=COLUMNS,
        rows=tuple(rows),
        plots=tuple(_plots(rows)),
        answers=("At batch 1: K 3.", "At batch 8: K 3."),
    )
    return table.to_html()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return {
        "run": of_a_run(),
        "comparison": of_a_comparison(tmp_path_factory.mktemp("heads")),
        "tune": of_a_tune(),
        "evaluation": eval_page(compare_arms(a_study()), {"model": "a target"}, "A study"),
    }


@pytest.fixture(scope="module")
def seen(pages: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    if browser.CHROMIUM is None:
        pytest.skip("needs Chromium")
    return browser.measured(pages, (SMALL_PHONE, PHONE, DESKTOP))


def test_no_page_is_wider_than_its_window(seen: dict[str, dict[str, Any]]) -> None:
    assert len(seen) == 12
    for name, found in seen.items():
        assert found["width"] <= found["room"], name
        assert found["outside"] == [], name
        assert found["marks"] == [], name


def test_a_table_that_does_not_fit_scrolls_and_shows_it(seen: dict[str, dict[str, Any]]) -> None:
    wider = [(name, table) for name, found in seen.items() for table in found["tables"]]
    wider = [(name, table) for name, table in wider if table["width"] > table["room"]]
    assert {name.split(" at ")[0] for name, _ in wider} >= {"run", "comparison", "tune"}
    for name, table in wider:
        assert table["scrolls"], (name, table)
        assert table["cue"], (name, table)


def test_no_table_of_a_desktop_is_cut_beside_empty_space(seen: dict[str, dict[str, Any]]) -> None:
    for name, found in seen.items():
        for table in found["tables"] if name.endswith(str(DESKTOP)) else ():
            assert table["width"] <= table["room"], (name, table)


def test_labels_and_their_text_need_not_scroll_on_a_phone(seen: dict[str, dict[str, Any]]) -> None:
    tables = {table["name"]: table for table in seen[f"run at {SMALL_PHONE}"]["tables"]}
    for name in ("Counts", "Speed and rows"):
        assert tables[name]["width"] <= tables[name]["room"]


# --- by rule, where there is no browser -------------------------------------------------------------


def test_every_section_of_a_long_page_is_in_the_row_of_links(pages: Mapping[str, str]) -> None:
    for name, html in pages.items():
        ids = re.findall(r'<section class="card[^>]* id="([^"]+)"><h2>', html)
        assert len(set(ids)) == len(ids) == html.count("<h2>"), name
        assert re.findall(r'<a href="#([^"]+)">', html) == (ids if len(ids) >= 4 else []), name
    assert '<a href="#by-category">By category</a>' in pages["run"]
    twice = Content(title="", settings={}, tables=[pairs("a b", [("", "", "")])] * 2)
    assert list(twice.anchors()) == ["a-b", "a-b-1"]


def test_a_table_is_folded_behind_its_chart_and_only_then(pages: Mapping[str, str]) -> None:
    for name, html in pages.items():
        for section in re.findall(r"<section class=\"card.*?</section>", html, re.DOTALL):
            if "<table" in section:
                assert ("<svg" in section) == ("<details><summary>Table: " in section), name


def test_a_bench_begins_with_its_answer_and_ends_with_its_method(pages: Mapping[str, str]) -> None:
    order = [
        *("a CPU", "At batch 1: K 3.", "<nav", "<svg"),
        *("<h2>Every row", "<h2>How it was measured", "in turns"),
    ]
    places = [pages["tune"].index(each) for each in order]
    assert places == sorted(places)
    assert pages["tune"].count(">batch</text>") == 4, "the x axis is titled by what it shows"


def test_an_odd_table_behind_charts_has_no_empty_space_beside_it() -> None:
    small, wide = (
        pairs("", [("a", "1", "")]),
        Table(title="", columns=COLUMNS, rows=(dict.fromkeys(keys(COLUMNS)),)),
    )
    lines = Lines(title="", label="", ticks=(0, 1), show=value, lines={})
    chart = Table(title="", columns=(), rows=(), lines=lines)

    def classes(*tables: Table) -> list[str]:
        return [width for _, width in Content(title="", settings={}, tables=tables).cards()]

    assert classes(chart, chart, small, wide) == ["", "", "whole", "whole"]
    assert classes(chart, small, wide) == ["", "", "whole"]
    assert classes(small, small, small, wide) == ["", "", "", "whole"], "which columns balance"
    assert classes(small) == [""]


def test_every_table_is_in_a_box_that_scrolls_and_can_be_reached(pages: Mapping[str, str]) -> None:
    box = re.compile(r'<div class="wide[^"]*" tabindex="0" role="region" aria-label="[^"]+">')
    for name, html in pages.items():
        assert len(box.findall(html)) == html.count("<table"), name
        (rule,) = re.findall(r"^\.wide \{([^}]*)\}", html, re.MULTILINE)
        assert "overflow-x: auto" in rule
        assert "linear-gradient" in rule
        assert "::-webkit-scrollbar" in html


def test_only_tables_that_half_a_page_cannot_hold_have_the_whole() -> None:
    def numbers(num: int) -> Table:
        columns = (Column(name="name"), *(Column(name=f"n{at}", interval=f"e{at}") for at in range(num)))
        row = {"name": "drafter", **{f"n{at}": 2.5 for at in range(num)}}
        ends = {f"e{at}": (2.25, 2.75) for at in range(num)}
        return Table(title="", columns=columns, rows=(row | ends,), bars="n0")

    assert width_class(numbers(3)) == ""
    assert width_class(numbers(4)) == ""
    assert width_class(numbers(6)) == "opens", "while its table is open"
    assert width_class(replace(numbers(6), bars="")) == "whole"
    assert width_class(pairs("", [("a label", "1,234", "with a note that is long " * 9)])) == ""
    assert width_class(Table(title="", columns=(), rows=())) == ""


def test_the_classes_of_wide_tables_are_on_the_pages(pages: Mapping[str, str]) -> None:
    whole = {
        name: re.findall(r'class="card whole" id="[^"]*"><h2>([^<]*)<', html) for name, html in pages.items()
    }
    assert whole["tune"] == ["Every row"]
    assert 'class="card opens" id="by-category"' in pages["run"]
    assert "mt-bench: paired differences" in whole["comparison"]


def test_a_comparison_says_what_is_compared(pages: Mapping[str, str]) -> None:
    page = pages["comparison"]
    title = "target: 4 drafters on mt-bench and humaneval-with-a-long-name-of-its-own"
    assert Page(page).text.count(title) == 2  # of the window, and on the page
    assert '<a href="mt-bench/drafter/report.html">mt-bench/<wbr>drafter</a>' in page
    (text,) = re.findall(r'<p class="finding">([^<]*)</p>\n<nav ', page)
    lines = [line.split(":")[0] for line in text.split("\n")]
    assert lines == ["mt-bench, by length", "humaneval-with-a-long-name-of-its-own, by length"]
    assert re.search(r"\.finding[^{]*\{ white-space: pre-line \}", page), "each has a line of its own"
    charts = re.findall(r'aria-label="([^":]*):[^"]*">(.*?)</svg>', page)
    joined = {title: "<polyline" in marks for title, marks in charts}
    assert joined["Mean acceptance length by data set"] is False
    assert joined["Acceptance by draft position on mt-bench"] is True


def test_a_bar_has_the_whole_name_where_there_is_room() -> None:
    name = "decode steps, as if every batch were"
    rows = ({"name": name, "share": 0.5},)
    table = Table(title="", columns=(Column(name="name"), Column(name="share")), rows=rows, bars="share")
    assert table.chart is not None
    assert f">{name}<" in str(svg(table.chart))


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({}, "org/target with org/head (K 4, padded) on gsm8k"),
        ({"drafter_batch": "non-padded"}, "org/target with org/head (K 4, non-padded) on gsm8k"),
        ({"drafter": "ngram:3", "spec_length": "auto"}, "org/target with ngram:3 (K auto) on gsm8k"),
        ({"drafter": None, "num_spec_tokens": 0}, "org/target alone on gsm8k"),
        (
            {"model": "/c/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39"},
            "meta-llama/Llama-3.1-8B with org/head (K 4, padded) on gsm8k",
        ),
    ],
)
def test_titles_say_what_ran(changes: dict[str, Any], title: str, tmp_path: Path) -> None:
    run = a_directory(tmp_path, data="/data/gsm8k", **changes)
    manifest = json.loads((run / "manifest.json").read_text())
    assert run_title(manifest) == title
    assert run_title(manifest | {"served_model_name": "mine"}).startswith("mine ")
