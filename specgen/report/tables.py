"""The tables of one run, and of runs side by side; terminal and page show the same."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specgen.display import (
    DASH,
    between,
    count,
    percent,
    plain,
    rate,
    ratio,
    same_texts,
    seconds,
)
from specgen.report.charts import Bars, Lines, Point, length_axis, share_axis
from specgen.report.page import Page, Tile
from specgen.report.report import DEFINITIONS, draft_lengths, verdict
from specgen.report.table import Column, Row, Table, pairs
from specgen.report.terminal import Part, definitions, heading

_POSITIONS = 4  # shown by category; report.json has all
_COUNTERS = (
    *("num_requests", "num_prompt_tokens", "num_cached_tokens", "total_num_output_tokens", "num_drafts"),
    *("num_draft_tokens", "num_accepted_tokens", "num_preemptions", "num_unfinished"),
)
_ACCEPTANCE = (
    Column(name="position", title="acceptance", show=lambda position: f"token {position}"),
    Column(name="drafted"),
    Column(name="accepted"),
    Column(name="rate", title="joint", show=percent, interval="ci95"),
    Column(name="conditional", show=percent, interval="conditional_ci95"),
)
_HISTOGRAM = (
    Column(name="accepted", title="step with"),
    Column(name="steps"),
    Column(name="share", show=percent),
)
_TIMES = (
    Column(name="time", title="by request"),
    *(Column(name=name, show=seconds) for name in ("mean", "median", "p99")),
)
_STEPS = (
    Column(name="kind", title="by step"),
    Column(name="num_steps", title="steps"),
    Column(name="mean_sequences", title="sequences", show=rate),
    Column(name="mean_seconds", title="mean", show=seconds),
    Column(name="max_seconds", title="max", show=seconds),
)
_LENGTHS = (Column(name="k", title="by draft length"), Column(name="steps", title="decode steps"))


def of_run(report: Mapping[str, Any], settings: Mapping[str, str]) -> Iterator[Part]:
    """What a terminal shows of a ``report.json`` that ran under ``settings``."""
    yield heading(settings)
    yield _counts(report)
    yield verdict(report)
    yield from _acceptance(report)
    yield from _times(report)
    yield _speed(report)
    if report["num_drafts"]:
        yield definitions(DEFINITIONS)


def page(report: Mapping[str, Any], settings: Mapping[str, str], title: str) -> str:
    """The same as a page."""
    return Page(
        title=title,
        settings=settings,
        sentence=verdict(report),
        alarming=True,
        tiles=list(_tiles(report)),
        tables=[*_acceptance(report), *_times(report), _counts(report), _speed(report)],
        notes=dict(DEFINITIONS) if report["num_drafts"] else {},
    ).to_html()


def _tiles(report: Mapping[str, Any]) -> Iterator[Tile]:
    if report["num_drafts"]:
        length = f"{plain(report['mean_acceptance_length'])}"
        ends = report["mean_acceptance_length_ci95"]
        interval = f"95 % {between(ends, plain)}" if ends else "over all steps"
        yield Tile(name="mean acceptance length", number=length, note=interval)
        accepted = f"{count(report['num_accepted_tokens'])} of {count(report['num_draft_tokens'])} drafts"
        number = percent(report["draft_acceptance_rate"])
        yield Tile(name="draft acceptance rate", number=number, note=accepted)
    speed = rate(report["output_tokens_per_second"])
    yield Tile(name="output tokens/s", number=speed, note=_tokens_and_time(report))
    if baseline := report["baseline"]:
        same = same_texts(baseline["identical"], baseline["num_compared"])
        yield Tile(name="against plain decoding", number=ratio(baseline["ratio"]), note=same)


def _tokens_and_time(report: Mapping[str, Any]) -> str:
    return f"{count(report['total_num_output_tokens'])} tokens in {seconds(report['wall_seconds'])}"


def _counts(report: Mapping[str, Any]) -> Table:
    items = [(name, count(report[name])) for name in _COUNTERS]
    if report["num_drafts"]:
        interval = between(report["mean_acceptance_length_ci95"], plain)
        by_request = plain(report["mean_acceptance_length_per_request"])
        length = f"{plain(report['mean_acceptance_length'])} {interval}, mean over requests {by_request}"
        items += [("mean acceptance length", length)]
        items += [("draft acceptance rate", percent(report["draft_acceptance_rate"]))]
    ends = [f"{count(number)} {reason}" for reason, number in report["finish_reasons"].items()]
    for name in ("errors", "unfinished", "preemptions"):
        ends += [f"{count(report['num_' + name])} {name}"] if report["num_" + name] else []
    return pairs("Counts", [*items, ("ended by", ", ".join(ends) or DASH)])


# --- acceptance -----------------------------------------------------------------------------------


def curve(positions: Sequence[Row], number: str, interval: str) -> list[Point]:
    """The rates at draft positions, with their intervals."""
    return [Point(name=str(row["position"]), number=row[number], interval=row[interval]) for row in positions]


def acceptance_lines(title: str, lines: Mapping[str, Sequence[Point]]) -> Lines:
    """Curves of acceptance over the position of the draft."""
    label = "position of the draft (token i)"
    return Lines(title=title, label=label, axis=share_axis(), show=percent, lines=lines)


def _acceptance(report: Mapping[str, Any]) -> Iterator[Table]:
    if not report["num_drafts"]:
        return
    positions = report["acceptance"]
    lines = {
        "joint": curve(positions, "rate", "ci95"),
        "conditional": curve(positions, "conditional", "conditional_ci95"),
    }
    yield Table(
        title="Acceptance by position",
        note="with 95 % intervals",
        columns=_ACCEPTANCE,
        rows=tuple(positions),
        chart=acceptance_lines("Acceptance by draft position", lines),
        bars="rate",
    )
    yield _histogram(report["acceptance_histogram"], report["num_drafts"])
    for kind, groups in (("category", report["categories"]), ("turn", report["turns"])):
        if groups:
            yield _breakdown(kind, groups)


def _histogram(steps: Sequence[int], num_drafts: int) -> Table:
    shares = [number / num_drafts for number in steps]
    points = [Point(name=f"{j} accepted", number=share) for j, share in enumerate(shares)]
    return Table(
        title="Accepted drafts per step",
        note="share of the verify steps",
        columns=_HISTOGRAM,
        rows=tuple(
            {"accepted": point.name, "steps": number, "share": point.number}
            for point, number in zip(points, steps, strict=True)
        ),
        chart=Bars(
            title="Verify steps by accepted drafts",
            label="share of the verify steps",
            axis=share_axis(max(shares)),
            show=percent,
            points=points,
        ),
        bars="share",
    )


def _breakdown(kind: str, groups: Mapping[str, Mapping[str, Any]]) -> Table:
    num_spec_tokens = len(next(iter(groups.values()))["acceptance"])
    shown = range(min(_POSITIONS, num_spec_tokens))
    length, ends = "mean_acceptance_length", "mean_acceptance_length_ci95"
    return Table(
        title=f"By {kind}",
        note="mean acceptance length; 1 is plain decoding, with 95 % intervals",
        columns=(
            Column(name=kind),
            Column(name="num_requests", title="requests"),
            Column(name="num_drafts", title="drafts"),
            Column(name=length, title="length", interval=ends),
            Column(name="draft_acceptance_rate", title="drafts accepted", show=percent),
            *(Column(name=f"token {i}", show=percent) for i in shown),
        ),
        rows=tuple(
            {kind: label, **group, **{f"token {i}": group["acceptance"][i]["rate"] for i in shown}}
            for label, group in groups.items()
        ),
        chart=Bars(
            title=f"Mean acceptance length by {kind}",
            label="tokens per verify step",
            axis=length_axis(num_spec_tokens),
            show=plain,
            points=[
                Point(name=label, number=group[length], interval=group[ends])
                for label, group in groups.items()
            ],
        ),
    )


# --- times ----------------------------------------------------------------------------------------


def _times(report: Mapping[str, Any]) -> Iterator[Table]:
    spreads = {"time to first token": report["ttft_seconds"], "time per output token": report["tpot_seconds"]}
    lengths = draft_lengths(report)
    yield Table(
        title="Times by request",
        note="from submission to the first token; (end - first token) / (tokens - 1)",
        columns=_TIMES,
        rows=tuple({"time": label, **times} for label, times in spreads.items() if times),
    )
    steps = tuple({"kind": f"{kind} steps", **step} for kind, step in report["steps"].items())
    yield Table(title="Times by step", columns=_STEPS, rows=steps)
    by_length = tuple({"k": f"K = {k}", "steps": number} for k, number in lengths.items())
    yield Table(title="Decode steps by draft length", columns=_LENGTHS, rows=by_length)


def _speed(report: Mapping[str, Any]) -> Table:
    speed = f"{rate(report['output_tokens_per_second'])} ({_tokens_and_time(report)})"
    items = [("output tokens/s", speed)]
    if cached := report["num_cached_tokens"]:
        prompt = report["num_prompt_tokens"]
        share = percent(cached / prompt)
        items += [("prefix cache", f"{count(cached)} of {count(prompt)} prompt tokens ({share})")]
    if report["num_drafts"]:
        rows = report["rows"]
        rejected = f"{_part(rows, 'target', 'target_rejected')} held rejected drafts"
        padding = f"{_part(rows, 'first_pass', 'first_pass_wasted')} were padding"
        items += [("target rows", rejected)]
        items += [("drafter rows", f"first pass {padding}; loop {count(rows['loop'])}")]
    if baseline := report["baseline"]:
        speed = f"{ratio(baseline['ratio'])} of {rate(baseline['output_tokens_per_second'])} tokens/s"
        same = same_texts(baseline["identical"], baseline["num_compared"])
        items += [("against plain decoding", f"{speed}, {same}")]
    return pairs("Speed and rows", items)


def _part(rows: Mapping[str, int], name: str, wasted: str) -> str:
    share = percent(rows[wasted] / rows[name] if rows[name] else None)
    return f"{count(rows[name])}, of which {count(rows[wasted])} ({share})"
