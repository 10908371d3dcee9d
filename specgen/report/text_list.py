"""Texts on a page, request by request: coloured by where each token came from, filtered by label."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from string import ascii_lowercase
from typing import Literal

from markupsafe import escape

from specgen.record.record_rows import RequestRow

Kind = Literal["prefill", "draft", "correction", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a token came from.

    ``prefill``: of the prompt's pass; ``draft``: accepted, at ``position`` of its step; ``correction``: the target's
    token in place of draft ``position``, ``rejected``; ``bonus``: the target's behind drafts that were all accepted;
    ``plain``: of a step without drafts.
    """

    kind: Kind
    position: int = 0
    rejected: int | None = None  # a token id


def sources(row: RequestRow) -> list[Source]:
    """The source of every token of a request; empty where its steps were not kept."""
    if row.steps is None:
        return []
    found = [Source("prefill")] * (row.num_output_tokens - sum(step.emitted for step in row.steps))
    for step in row.steps:
        found += islice(sources_of(step.drafts, step.accepted), step.emitted)
    return found


def sources_of(drafts: Sequence[int], accepted: int) -> Iterator[Source]:
    """The sources of the tokens of one verify step, the last of which the target chose."""
    for position in range(accepted):
        yield Source("draft", position)
    if accepted < len(drafts):
        yield Source("correction", accepted, drafts[accepted])
    else:
        yield Source("bonus" if drafts else "plain", accepted)


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
        """The labels with more than one value: the class of the entries with each value, the most frequent first."""
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
    numbers = Counter(value for value in values if value is not None)
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
