"""The table of a tune: its arms beside plain decoding and beside the fastest, the sentences, and the best line."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from specgen import bundled, display
from specgen.bench.matrices import Workload
from specgen.bench.output import BenchTable, Plot, Value
from specgen.config import DraftLength, EngineConfig
from specgen.engine.arms import Arm
from specgen.experiments.race import DROPPING, Standing
from specgen.experiments.repeat import Repeats, Speedup
from specgen.experiments.throughput_table import milliseconds
from specgen.report.charts import DRAFT_LENGTHS, Scatter, Spot, quarters
from specgen.report.table import Column, Row, Table
from specgen.template_kwargs import TemplateKwargs

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
    standings: Mapping[int, Standing],
    conditions: Mapping[str, Value],
    notes: Sequence[str],
    command: Callable[[Arm], str],
) -> BenchTable:
    """The table of the arms that have repeats, by batch size; ``command`` is what runs as an arm did."""
    known = {batch: standing for batch, standing in standings.items() if standing.arms}
    rows = {
        name: _row(arms[name], standing)
        for standing in known.values()
        for name in arms
        if name in standing.arms
    }
    repeats = {name: found for standing in known.values() for name, found in standing.arms.items()}
    sentences = [sentence(batch, standing) for batch, standing in known.items()]
    bests = [standing.best for standing in known.values() if standing.is_judged]
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


def _row(arm: Arm, standing: Standing) -> Row:
    repeats = standing.arms[arm.name]
    over_plain = standing.over_reference(arm.name) if standing.plain in standing.arms else None
    over_best = standing.over_best(arm.name)
    tpot = repeats.median(lambda repeat: repeat.tpot.median if repeat.tpot else None)
    return {
        "batch": arm.changes["batch"],
        "K": arm.changes["K"],
        "drafter_batch": arm.changes.get("drafter_batch", _PLAIN),
        "speed": repeats.speed.median,
        **_ratio("x_plain", over_plain, arm.name == standing.plain),
        **_ratio("x_best", over_best, arm.name == standing.best),
        "tpot": milliseconds(tpot),
        "per_user": 1 / tpot if tpot else None,
        "acceptance_length": repeats.acceptance_length,
        "in_batch": repeats.median(lambda repeat: repeat.mean_sequences),
        "repeats": len(repeats.each),
        "same_texts": repeats.same_texts(standing.arms[standing.plain]) if over_plain else None,
        "wrong_tokens": repeats.num_wrong,
        "verdict": _verdict(arm.name, standing),
    }


def _doubts(rows: Mapping[str, Row]) -> Iterator[str]:
    """What says that an arm may be fast because it is wrong."""
    for name, row in rows.items():
        if row["wrong_tokens"]:
            yield f"wrong: {name}: {display.count(row['wrong_tokens'])} tokens differ from the pair's known text"
    others = [name for name, row in rows.items() if row["same_texts"] is not None and row["same_texts"] < 1]
    if others:
        named = "; ".join(others)
        yield f"texts differ from plain decoding's in {named}: specgen verify says whether rounding explains it"


def _ratio(name: str, found: Speedup | None, itself: bool) -> dict[str, object]:
    """The columns of a ratio; an arm over itself is 1, without an interval."""
    if found is None:
        return {name: None, f"{name}_ci95": None}
    return {name: found.ratio, f"{name}_ci95": None if itself else found.interval}


def _verdict(arm: str, standing: Standing) -> str:
    if arm == standing.best:
        return "best" if standing.is_judged else "unknown"
    if standing.cannot_win(arm):
        return "dropped"
    if standing.over_best(arm).interval is None:
        return "unknown"
    return "no different" if standing.no_different(arm) else "slower"


def _plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Speed-up and speed over the batch, a line per K, for each drafter batch; plain decoding is in all of them."""
    modes = dict.fromkeys(row["drafter_batch"] for row in rows if row["drafter_batch"] != _PLAIN)
    for y, title in (("x_plain", "Speed-up over plain decoding"), ("speed", "Output tokens per second")):
        for mode in modes:
            yield Plot(
                title=f"{title}, {mode}",
                x="batch",
                y=y,
                series="K",
                where={"drafter_batch": (_PLAIN, mode)},
                reference=1.0 if y == "x_plain" else None,
                order=DRAFT_LENGTHS,
            )


def best_line(rows: Mapping[str, Row]) -> Table:
    """The arms that no other arm beats in both tokens per second for one user and for all (the Pareto front)."""
    spots = [
        Spot(name=name, x=row["per_user"], y=row["speed"])
        for name, row in rows.items()
        if row["per_user"] is not None
    ]
    front = sorted((spot for spot in spots if not any(_beats(one, spot) for one in spots)), key=_user_first)
    groups: dict[str, list[Spot]] = {str(row["K"]): [] for row in rows.values()}
    for spot in spots:
        groups[str(rows[spot.name]["K"])].append(spot)
    chart = Scatter(
        title="Tokens per second for one user and for all",
        ticks=quarters(max((spot.y for spot in spots), default=1)),
        across=quarters(max((spot.x for spot in spots), default=1)),
        show=display.rate,
        label="tokens/s for one user",
        side="tokens/s for all",
        groups=groups,
        guide=[(spot.x, spot.y) for spot in front],
        order=DRAFT_LENGTHS,
    )
    return Table(
        title="Tokens per second for one user and for all",
        note="by K, at every batch size; arms that are not on the best line, listed below, are beaten by one of these "
        "in both",
        lines=chart if spots else None,
        columns=(
            Column(name="arm", title=""),
            Column(name="per_user", unit="tokens/s", show=display.rate),
            Column(name="speed", unit="tokens/s", show=display.rate),
        ),
        rows=tuple({"arm": spot.name, "per_user": spot.x, "speed": spot.y} for spot in front),
    )


def _beats(one: Spot, other: Spot) -> bool:
    """Whether ``one`` is no worse in both numbers, and better in one."""
    return one.x >= other.x and one.y >= other.y and (one.x, one.y) != (other.x, other.y)


def _user_first(spot: Spot) -> tuple[float, float]:
    return spot.x, spot.y


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


def sentence(batch: int, standing: Standing) -> str:
    """The fastest arm at a batch size, by how much, and what is no different; of at least one arm."""
    best, found = standing.best, standing.arms[standing.best]
    if not standing.is_judged:
        ratio = display.ratio(standing.over_reference(best).ratio)
        ahead = f", {ratio} of plain" if standing.plain in standing.arms and best != standing.plain else ""
        return (
            f"At batch {batch}: no verdict, as one repeat has no spread ({_label(best)} was ahead{ahead}): raise "
            "--budget or --repeats."
        )
    parts = [f"At batch {batch}: {_label(best)}"]
    if standing.plain not in standing.arms:
        parts.append("the fastest; plain decoding was not measured")
    elif best != standing.plain:
        parts.append(f"{interval_of(standing.over_reference(best))} of plain")
    parts += [each for each in (_latency(found), f"{display.count(found.speed.median)} tokens/s") if each]
    return "; ".join([", ".join(parts), *_others(standing)]) + "."


def dropped(standing: Standing, arm: str) -> str:
    """Why ``arm`` gets no more repeats."""
    ratio, most = display.ratio(standing.over_best(arm).ratio), display.ratio(standing.at_most(arm))
    done = len(standing.arms[arm].each)
    return (
        f"dropped: {arm}: {ratio} of {_label(standing.best)} after {done} repeats, at {display.percent(DROPPING)} "
        f"confidence at most {most}"
    )


def interval_of(found: Speedup) -> str:
    """``1.87x [1.84, 1.90]``"""
    if found.interval is None:
        return f"{display.ratio(found.ratio)} (one repeat, no interval)"
    return f"{display.ratio(found.ratio)} {display.between(found.interval, display.plain)}"


def _others(standing: Standing) -> Iterator[str]:
    """The same K with the other drafter batch, ``auto``, and whatever else may be as fast."""
    best = standing.best
    k = _label(best).partition(", ")[0]
    twins = [arm for arm in standing.arms if arm != best and _label(arm).partition(", ")[0] == k]
    autos = [arm for arm in standing.arms if _label(arm).startswith("K auto") and arm != best]
    for arm in twins:
        yield _beside(standing, arm, _label(arm).partition(", ")[2])
    if autos and not k.endswith("auto"):
        fastest = max(autos, key=lambda arm: standing.over_best(arm).ratio)
        yield _beside(standing, fastest, _label(fastest).removeprefix("K "))
    told = {*twins, *autos}
    alike = [_label(arm) for arm in standing.arms if arm not in told and standing.no_different(arm)]
    if alike:
        yield f"no different: {' and '.join(alike)}"
    if best == standing.plain and len(standing.arms) > 1:
        drafting = max((a for a in standing.arms if a != best), key=lambda arm: standing.over_best(arm).ratio)
        yield f"with drafts at best {_label(drafting)}, {interval_of(standing.over_best(drafting))} of plain"


def _beside(standing: Standing, arm: str, name: str) -> str:
    """How ``arm`` compares with the best one."""
    found = interval_of(standing.over_best(arm))
    return f"{name} no different, {found}" if standing.no_different(arm) else f"{name} {found} of that"


def _label(arm: str) -> str:
    """The name of an arm without its batch size."""
    return arm.partition(", ")[2]


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
