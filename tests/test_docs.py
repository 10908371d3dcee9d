"""What the README, CONTRIBUTING and the pages of docs/ point at is there."""

import re
from pathlib import Path

import cli_reference
import pytest
from typer.main import get_command

from specgen.cli.main import app

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
OF_OTHERS = {
    "--index-url",
    "--headless",
    "--hide-scrollbars",
    "--window-size",
    "--screenshot",
}  # pip's, chromium's
OF_SCRIPTS = {"--layers", "--experts", "--expert-overlap", "--weights", "--head", "--shape", "--accept"}
OF_ALL = {"--help"}


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def options() -> set[str]:
    """The options of every command."""
    commands = [get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
    return {
        name for command in commands for each in command.params for name in each.opts + each.secondary_opts
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, _, name in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if name else []
        assert not name or name in map(anchor, headings), f"{target}#{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_options_exist(page):
    text = page.read_text()
    for path in re.findall(r"\b((?:tests|scripts|docs|eval|data)/[\w/.-]*\w)", text):
        assert (ROOT / path).exists() or path == "eval/reference/NAME.json", path
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= options() | OF_OTHERS | OF_SCRIPTS | OF_ALL


def test_the_reference_of_commands_is_what_help_prints():
    found = cli_reference.PAGE.read_text(encoding="utf-8")
    assert found == cli_reference.reference(), "run python scripts/cli_reference.py"


def test_every_page_is_found_from_the_readme_and_from_contributing():
    for start in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / start).read_text()
        assert [page.name for page in DOCS if f"(docs/{page.name})" not in text] == []


def test_the_map_names_every_package_and_files_that_are_there():
    rows = re.findall(r"^\| `(\w+)/` \|.*\| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == {
        path.parent.name for path in (ROOT / "specgen").glob("*/__init__.py")
    }
    for package, files in rows:
        for file in re.findall(r"`(.*?)`", files):
            assert (ROOT / "specgen" / package / file).exists(), f"{package}/{file}"
