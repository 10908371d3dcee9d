"""The table of a tune: its arms beside plain decoding and beside the fastest, the sentences, and the best line."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from specgen.config import DraftLength, EngineConfig, TemplateKwargs, bundled
from specgen.engine.arms import Arm
from specgen.experiments.matrices import Workload
from specgen.experiments.output import BenchTable, Plot, Value
from specgen.experiments.ranking import DROPPING, Ranking
from specgen.experiments.rounds import Repeats, Speedup
from specgen.experiments.throughput import milliseconds
from specgen.report import display
from specgen.report.charts import DRAFT_LENGTHS
from specgen.report.table import Column, Row, Table

_PLAIN = "-"  # the drafter batch of plain decoding
COLUMNS = (
    Column(name="batch"),
    Column(name="K"),
    Column(name="drafter_batch"),
    Column(name="speed", unit="tokens/s", show=display.rate),
    Column(name="x_plain", show=display.ratio, interval="x_plain_ci95"),
    Column(name="x_best", show=display.ratio, interval="x_best_ci95"),
    Column(name="tpot", unit="ms"),
    Column(name="per_user", unit="tokens/s", show=display.rate),
    Column(name="acceptance_length"),
    Column(name="in_batch", show=display.rate),
    Column(name="repeats"),
    Column(name="same_texts", show=display.percent),
    Column(name="wrong_tokens"),
    Column(name="verdict"),
)


def tune_table(
    arms: Mapping[str, Arm],
    rankings: Mapping[int, Ranking],
    conditions: Mapping[str, Value],
    notes: Sequence[str],
    command: Callable[[Arm], str],
) -> BenchTable:
    """The table of the arms that have repeats, by batch size; ``command`` is what runs as an arm did."""
    known = {batch: ranking for batch, ranking in rankings.items() if ranking.arms}
    rows = {
        name: _row(arms[name], ranking) for ranking in known.values() for name in arms if name in ranking.arms
    }
    repeats = {name: found for ranking in known.values() for name, found in ranking.arms.items()}
    sentences = [sentence(batch, ranking, arms) for batch, ranking in known.items()]
    bests = [ranking.best for ranking in known.values() if ranking.is_judged]
    if bests:
        fastest = max(bests, key=lambda name: repeats[name].speed.median)
        sentences.append(f"Most tokens per second: {command(arms[fastest])}")
    disturbed = [f"{name}: {text}" for name, found in repeats.items() for text in found.disturbances]
    judged = any(row["wrong_tokens"] is not None for row in rows.values())
    shown = [column for column in COLUMNS if judged or column.name != "wrong_tokens"]
    keys = [key for column in shown for key in (column.name, column.interval) if key]
    return BenchTable(
        name="tune",
        title="K, drafter batch and batch size",
        conditions=conditions,
        columns=tuple(shown),
        rows=tuple({key: row[key] for key in keys} for row in rows.values()),
        plots=tuple(_plots(tuple(rows.values()))),
        answers=tuple(sentences),
        notes=(*_doubts(rows), *disturbed, *notes),
        more=(best_line(rows),),
        num_keys=3,
    )


def _row(arm: Arm, ranking: Ranking) -> Row:
    repeats = ranking.arms[arm.name]
    over_plain = ranking.over_reference(arm.name) if ranking.plain in ranking.arms else None
    over_best = ranking.over_best(arm.name)
    tpot = repeats.median(lambda repeat: repeat.tpot.median if repeat.tpot else None)
    return {
        "batch": arm.changes["batch"],
        "K": arm.changes["K"],
        "drafter_batch": arm.changes.get("drafter_batch", _PLAIN),
        "speed": repeats.speed.median,
        **_ratio("x_plain", over_plain, arm.name == ranking.plain),
        **_ratio("x_best", over_best, arm.name == ranking.best),
        "tpot": milliseconds(tpot),
        "per_user": 1 / tpot if tpot else None,
        "acceptance_length": repeats.acceptance_length,
        "in_batch": repeats.median(lambda repeat: repeat.mean_sequences),
        "repeats": len(repeats.each),
        "same_texts": repeats.same_texts(ranking.arms[ranking.plain]) if over_plain else None,
        "wrong_tokens": repeats.num_wrong,
        "verdict": _verdict(arm.name, ranking),
    }


def _doubts(rows: Mapping[str, Row]) -> Iterator[str]:
    """What says that an arm may be fast because it is wrong."""
    for name, row in rows.items():
        if row["wrong_tokens"]:
            yield f"wrong: {name}: {display.count(row['wrong_tokens'])} tokens differ from the pair's known text"
    others = [name for name, row in rows.items() if row["same_texts"] is not None and row["same_texts"] < 1]
    if others:
        named = "; ".join(others)
        yield f"texts differ from plain decoding in {named}: specgen verify says whether rounding explains it"


def _ratio(name: str, found: Speedup | None, itself: bool) -> dict[str, object]:
    """The columns of a ratio; an arm over itself is 1, without an interval."""
    if found is None:
        return {name: None, f"{name}_ci95": None}
    return {name: found.ratio, f"{name}_ci95": None if itself else found.interval}


def _verdict(arm: str, ranking: Ranking) -> str:
    if arm == ranking.best:
        return "best" if ranking.is_judged else "unknown"
    if ranking.cannot_win(arm):
        return "dropped"
    if ranking.over_best(arm).interval is None:
        return "unknown"
    return "no different" if ranking.no_different(arm) else "slower"


def _plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Speed-up and speed over the batch, a line per K, for each drafter batch; plain decoding is in all of them."""
    modes = dict.fromkeys(row["drafter_batch"] for row in rows if row["drafter_batch"] != _PLAIN)
    for y, title in (("x_plain", "Speed-up over plain decoding"), ("speed", "Output tokens per second")):
        for mode in modes or [_PLAIN]:  # n-grams have none
            yield Plot(
                title=f"{title}, {mode}" if modes else title,
                x="batch",
                y=y,
                series="K",
                where={"drafter_batch": (_PLAIN, mode)},
                reference=1.0 if y == "x_plain" else None,
                order=DRAFT_LENGTHS,
            )


def best_line(rows: Mapping[str, Row]) -> Table:
    """The arms that no other arm beats in both tokens per second for one user and for all (the Pareto front)."""
    points = {
        name: (row["per_user"], row["speed"]) for name, row in rows.items() if row["per_user"] is not None
    }
    front = {
        name: point
        for name, point in points.items()
        if not any(
            other[0] >= point[0] and other[1] >= point[1] and other != point for other in points.values()
        )
    }
    return Table(
        title="Tokens per second for one user and for all",
        note="every other arm, at any batch size, is beaten by one of these in both",
        columns=(
            Column(name="arm", title=""),
            Column(name="per_user", unit="tokens/s", show=display.rate),
            Column(name="speed", unit="tokens/s", show=display.rate),
        ),
        rows=tuple(
            {"arm": name, "per_user": front[name][0], "speed": front[name][1]}
            for name in sorted(front, key=lambda name: front[name])
        ),
    )


_RUN_AS_MEASURED = (  # options of ``generate`` that are kept where they are not its defaults
    "device",
    "tensor_parallel",
    "dtype",
    "kv_dtype",
    "attention",
    "cuda_graphs",
    "gpu_memory_utilization",
    "max_prefill_tokens",
    "generation_config",
)


def label(changes: Mapping[str, Any]) -> str:
    """What an arm changes beside the batch size: ``plain``, ``K 2, padded``."""
    mode = changes.get("drafter_batch")
    return ("plain" if changes["K"] == 0 else f"K {changes['K']}") + (f", {mode}" if mode else "")


def sentence(batch: int, ranking: Ranking, arms: Mapping[str, Arm]) -> str:
    """The fastest arm at a batch size, by how much, and what is no different; of at least one arm."""
    best, found = ranking.best, ranking.arms[ranking.best]
    named = label(arms[best].changes)
    if not ranking.is_judged:
        ratio = display.ratio(ranking.over_reference(best).ratio)
        ahead = f", {ratio} of plain" if ranking.plain in ranking.arms and best != ranking.plain else ""
        return (
            f"At batch {batch}: no verdict, as one repeat has no spread ({named} was ahead{ahead}): raise --budget or "
            "--repeats."
        )
    parts = [f"At batch {batch}: {named}"]
    if ranking.plain not in ranking.arms:
        parts.append("the fastest; plain decoding was not measured")
    elif best != ranking.plain:
        parts.append(f"{interval_of(ranking.over_reference(best))} of plain")
    parts += [each for each in (_latency(found), f"{display.count(found.speed.median)} tokens/s") if each]
    return "; ".join([", ".join(parts), *_others(ranking, arms)]) + "."


def dropped(ranking: Ranking, arm: str, arms: Mapping[str, Arm]) -> str:
    """Why ``arm`` gets no more repeats."""
    ratio, most = display.ratio(ranking.over_best(arm).ratio), display.ratio(ranking.at_most(arm))
    done = len(ranking.arms[arm].each)
    return (
        f"dropped: {arm}: {ratio} of {label(arms[ranking.best].changes)} after {done} repeats, at "
        f"{display.percent(DROPPING)} confidence at most {most}"
    )


def interval_of(found: Speedup) -> str:
    """``1.87x [1.84, 1.90]``"""
    if found.interval is None:
        return f"{display.ratio(found.ratio)} (one repeat, no interval)"
    return f"{display.ratio(found.ratio)} {display.between(found.interval, display.plain)}"


def _others(ranking: Ranking, arms: Mapping[str, Arm]) -> Iterator[str]:
    """The same K with the other drafter batch, ``auto``, and whatever else may be as fast."""
    best, k = ranking.best, arms[ranking.best].changes["K"]
    others = {arm: arms[arm].changes for arm in ranking.arms if arm != best}
    twins = [arm for arm, changes in others.items() if changes["K"] == k]
    for arm in twins:
        yield _beside(ranking, arm, others[arm]["drafter_batch"])
    autos = [arm for arm, changes in others.items() if changes["K"] == "auto" and k != "auto"]
    if autos:
        fastest = max(autos, key=lambda arm: ranking.over_best(arm).ratio)
        yield _beside(ranking, fastest, label(others[fastest]).removeprefix("K "))
    alike = [arm for arm in others if arm not in {*twins, *autos} and ranking.no_different(arm)]
    if alike:
        yield f"no different: {' and '.join(label(others[arm]) for arm in alike)}"
    if best == ranking.plain and others:
        drafting = max(others, key=lambda arm: ranking.over_best(arm).ratio)
        yield f"with drafts at best {label(others[drafting])}, {interval_of(ranking.over_best(drafting))} of plain"


def _beside(ranking: Ranking, arm: str, name: str) -> str:
    """How ``arm`` compares with the best one."""
    found = interval_of(ranking.over_best(arm))
    return f"{name} no different, {found}" if ranking.no_different(arm) else f"{name} {found} of that"


def _latency(repeats: Repeats) -> str:
    seconds = repeats.median(lambda repeat: repeat.tpot.median if repeat.tpot else None)
    return "" if seconds is None else f"{display.seconds(seconds)} per token"


def command(arm: Arm, engine: EngineConfig, workload: Workload, data_path: Path | None) -> str:
    """The ``specgen generate`` that runs as ``arm`` did; ``engine`` is what the arms changed."""
    config, words = arm.configure(engine), ["specgen", "generate"]
    if (engine.model, engine.drafter) != bundled.pair(None, None, DraftLength(most=1)):
        words += ["--model", engine.model]
        if config.draft_length.most:
            words += ["--drafter", str(engine.drafter)]
    words += ["--dataset", workload.dataset]
    if data_path is not None:
        words += ["--data-path", str(data_path)]
    how = workload.how
    words += [] if how.split is None else ["--split", how.split]
    words += [] if how.prompt_field is None else ["--prompt-field", how.prompt_field]
    words += [] if how.chat is None else ["--chat" if how.chat else "--raw"]
    if engine.template_kwargs != TemplateKwargs():  # others are other prompts
        words += ["--chat-template-kwargs", str(engine.template_kwargs)]
    words += ["--max-batch-size", str(config.max_batch_size)]
    length = config.draft_length
    words += ["--num-spec-tokens", "auto" if length.auto else str(length.most)]
    if config.head is not None:
        words += ["--drafter-batch", config.drafter_batch]
    if workload.output_lens == "fixed":
        words += ["--max-new-tokens", str(workload.max_new_tokens)]
    defaults = {each.name: each.default for each in fields(EngineConfig)}
    for name in _RUN_AS_MEASURED:
        value = getattr(config, name)
        if value != defaults[name]:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
