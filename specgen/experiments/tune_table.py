"""The table of ``specgen tune``: its arms, which is fastest and by how much, and the command that runs so."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain, product

from specgen.config import DraftLength, EngineConfig, bundled
from specgen.engine.arms import Arm
from specgen.experiments.output import BenchTable, Plot, Value, selected
from specgen.experiments.rounds import Ranking, Repeat, disturbed
from specgen.experiments.tune_job import SETTINGS, Workload, label
from specgen.report import display
from specgen.report.charts import DRAFT_LENGTHS
from specgen.report.table import Column, Row

NAME = "tune"  # of its files
_PLAIN = "-"  # the drafter batch of plain decoding
_OF_PLAIN: Mapping[str, Value] = {"K": 0, "drafter_batch": _PLAIN}
_SPREADS, _PARTS = ("ttft", "tpot", "itl"), ("mean", "median", "p99")
_KEYS = ("batch", *SETTINGS, "K", "drafter_batch")
COLUMNS = (
    *(Column(name=name) for name in _KEYS if name not in SETTINGS),
    Column(name="speed", unit="tokens/s", show=display.rate),
    Column(name="x_plain", show=display.ratio, interval="x_plain_ci95"),
    Column(name="x_best", show=display.ratio, interval="x_best_ci95"),
    Column(name="tpot", unit="ms"),
    Column(name="acceptance_length"),
    Column(name="in_batch", show=display.rate),
    Column(name="repeats"),
    Column(name="same_texts", show=display.percent),
    Column(name="wrong_tokens"),
    Column(name="verdict"),
)
_MORE = (  # not on the terminal of a search
    *(Column(name=name, unit="tokens/s", show=display.rate) for name in ("lowest", "highest")),
    Column(name="acceptance"),
    Column(name="step", unit="ms"),
    *(Column(name=f"{name}_{part}", unit="ms") for name in _SPREADS for part in _PARTS),
)


def tune_table(
    arms: Mapping[str, Arm],
    rankings: Mapping[int, Ranking],
    conditions: Mapping[str, Value],
    notes: Sequence[str],
    command: Callable[[Arm], str] | None,
) -> BenchTable:
    """The table of the arms that have repeats, by batch size; ``command`` is what runs as an arm did, if it can."""
    known = {batch: ranking for batch, ranking in rankings.items() if ranking.arms}
    repeats = {name: found for ranking in known.values() for name, found in ranking.arms.items()}
    ran = {name: arm for name, arm in arms.items() if name in repeats}
    firsts = _firsts(ran.values())
    rows = {
        name: _row(name, ranking, ran, firsts, judges_texts=command is not None)
        for ranking in known.values()
        for name in ran
        if name in ranking.arms
    }
    busy, others = disturbed(repeats)
    sentences = [sentence(batch, ranking, arms) for batch, ranking in known.items()]
    sentences += busy  # where the speeds are
    bests = [ranking.best for ranking in known.values() if ranking.is_judged]
    if bests and command is not None:
        fastest = max(bests, key=lambda name: repeats[name].speed)
        sentences.append(f"Most tokens per second: {command(arms[fastest])}")
    brief = list(_brief(ran.values(), rows.values(), firsts))
    columns = (*brief, *_MORE)
    return BenchTable(
        name=NAME,
        title="K, drafter batch and batch size",
        conditions=conditions,
        columns=columns,
        rows=selected(columns, rows.values()),
        plots=tuple(_plots(tuple(rows.values()))),
        answers=tuple(sentences),
        notes=(*_doubts(rows), *others, *notes),
        shown=len(brief) if all(ranking.drops for ranking in rankings.values()) else None,
        num_keys=sum(column.name in _KEYS for column in brief),
    )


def _firsts(arms: Iterable[Arm]) -> dict[str, str]:
    """The first value of drafter batch and of each setting with several in ``arms``: others are compared with it."""
    found: dict[str, list[str]] = {}
    for arm in arms:
        for axis in arm.changes.keys() & {"drafter_batch", *SETTINGS}:
            found.setdefault(axis, []).append(arm.changes[axis])
    return {axis: found[axis][0] for axis in _KEYS if len({*found.get(axis, ())}) > 1}


def _ratio_to(first: str) -> str:
    return f"x_{first.replace('-', '_')}"


def _brief(arms: Iterable[Arm], rows: Iterable[Row], firsts: Mapping[str, str]) -> Iterator[Column]:
    """``COLUMNS``, with the settings that arms differ in and the ratios to their first values."""
    changed = {name for arm in arms for name in arm.changes}
    judged = any(row["wrong_tokens"] is not None for row in rows)
    for column in COLUMNS:
        if column.name == "K":
            yield from (Column(name=name) for name in SETTINGS if name in changed)
        if judged or column.name != "wrong_tokens":
            yield column
        if column.name == "x_best":
            for name in map(_ratio_to, firsts.values()):
                yield Column(name=name, show=display.ratio, interval=f"{name}_ci95")


def _row(
    name: str, ranking: Ranking, arms: Mapping[str, Arm], firsts: Mapping[str, str], *, judges_texts: bool
) -> Row:
    repeats, changes = ranking.arms[name], arms[name].changes
    plain = _beside(name, ranking, arms, K=0)
    is_judged = judges_texts and ranking.plain in ranking.arms and ranking.has_steps
    row = {
        **{axis: changes[axis] for axis in _KEYS if axis in changes},
        "drafter_batch": changes.get("drafter_batch", _PLAIN),
        "speed": repeats.speed,
        **_ratio("x_plain", name, plain, ranking),
        **_ratio("x_best", name, ranking.best, ranking),
        "tpot": _milliseconds(repeats.tpot),
        "acceptance_length": repeats.acceptance_length,
        "in_batch": repeats.median(lambda repeat: repeat.mean_sequences),
        "repeats": len(repeats.each),
        "same_texts": repeats.same_texts(ranking.arms[ranking.plain]) if is_judged else None,
        "wrong_tokens": repeats.num_wrong,
        "verdict": _verdict(name, ranking),
        "lowest": min(repeats.speeds),
        "highest": max(repeats.speeds),
        "acceptance": repeats.acceptance,
        "step": _milliseconds(repeats.median(lambda repeat: repeat.step_seconds)),
    }
    for axis, first in firsts.items():
        base = _beside(name, ranking, arms, **{axis: first}) if axis in changes else None
        row |= _ratio(_ratio_to(first), name, base, ranking)
    for spread, part in product(_SPREADS, _PARTS):
        row[f"{spread}_{part}"] = _milliseconds(repeats.median(_latency(spread, part)))
    return row


def _beside(name: str, ranking: Ranking, arms: Mapping[str, Arm], **changed: object) -> str | None:
    """The arm of a ``ranking`` that is like ``name`` but for what is ``changed``; None where that has not run."""
    wanted = {**arms[name].changes, **changed}
    if wanted["K"] == 0:
        wanted.pop("drafter_batch", None)
    return next((each for each in ranking.arms if arms[each].changes == wanted), None)


def _latency(name: str, part: str) -> Callable[[Repeat], float | None]:
    return lambda repeat: getattr(getattr(repeat, name), part, None)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _doubts(rows: Mapping[str, Row]) -> Iterator[str]:
    """Notes on arms that may be fast because they are wrong."""
    for name, row in rows.items():
        if row["wrong_tokens"]:
            yield f"wrong: {name}: {display.count(row['wrong_tokens'])} tokens differ from the pair's known text"
    others = [name for name, row in rows.items() if row["same_texts"] is not None and row["same_texts"] < 1]
    if others:
        named = "; ".join(others)
        yield f"texts differ from plain decoding in {named}: specgen verify says whether rounding explains it"


def _ratio(column: str, arm: str, other: str | None, ranking: Ranking) -> dict[str, object]:
    """The columns of the speed of ``arm`` over that of ``other``; over itself it is 1, without an interval."""
    if other is None or not ranking.has_steps:
        return {column: None, f"{column}_ci95": None}
    found = ranking.arms[arm].speedup(ranking.arms[other])
    return {column: found.value, f"{column}_ci95": None if other == arm else found.interval}


def _verdict(arm: str, ranking: Ranking) -> str:
    if not ranking.has_steps:
        return "unknown"
    if arm == ranking.best:
        return "best" if ranking.is_judged else "unknown"
    if ranking.cannot_win(arm):
        return "dropped"
    if ranking.over_best(arm).interval is None:
        return "unknown"
    return "no different" if ranking.no_different(arm) else "slower"


def _plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Speed-up and speed, plain decoding in all of them.

    Over the batch with a line for each K, or over the first of ``SETTINGS`` that arms differ in with one for each
    drafter batch; a plot for each value of what else differs.
    """
    values = {name: dict.fromkeys(row[name] for row in rows if name in row) for name in _KEYS}
    over = [name for name in SETTINGS if len(values[name]) > 1]
    x, series = (over[0], "drafter_batch") if over else ("batch", "K")
    apart = [name for name in _KEYS if name not in (x, series) and values[name]]
    drafts = {name: [each for each in values[name] if each != _OF_PLAIN.get(name)] for name in apart}
    for y, title in (("x_plain", "Speed-up over plain decoding"), ("speed", "Output tokens per second")):
        for each in product(*(drafts[name] or [_OF_PLAIN.get(name)] for name in apart)):
            where = {
                name: (_OF_PLAIN.get(name, value), value) for name, value in zip(apart, each, strict=True)
            }
            shown = [
                str(value) if name == "drafter_batch" else f"{name} {value}"
                for name, value in zip(apart, each, strict=True)
                if (name == "drafter_batch" and value != _PLAIN) or len(drafts[name]) > 1
            ]
            yield Plot(
                title=", ".join((title, *shown)),
                x=x,
                y=y,
                series=series,
                where=where,
                reference=1.0 if y == "x_plain" else None,
                order=DRAFT_LENGTHS if series == "K" else (),
            )


# fields of an arm's configuration that ``command`` says otherwise, or that are the bench's own
_ASIDE = {
    *("model", "drafter", "num_spec_tokens", "drafter_batch", "draft_lm_head", "max_batch_size"),
    "prefix_cache",
}


def sentence(batch: int, ranking: Ranking, arms: Mapping[str, Arm]) -> str:
    """The fastest arm at a batch size, by how much, and what is no different; of at least one arm."""
    best, found = ranking.best, ranking.arms[ranking.best]
    named, plain = label(arms[best].changes), _beside(best, ranking, arms, K=0)
    if not ranking.has_steps:
        return f"At batch {batch}: no verdict, as every text ended at its first token: no step had drafts."
    if not ranking.is_judged:
        one = f"one repeat has no spread ({named} was ahead)"
        return f"At batch {batch}: no verdict, {one}: raise --budget or --repeats."
    parts = [f"At batch {batch}: {named}"]
    if plain is None:
        parts.append("the fastest; plain decoding was not measured")
    elif plain != best:
        of_plain = found.speedup(ranking.arms[plain])
        parts.append(
            f"{display.ratio(of_plain.value)} {display.between(of_plain.interval, display.plain)} of plain"
        )
    parts += [f"{display.seconds(found.tpot)} per token"] if found.tpot is not None else []
    alike = [label(arms[arm].changes) for arm in ranking.arms if ranking.no_different(arm)]
    others = f"; no different: {' and '.join(alike)}" if alike else ""
    return f"{', '.join(parts)}, {display.count(found.speed)} tokens/s{others}."


def command(arm: Arm, engine: EngineConfig, workload: Workload) -> str:
    """The ``specgen generate`` that runs as ``arm`` did; ``engine`` is what the arms changed."""
    config, how = arm.configure(engine), workload.how
    length = config.draft_length
    is_bundled = (engine.model, engine.drafter) == bundled.pair(None, None, DraftLength(most=1))
    given = {  # option: value, None where it is left out
        "--model": None if is_bundled else engine.model,
        "--drafter": None if is_bundled or length.most == 0 else engine.drafter,
        "--dataset": workload.dataset,
        "--data-path": workload.data_path,
        "--split": how.split,
        "--prompt-field": how.prompt_field,
        **({} if how.chat is None else {"--chat" if how.chat else "--raw": True}),
        "--max-batch-size": config.max_batch_size,
        "--num-spec-tokens": length.kind if length.auto else length.most,
        "--drafter-batch": None if config.head is None else config.drafter_batch,
        "--draft-lm-head": "fp8" if config.head and config.draft_lm_head == "fp8" else None,
        "--max-new-tokens": workload.max_new_tokens if workload.output_lens == "fixed" else None,
    }
    options = (each for each in fields(config) if each.metadata and each.name not in _ASIDE)
    changed = [each.name for each in options if getattr(config, each.name) != each.default]
    given |= {f"--{name.replace('_', '-')}": getattr(config, name) for name in changed}
    words = [
        [name] if value is True else [name, str(value)] for name, value in given.items() if value is not None
    ]
    return shlex.join(["specgen", "generate", *chain(*words)])
