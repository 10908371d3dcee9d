"""Renders sentences and tables to the width of the terminal; only a single longer word exceeds it."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TextIO

from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from specgen.report.charts import fraction
from specgen.report.table import Column, Table

Part = Table | str
_WIDTH = 100  # if the output is not a terminal
_GAP = 2
_LEAST = 16  # minimum width of a text column
_BAR, _SHORTEST_BAR = 20, 6
ALARMING = "alarming"  # a key of rows that is no column
_SOLID = "\ue000"  # a non-breaking space


def width_of(file: TextIO) -> int:
    """COLUMNS if it is set, else the columns of the terminal ``file``; 100 for any other file."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(file.fileno()).columns or _WIDTH
    except (OSError, ValueError):  # no terminal, or no file of the system's
        return _WIDTH


def heading(settings: Mapping[str, str]) -> str:
    """The settings in one paragraph that breaks between them."""
    return f"{_SOLID}· ".join(f"{key} {value}".replace(" ", _SOLID) for key, value in settings.items())


def definitions(terms: Iterable[tuple[str, str]]) -> str:
    """Definitions of terms, one per line."""
    return "\n".join(f"{term} = {text}" for term, text in terms)


def has_colours(file: TextIO) -> bool:
    """Whether ``file`` is a terminal whose user has not asked for none (https://no-color.org)."""
    return file.isatty() and not os.environ.get("NO_COLOR")


def render(parts: Iterable[Part], width: int = _WIDTH, colours: bool = False) -> str:
    """``parts`` wrapped to ``width`` columns and separated by empty lines; ends with a line break.

    With ``colours`` a row whose ``ALARMING`` is true is red.
    """
    console = Console(
        width=width,
        color_system="standard" if colours else None,
        force_terminal=colours,
        legacy_windows=False,
    )
    blocks = (_lines(part, console) if isinstance(part, str) else _tables(part, console) for part in parts)
    return "\n\n".join(block for block in blocks if block) + "\n"


def _lines(text: str, console: Console) -> str:
    """Wrapped lines; if there are several, continuations are indented."""
    lines = text.splitlines()
    margin = "  " if len(lines) > 1 else ""
    wrapped = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        parts = _fold(re.findall(r"\S+\s*", line), console.width - len(margin), indent)
        plain = (part.replace(_SOLID, " ").rstrip().removesuffix(" ·") for part in parts)
        wrapped.append(f"\n{margin}".join(plain))
    return "\n".join(wrapped)


def _fold(words: Iterable[str], width: int, indent: str = "") -> list[str]:
    """Breaks between words only: a long path stays whole, so that it can be copied."""
    lines = [indent]
    for word in words:
        if lines[-1].strip() and cell_len(lines[-1] + word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [each.rstrip() for each in lines]


@dataclass(frozen=True, kw_only=True)
class _Strip:
    """One column of text and its widths."""

    heading: str
    cells: tuple[str, ...]
    wraps: bool

    @cached_property
    def natural(self) -> int:
        return max(map(cell_len, (self.heading, *self.cells)))

    @cached_property
    def least(self) -> int:
        """The minimum width: numbers do not wrap, headings break between words, text may fold."""
        if self.wraps:
            return min(self.natural, max(_LEAST, *map(cell_len, _words(self.heading))))
        return max(map(cell_len, (*self.cells, *_words(self.heading))))


def _words(heading: str) -> list[str]:
    """The pieces of a heading between which it may break."""
    return re.findall(r"[^\s_-]*[\s_-]?", heading)


def _tables(table: Table, console: Console) -> str:
    """One table, or if it is too wide several that repeat the key columns."""
    blocks = []
    for strips in _blocks(table, console.width) if table.rows else ():
        with console.capture() as captured:
            console.print(_grid(table, strips, console.width))
        blocks.append("\n".join(line.rstrip() for line in captured.get().rstrip().split("\n")))
    return "\n\n".join(blocks)


def _blocks(table: Table, width: int) -> list[list[_Strip]]:
    """The fewest blocks of columns that ``width`` allows, of about equal width."""
    keys = [strip for column in table.columns[: table.num_keys] for strip in _strips(table, column)]
    chunks = [
        [strip for column in table.columns[at : at + table.group] for strip in _strips(table, column)]
        for at in range(table.num_keys, len(table.columns), table.group)
    ]
    fewest = len(_fill(keys, chunks, width))
    fillings = (_fill(keys, chunks, narrower) for narrower in range(1, width + 1))
    return next(blocks for blocks in fillings if len(blocks) == fewest)


def _fill(keys: list[_Strip], chunks: list[list[_Strip]], width: int) -> list[list[_Strip]]:
    blocks = [keys]
    for chunk in chunks:
        if len(blocks[-1]) > len(keys) and _total(strip.least for strip in blocks[-1] + chunk) > width:
            blocks.append(keys)
        blocks[-1] = blocks[-1] + chunk
    return blocks


def _strips(table: Table, column: Column) -> Iterator[_Strip]:
    """The column, and one for its intervals."""
    texts = tuple(map(column.text, table.rows))
    yield _Strip(heading=column.heading, cells=texts, wraps=column.wraps or column is table.columns[0])
    if column.interval:
        yield _Strip(heading="95 %", cells=tuple(map(column.ends, table.rows)), wraps=False)


def _total(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - _GAP


def _grid(table: Table, strips: Sequence[_Strip], width: int) -> rich_table.Table:
    widths = [strip.natural for strip in strips]
    if _total(widths) > width:
        widths = [strip.least for strip in strips]
        for at, strip in enumerate(strips):  # text columns share the remaining width
            widths[at] += min(strip.natural - widths[at], width - _total(widths)) if strip.wraps else 0
    grid = rich_table.Table(box=None, show_header=table.has_header, pad_edge=False, padding=(0, _GAP, 0, 0))
    for strip, each in zip(strips, widths, strict=True):
        header = Text("\n".join(_fold(_words(strip.heading), each)))
        grid.add_column(header, justify="left" if strip.wraps else "right", width=each, overflow="fold")
    styles = ("bold red" if row.get(ALARMING) else "" for row in table.rows)
    texts = zip(*(strip.cells for strip in strips), strict=True)
    rows = [[Text(cell, style) for cell in cells] for cells, style in zip(texts, styles, strict=True)]
    room = min(_BAR, width - _total(widths) - _GAP)
    if table.bars and room >= _SHORTEST_BAR:
        grid.add_column("", width=room)
        for cells, row in zip(rows, table.rows, strict=True):
            cells.append(Text(_bar(fraction(table.ticks, row[table.bars] or table.ticks[0]), room)))
    for cells in rows:
        grid.add_row(*cells)
    return grid


def _bar(share: float, width: int) -> str:
    """A bar in eighths of a character."""
    whole, eighths = divmod(round(share * width * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()
