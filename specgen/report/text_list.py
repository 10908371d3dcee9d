"""Texts on a page, request by request: coloured token by token, filtered by label, the worst first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from markupsafe import escape

from specgen.report.token_sources import Source

_MARKUP = 20  # bytes around a span
_POSITIONS = 8  # of drafts, with their own shade


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a text; ``style`` is a class of the style sheet, ``rejected`` the draft in whose place it stands."""

    text: str
    style: str = ""
    rejected: str | None = None

    @property
    def num_bytes(self) -> int:
        """Size in the HTML page."""
        texts = self.text if self.rejected is None else f"{self.text}{self.rejected} tabindex=0 data-draft="
        return _MARKUP + len(escape(texts).encode())


def span_style(source: Source) -> str:
    """The class of a token: of an accepted draft ``d0`` to ``d7``, else the kind of its source."""
    return f"d{min(source.position, _POSITIONS - 1)}" if source.kind == "draft" else source.kind


@dataclass(frozen=True, kw_only=True)
class ShownText:
    """A text as spans, under its name: an arm, or a part of the text."""

    name: str
    spans: Sequence[Span]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One request: its ``labels``, by which a page filters, a line of numbers, what was asked, and its texts."""

    title: str
    labels: Mapping[str, str]
    note: str
    question: str
    texts: Sequence[ShownText]

    @property
    def num_bytes(self) -> int:
        """Size in the HTML page, approximately."""
        own = 400 + len(
            escape(f"{self.title}{self.note}{self.question}{''.join(self.labels.values())}").encode()
        )
        return own + sum(span.num_bytes for text in self.texts for span in text.spans)


@dataclass(frozen=True, kw_only=True)
class TextList:
    """Entries under a heading; the first ``num_open`` are open. ``keys`` explains the styles that occur, by style."""

    title: str
    note: str
    entries: Sequence[Entry]
    num_open: int = 1
    keys: Mapping[str, str]

    @property
    def filters(self) -> dict[str, dict[str, str]]:
        """By label with more than one value: the class of the entries with each value, the most frequent first."""
        names = dict.fromkeys(name for entry in self.entries for name in entry.labels)
        found = {name: _by_frequency(entry.labels.get(name) for entry in self.entries) for name in names}
        several = [(name, values) for name, values in found.items() if len(values) > 1]
        return {
            name: {value: f"{letter}{at}" for at, value in enumerate(values)}
            for letter, (name, values) in zip(ascii_lowercase, several, strict=False)
        }


def classes(filters: Mapping[str, Mapping[str, str]], entry: Entry) -> str:
    """The classes of ``TextList.filters`` that hold for ``entry``."""
    found = (values.get(entry.labels.get(name, "")) for name, values in filters.items())
    return " ".join(filter(None, found))


def _by_frequency(values: Iterable[str | None]) -> list[str]:
    numbers: dict[str, int] = {}
    for value in values:
        if value is not None:
            numbers[value] = numbers.get(value, 0) + 1
    return sorted(numbers, key=lambda value: (-numbers[value], value))


def within(entries: Iterable[Entry], num_bytes: int) -> list[Entry]:
    """The first of ``entries`` that fit in so many bytes of a page together."""
    found, room = [], num_bytes
    for entry in entries:
        room -= entry.num_bytes
        if room < 0:
            break
        found.append(entry)
    return found
