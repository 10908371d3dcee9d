"""The texts of a run for its page: where drafts fail, and the requests with the worst acceptance, token by token."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from specgen.config import UserError
from specgen.record.columns import Array, Run
from specgen.record.record_rows import RequestRow
from specgen.report.display import count, percent, plain, several
from specgen.report.table import Column, Row, Table
from specgen.report.text_list import Entry, ShownText, Source, Span, TextList, sources, span_style, within
from specgen.text.reasoning import Part, pieces_by_part
from specgen.text.tokenizer import Tokenizer, fitted, load_tokenizer

_WORST = 2_000  # requests shown, and of every category, turn and reason to end ...
_WORST_OF_EACH = 5  # ... so that each filter of a page finds some
_GROUPS = 200  # the first; data may have a category per row
_COUNTED = 10_000  # requests whose rejections are counted by token, about
_PAGE_BYTES = 3_500_000
_QUESTION = 2_000  # characters
_KEYS = {
    **{f"d{position}": f"draft {position}, accepted" for position in range(7)},
    "d7": "a later draft, accepted",
    "correction": "the target's token in place of a rejected draft: hover or tap to see it",
    "bonus": "bonus token (all drafts accepted)",
    "plain": "from a step without drafts",
    "prefill": "from prefill",
}

_TOKENS = 12  # shown
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


class RunTexts:
    """What the page of a ``run`` shows of its texts; ``rows`` are its completions by id.

    A row may have a ``title`` for its id. Those whose steps were not kept are not shown.
    """

    def __init__(self, run: Run, rows: Mapping[str, Mapping[str, Any]]) -> None:
        self._run, self._rows = run, rows
        self._stride = -(-len(rows) // _COUNTED) or 1
        self._num_counted = 0
        self._rejected: Counter[tuple[int, int]] = Counter()  # draft, and what the target said in its place
        self._accepted: Counter[int] = Counter()

    def shown(self, tokenizer: Tokenizer | None) -> tuple[list[Table], TextList | None]:
        """The tables of rejections, and the texts; without a ``tokenizer`` these are in one colour."""
        # by a hash of the id, so that the order of the requests has no part in it
        for name in self._run.names:
            if crc32(name.encode()) % self._stride == 0 and (request := self._request(name)) is not None:
                self._num_counted += 1
                for source, token in zip(sources(request), self._rows[name]["token_ids"], strict=True):
                    if source.kind == "draft":
                        self._accepted[token] += 1
                    elif source.rejected is not None:
                        self._rejected[source.rejected, token] += 1
        length = self._lengths()
        found = ((row, self._request(self._run.names[row])) for row in self._chosen(length))
        chosen = [(float(length[row]), request) for row, request in found if request is not None]
        if not chosen:
            return [], None
        entries = within((self._entry(request, tokenizer) for _, request in chosen), _PAGE_BYTES)
        ordered = sorted(zip(chosen, entries, strict=False), key=lambda each: (each[0][0], each[0][1].name))
        return self._tables(tokenizer), self._listed([entry for _, entry in ordered], tokenizer)

    def _request(self, name: str) -> RequestRow | None:
        """None of one that is not among the rows, or without steps."""
        request = RequestRow.of_row(self._rows[name]) if name in self._rows else None
        return None if request is None or request.steps is None else request

    def _lengths(self) -> Array:
        """The acceptance length of each request, infinite without a draft."""
        accepted, steps = self._run.counts.num_accepted, self._run.counts.num_drafts
        return np.where(steps > 0, 1 + accepted / np.maximum(steps, 1), np.inf)

    def _chosen(self, length: Array) -> list[int]:
        """The worst of every category, turn and reason to end, then the worst of all."""
        order, run, found = np.argsort(length, kind="stable"), self._run, list[int]()
        for codes in (run.turn, run.reason, run.category):
            _, of_row = np.unique(codes, return_inverse=True)
            by_group = order[np.argsort(of_row[order], kind="stable")]
            groups = of_row[by_group]
            rank = np.arange(len(groups)) - np.searchsorted(groups, groups)
            found += by_group[(rank < _WORST_OF_EACH) & (groups < _GROUPS)].tolist()
        return list(dict.fromkeys([*found, *order[:_WORST].tolist()]))

    def _tables(self, tokenizer: Tokenizer | None) -> list[Table]:
        """The tokens most often missed, and the drafts most often rejected; one behind a rejected one is neither."""
        note = f"; in {count(self._num_counted)} of the requests" if self._stride > 1 else ""
        missed, rejected = Counter[int](), Counter[int]()
        others: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for (draft, token), number in self._rejected.items():
            missed[token] += number
            rejected[draft] += number
            others[token][draft] += number

        def piece(token: int) -> str:
            text = "" if tokenizer is None else tokenizer.decode_with_special([token])
            is_part = "\N{REPLACEMENT CHARACTER}" in text  # of a character: such tokens look alike
            return f"token {token}" if is_part or not text else quoted(text)

        def listed(drafts: Counter[int]) -> str:
            shown = [f"{piece(draft)} {count(number)}" for draft, number in _most(drafts)[:_OTHERS]]
            more = len(drafts) - len(shown)
            return ", ".join(shown) + (f" and {count(more)} more" if more else "")

        def rows(numbers: Counter[int]) -> tuple[Row, ...]:
            return tuple(
                {
                    "token": piece(token),
                    "rejected": number,
                    "share": number / (number + self._accepted[token]),
                    "others": listed(others[token]),
                }
                for token, number in _most(numbers)
            )

        found = (
            (
                "Tokens that are missed most",
                "the target's token where a draft was rejected",
                _BY_TOKEN,
                missed,
            ),
            ("Drafts that are rejected most", "rejected drafts", _BY_DRAFT, rejected),
        )
        return [
            Table(title=title, note=f"{each}{note}", columns=columns, rows=rows(numbers))
            for title, each, columns, numbers in found
            if numbers
        ]

    def _listed(self, entries: Sequence[Entry], tokenizer: Tokenizer | None) -> TextList:
        keys = keys_of(entries)
        drafted = "correction" in keys or "bonus" in keys
        note = "the lowest acceptance length first" if drafted else "every token is of the target alone"
        if len(entries) < len(self._rows):
            note += f"; {count(len(entries))} of {count(len(self._rows))} requests, the others are in completions.jsonl"
        if tokenizer is None:
            note += "; the tokenizer could not be read, so tokens are not told apart"
        return TextList(title="Requests and their texts", note=note, entries=entries, keys=keys)

    def _entry(self, request: RequestRow, tokenizer: Tokenizer | None) -> Entry:
        row = self._rows[request.name]
        prompt = str(row.get("prompt", ""))
        tokens = f"{count(len(row.get('token_ids', ())))} tokens"
        category = {} if request.category is None else {"category": request.category}
        length, counts = request.acceptance_length, request.counts
        if length is not None:
            rejections = several(sum(counts.reached) - sum(counts.accepted), "rejection")
            tokens = f"acceptance length {plain(length)} · {tokens} · {rejections}"
        return Entry(
            title=str(row.get("title", request.name)),
            labels=category | {"turn": f"turn {request.turn}", "ended by": request.reason},
            note=tokens,
            question=prompt if len(prompt) <= _QUESTION else f"… {prompt[-_QUESTION:]}",
            texts=texts_of(row, sources(request), tokenizer),
        )


def keys_of(entries: Sequence[Entry]) -> dict[str, str]:
    """What the styles mean that occur in ``entries``."""
    styles = {span.style for entry in entries for text in entry.texts for span in text.spans}
    return {style: text for style, text in _KEYS.items() if style in styles}


def known_tokenizer(model: str) -> Tokenizer | None:
    """None where it cannot be read: what has finished may have lost its model, or lie on another machine."""
    try:
        return load_tokenizer(model)
    except UserError:
        return None


def texts_of(
    row: Mapping[str, Any], sources: Sequence[Source], tokenizer: Tokenizer | None
) -> list[ShownText]:
    """Reasoning and answer of ``row``, a span per token; one span where the tokens do not add up to the text."""
    parts: dict[Part, list[tuple[int, str]]] = {}
    if tokenizer is not None and len(sources) == len(row["token_ids"]):
        parts = pieces_by_part(tokenizer, row.get("prompt", ""), row["token_ids"])
    stored: dict[Part, str | None] = {"reasoning": row.get("reasoning"), "answer": row["text"]}
    shown = []
    for part, text in stored.items():
        if text is None:
            continue
        own = parts.get(part, [])
        texts = fitted([piece for _, piece in own], text)
        spans = [Span(text)]
        if texts is not None and tokenizer is not None:
            spans = [_span(text, sources[at], tokenizer) for text, (at, _) in zip(texts, own, strict=True)]
        shown.append(ShownText(name=part if row.get("reasoning") is not None else "", spans=spans))
    return shown


def _span(text: str, source: Source, tokenizer: Tokenizer) -> Span:
    rejected = None if source.rejected is None else tokenizer.decode_with_special([source.rejected])
    return Span(text, span_style(source), rejected)


def quoted(text: str) -> str:
    """A token's text in quotes, blanks made visible."""
    return f"“{text.replace(' ', '␣').replace(chr(10), '⏎').replace(chr(9), '⇥')}”"


def _most(numbers: Counter[int]) -> list[tuple[int, int]]:
    """The most frequent, of equal ones the smaller id: the order does not depend on that of the requests."""
    return sorted(numbers.items(), key=lambda each: (-each[1], each[0]))[:_TOKENS]
