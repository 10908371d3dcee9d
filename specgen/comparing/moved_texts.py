"""The texts of the requests that two heads differ on most, as both heads gave them, token by token."""

from collections import deque
from collections.abc import Iterator, Mapping

from specgen.comparing.finished_runs import HeadRun
from specgen.comparing.head_figures import Comparison, HeadPair
from specgen.comparing.moved_requests import gain, last_words, moved, rows_of
from specgen.display import plain
from specgen.events import read
from specgen.report.paired_requests import Pair
from specgen.report.run_texts import keys_of, texts_of
from specgen.report.text_list import Entry, ShownText, TextList, within
from specgen.report.token_sources import Trace, traced
from specgen.text.tokenizer import Tokenizer

_PAGE_BYTES = 2_000_000


def moved_texts(found: Comparison, tokenizer: Tokenizer | None) -> TextList | None:
    """For every head against the first the texts of the requests that moved most, the largest differences first.

    Without ``tokenizer`` texts have one colour. None where no request has moved.
    """
    pairs = [pair for pair in found.pairs if pair.first == found.runs.heads[0]]
    shown = [(pair, each) for pair in pairs for each in moved(pair)]
    if not shown:
        return None
    shown.sort(key=lambda each: -abs(gain(each[1])))
    runs = {(run.data, run.head): run for run in found.runs.runs}
    names: dict[tuple[str, str], set[str]] = {}
    for pair, (ours, _) in shown:
        for head in (pair.first, pair.ours):
            names.setdefault((pair.data, head), set()).add(ours.name)
    texts = {key: _Texts(runs[key], wanted, tokenizer) for key, wanted in names.items()}
    entries = within((_entry(pair, each, texts) for pair, each in shown), _PAGE_BYTES)
    return TextList(
        title="The requests that moved most",
        note="both heads' tokens by how they came, the largest differences of their acceptance lengths first",
        entries=entries,
        keys=keys_of(entries),
    )


class _Texts:
    """The rows and steps of some requests of a run."""

    def __init__(self, run: HeadRun, names: set[str], tokenizer: Tokenizer | None) -> None:
        self.rows = rows_of(run.directory, names)
        self._tokenizer = tokenizer
        self._traces: dict[str, Trace] = {}
        deque(traced(read(run.directory / "events.jsonl"), self._keep), maxlen=0)

    def _keep(self, trace: Trace) -> None:
        if trace.name in self.rows:
            self._traces[trace.name] = trace

    def of(self, name: str, head: str) -> Iterator[ShownText]:
        """What ``head`` gave for the request ``name``."""
        for text in texts_of(self.rows[name], self._traces[name].sources(), self._tokenizer):
            yield ShownText(name=", ".join(filter(None, (head, text.name))), spans=text.spans)


def _entry(pair: HeadPair, each: Pair, texts: Mapping[tuple[str, str], _Texts]) -> Entry:
    ours, first = each
    sides = {pair.first: first, pair.ours: ours}
    category = {} if ours.category is None else {"category": ours.category}
    return Entry(
        title=f"{pair.data} {ours.name}",
        labels={"heads": f"{pair.ours} against {pair.first}", "data": pair.data, **category},
        note=", ".join(f"{head} {plain(side.length)}" for head, side in sides.items()),
        question=last_words(texts[pair.data, pair.ours].rows[ours.name]["prompt"]),
        texts=[shown for head in sides for shown in texts[pair.data, head].of(ours.name, head)],
    )
