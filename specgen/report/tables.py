"""The tables of one run, for terminal and page, and sentences about what its numbers do not show by themselves."""

from collections.abc import Iterator, Mapping, Sequence

from specgen.report.acceptance import Position, Speculation
from specgen.report.charts import Lines, Point, lengths, ticks_to
from specgen.report.display import (
    DASH,
    between,
    count,
    percent,
    plain,
    rate,
    ratio,
    same_texts,
    seconds,
    several,
)
from specgen.report.grid import Grid, by_position, chosen
from specgen.report.page import Page
from specgen.report.report import DEFINITIONS, RECEIVED_TERM, Report
from specgen.report.table import Column, Table, pairs
from specgen.report.terminal import Part, definitions, heading
from specgen.report.text_list import TextList
from specgen.report.timings import WallTime

DEAD_LENGTH = 1.05  # tokens per verify step; plain decoding has 1
_POSITIONS = 4  # shown per category, or a figure less; report.json has all
_TILES = ("mean acceptance length", "draft acceptance rate", "output tokens/s", "against plain decoding")
_PLAIN = "Plain decoding: there are no drafts, so there is no acceptance to report."
_Item = tuple[str, str, str]  # label, number, note
_ACCEPTANCE = (
    Column(name="position", title="acceptance", show=lambda position: f"token {position}"),
    Column(name="drafted"),
    Column(name="accepted"),
    Column(name="rate", title="joint", show=percent, interval="ci95"),
    Column(name="conditional", show=percent, interval="conditional_ci95"),
)
_HISTOGRAM = (
    Column(name="j", title="step with", show=lambda j: f"{j} accepted"),
    Column(name="steps"),
    Column(name="share", show=percent),
)
_CONFIDENCE = (
    Column(name="confidence"),
    Column(name="drafts"),
    Column(name="accepted"),
    Column(name="share", show=percent, interval="ci95"),
)
_CONFIDENCE_TERMS = (
    (
        "confidence",
        "its probability of its most likely token; lookups: matched / N, or how often answers go on so",
    ),
    ("AUC", "chance that it was surer of an accepted draft than of a rejected one; 0.5 says nothing"),
    ("ECE", "how far accepted shares are from confidence, the mean over drafts; 0 is best"),
)
_BASELINE_TERM = (
    "against plain decoding",
    "one run of each, one after the other, so without an interval; arms of `specgen tune` take turns and have one",
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
_WALL = {
    "prefill": "prefill passes",
    "full": "decode time at full batch",
    "filling": "extra time in smaller batches while prompts wait",
    "tail": "extra time while the batch drains",
    "captures": "captures of CUDA graphs",
    "idle_outside": "device idle: prompts, texts, files (at most)",
    "idle_engine": "device idle: other",
    "rest": "before the first pass and after the last",
}
_LENGTHS = (Column(name="k", title="by draft length"), Column(name="steps", title="decode steps"))


def of_run(report: Report, settings: Mapping[str, str]) -> Iterator[Part]:
    """What the terminal shows of a run with these ``settings``: figures, and what their names mean."""
    yield from figures(report, settings)
    yield definitions(_terms(report))


def figures(report: Report, settings: Mapping[str, str]) -> Iterator[Part]:
    """What the terminal shows of a run, without what the names mean."""
    yield heading(settings)
    yield report.unfinished
    counts, speed = _numbers(report)
    yield counts
    yield from remarks(report)
    yield from _acceptance(report)
    yield from _times(report)
    yield speed


def page(
    report: Report,
    settings: Mapping[str, str],
    title: str,
    origin: Mapping[str, str] | None = None,
    rejections: Sequence[Table] = (),
    texts: TextList | None = None,
) -> str:
    """The report of a run as an HTML page, with its ``origin`` (from ``origin.origin``) and what ``RunTexts`` shows."""
    sentences = list(remarks(report))
    return Page(
        title=title,
        settings=settings,
        sentence="\n".join(sentences),
        alarming=sentences != [_PLAIN],
        tiles=[item for item in (*_counts(report), *_speed(report)) if item[0] in _TILES],
        tables=[
            *_acceptance(report),
            *rejections,
            *_times(report),
            *wall_table(report.wall),
            *_numbers(report),
        ],
        texts=texts,
        notes=dict(_terms(report)),
        origin=origin or {},
    ).to_html()


def _terms(report: Report) -> list[tuple[str, str]]:
    known = _CONFIDENCE_TERMS if any(confidence_table(report)) else ()
    groups = (report, *report.categories.values(), *report.turns.values())
    received = (RECEIVED_TERM,) if any(group.received is not None for group in groups) else ()
    one_run = (_BASELINE_TERM,) if report.baseline and report.baseline.ratio else ()
    return [*(DEFINITIONS if report.num_drafts else ()), *received, *known, *one_run]


def _numbers(report: Report) -> tuple[Table, Table]:
    return pairs("Counts", _counts(report)), pairs("Speed and rows", _speed(report))


def _counts(report: Report) -> Iterator[_Item]:
    without = report.num_steps_without_drafts
    notes = {"num_drafts": f"steps with drafts; {count(without)} had none"} if without else {}
    for each in chosen("report", [report]):
        yield each.name, each.show(each.value(report)), notes.get(each.name, "")
    if report.num_drafts:
        ends, by_request = report.mean_acceptance_length_ci95, report.mean_acceptance_length_per_request
        interval = between(ends, plain) if ends else "no interval (one conversation, or all alike)"
        note = f"{interval}, mean over requests {plain(by_request)}"
        yield "mean acceptance length", plain(report.mean_acceptance_length), note
        if without:
            steps = f"(of {count(report.num_drafts + without)} steps {count(without)} had no drafts)"
            yield "length over all steps", plain(report.length_over_all_steps), steps
        if report.received is not None:
            note = "in the texts, which end before some accepted drafts"
            yield "tokens per step", plain(report.received), note
        drafts = f"({count(report.num_accepted_tokens)} of {count(report.num_draft_tokens)} drafts)"
        yield "draft acceptance rate", percent(report.draft_acceptance_rate), drafts
        if report.cut_rate is not None:
            yield (
                "cut by constraints",
                percent(report.cut_rate),
                "of drafting steps: the next draft was not allowed",
            )
    if report.confidence.auc is not None:
        note = f"(AUC: 0.5 is chance, 1 perfect), ECE {plain(report.confidence.ece)}"
        yield "confidence of drafts", plain(report.confidence.auc), note
    others = {
        "errors": report.num_errors,
        "unfinished": report.num_unfinished,
        "preemptions": report.num_preemptions,
    }
    reasons = (f"{count(n)} {name}" for name, n in {**report.finish_reasons, **others}.items() if n)
    yield "ended by", ", ".join(reasons) or DASH, ""


# --- acceptance -----------------------------------------------------------------------------------


def curve(positions: Sequence[Position]) -> list[Point]:
    """The joint rates by draft position with their intervals."""
    return [Point(name=str(each.position), number=each.rate, interval=each.ci95) for each in positions]


def curves(title: str, lines: Mapping[str, Sequence[Point]]) -> Lines:
    """A chart of acceptance over draft position."""
    label = "position of the draft (token i)"
    return Lines(title=title, label=label, ticks=ticks_to(1), show=percent, lines=lines)


def _acceptance(report: Report) -> Iterator[Table]:
    if not report.num_drafts:
        return
    conditional = [
        Point(name=str(each.position), number=each.conditional, interval=each.conditional_ci95)
        for each in report.acceptance
    ]
    lines = {"joint": curve(report.acceptance), "conditional": conditional}
    yield Table(
        title="Acceptance by position",
        note="with 95 % intervals",
        columns=_ACCEPTANCE,
        rows=tuple(map(vars, report.acceptance)),
        lines=curves("Acceptance by draft position", lines),
        bars="rate",
    )
    steps = report.acceptance_histogram
    shares = [number / report.num_drafts for number in steps]
    yield Table(
        title="Accepted drafts per step",
        note="share of the verify steps",
        columns=_HISTOGRAM,
        rows=tuple({"j": j, "steps": number, "share": shares[j]} for j, number in enumerate(steps)),
        bars="share",
        ticks=ticks_to(max(shares)),
    )
    yield from confidence_table(report)
    for kind, groups in (("part", report.parts), ("category", report.categories), ("turn", report.turns)):
        if groups:
            yield _breakdown(kind, groups)


def confidence_table(report: Report) -> Iterator[Table]:
    """Whether the drafter knows when it is right; nothing where it did not say."""
    confidence = report.confidence
    levels = zip(confidence.levels, confidence.bounds, strict=True)
    rows = [
        {"confidence": f"{low:.2f} to {high:.2f}", **vars(each)}
        for each, (low, high) in levels
        if each.drafts
    ]
    if rows:
        yield Table(
            title="Accepted by the drafter's confidence",
            note=f"AUC {plain(confidence.auc)}, ECE {plain(confidence.ece)}; drafts behind accepted ones, with 95 % "
            "intervals; where the share is the confidence, drafts are accepted as often as the drafter expects",
            columns=_CONFIDENCE,
            rows=tuple(rows),
            bars="share",
            ticks=ticks_to(1),
        )


def _breakdown(kind: str, groups: Mapping[str, Speculation]) -> Table:
    figures = chosen("group", groups.values())
    received = any(each.name == "tokens_per_step" for each in figures)
    positions = by_position(groups.values(), _POSITIONS - received)
    grid = Grid(
        groups=[({kind: label}, group) for label, group in groups.items()], figures=[*figures, *positions]
    )
    return grid.table(
        [Column(name=kind)],
        f"By {kind}",
        note="mean acceptance length; 1 is plain decoding, with 95 % intervals",
        bars="mean_acceptance_length",
        ticks=lengths(len(next(iter(groups.values())).acceptance)),
    )


# --- times ----------------------------------------------------------------------------------------


def _times(report: Report) -> Iterator[Table]:
    spreads = {"time to first token": report.ttft_seconds, "time per output token": report.tpot_seconds}
    note = "from submission to the first token; (end - first token) / (tokens - 1)"
    times = tuple({"time": label, **vars(each)} for label, each in spreads.items() if each)
    yield Table(title="Times by request", note=note, columns=_TIMES, rows=times)
    steps = tuple({"kind": f"{kind} steps", **vars(step)} for kind, step in report.steps.items())
    yield Table(title="Times by step", columns=_STEPS, rows=steps)
    lengths = tuple({"k": f"K = {k}", "steps": number} for k, number in report.draft_lengths.items())
    yield Table(title="Decode steps by draft length", columns=_LENGTHS, rows=lengths)


def _speed(report: Report) -> Iterator[_Item]:
    tokens, wall = count(report.total_num_output_tokens), seconds(report.wall_seconds)
    busy = "; BUSY" if report.busy else ""
    yield "output tokens/s", rate(report.output_tokens_per_second), f"({tokens} tokens in {wall}){busy}"
    if cached := report.num_cached_tokens:
        prompt = report.num_prompt_tokens
        yield "prefix cache", count(cached), f"of {count(prompt)} prompt tokens ({percent(cached / prompt)})"
    if report.num_drafts:
        rows = report.rows()
        yield "target rows", f"{_share(rows, 'target', 'target_rejected')} held rejected drafts", ""
        if _has_head(report):
            fill = _share(rows, "first_pass", "first_pass_wasted")
            yield "drafter rows", f"KV fill {fill} were padding; draft loop {count(rows['loop'])}", ""
    if baseline := report.baseline:
        same = "no step had drafts, so nothing was compared"
        if baseline.identical is not None:
            same = same_texts(baseline.identical, baseline.num_compared)
            same += " (sampled ones may differ)" * (baseline.sampled and baseline.identical < 1)
        speed = rate(baseline.output_tokens_per_second)
        if unlike := report.unlike_work:
            same += f"; {unlike}"
        note = f"plain decoding ({speed} tokens/s), {same}{busy}"
        yield "against plain decoding", ratio(baseline.ratio), note


def _has_head(report: Report) -> bool:
    """Whether a head drafted, and not n-grams."""
    rows = report.rows()
    return bool(rows["loop"] or rows["first_pass"])


def _share(rows: Mapping[str, int], name: str, wasted: str) -> str:
    share = percent(rows[wasted] / rows[name] if rows[name] else None)
    return f"{count(rows[name])}, of which {count(rows[wasted])} ({share})"


def wall_table(wall: WallTime | None) -> Iterator[Table]:
    """The parts of a run's wall time; nothing for a run without them."""
    if wall is None:
        return
    whole = wall.whole
    rows = [
        {"part": title, "seconds": part, "share": part / whole if whole else None}
        for part, title in ((getattr(wall, name), title) for name, title in _WALL.items())
    ]
    yield Table(
        title="Where the wall time went",
        note="by the device's clock",
        columns=(
            Column(name="part", title="part"),
            Column(name="seconds", title="time", show=seconds),
            Column(name="share", show=percent),
        ),
        rows=tuple(row for row in rows if row["seconds"]),
        bars="share",
        ticks=ticks_to(max((row["share"] or 0.0) for row in rows)),
    )


# --- sentences ------------------------------------------------------------------------------------


def failures(report: Report) -> str:
    """A sentence on how many requests failed; empty without one."""
    failed = report.num_errors
    of = count(failed + report.num_requests)
    return f"{count(failed)} of {of} requests failed, which are in no number" if failed else ""


def remarks(report: Report) -> Iterator[str]:
    """Sentences on what is unusual in a run."""
    ended, reasoning = report.finish_reasons, report.ended_in_reasoning
    if report.busy:
        yield f"BUSY: {report.busy}, so speeds are doubtful: run it again when the machine is idle."
    if report.num_spec_tokens == 0:
        yield _PLAIN
    elif report.mean_acceptance_length is None:
        yield "No verify step had drafts, so there is no acceptance to report."
    elif number := report.num_unverified_tokens:
        yield (
            f"{count(number)} of {count(number + report.num_draft_tokens)} drafts were not verified, as the drafter "
            "was not sure of them: acceptance is of those that were, and not to be compared with that of a fixed K."
        )
    elif report.mean_acceptance_length < DEAD_LENGTH:
        why = (
            "Head and target probably do not match: `specgen inspect` says whether they fit and how the head was read."
            if _has_head(report)
            else "N-grams need text that repeats itself."
        )
        yield f"Almost no draft was accepted: the mean acceptance length is under {DEAD_LENGTH}. {why}"
    if (number := report.num_lost_tokens) and not report.unfinished:  # else they may become texts
        yield (
            f"{count(number)} tokens more than the texts have were computed, of requests that were stopped or failed: "
            "their time is in the speeds."
        )
    if number := ended.get("incomplete", 0):
        yield (
            f"{several(number, 'answer')} ended before fitting what was asked (json-schema, regex, choice): raise "
            "--max-new-tokens, or bound strings and lists."
        )
    if number := ended.get("context", 0):
        yield (
            f"{count(number)} of {count(sum(ended.values()))} texts ended where the model's context was full, before "
            "--max-new-tokens: shorten the prompts or ask for less."
        )
    if number := sum(reasoning.values()):
        remedy = ": raise --max-new-tokens" if reasoning.get("length") else ""
        yield f"{several(number, 'answer')} ended while reasoning{remedy}."
    if number := report.num_empty:
        yield empty_texts(number, report.num_requests)


def empty_texts(number: int, num_requests: int) -> str:
    """A sentence on ``number`` of empty texts, with the likely remedy."""
    return (
        f"{count(number)} of {count(num_requests)} texts are empty: the model ended them at once. A chat model needs "
        "its chat template: add --chat (eval: --apply-chat-template; compare: rows with messages)."
    )
