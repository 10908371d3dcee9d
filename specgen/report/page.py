"""A report, a study or a bench as one HTML page that carries all it needs and opens without a network.

The template escapes every text; markup comes from it and from ``charts.svg`` alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specgen.report.charts import svg
from specgen.report.table import Table

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Two texts of one question, by who wrote them, side by side; they are marked from where they part."""

    place: str
    note: str
    question: str
    texts: Mapping[str, str]

    @property
    def num_equal(self) -> int:
        """Characters before the first that differs."""
        ours, theirs = self.texts.values()
        pairs = enumerate(zip_longest(ours, theirs))
        return next((at for at, (one, other) in pairs if one != other), len(ours))


@dataclass(frozen=True, kw_only=True)
class TextCard:
    """Texts that differ, under a heading."""

    title: str
    note: str
    texts: Sequence[Texts]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What is shown, from top to bottom; what is empty is left out."""

    title: str
    settings: Mapping[str, str]
    sentence: str = ""
    alarming: bool = False  # the sentence
    tiles: Sequence[tuple[str, str, str]] = ()  # name, number in large print, note
    tables: Sequence[Table] = ()
    notes: Mapping[str, str] = field(default_factory=dict)  # what words mean
    findings: Sequence[str] = ()
    cards: Sequence[TextCard] = ()

    def to_html(self) -> str:
        """The page, light or dark as the reader likes."""
        return f"{_TEMPLATES.get_template('page.html').render(page=self, svg=svg)}\n"
