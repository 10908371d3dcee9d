"""Figures that the README and docs/ print, where they repeat exactly, are those of the commands beside them."""

import re
from pathlib import Path

import pytest

from tests.commands import printed

# One run of each command; that a report says what happened is tested quickly elsewhere.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("documented figures")]

ROOT = Path(__file__).parents[1]
README, EVALUATION, PAPER = (
    ROOT / name for name in ("README.md", "docs/evaluation.md", "docs/table-for-a-paper.md")
)
# Times, and what follows from them: of another machine, or of another hour. Headings of shortened tables.
OTHERWISE = re.compile(r"tokens/s|\d m?s\b|against plain decoding|^by request|^run 1 |^arm |^engine")


def shown(text: str) -> list[str]:
    """The lines of ``text``, single-spaced: no bars, and no dots, which are left out where a printed line ends."""
    return [
        line for line in (" ".join(re.sub("[█-▏·]", " ", each).split()) for each in text.splitlines()) if line
    ]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```(?:text|console)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def documented(page: Path, first: str) -> list[str]:
    """The lines that repeat of the one block with the line ``first``."""
    (block,) = [shown(block) for block in blocks(page) if first in shown(block)]
    return [line for line in block if not OTHERWISE.search(line) and not line.startswith("$ ")]


def require_printed(lines: list[str], text: str) -> None:
    """Every line of ``lines`` is printed, in this order; sentences may break elsewhere."""
    words, at = " ".join(shown(text)), 0
    for line in lines:
        found = words.find(line, at)
        assert found >= 0, f"{line!r} is not printed, or elsewhere"
        at = found + len(line)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of the README's runs, and what the first printed."""
    root = tmp_path_factory.mktemp("demo") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # paths are shown from here
        report = printed("generate", "--output", root / "padded", "--baseline", "--device", "cpu")
        printed(
            "generate", "--drafter-batch", "non-padded", "--output", root / "non-padded", "--device", "cpu"
        )
    return root, report


def test_the_figures_of_the_demo_in_the_readme(runs: tuple[Path, str]) -> None:
    (rate, length) = re.findall(
        r"\((?s:.*?)(\d+\.\d %) of first drafts, mean length (\d\.\d+);", README.read_text()
    )[0]
    lines = shown(runs[1])
    assert any(line.startswith("token 0 528 490 " + rate) for line in lines)
    assert any(line.startswith(f"mean acceptance length {length} ") for line in lines)


def test_two_runs_side_by_side(runs: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = documented(EVALUATION, "drafter KV fill 2,640 2,195 0.83x")
    assert len(lines) > 6
    monkeypatch.chdir(runs[0].parent)
    require_printed(lines, printed("report", "runs/padded", "runs/non-padded"))


def test_paired_differences_of_two_heads(runs: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    head = ("--model", "data/demo/target", "--drafter", "data/demo/drafter-eagle1")
    printed("generate", *head, "--output", runs[0] / "eagle1", "--device", "cpu")
    lines = documented(EVALUATION, "runs/padded runs/eagle1 difference 95 % p")
    assert len(lines) == 8
    monkeypatch.chdir(runs[0].parent)
    require_printed(lines, printed("report", "runs/padded", "runs/eagle1"))


@pytest.mark.slow
def test_texts_that_verify_compares() -> None:
    lines = documented(EVALUATION, "compared with plain decoding, batch 1, greedy")
    assert len(lines) > 10
    require_printed(lines, printed("verify", "--num-prompts", "20", "--device", "cpu"))


@pytest.mark.slow
def test_scores_of_an_evaluation() -> None:
    lines = documented(EVALUATION, "word_problems exact_match,strict-match, 250 samples")
    assert len(lines) >= 10
    require_printed(lines, printed("eval", "word_problems", "--apply-chat-template", "--device", "cpu"))


def test_a_table_for_a_paper_has_the_figures_of_the_terminal() -> None:
    """Its data sets are not bundled: two blocks of one comparison agree at least."""
    terminal, exported = (" ".join(documented(PAPER, first)) for first in (PAPER_FIRST, PAPER_HEADER))
    cell = re.compile(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]")
    lengths = terminal.partition("paired heads")[0]
    assert sorted(cell.findall(lengths)) == sorted(cell.findall(exported.replace("**", "")))
    assert len(cell.findall(lengths)) == 9


PAPER_FIRST = "length requests eagle3 95 % dflash 95 % ngram:3 95 %"
PAPER_HEADER = "| head | mt-bench length | gsm8k length | mean length of all |"
