"""Where drafts fail: rejections by token and by category."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from specgen.record.record_rows import RequestRow
from specgen.report.display import count, percent
from specgen.report.table import Column, Row, Table
from specgen.report.token_sources import sources

_TOKENS, _CATEGORIES = 12, 20  # shown
_OTHERS = 3  # drafts shown per token
_BY_TOKEN = (
    Column(name="token", title="the target's token"),
    Column(name="rejected", title="missed"),
    Column(name="share", title="of occurrences", show=percent),
    Column(name="others", title="rejected drafts in its place", wraps=True),
)
_BY_DRAFT = (
    Column(name="token", title="draft"),
    Column(name="rejected"),
    Column(name="share", title="of occurrences", show=percent),
)
_BY_CATEGORY = (
    Column(name="category"),
    Column(name="rejections"),
    Column(name="share", title="of all", show=percent),
    Column(name="per_step", title="of its steps", show=percent),
)


class Rejections:
    """Counts over requests: of every rejected draft, what the target said in its place.

    A place is a draft that the target decided on: those behind the first rejected one of a step are not.
    """

    def __init__(self) -> None:
        self._pairs: Counter[tuple[int, int]] = Counter()  # draft, token
        self._accepted: Counter[int] = Counter()
        self._categories: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])  # rejections, steps

    def add_category(self, row: RequestRow) -> None:
        """Count the rejections of one request by its category."""
        sums = self._categories["(none)" if row.category is None else row.category]
        sums[0] += row.num_rejections
        sums[1] += sum(row.counts["histogram"])

    def add_tokens(self, row: RequestRow, token_ids: Sequence[int]) -> None:
        """Count one request, whose tokens are ``token_ids``, by token."""
        for source, token in zip(sources(row), token_ids, strict=True):
            if source.kind == "draft":
                self._accepted[token] += 1
            elif source.rejected is not None:
                self._pairs[source.rejected, token] += 1

    def tables(self, piece: Callable[[int], str], note: str) -> Iterator[Table]:
        """The most frequent ones; ``piece`` is the text of a token, ``note`` says which requests were counted."""
        yield self._by_category()
        missed, rejected = Counter[int](), Counter[int]()
        others: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for (draft, token), number in self._pairs.items():
            missed[token] += number
            rejected[draft] += number
            others[token][draft] += number
        yield Table(
            title="Tokens that are missed most",
            note=f"the target's token where a draft was rejected{note}",
            columns=_BY_TOKEN,
            rows=tuple(
                {**row, "others": _listed(others[token], piece)} for token, row in self._rows(missed, piece)
            ),
        )
        yield Table(
            title="Drafts that are rejected most",
            note=f"rejected drafts{note}",
            columns=_BY_DRAFT,
            rows=tuple(row for _, row in self._rows(rejected, piece)),
        )

    def _rows(self, rejected: Counter[int], piece: Callable[[int], str]) -> Iterator[tuple[int, Row]]:
        """The most frequent tokens and their rows."""
        for token, number in _most(rejected):
            share = number / (number + self._accepted[token])
            yield token, {"token": quoted(piece(token)), "rejected": number, "share": share}

    def _by_category(self) -> Table:
        """No rows for a single category."""
        total = sum(rejections for rejections, _ in self._categories.values())
        ordered = sorted(self._categories.items(), key=lambda each: (-each[1][0], each[0]))
        rows = [
            {
                "category": category,
                "rejections": rejections,
                "share": rejections / total if total else None,
                "per_step": rejections / steps if steps else None,
            }
            for category, (rejections, steps) in ordered[:_CATEGORIES]
        ]
        shown = (
            f"; {count(len(rows))} of {count(len(ordered))} categories" if len(rows) < len(ordered) else ""
        )
        return Table(
            title="Rejections by category",
            note=f"verify steps that rejected a draft{shown}",
            columns=_BY_CATEGORY,
            rows=tuple(rows) if len(rows) > 1 else (),
        )


def quoted(text: str) -> str:
    """A token's text in quotes, blanks made visible."""
    return f"“{text.replace(' ', '␣').replace(chr(10), '⏎').replace(chr(9), '⇥')}”"


def _most(numbers: Counter[int]) -> list[tuple[int, int]]:
    """The most frequent, of equal ones the smaller id: the order does not depend on that of the requests."""
    return sorted(numbers.items(), key=lambda each: (-each[1], each[0]))[:_TOKENS]


def _listed(drafts: Counter[int], piece: Callable[[int], str]) -> str:
    shown = _most(drafts)[:_OTHERS]
    more = len(drafts) - len(shown)
    texts = [f"{quoted(piece(draft))} {count(number)}" for draft, number in shown]
    return ", ".join(texts) + (f" and {count(more)} more" if more else "")
