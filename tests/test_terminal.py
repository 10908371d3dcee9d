"""No line is wider than the terminal, and no text or number is cut."""

import fcntl
import io
import os
import re
import shutil
import struct
import termios
from pathlib import Path

import pytest
from rich.cells import cell_len

from specgen.report.display import percent
from specgen.report.references import load_reference
from specgen.report.table import Column, Table, pairs
from specgen.report.terminal import ALARMING, definitions, has_colours, heading, render, width_of
from tests.commands import printed
from tests.tiny_checkpoints import change_json

pytestmark = pytest.mark.xdist_group("terminal")  # two runs for all


def table_of(label: str, num_columns: int = 3) -> Table:
    names = [f"token {i}" for i in range(num_columns)]
    columns = (Column(name="category"), *(Column(name=name, show=percent) for name in names))
    rows = tuple({"category": text, **dict.fromkeys(names, 0.123)} for text in (label, "math"))
    return Table(title="By category", columns=columns, rows=rows)


def test_a_file_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert width_of(io.StringIO()) == 100
    monkeypatch.setenv("COLUMNS", "80")
    assert width_of(io.StringIO()) == 80
    for nonsense in ("0", "²", "-5", "wide", ""):
        monkeypatch.setenv("COLUMNS", nonsense)
        assert width_of(io.StringIO()) == 100


def test_a_terminal_is_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 63, 0, 0))
    monkeypatch.setattr("rich.console._STD_STREAMS", (slave,))
    with os.fdopen(slave, "w") as terminal:
        assert width_of(terminal) == 63
    os.close(master)


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize(
    "label",
    ["a name of several words that goes on", "x" * 150, "数学の問題" * 12, "[bold]a[/bold] :smile: [red]"],
    ids=["words", "path", "wide", "markup"],
)
def test_labels_wrap_and_stay_whole(label: str, width: int) -> None:
    text = render([label, pairs("", [(label, label, "")]), table_of(label)], width)
    first, _, rest = text.partition("\n\n")
    assert max(map(cell_len, first.splitlines())) <= max(width, *map(cell_len, label.split()))
    assert max(map(cell_len, rest.splitlines())) <= width
    assert "\x1b" not in text
    sentence = "".join(first.split())
    assert sentence == "".join(label.split())
    lines = text.split("\n\n")[2].splitlines()
    start, end = (
        next(i for i, line in enumerate(lines) if line.startswith(each)) for each in ("category", "math")
    )
    assert "".join("".join(lines[start + 1 : end]).replace("12.3 %", "").split()) == sentence


@pytest.mark.parametrize("num_columns", [3, 16, 40])
def test_numbers_are_never_cut(num_columns: int) -> None:
    for width in range(40, 61):
        text = render([table_of("chat", num_columns)], width)
        assert max(map(len, text.splitlines())) <= width
        assert text.count("12.3 %") == 2 * num_columns
    blocks = text.rstrip("\n").split("\n\n")
    assert all(block.splitlines()[-1].startswith("math") for block in blocks)
    assert len({len(block.splitlines()[-1].split()) for block in blocks}) <= 2  # of about equal width


def test_a_setting_and_a_definition_are_distinct_from_the_next() -> None:
    settings = heading({"model": "a b", "runs on": "cpu, float32"})
    assert render([settings], 20) == "model a b\nruns on cpu, float32\n"
    terms = definitions([("p", "a test of some length"), ("q", "another")])
    assert render([terms], 16) == "p = a test of\n  some length\nq = another\n"


def test_what_is_empty_leaves_no_gap() -> None:
    empty = Table(title="", columns=(Column(name="a"),), rows=())
    assert render(["", "one", empty, "two"]) == "one\n\ntwo\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two short runs of the bundled pair, in directories with long names."""
    paths = [
        tmp_path_factory.mktemp("runs") / f"a-run-with-a-{name}-drafter-batch"
        for name in ("padded", "non-padded")
    ]
    for path, batch in zip(paths, ("padded", "non-padded"), strict=True):
        small = ["--num-prompts", "3", "--max-new-tokens", "12", "--device", "cpu", "--num-spec-tokens", "7"]
        command = ["generate", *small, "--drafter-batch", batch, "--baseline", "--output", str(path)]
        printed(*command)
    return [str(path) for path in paths]


def require_fits(report: str, width: int) -> None:
    broken = [line for line in report.splitlines() if " " in line.strip()]  # a URL stays whole
    assert 60 < max(map(len, broken)) <= width
    assert "…" not in report


@pytest.mark.parametrize("width", [80, 100])
def test_reports_fit(runs: list[str], width: int) -> None:
    for directories in [runs[:1], runs, [*runs, *runs]]:
        require_fits(printed("report", *directories, columns=width), width)


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", ["vllm-ci-llama-3.1-8b", "vllm-25196-padded", "dspark-qwen3-8b-dspark"])
def test_reports_beside_published_figures_fit(runs: list[str], tmp_path: Path, name: str, width: int) -> None:
    """Of a run that says that it was measured as the reference was."""
    theirs = load_reference(name).measurements[0]
    data = {"dataset": theirs.dataset}
    if theirs.dataset.startswith("eval "):
        data = {"tasks": [theirs.dataset.removeprefix("eval ")]}
    run = shutil.copytree(runs[0], tmp_path / "run")
    engine = {"num_spec_tokens": theirs.num_spec_tokens, "draft_sampling": theirs.draft_sampling}
    sampling = {"temperature": theirs.temperature}
    change_json(run / "manifest.json", engine=engine, sampling=sampling, data=data)
    require_fits(printed("report", run, "--against", name, columns=width), width)


def test_what_is_alarming_is_red_in_a_terminal_alone():
    columns = (Column(name="figure"), Column(name="number"))
    rows = ({"figure": "good", "number": 1}, {"figure": "bad", "number": 2, ALARMING: True})
    table = Table(title="", columns=columns, rows=rows)
    plain, red = render([table], 80), render([table], 80, colours=True)
    assert "\x1b" not in plain
    coloured = [line for line in red.splitlines() if "\x1b[1;31m" in line]
    assert len(coloured) == 1
    assert "bad" in coloured[0]
    assert re.sub(r"\x1b\[[\d;]*m", "", red) == plain


def test_colours_are_for_terminals_whose_users_want_them(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert has_colours(Terminal())
    assert not has_colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(Terminal())
