"""The tables of a comparison, for terminal and page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specgen.experiments.head_figures import Comparison, HeadPair, is_significant
from specgen.experiments.rounds import PLAIN, MedianRange, disturbed
from specgen.report.acceptance import Estimate, mean_length
from specgen.report.charts import Point
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


def lengths_table(found: Comparison) -> Table:
    """Mean acceptance length: a row for each data set, a column for each head."""
    rows = []
    for data in found.data:
        numbers = dict.fromkeys(count(run.report.num_requests) for run in found.on(data))
        lengths = {head: found.length(data, head) for head in found.heads}
        rows.append({"data": data, "requests": " or ".join(numbers), **_lengths(lengths)})
    if len(rows) > 1:
        means = {head: mean_of(found, head) for head in found.heads}
        rows.append({"data": "mean", "requests": "", **_lengths(means)})
    columns = (
        Column(name=f"length of {head}", title=head, show=plain, interval=f"ends of {head}")
        for head in found.heads
    )
    return Table(
        title="Mean acceptance length",
        note="over all steps, with 95 % intervals; 1 is plain decoding; mean: of the data sets, with equal weights",
        columns=(Column(name="data", title="length"), Column(name="requests"), *columns),
        rows=tuple(rows),
    )


def _lengths(lengths: Mapping[str, Estimate | None]) -> Row:
    """The cells of the heads."""
    row: dict[str, Any] = {}
    for head, length in lengths.items():
        row |= {f"length of {head}": length and length.value, f"ends of {head}": length and length.interval}
    return row


def mean_of(found: Comparison, head: str) -> Estimate | None:
    """The mean of ``head``'s lengths over data sets; None unless it has run on all of them."""
    return mean_length([found.of(data, head) for data in found.data])


def positions_table(found: Comparison) -> Table:
    """Joint acceptance: a row for each data set and head, a column for each draft position."""
    num = max(len(run.report.acceptance) for run in found.runs)
    rows = []
    for run in found.in_order():
        row: dict[str, Any] = {"data": run.data, "head": run.head}
        points = positions(found, run.data, run.head)
        points += [Point(name="", number=None)] * (num - len(points))
        for i, point in enumerate(points):
            row |= {f"token {i}": point.number, f"token {i} ends": point.interval}
        rows.append(row)
    return Table(
        title="Acceptance by position",
        note="joint, over all steps, with 95 % intervals",
        columns=(
            Column(name="data", title="acceptance"),
            Column(name="head", wraps=True),
            *(Column(name=f"token {i}", show=percent, interval=f"token {i} ends") for i in range(num)),
        ),
        rows=tuple(rows),
        num_keys=2,
    )


def positions(found: Comparison, data: str, head: str) -> list[Point]:
    """Acceptance by draft position over all steps; empty without a step."""
    acceptance = found.of(data, head)
    return [
        Point(name=str(i), number=each.rate, interval=each.share_interval())
        for i, each in enumerate(acceptance.positions_over_all_steps() if acceptance else ())
    ]


def pairs_table(found: Comparison) -> Table:
    """Paired differences: a row for each data set and two heads."""
    num = max(len(pair.positions) for pair in found.pairs)
    return Table(
        title="Paired differences",
        note="the first head less the second, over the requests that both answered",
        columns=(
            Column(name="data", title="paired"),
            Column(name="heads", wraps=True),
            Column(name="requests"),
            Column(name="identical", title="same texts"),
            Column(name="difference", show=plain, interval="ends"),
            Column(name="p", show=p_value),
            *(Column(name=f"token {i}") for i in range(num)),
        ),
        rows=tuple(_pair(pair, num) for pair in found.pairs),
        num_keys=2,
    )


def _pair(pair: HeadPair, num_positions: int) -> Row:
    positions = [hundredths(each.paired.difference) + "*" * is_significant(each) for each in pair.positions]
    return {
        "data": pair.data,
        "heads": f"{pair.ours} - {pair.first}",
        "requests": len(pair.requests),
        # without a step nothing was verified
        "identical": pair.requests.num_identical if pair.length else None,
        **_paired(pair.length),
        **{f"token {i}": positions[i] if i < len(positions) else DASH for i in range(num_positions)},
    }


def _paired(figure: PairedFigure | None, of: str = "") -> Row:
    """The cells of a difference, ``of`` a head where a row has several."""
    return {
        f"difference{of}": figure and figure.paired.difference,
        f"ends{of}": figure and figure.paired.interval,
        f"p{of}": figure and figure.p,
    }


def categories_table(found: Comparison) -> Table:
    """Lengths by category, and how each head differs from the first."""
    first, *others = found.heads
    rows = [
        {"data": data, "category": category, **_category(found, data, category, first, others)}
        for data in found.data
        for category in dict.fromkeys(
            name for run in found.in_order() if run.data == data for name in run.report.categories
        )
    ]
    columns = [Column(name="data", title="category"), Column(name="category", title="", wraps=True)]
    columns += [Column(name=f"length of {head}", title=head, show=plain) for head in found.heads]
    for head in others:
        columns += [
            Column(
                name=f"difference of {head}",
                title=f"{head} - {first}",
                show=plain,
                interval=f"ends of {head}",
            ),
            Column(name=f"p of {head}", title="p", show=p_value),
        ]
    return Table(
        title="By category",
        note="mean acceptance length, and the paired difference from the first head",
        columns=tuple(columns),
        rows=tuple(rows),
        num_keys=2 + len(found.heads),
        group=2,
    )


def _category(found: Comparison, data: str, category: str, first: str, others: Sequence[str]) -> Row:
    row: dict[str, Any] = {}
    for head in found.heads:
        length = found.length(data, head, category)
        row[f"length of {head}"] = length and length.value
    for head in others:
        pair = found.pair(data, head, first)
        row |= _paired(pair.categories.get(category) if pair else None, f" of {head}")
    return row


def speeds_table(found: Comparison) -> Table:
    """Output tokens per second, and ratios within a round: to plain decoding and to the first head."""
    first, rows = found.heads[0], []
    for data in found.data:
        drafted = {run.head for run in found.on(data) if run.report.num_drafts}
        for arm in (PLAIN, *found.heads):
            if (speed := found.rounds(data).speed(arm)) is None:
                continue
            row: dict[str, Any] = {"data": data, "arm": arm, **_spread("speed", speed, rate)}
            for name, other in (("plain", PLAIN), ("first", first)):
                times = found.rounds(data).times(arm, other) if arm in drafted and arm != other else None
                row |= _spread(name, times, ratio)
            rows.append(row)
    columns = [("speed", "tokens/s"), ("plain", "x plain")]
    if len(found.heads) > 1:
        columns.append(("first", f"x {first}"))
    return Table(
        title="Speed",
        note="the median of rounds in which all took turns, [lowest, highest]; ratios are within a round",
        columns=(
            Column(name="data", title="speed"),
            Column(name="arm", title="", wraps=True),
            *(
                Column(name=f"{name}{end}", title=f"{title}{end}")
                for name, title in columns
                for end in ("", " range")
            ),
        ),
        rows=tuple(rows),
        num_keys=2,
        group=2,
    )


def _spread(name: str, spread: MedianRange | None, show: Show) -> Row:
    if spread is None:
        return {name: "", f"{name} range": ""}
    return {name: show(spread.median), f"{name} range": between(spread.ends, show)}


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
