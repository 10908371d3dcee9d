"""Reports, studies and benches as self-contained HTML pages.

The template escapes every text; markup comes from it and from ``svg.svg`` alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    def to_html(self) -> str:
        return f"{_TEMPLATES.get_template('page.html').render(page=self, svg=svg, classes=classes)}\n"
