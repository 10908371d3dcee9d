"""The lines of every room stay within the budget of the table in CONTRIBUTING.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
ROW = re.compile(r"^\| `([\w/*.]+)` \| ([\d,]+) \|$", re.MULTILINE)


def budgets() -> dict[str, int]:
    """Lines by room: a pattern of files, as the table has them."""
    return {pattern: int(lines.replace(",", "")) for pattern, lines in ROW.findall(PAGE.read_text())}


def lines_of(pattern: str) -> int:
    """Of all files that ``pattern`` matches, blank ones too, as ``wc -l`` counts."""
    return sum(path.read_bytes().count(b"\n") for path in ROOT.glob(pattern) if path.is_file())


def test_no_room_is_larger_than_its_budget() -> None:
    above = []
    for pattern, budget in budgets().items():
        lines = lines_of(pattern)
        print(f"{pattern}: {lines:,} of {budget:,} lines, {budget - lines:+,} left")
        if lines > budget:
            above.append(
                f"{pattern} has {lines:,} lines, {lines - budget:,} more than its budget of {budget:,}"
            )
    assert not above, (
        f"{'; '.join(above)}: make something needless, or say in CONTRIBUTING.md what the lines are for"
    )


def test_every_file_of_the_package_is_in_one_room() -> None:
    rooms = [{*ROOT.glob(pattern)} for pattern in budgets()]
    files = [path for kind in ("specgen/**/*.py", "tests/*.py", "docs/*.md") for path in ROOT.glob(kind)]
    assert {str(path): sum(path in room for room in rooms) for path in files} == {
        str(path): 1 for path in files
    }


@pytest.mark.parametrize(("number", "said"), [(2, None), (1, "has 2 lines, 1 more than its budget of 1")])
def test_what_is_too_much_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str | None
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n\n")
    (tmp_path / "page.md").write_text(f"| room | lines |\n|---|---|\n| `*.py` | {number} |\n")
    monkeypatch.setattr("tests.test_budget.ROOT", tmp_path)
    monkeypatch.setattr("tests.test_budget.PAGE", tmp_path / "page.md")
    if said is None:
        test_no_room_is_larger_than_its_budget()
    else:
        with pytest.raises(AssertionError, match=said):
            test_no_room_is_larger_than_its_budget()
