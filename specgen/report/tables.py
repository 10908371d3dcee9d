"""Reports as plain text for a terminal: one run, or runs side by side."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specgen.display import (
    DASH,
    between,
    clip,
    count,
    hundredths,
    percent,
    plain,
    rate,
    ratio,
    same_texts,
    seconds,
    table,
)
from specgen.report.report import DEFINITIONS, draft_lengths, verdict

_WIDTH = 100  # columns
_BAR = 20
_LABEL = 18  # of a category
_NAME = 12  # of a run in a comparison: with it, four runs fit
_POSITIONS = 4  # shown by category; report.json has all
_LENGTHS = 4  # shown of those that ran
_COUNTERS = (
    "num_requests",
    "total_num_output_tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
)


def render(report: Mapping[str, Any], settings: Mapping[str, str]) -> str:
    """One ``report.json`` at 100 columns, under its ``settings``; ends with a line break."""
    sections = [heading(settings), _pairs(_counters(report)), textwrap.wrap(verdict(report), _WIDTH)]
    if report["num_drafts"]:
        sections += [_acceptance(report), _histogram(report)]
        sections += [_breakdown("category", report["categories"]), _breakdown("turn", report["turns"])]
        sections += [_pairs(_speed(report)), _definitions()]
    else:
        sections += [_pairs(_speed(report))]
    return joined(sections)


def compare(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Runs ``(name, report.json)`` in columns with their ratio to the first; ends with a line break."""
    assert runs
    legend: list[str] = []
    if any(len(name) > _NAME for name, _ in runs):
        legend = [f"run {i}  {name}" for i, (name, _) in enumerate(runs, start=1)]
        runs = [(f"run {i}", report) for i, (_, report) in enumerate(runs, start=1)]
    blocks = [_side_by_side([runs[0], *runs[i : i + 3]]) for i in range(1, max(len(runs), 2), 3)]
    sentences = [
        textwrap.wrap(f"{name}: {sentence}", _WIDTH)
        for name, report in runs
        for sentence in (f"K by step: {_lengths(report)}" if draft_lengths(report) else "", verdict(report))
        if sentence
    ]
    return joined([legend, *blocks, *sentences, _definitions()])


# --- one run --------------------------------------------------------------------------------------


def heading(settings: Mapping[str, str]) -> list[str]:
    """What ran, as lines that break between settings."""
    solid = [f"{key} {value}".replace(" ", "\N{NO-BREAK SPACE}") for key, value in settings.items()]
    lines = textwrap.wrap("\N{NO-BREAK SPACE}· ".join(solid), _WIDTH, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ").removesuffix(" ·") for line in lines]


def _counters(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [(name, count(report[name])) for name in _COUNTERS]
    if report["num_drafts"]:
        interval = between(report["mean_acceptance_length_ci95"], plain)
        by_request = plain(report["mean_acceptance_length_per_request"])
        length = f"{plain(report['mean_acceptance_length'])} {interval}, mean over requests {by_request}"
        pairs += [("mean acceptance length", length)]
        pairs += [("draft acceptance rate", percent(report["draft_acceptance_rate"]))]
    ends = [f"{count(number)} {reason}" for reason, number in report["finish_reasons"].items()]
    for name in ("errors", "unfinished", "preemptions"):
        ends += [f"{count(report['num_' + name])} {name}"] if report["num_" + name] else []
    return [*pairs, ("ended by", ", ".join(ends) or DASH)]


def _acceptance(report: Mapping[str, Any]) -> list[str]:
    header = ("acceptance", "drafted", "accepted", "joint", "95 %", "conditional", "95 %")
    rows = [
        (
            f"token {row['position']}",
            count(row["drafted"]),
            count(row["accepted"]),
            percent(row["rate"]),
            between(row["ci95"], hundredths),
            percent(row["conditional"]),
            between(row["conditional_ci95"], hundredths),
        )
        for row in report["acceptance"]
    ]
    return _with_bars(table(header, rows), [row["rate"] or 0.0 for row in report["acceptance"]])


def _histogram(report: Mapping[str, Any]) -> list[str]:
    steps = report["acceptance_histogram"]
    shares = [number / report["num_drafts"] for number in steps]
    rows = [(f"{j} accepted", count(number), percent(shares[j])) for j, number in enumerate(steps)]
    return _with_bars(table(("step with", "steps", "share"), rows), shares)


def _breakdown(kind: str, groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not groups:
        return []
    positions = range(min(_POSITIONS, len(next(iter(groups.values()))["acceptance"])))
    rows = []
    for label, group in groups.items():
        counts = (count(group["num_requests"]), count(group["num_drafts"]))
        length = (
            plain(group["mean_acceptance_length"]),
            between(group["mean_acceptance_length_ci95"], plain),
        )
        rates = [percent(group["acceptance"][i]["rate"]) for i in positions]
        rows.append((clip(label, _LABEL), *counts, *length, *rates))
    return table((kind, "requests", "drafts", "length", "95 %", *(f"token {i}" for i in positions)), rows)


def _speed(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    tokens, wall = count(report["total_num_output_tokens"]), seconds(report["wall_seconds"])
    pairs = [("output tokens/s", f"{rate(report['output_tokens_per_second'])} ({tokens} tokens in {wall})")]
    for label, key in (("time to first token", "ttft_seconds"), ("time per output token", "tpot_seconds")):
        if report[key]:
            pairs += [(label, ", ".join(f"{name} {seconds(time)}" for name, time in report[key].items()))]
    for kind, steps in report["steps"].items():
        times = f"mean {seconds(steps['mean_seconds'])}, max {seconds(steps['max_seconds'])}"
        many = f"{count(steps['num_steps'])} with {rate(steps['mean_sequences'])} sequences"
        pairs += [(f"{kind} steps", f"{many}, {times}")]
    if cached := report["num_cached_tokens"]:
        share = percent(cached / report["num_prompt_tokens"])
        pairs += [
            (
                "prefix cache",
                f"{count(cached)} of {count(report['num_prompt_tokens'])} prompt tokens ({share})",
            )
        ]
    if draft_lengths(report):
        pairs += [("K by step", _lengths(report))]
    if report["num_drafts"]:
        pairs += _rows(report["rows"])
    if baseline := report["baseline"]:
        speed = f"{ratio(baseline['ratio'])} of {rate(baseline['output_tokens_per_second'])} tokens/s"
        pairs += [
            (
                "against plain decoding",
                f"{speed}, {same_texts(baseline['identical'], baseline['num_compared'])}",
            )
        ]
    return pairs


def _rows(rows: Mapping[str, int]) -> list[tuple[str, str]]:
    def part(name: str, wasted: str) -> str:
        share = percent(rows[wasted] / rows[name] if rows[name] else None)
        return f"{count(rows[name])}, of which {count(rows[wasted])} ({share})"

    return [
        ("target rows", f"{part('target', 'target_rejected')} held rejected drafts"),
        (
            "drafter rows",
            f"first pass {part('first_pass', 'first_pass_wasted')} were padding; loop {count(rows['loop'])}",
        ),
    ]


# --- runs side by side ----------------------------------------------------------------------------

_Metric = tuple[
    str, tuple[str | int, ...], Callable[[Any], str]
]  # label, path in report.json, how to show it
_COUNTED: tuple[_Metric, ...] = (
    *((name, (name,), count) for name in _COUNTERS),
    ("mean acceptance length", ("mean_acceptance_length",), plain),
    ("  95 %", ("mean_acceptance_length_ci95",), lambda interval: between(interval, plain)),
    ("  mean over requests", ("mean_acceptance_length_per_request",), plain),
)
_TIMED: tuple[_Metric, ...] = (
    ("output tokens/s", ("output_tokens_per_second",), rate),
    ("time to first token", ("ttft_seconds", "mean"), seconds),
    ("time per output token", ("tpot_seconds", "mean"), seconds),
    ("decode step", ("steps", "decode", "mean_seconds"), seconds),
    ("target rows", ("rows", "target"), count),
    ("  rejected drafts", ("rows", "target_rejected"), count),
    ("drafter first pass", ("rows", "first_pass"), count),
    ("  padding", ("rows", "first_pass_wasted"), count),
    ("drafter loop rows", ("rows", "loop"), count),
    ("against plain decoding", ("baseline", "ratio"), ratio),
)


def _side_by_side(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    (first, _), *others = runs
    reports = [report for _, report in runs]
    positions = range(max(len(report["acceptance"]) for report in reports))
    accepted = [(f"acceptance at token {i}", ("acceptance", i, "rate"), percent) for i in positions]
    rows = [_metric_row(metric, reports) for metric in (*_COUNTED, *accepted, *_TIMED)]
    header = ["", first, *(cell for name, _ in others for cell in (name, "ratio"))]
    return table(header, [row for row in rows if set(row[1:]) - {DASH, ""}])


def _lengths(report: Mapping[str, Any]) -> str:
    """``4 in 300, 2 in 25 steps``: the most frequent ones, and the rest as one."""
    lengths = list(draft_lengths(report).items())
    parts = [f"{k} in {count(number)}" for k, number in lengths[:_LENGTHS]]
    rest = [f"others in {count(sum(number for _, number in lengths[_LENGTHS:]))}"]
    return f"{', '.join(parts + rest * (len(lengths) > _LENGTHS))} steps"


def _metric_row(metric: _Metric, reports: Sequence[Mapping[str, Any]]) -> list[str]:
    label, path, show = metric
    first, *others = (_at(report, path) for report in reports)
    return [label, show(first), *(cell for value in others for cell in (show(value), _ratio(value, first)))]


def _ratio(value: object, first: object) -> str:
    """Empty where either is no number or the first is 0."""
    if isinstance(value, int | float) and isinstance(first, int | float) and first:
        return ratio(value / first)
    return ""


def _at(report: Mapping[str, Any], path: Sequence[str | int]) -> object:
    """What lies at ``path``; None where the path ends early, as it does for what a run has not seen."""
    value: Any = report
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        return None
    return value


# --- layout ---------------------------------------------------------------------------------------


def _with_bars(lines: Sequence[str], shares: Sequence[float]) -> list[str]:
    """``lines`` of a table with a bar in eighths of a character to the right of each row under the header."""
    header, *rows = lines
    width = max(map(len, rows))
    bars = []
    for share in shares:
        whole, eighths = divmod(round(share * _BAR * 8), 8)
        bars.append("█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip())
    return [header, *(f"{row:<{width}}  {bar}".rstrip() for row, bar in zip(rows, bars, strict=True))]


def _pairs(pairs: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in pairs)
    return [f"{label:<{width}}  {value}" for label, value in pairs]


def _definitions() -> list[str]:
    return [
        line
        for term, text in DEFINITIONS
        for line in textwrap.wrap(f"{term} = {text}", _WIDTH, subsequent_indent="  ")
    ]


def joined(sections: Sequence[Sequence[str]]) -> str:
    """Sections of lines with an empty line between them; ends with a line break."""
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"
