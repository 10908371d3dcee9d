"""Writes docs/cli.md: what ``--help`` prints of every command. Run it after changing an option.

Options that several commands have in the same words are printed once; each command names them and prints its own.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

from specgen.cli.help import Command, write_sections
from specgen.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
_WIDTH = 110
_NO_BREAK = "\N{NON-BREAKING HYPHEN}"  # in names of options, which the formatter would break
_HEAD = """# Commands and options

What `--help` prints; `python scripts/cli_reference.py` writes this page. Options that several commands have in the
same words are [at the end](#options-of-several-commands); each command lists their names. Options may also come from a
file: [running.md](running.md#options-in-a-file). Some of [vLLM's names](engine.md#vllms-words) work too.
"""
_SHARED = "Options of several commands"

Sections = Mapping[str, list[tuple[str, str]]]


def reference() -> str:
    """The page."""
    found = [(ctx, ctx.command.sections(ctx)) for ctx in contexts() if isinstance(ctx.command, Command)]
    shared = shared_options([sections for _, sections in found])
    own = [_block(ctx.command_path, _own_help(ctx, sections, shared)) for ctx, sections in found]
    groups = [
        _block(ctx.command_path, ctx.get_help()) for ctx in contexts() if not isinstance(ctx.command, Command)
    ]
    formatter = found[0][0].make_formatter()
    write_sections(formatter, shared)
    return "\n".join([_HEAD, *groups, *own, _block(_SHARED, formatter.getvalue())])


def contexts() -> Iterator[Any]:
    """A context of every command and group of commands, the groups before their own."""
    group = get_command(app)
    yield from _inside(
        group, group.context_class(group, info_name="specgen", **app.info.context_settings or {})
    )


def _inside(command: Any, ctx: Any) -> Iterator[Any]:
    ctx.terminal_width = ctx.max_content_width = _WIDTH
    yield ctx
    for name, each in getattr(command, "commands", {}).items():
        yield from _inside(each, each.context_class(each, parent=ctx, info_name=name))


def shared_options(commands: list[Sections]) -> Sections:
    """By section, the names and helps that more than one of ``commands`` has."""
    counts = Counter(
        (title, record) for sections in commands for title, records in sections.items() for record in records
    )
    shared: dict[str, list[tuple[str, str]]] = {}
    for (title, record), count in counts.items():
        if count > 1:
            shared.setdefault(title, []).append(record)
    return shared


def _own_help(ctx: Any, sections: Sections, shared: Sections) -> str:
    """The help of a command, of options in ``shared`` the names alone."""
    formatter = ctx.make_formatter()
    ctx.command.format_usage(ctx, formatter)
    ctx.command.format_help_text(ctx, formatter)
    own: dict[str, list[tuple[str, str]]] = {}
    names: list[tuple[str, str]] = []
    for title, records in sections.items():
        own[title] = [each for each in records if each not in shared.get(title, ())]
        others = [_long(name) for name, text in records if (name, text) not in own[title]]
        names += [(title, ", ".join(others).replace("-", _NO_BREAK))] if others else []
    write_sections(formatter, {title: records for title, records in own.items() if records})
    write_sections(formatter, {_SHARED: names})
    return str(formatter.getvalue()).replace(_NO_BREAK, "-")


def _long(name: str) -> str:
    """``--chat / --raw`` of the record ``--chat / --raw``, ``--help`` of ``-h, --help``, without types."""
    return " / ".join(word for word in name.split() if word.startswith("--"))


def _block(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text.strip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
