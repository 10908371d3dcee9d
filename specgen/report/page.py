"""Reports, studies and benches as self-contained HTML pages.

The template escapes every text; markup comes from it and from ``svg.svg`` alone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specgen.report.charts import svg
from specgen.report.table import Table
from specgen.report.text_list import TextList, classes

# classes of the style sheet: of the whole width always, while its table is open
_WHOLE, _OPENS = "whole", "opens"
_HALF = 58  # digits side by side that a table of one of two columns holds
_FEWEST = 4  # sections that a row of links leads to
_PADDING, _LONGEST_WORD = 1.4, 16  # digits
_NARROW = " .,:;[]()'|il"  # half a digit each

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True, kw_only=True)
class Page:
    """The content of a page from top to bottom; empty fields are left out."""

    title: str
    settings: Mapping[str, str]  # a few short ones: they stand above the answer
    sentence: str = ""
    alarming: bool = False  # whether the sentence is an alert
    tiles: Sequence[tuple[str, str, str]] = ()  # name, large number, note
    tables: Sequence[Table] = ()
    notes: Mapping[str, str] = field(default_factory=dict)  # definitions of terms, or how it was measured
    notes_title: str = "Definitions"
    origin: Mapping[str, str] = field(default_factory=dict)  # see ``origin.origin``
    findings: Sequence[str] = ()
    texts: TextList | None = None

    def cards(self) -> Iterator[tuple[Table, str]]:
        """The tables that show something, and the classes of their widths."""
        tables = [table for table in self.tables if table.rows or table.chart]
        for is_whole, group in groupby(tables, lambda table: width_class(table) == _WHOLE):
            cards = list(group)
            # else the last of an odd number has nothing beside it but space
            odd_one = len(cards) % 2 and len(cards) < len(tables) and all(table.chart for table in cards[:-1])
            for table in cards:
                alone = (len(tables) == 1 and table.has_header) or (odd_one and table is cards[-1])
                yield table, _WHOLE if is_whole or alone else width_class(table)

    def anchors(self) -> dict[str, str]:
        """The title of each section by its id in the page, which is made of it."""
        titles = [table.title for table, _ in self.cards()]
        titles += [self.notes_title] * bool(self.notes) + ([self.texts.title] if self.texts else [])
        found: dict[str, str] = {}
        for title in titles:
            name = re.sub(r"\W+", "-", title.lower()).strip("-")
            found[f"{name}-{len(found)}" if name in found else name] = title
        return found

    def to_html(self) -> str:
        template = _TEMPLATES.get_template("page.html")
        return f"{template.render(page=self, svg=svg, classes=classes, fewest=_FEWEST)}\n"


def width_class(table: Table) -> str:
    """The class of a card whose table half a page cannot hold; a table below a chart is open only when asked for."""
    narrowest = sum(_narrowest(table, at) for at in range(len(table.columns))) if table.rows else 0
    if narrowest <= _HALF:
        return ""
    return _OPENS if table.chart else _WHOLE


def _narrowest(table: Table, at: int) -> float:
    """The digits that a column takes at least: text breaks between words, and intervals stand below their numbers."""
    column = table.columns[at]
    wraps = column.wraps or at == 0
    texts = [column.text(row) for row in table.rows]
    words = [
        *re.split(r"[\s_-]", column.heading),
        *(each for text in texts * wraps for each in re.split(r"[\s-]", text)),
    ]
    breakable = min(max(map(_digits, words)), _LONGEST_WORD)
    whole = (_digits(text) for text in texts if not wraps)
    return _PADDING + max(breakable, *whole, *(_digits(column.ends(row)) for row in table.rows))


def _digits(text: str) -> float:
    return len(text) - sum(map(text.count, _NARROW)) / 2
