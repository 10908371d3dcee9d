"""The tables of a comparison, for terminal and page."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from specgen.experiments.head_figures import Comparison, HeadPair, is_significant
from specgen.experiments.rounds import PLAIN, MedianRange, disturbed
from specgen.report.acceptance import Acceptance, mean_length
from specgen.report.display import (
    DASH,
    Show,
    between,
    checkpoint_name,
    count,
    from_here,
    hundredths,
    p_value,
    percent,
    plain,
    rate,
    ratio,
)
from specgen.report.grid import Figure, Grid, field_of
from specgen.report.intervals import Estimate
from specgen.report.paired_requests import PairedFigure
from specgen.report.report import DEFINITIONS
from specgen.report.table import Column, Row, Table
from specgen.report.tables import empty_texts, failures
from specgen.report.terminal import Part, definitions, heading

_LENGTH = (
    "mean acceptance length",
    "1 + accepted drafts / verify steps, those without drafts too; no prefill, no padding",
)
_PAIRED = (
    "difference",
    "of the mean acceptance length, paired by request; p by t test over conversations, after Holm over its table's "
    "rows; omitted if all differences are equal",
)
_ACCEPTANCE = (
    "acceptance at token i",
    "steps that accepted more than i drafts / verify steps, those without drafts too (joint); 1 + their sum is the "
    "length",
)
_POINTS = (
    "token i",
    "difference of the acceptance at token i in points; * p < 0.05 after Holm over all of them",
)
_SPEED = (
    "tokens/s",
    "of rounds in which all took turns, the median [lowest, highest]; ratios are within a round",
)


def of_heads(found: Comparison) -> Iterator[Part]:
    """What the terminal shows of a comparison."""
    yield heading(settings(found))
    paths = {run.head: run.drafter for run in reversed(found.runs)}  # of equal weights the first
    yield "\n".join(f"{head}  {from_here(paths[head])}" for head in found.heads)
    yield "\n".join(notes(found))
    yield from tables(found)
    yield "\n".join([*verdicts(found), *disturbances(found)[0]])
    yield definitions(terms(found))


def settings(found: Comparison) -> dict[str, str]:
    """What all runs share, by label."""
    own = {"drafter", "drafter batch", "data", "rows set their own"}
    first, *others = (run.manifest.get("settings", {}) for run in found.runs)
    return {
        name: checkpoint_name(text) if name == "model" else text
        for name, text in first.items()
        if name not in own and all(each.get(name) == text for each in others)
    }


def notes(found: Comparison) -> Iterator[str]:
    """What a reader has to know of the runs beyond their numbers."""
    for name, values in found.unlike.items():
        each = dict.fromkeys(map(str, values))
        yield f"The runs also differ in {name}: {', '.join(each)}."
    own = {run.data: run.manifest["data"].get("own_parameters", []) for run in found.runs}
    for data, names in own.items():
        if names:
            yield f"Rows of {data} set their own {', '.join(names)}."
    for run in found.runs:
        if without := run.report.num_steps_without_drafts:
            steps = f"{count(without)} of {count(without + run.report.num_drafts)} steps"
            yield f"{run.head} on {run.data}: {steps} had no drafts and gave one token each."
        if (got := run.report.received) is not None:
            length = "the length also counts drafts accepted behind their ends"
            yield f"{run.head} on {run.data}: texts got {plain(got)} tokens per step ({length})."
        if failed := failures(run.report):
            yield f"{run.head} on {run.data}: {failed}: see its errors.jsonl."
        if number := run.report.num_empty:
            yield f"{run.head} on {run.data}: {empty_texts(number, run.report.num_requests)}"
    yield from disturbances(found)[1]


def disturbances(found: Comparison) -> tuple[list[str], list[str]]:
    """Of the rounds of speeds: that the machine was busy, and what else."""
    each = [
        (data, disturbed(rounds.measured((PLAIN, *found.heads)))) for data, rounds in found.speeds.items()
    ]
    busy, others = (
        [f"Speeds on {data}: {text}." for data, told in each for text in told[at]] for at in (0, 1)
    )
    return busy, others


def terms(found: Comparison) -> list[tuple[str, str]]:
    """Definitions of what the tables name."""
    paired = (_PAIRED, _POINTS) if any(pair.length for pair in found.pairs) else ()
    speeds = (_SPEED,) if any(map(len, found.speeds.values())) else ()
    return [_LENGTH, _ACCEPTANCE, DEFINITIONS[-1], *paired, *speeds]


def tables(found: Comparison) -> Iterator[Table]:
    """Lengths, acceptance by position, paired differences, categories, speeds."""
    yield lengths_table(found)
    yield positions_table(found)
    if found.pairs:
        yield pairs_table(found)
    yield categories_table(found)
    yield speeds_table(found)


def mean_of(found: Comparison, head: str) -> Estimate | None:
    """The mean of ``head``'s lengths over data sets; None unless it has run on all of them."""
    return mean_length([found.of(data, head) for data in found.data])


def lengths_table(found: Comparison) -> Table:
    """Mean acceptance length: a row for each data set, a column for each head."""
    groups: list[tuple[Row, Callable[[str], Estimate | None]]] = []
    for data in found.data:
        numbers = dict.fromkeys(count(run.report.num_requests) for run in found.on(data))
        groups.append(({"data": data, "requests": " or ".join(numbers)}, partial(found.length, data)))
    if len(groups) > 1:
        groups.append(({"data": "mean", "requests": ""}, partial(mean_of, found)))
    lengths = [
        Figure.estimated(f"length of {head}", methodcaller("__call__", head), title=head)
        for head in found.heads
    ]
    return Grid(groups=groups, figures=lengths).table(
        [Column(name="data", title="length"), Column(name="requests")],
        "Mean acceptance length",
        note="over all steps, with 95 % intervals; 1 is plain decoding; mean: of the data sets, with equal weights",
        num_keys=1,
    )


def positions(acceptance: Acceptance | None) -> list[Estimate]:
    """Acceptance by draft position over all steps; empty without a step."""
    return acceptance.positions_over_all_steps if acceptance else []


def positions_table(found: Comparison) -> Table:
    """Joint acceptance: a row for each data set and head, a column for each draft position."""
    groups = [
        ({"data": run.data, "head": run.head}, positions(found.of(run.data, run.head)))
        for run in found.in_order()
    ]

    def at(position: int) -> Figure:
        return Figure.estimated(
            f"token {position}", lambda each: dict(enumerate(each)).get(position), show=percent
        )

    figures = [at(i) for i in range(max(len(run.report.acceptance) for run in found.runs))]
    return Grid(groups=groups, figures=figures).table(
        [Column(name="data", title="acceptance"), Column(name="head", wraps=True)],
        "Acceptance by position",
        note="joint, over all steps, with 95 % intervals",
    )


def pairs_table(found: Comparison) -> Table:
    """Paired differences: a row for each data set and two heads."""

    def at(position: int) -> Figure:
        return Figure(name=f"token {position}", tables="", of=lambda pair: _points(pair, position))

    return Grid(
        groups=[({"data": pair.data, "heads": f"{pair.ours} - {pair.first}"}, pair) for pair in found.pairs],
        figures=[
            Figure(name="requests", tables="", of=lambda pair: len(pair.requests)),
            Figure(
                name="identical",
                title="same texts",
                tables="",
                # without a step nothing was verified
                of=lambda pair: pair.requests.num_identical if pair.length else None,
            ),
            *_paired(lambda pair: pair.length),
            *(at(i) for i in range(max(len(pair.positions) for pair in found.pairs))),
        ],
    ).table(
        [Column(name="data", title="paired"), Column(name="heads", wraps=True)],
        "Paired differences",
        note="the first head less the second, over the requests that both answered",
    )


def _points(pair: HeadPair, position: int) -> str:
    """The difference at a position in points, with a star if it is significant."""
    if position >= len(pair.positions):
        return DASH
    figure = pair.positions[position]
    return hundredths(figure.paired.difference) + "*" * is_significant(figure)


def _paired(
    of: Callable[[Any], PairedFigure | None], whose: str = "", title: str | None = None
) -> tuple[Figure, Figure]:
    """A difference and its p; ``whose`` they are where a row has several."""
    return (
        Figure.estimated(f"difference{whose}", field_of(of, "difference"), title=title),
        Figure(name=f"p{whose}", title="p", show=p_value, tables="", of=field_of(of, "p")),
    )


def categories_table(found: Comparison) -> Table:
    """Lengths by category, and how each head differs from the first."""
    first, *others = found.heads
    groups = [
        ({"data": data, "category": category}, (data, category))
        for data in found.data
        for category in dict.fromkeys(
            name for run in found.in_order() if run.data == data for name in run.report.categories
        )
    ]

    def difference(head: str) -> tuple[Figure, Figure]:
        def of(group: tuple[str, str]) -> PairedFigure | None:
            pair = found.pair(group[0], head, first)
            return pair.categories.get(group[1]) if pair else None

        return _paired(of, f" of {head}", f"{head} - {first}")

    def length(head: str) -> Figure:  # without an interval, which would leave no room for the differences
        of = field_of(lambda group: found.length(group[0], head, group[1]), "value")
        return Figure(name=f"length of {head}", title=head, show=plain, tables="", of=of)

    differences = [figure for head in others for figure in difference(head)]
    return Grid(groups=groups, figures=[*map(length, found.heads), *differences]).table(
        [Column(name="data", title="category"), Column(name="category", title="", wraps=True)],
        "By category",
        note="mean acceptance length, and the paired difference from the first head",
        num_keys=2 + len(found.heads),
        group=2,
    )


def speeds_table(found: Comparison) -> Table:
    """Output tokens per second, and ratios within a round: to plain decoding and to the first head."""
    first = found.heads[0]
    groups = [
        ({"data": data, "arm": arm}, (data, arm))
        for data in found.data
        for arm in (PLAIN, *found.heads)
        if found.rounds(data).speed(arm) is not None
    ]

    def times(group: tuple[str, str], other: str) -> MedianRange | None:
        data, arm = group
        drafted = {run.head for run in found.on(data) if run.report.num_drafts}
        return found.rounds(data).times(arm, other) if arm in drafted and arm != other else None

    ratios = {"x plain": PLAIN, **({f"x {first}": first} if len(found.heads) > 1 else {})}
    figures = _spread("tokens/s", lambda group: found.rounds(group[0]).speed(group[1]), rate)
    for title, other in ratios.items():
        figures += _spread(title, partial(times, other=other), ratio)
    return Grid(groups=groups, figures=figures).table(
        [Column(name="data", title="speed"), Column(name="arm", title="", wraps=True)],
        "Speed",
        note="the median of rounds in which all took turns, [lowest, highest]; ratios are within a round",
        group=2,
    )


def _spread(title: str, of: Callable[[Any], MedianRange | None], show: Show) -> list[Figure]:
    """A median and its range, in columns of their own; both empty where there is none."""
    cells = {
        "": lambda group: show(spread.median) if (spread := of(group)) else "",
        " range": lambda group: between(spread.ends, show) if (spread := of(group)) else "",
    }
    return [Figure(name=f"{title}{end}", tables="", of=cell) for end, cell in cells.items()]


def leader(found: Comparison, data: str) -> str:
    """The head with the highest mean acceptance length on ``data``."""
    return max((run.head for run in found.on(data)), key=lambda head: _length(found, data, head))


def leads(found: Comparison, data: str) -> bool:
    """Whether the ``leader`` is significantly better than every other head, of which there is at least one."""
    margins = _margins(found, data)
    return bool(margins) and all(_is_ahead(*margin) for margin in margins.values())


def _margins(found: Comparison, data: str) -> dict[str, tuple[PairedFigure | None, int]]:
    """The length of the ``leader`` against that of every other head; times 1 or -1 differences are the leader's."""
    first = leader(found, data)
    pairs = {run.head: found.pair(data, first, run.head) for run in found.on(data)}
    return {head: (pair.length, 1 if pair.ours == first else -1) for head, pair in pairs.items() if pair}


def _is_ahead(figure: PairedFigure | None, sign: int) -> bool:
    return figure is not None and is_significant(figure) and sign * figure.paired.difference > 0


def verdicts(found: Comparison) -> Iterator[str]:
    """A sentence on all data sets where there are several, then one for each; none for a single head."""
    compared = [data for data in found.data if len(found.on(data)) > 1]
    if len(compared) > 1:
        yield _overall(found, compared)
    for data in compared:
        yield f"{data}: {_verdict(found, data)}"


def _overall(found: Comparison, compared: Sequence[str]) -> str:
    clear: dict[str, list[str]] = {}
    for data in compared:
        if leads(found, data):
            clear.setdefault(leader(found, data), []).append(data)
    parts = [
        f"{head} leads on {f'all {len(compared)} data sets' if len(sets) == len(compared) else _and(sets)}"
        for head, sets in clear.items()
    ]
    if unclear := [data for data in compared if not leads(found, data)]:
        where = "any data set" if len(unclear) == len(compared) else _and(unclear)
        parts.append(f"no significant difference on {where}")
    return f"In short: {'; '.join(parts)}."


def _verdict(found: Comparison, data: str) -> str:
    first, margins = leader(found, data), _margins(found, data)
    if all(figure is None for figure, _ in margins.values()):
        return "nothing was compared: no request has steps of both heads."
    above = [f"{head} by {_difference(*each)}" for head, each in margins.items() if _is_ahead(*each)]
    others = [f"{head}, {_difference(*each)}" for head, each in margins.items() if not _is_ahead(*each)]
    parts = []
    if above:
        parts.append(f"{first} leads {_and(above)}")
    if others:
        parts.append(f"no significant difference between {'it' if above else first} and {_and(others)}")
    return "; ".join(parts) + "."


def _difference(figure: PairedFigure | None, sign: int) -> str:
    """``0.17 [0.11, 0.22] (p < 0.001)``"""
    if figure is None:
        return "no request has steps of both"
    paired, gain = figure.paired, plain(sign * figure.paired.difference)
    if paired.num_groups < 2:
        return "one conversation is too few"
    if paired.interval is None:
        alike = f"{gain} in every conversation, so without an interval"
        return "every conversation has the same acceptance" if paired.difference == 0 else alike
    low, high = sorted(sign * end for end in paired.interval)
    p = p_value(figure.p)
    return f"{gain} {between((low, high), plain)} (p {p if p[0] == '<' else f'= {p}'})"


def _length(found: Comparison, data: str, head: str) -> float:
    length = found.length(data, head)
    return 1.0 if length is None else length.value  # no text has a second token


def _and(parts: Sequence[str]) -> str:
    """``a, b and c``"""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
