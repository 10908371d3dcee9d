"""Reports, studies and benches as self-contained HTML pages.

The template escapes every text; markup comes from it and from ``svg.svg`` alone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specgen.report.charts import svg
from specgen.report.table import Table
from specgen.report.text_list import TextList, classes

_WHOLE, _WITH_CHART = "whole", "whole beside"  # classes of the style sheet
# Digits side by side that a table of one of two columns holds, and one of the whole width beside its chart
_HALF, _BESIDE_A_CHART = 58, 76
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
    settings: Mapping[str, str]
    sentence: str = ""
    alarming: bool = False  # whether the sentence is an alert
    tiles: Sequence[tuple[str, str, str]] = ()  # name, large number, note
    tables: Sequence[Table] = ()
    notes: Mapping[str, str] = field(default_factory=dict)  # definitions of terms
    origin: Mapping[str, str] = field(default_factory=dict)  # see ``origin.origin``
    findings: Sequence[str] = ()
    texts: TextList | None = None
    generator: str = ""  # marks a page that its command may replace

    def cards(self) -> Iterator[tuple[Table, str]]:
        """The tables that show something, and the classes of their widths."""
        tables = [table for table in self.tables if table.rows or table.chart]
        widths = [width_class(table) for table in tables]
        for at, (table, width) in enumerate(zip(tables, widths, strict=True)):
            neighbours = [widths[other] for other in (at - 1, at + 1) if 0 <= other < len(widths)]
            alone = bool(neighbours) and all(
                neighbours
            )  # between wide ones, beside which is nothing but space
            yield table, width or (_WITH_CHART if table.chart and table.rows else _WHOLE) * alone

    def to_html(self) -> str:
        template = _TEMPLATES.get_template("page.html")
        return f"{template.render(page=self, svg=svg, classes=classes)}\n"


def width_class(table: Table) -> str:
    """The class of a table's card: ``whole`` for one that half a page cannot hold, ``beside`` if its chart fits too."""
    narrowest = sum(_narrowest(table, at) for at in range(len(table.columns))) if table.rows else 0
    if narrowest <= _HALF:
        return ""
    return _WITH_CHART if table.chart and narrowest <= _BESIDE_A_CHART else _WHOLE


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
