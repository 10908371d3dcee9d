"""The texts of a run for its page: where drafts fail, and the requests with the worst acceptance, token by token."""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

from specgen.record.record_rows import RequestRow
from specgen.report.display import count, plain
from specgen.report.rejections import Rejections
from specgen.report.table import Table
from specgen.report.text_list import Entry, ShownText, Span, TextList, span_style, within
from specgen.report.token_sources import Source, sources
from specgen.text.pieces import fitted, pieces_by_part
from specgen.text.reasoning import Part
from specgen.text.tokenizer import Tokenizer

_WORST = 2_000  # requests kept, and of every category, turn and reason to end ...
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


class RunTexts:
    """Sees the requests of a run, whose ``rows`` are its completions by id, and keeps what its page shows.

    A row may have a ``title`` for its id. Memory grows with the requests kept and not with the run.
    """

    def __init__(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        self._rows = rows
        self._rejections = Rejections()
        self._stride = -(-len(rows) // _COUNTED) or 1
        self._num_counted = 0
        self._worst: dict[tuple[str, str], list[_Kept]] = {}  # by label and value; heaps, the best on top

    def watch(self, requests: Iterable[RequestRow]) -> Iterator[RequestRow]:
        """``requests`` unchanged; those whose steps were not kept are not shown."""
        for request in requests:
            if request.steps is not None and request.reason != "error":
                self._see(request)
            yield request

    def _see(self, request: RequestRow) -> None:
        self._rejections.add_category(request)
        if request.name not in self._rows:
            return
        # by a hash of the id, so that the order in which requests finish has no part in it
        if crc32(request.name.encode()) % self._stride == 0 and request.num_rejections:
            token_ids = self._rows[request.name].get("token_ids", ())
            if len(token_ids) == request.num_output_tokens:
                self._num_counted += 1
                self._rejections.add_tokens(request, token_ids)
        kept = _Kept(request)
        self._keep(("", ""), kept, _WORST)
        for label in _labels(request).items():
            if label in self._worst or len(self._worst) < _GROUPS:
                self._keep(label, kept, _WORST_OF_EACH)

    def _keep(self, group: tuple[str, str], kept: "_Kept", most: int) -> None:
        heap = self._worst.setdefault(group, [])
        if len(heap) < most:
            heapq.heappush(heap, kept)
        else:
            heapq.heappushpop(heap, kept)

    def shown(self, tokenizer: Tokenizer | None) -> tuple[list[Table], TextList | None]:
        """The tables of rejections, and the texts; without a ``tokenizer`` these are in one colour."""
        if not self._worst:
            return [], None
        worst = sorted(self._worst["", ""], reverse=True)
        first = [kept for group, heap in self._worst.items() if group != ("", "") for kept in heap]
        chosen = list({id(kept): kept for kept in (*first, *worst)}.values())
        entries = within((self._entry(kept.request, tokenizer) for kept in chosen), _PAGE_BYTES)
        order = sorted(range(len(entries)), key=lambda at: chosen[at], reverse=True)
        return self._tables(tokenizer), self._listed([entries[at] for at in order], tokenizer)

    def _tables(self, tokenizer: Tokenizer | None) -> list[Table]:
        if not self._num_counted:
            return []
        of_some = f"; in {count(self._num_counted)} of the requests" if self._stride > 1 else ""

        def piece(token: int) -> str:
            text = "" if tokenizer is None else tokenizer.decode_with_special([token])
            return text or f"token {token}"

        return list(self._rejections.tables(piece, of_some))

    def _listed(self, entries: Sequence[Entry], tokenizer: Tokenizer | None) -> TextList:
        keys = keys_of(entries)
        drafted = "correction" in keys or "bonus" in keys
        note = "the lowest acceptance length first" if drafted else "every token is of the target alone"
        if len(entries) < len(self._rows):
            note += f"; {count(len(entries))} of {count(len(self._rows))} requests, the others are in completions.jsonl"
        if tokenizer is None:
            note += "; the tokenizer could not be read, so tokens are not told apart"
        return TextList(
            title="Requests and their texts",
            note=note,
            entries=entries,
            keys=keys,
        )

    def _entry(self, request: RequestRow, tokenizer: Tokenizer | None) -> Entry:
        row = self._rows[request.name]
        prompt = str(row.get("prompt", ""))
        tokens = f"{count(len(row.get('token_ids', ())))} tokens"
        length = request.acceptance_length
        if length is not None:
            tokens = (
                f"{plain(length)} tokens per step · {tokens} · {count(request.num_rejections)} rejections"
            )
        return Entry(
            title=str(row.get("title", request.name)),
            labels=_labels(request),
            note=tokens,
            question=prompt if len(prompt) <= _QUESTION else f"… {prompt[-_QUESTION:]}",
            texts=texts_of(row, sources(request), tokenizer),
        )


class _Kept:
    """A request in a heap of the worst: the least is the best, and of equal ones the later id."""

    def __init__(self, request: RequestRow) -> None:
        self.request = request
        length = request.acceptance_length
        self._key = (float("inf") if length is None else length, request.name)

    def __lt__(self, other: "_Kept") -> bool:
        return self._key > other._key


def _labels(request: RequestRow) -> dict[str, str]:
    category = {} if request.category is None else {"category": request.category}
    return {**category, "turn": f"turn {request.turn}", "ended by": request.reason}


def keys_of(entries: Sequence[Entry]) -> dict[str, str]:
    """What the styles mean that occur in ``entries``."""
    styles = {span.style for entry in entries for text in entry.texts for span in text.spans}
    return {style: text for style, text in _KEYS.items() if style in styles}


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
