"""The table of a tune: its arms beside plain decoding and beside the fastest, the sentences, and the best line."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from specgen import display
from specgen.bench.advice import sentence
from specgen.bench.output import BenchTable, Plot, Value
from specgen.bench.race import Standing
from specgen.bench.repeats import Speedup
from specgen.bench.throughput_table import milliseconds
from specgen.engine.arms import Arm
from specgen.report.charts import DRAFT_LENGTHS, Scatter, Spot, quarters
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
