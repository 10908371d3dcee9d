"""Reports, studies and benches as self-contained HTML pages.

The template escapes every text; markup comes from it and from ``svg.svg`` alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specgen.report.svg import svg
from specgen.report.table import Table
from specgen.report.text_list import TextList, classes

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True, kw_only=True)
class TextPair:
    """Two answers to one question by arm, side by side, highlighted from the first difference."""

    label: str
    note: str
    question: str
    texts: Mapping[str, str]

    @property
    def num_equal(self) -> int:
        """Length of the common prefix in characters."""
        ours, theirs = self.texts.values()
        pairs = enumerate(zip_longest(ours, theirs))
        return next((at for at, (one, other) in pairs if one != other), len(ours))


@dataclass(frozen=True, kw_only=True)
class TextCard:
    """TextPair that differ, under a heading."""

    title: str
    note: str
    texts: Sequence[TextPair]


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
    cards: Sequence[TextCard] = ()
    texts: TextList | None = None

    def to_html(self) -> str:
        return f"{_TEMPLATES.get_template('page.html').render(page=self, svg=svg, classes=classes)}\n"
