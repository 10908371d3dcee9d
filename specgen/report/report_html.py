"""A report as one HTML page that carries all it needs and opens without a network."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from specgen.display import Show, between, count, hundredths, percent, plain, rate, ratio, same_texts, seconds
from specgen.report.charts import acceptance_chart, histogram_chart, length_chart
from specgen.report.page import Cell, card, document, legend, pairs, table, tile
from specgen.report.report import DEFINITIONS, draft_lengths, verdict

_COUNTERS = (
    "num_requests",
    "num_prompt_tokens",
    "num_cached_tokens",
    "total_num_output_tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_preemptions",
    "num_unfinished",
)


def render(report: Mapping[str, Any], settings: Mapping[str, str], title: str) -> str:
    """The page of one ``report.json`` under ``title`` and ``settings``, light or dark as the reader likes."""
    sentence = verdict(report)
    return document(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            pairs("settings", settings),
            f'<p class="alert">{escape(sentence)}</p>' if sentence else "",
            f'<section class="tiles" aria-label="Main numbers">{"".join(_tiles(report))}</section>',
            f'<div class="columns">{"".join(_cards(report))}</div>',
            pairs("notes card", dict(DEFINITIONS)) if report["num_drafts"] else "",
        ],
    )


def _tiles(report: Mapping[str, Any]) -> list[str]:
    tokens = f"{count(report['total_num_output_tokens'])} tokens in {seconds(report['wall_seconds'])}"
    tiles = [tile("output tokens/s", rate(report["output_tokens_per_second"]), tokens)]
    if baseline := report["baseline"]:
        same = same_texts(baseline["identical"], baseline["num_compared"])
        tiles.append(tile("against plain decoding", ratio(baseline["ratio"]), same))
    if not report["num_drafts"]:
        return tiles
    ends = report["mean_acceptance_length_ci95"]
    interval = f"95 % {between(ends, plain)}" if ends else "over all steps"
    accepted = f"{count(report['num_accepted_tokens'])} of {count(report['num_draft_tokens'])} drafts"
    return [
        tile("mean acceptance length", plain(report["mean_acceptance_length"]), interval),
        tile("draft acceptance rate", percent(report["draft_acceptance_rate"]), accepted),
        *tiles,
    ]


def _cards(report: Mapping[str, Any]) -> list[str]:
    if not report["num_drafts"]:
        return [_times(report), _counts(report)]
    breakdowns = (("category", report["categories"]), ("turn", report["turns"]))
    groups = [_groups(kind, groups) for kind, groups in breakdowns if groups]
    return [_acceptance(report), _histogram(report), _times(report), *groups, _counts(report)]


# --- acceptance -----------------------------------------------------------------------------------


def _acceptance(report: Mapping[str, Any]) -> str:
    rows = [
        (
            str(row["position"]),
            count(row["drafted"]),
            count(row["accepted"]),
            _with_interval(percent(row["rate"]), row["ci95"], hundredths),
            _with_interval(percent(row["conditional"]), row["conditional_ci95"], hundredths),
        )
        for row in report["acceptance"]
    ]
    numbers = table("Acceptance by position", ("token", "drafted", "accepted", "joint", "conditional"), rows)
    key = legend({"joint": "first", "conditional": "second"}, "with 95 % intervals")
    return card("Acceptance by position", key, body=acceptance_chart(report["acceptance"]) + numbers)


def _histogram(report: Mapping[str, Any]) -> str:
    steps = report["acceptance_histogram"]
    rows = [(str(j), count(number), percent(number / report["num_drafts"])) for j, number in enumerate(steps)]
    numbers = table("Verify steps by accepted drafts", ("accepted", "steps", "share"), rows)
    return card(
        "Accepted drafts in a step", "share of the verify steps", body=histogram_chart(steps) + numbers
    )


def _groups(kind: str, groups: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (
            label,
            count(group["num_requests"]),
            _with_interval(
                plain(group["mean_acceptance_length"]), group["mean_acceptance_length_ci95"], plain
            ),
            percent(group["draft_acceptance_rate"]),
        )
        for label, group in groups.items()
    ]
    numbers = table(f"Speculation by {kind}", (kind, "requests", "mean length", "drafts accepted"), rows)
    note = "mean acceptance length; 1 is plain decoding, lines are 95 % intervals"
    return card(f"By {kind}", note, body=length_chart(kind, groups) + numbers)


def _with_interval(number: str, interval: Sequence[float] | None, show: Show) -> Cell:
    return (number, between(interval, show)) if interval else number


# --- times and counts -----------------------------------------------------------------------------


def _times(report: Mapping[str, Any]) -> str:
    spreads = (
        ("time to first token", report["ttft_seconds"]),
        ("time per output token", report["tpot_seconds"]),
    )
    requests = [(label, *map(seconds, times.values())) for label, times in spreads if times]
    steps = [
        (
            kind,
            count(step["num_steps"]),
            rate(step["mean_sequences"]),
            seconds(step["mean_seconds"]),
            seconds(step["max_seconds"]),
        )
        for kind, step in report["steps"].items()
    ]
    by_request = table("Times by request", ("by request", "mean", "median", "p99"), requests)
    by_step = table("Times by step", ("by step", "steps", "sequences", "mean", "max"), steps)
    lengths = [(f"K = {k}", count(number)) for k, number in draft_lengths(report).items()]
    by_length = table("Decode steps by draft length", ("by draft length", "decode steps"), lengths)
    note = "from submission to the first token; (end - first token) / (tokens - 1)"
    return card("Times", note, body=by_request + by_step + by_length) if by_request + by_step else ""


def _counts(report: Mapping[str, Any]) -> str:
    cells: list[tuple[str, Cell]] = [(name, count(report[name])) for name in _COUNTERS]
    cells += [(f"ended by {reason}", count(number)) for reason, number in report["finish_reasons"].items()]
    cells += [("failed", count(report["num_errors"]))] if report["num_errors"] else []
    if report["num_drafts"]:
        rows = {name: count(number) for name, number in report["rows"].items()}
        cells += [
            ("mean acceptance length over requests", plain(report["mean_acceptance_length_per_request"])),
            ("target rows of rejected drafts", (rows["target_rejected"], f"of {rows['target']}")),
            ("drafter first-pass rows of padding", (rows["first_pass_wasted"], f"of {rows['first_pass']}")),
            ("drafter loop rows", rows["loop"]),
        ]
    return card("Counts", "", body=table("Counts", (), cells))
