"""Two heads request by request: a point for each, and those on which the heads differ most."""

import json
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from specgen.comparing.finished_runs import HeadRuns
from specgen.comparing.head_figures import HeadPair
from specgen.display import DASH, clip, count, plain
from specgen.report.charts import Scatter, Spot, lengths
from specgen.report.paired_requests import Pair, with_steps
from specgen.report.table import Column, Row, Table

_SHOWN = 5  # on either side
_POINTS = 1000  # of a chart
_PROMPT = 80  # characters
_SPECIAL = re.compile(r"<[|/\w]+>")  # tokens of chat templates


def moved_table(pair: HeadPair, runs: HeadRuns) -> Table:
    """A point for each request, and a row for each that ``moved`` most."""
    most = moved(pair)
    run = runs.of(pair.data, pair.ours)
    assert run is not None
    prompts = {
        name: last_words(row["prompt"])
        for name, row in rows_of(run.directory, {ours.name for ours, _ in most}).items()
    }
    columns = [Column(name="request"), Column(name="category"), Column(name="steps")]
    columns += [Column(name=name, title=name, show=plain) for name in (pair.first, pair.ours, "difference")]
    return Table(
        title=f"{pair.data}: {pair.ours} against {pair.first}",
        note="the mean acceptance length of each request; in the table those that moved most, with the end of their "
        f"prompt and the steps of {pair.ours}; above the line {pair.ours} is ahead",
        lines=_points(pair, run.report["num_spec_tokens"]) if most else None,
        columns=tuple(columns),
        rows=tuple(_row(each, pair, prompts) for each in most),
    )


def moved(pair: HeadPair) -> list[Pair]:
    """The requests with the largest differences of their own mean acceptance length, gains first."""
    ordered = sorted(with_steps(pair.requests), key=gain, reverse=True)
    gains = [each for each in ordered if gain(each) > 0][:_SHOWN]
    losses = [each for each in ordered if gain(each) < 0][-_SHOWN:]
    return [*gains, *losses]


def _points(pair: HeadPair, num_spec_tokens: int) -> Scatter:
    """A point for each request, or for every n-th where they are many."""
    drafted, ticks = with_steps(pair.requests), lengths(num_spec_tokens)
    every = -(-len(drafted) // _POINTS)
    spots = [Spot(name=ours.name, x=first.length, y=ours.length) for ours, first in drafted[::every]]
    return Scatter(
        title=f"{'One in ' + count(every) + ' requests' if every > 1 else 'Requests'} of {pair.data}",
        ticks=ticks,
        show=plain,
        across=ticks,
        label=pair.first,
        side=pair.ours,
        groups={pair.ours: spots},
        guide=[(ticks[0], ticks[0]), (ticks[-1], ticks[-1])],
    )


def gain(pair: Pair) -> float:
    """How much longer the first of ``pair`` is."""
    ours, first = pair
    return ours.length - first.length


def _row(each: Pair, pair: HeadPair, prompts: dict[str, str]) -> Row:
    ours, first = each
    return {
        "request": f"{ours.name}: {prompts.get(ours.name, '')}",
        "category": ours.category or DASH,
        "steps": ours.num_steps,
        pair.first: first.length,
        pair.ours: ours.length,
        "difference": gain(each),
    }


def rows_of(directory: Path, names: Container[str]) -> dict[str, dict[str, Any]]:
    """The rows of the run in ``directory`` with the ids ``names``."""
    with (directory / "completions.jsonl").open("rb") as lines:
        return {row["id"]: row for row in map(json.loads, lines) if row["id"] in names}


def last_words(prompt: object) -> str:
    """The end of a prompt as the model saw it, without the tokens of chat templates."""
    words = " ".join(_SPECIAL.sub(" ", str(prompt)).split())
    return clip(words[::-1], _PROMPT)[::-1]
