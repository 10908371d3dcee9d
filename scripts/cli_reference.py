"""Writes docs/cli.md: what ``--help`` prints of every command. Run it after changing an option."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from specgen.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
_HEAD = """# Commands and options

What `--help` prints, by command; `python scripts/cli_reference.py` writes this page. Options may also come from a file:
[running.md](running.md#options-in-a-file).
"""


def reference() -> str:
    """The page."""
    helps = (
        f"\n## {' '.join(('specgen', *words))}\n\n```text\n{_help(words)}\n```\n" for words in commands()
    )
    return _HEAD + "".join(helps)


def commands() -> Iterator[tuple[str, ...]]:
    """The words of every command, the groups before their own."""
    yield from _inside(get_command(app), ())


def _inside(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    for name, each in getattr(command, "commands", {}).items():
        yield from _inside(each, (*words, name))


def _help(words: tuple[str, ...]) -> str:
    env = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    done = CliRunner().invoke(app, [*words, "--help"], prog_name="specgen", env=env)
    assert done.exit_code == 0, done.output
    return done.stdout.rstrip()


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
