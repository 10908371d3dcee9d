"""The numbers of a report: each is named, shown and placed here, once; and grids of them, of arms and of groups.

A group is what a number is of: the ``Report`` of a run, or the ``Speculation`` of some of its requests.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from specgen.record.record_rows import PARTS
from specgen.report.display import DASH, Show, between, count, percent, plain, rate, ratio, seconds
from specgen.report.intervals import Estimate
from specgen.report.table import Column, Row, Table


@dataclass(frozen=True, kw_only=True)
class Figure(Column):
    """One number of a group, in the ``tables`` with these names; ``short`` is its title where columns are narrow.

    ``of`` computes it, None where it is not known; without ``of`` it is the group's field ``name``, or the group has
    none. A table leaves it out where it is ``needed`` by no group.
    """

    tables: str = ""
    short: str | None = None
    of: Callable[[Any], Any] | None = None
    needed: Callable[[Any], bool] | None = None

    @classmethod
    def estimated(
        cls, name: str, of: Callable[[Any], Estimate | None], *, title: str | None = None, show: Show = plain
    ) -> Self:
        """One whose interval is computed with it."""
        return cls(name=name, title=title, show=show, of=of, interval=f"ends of {name}")

    def value(self, group: object) -> Any:  # noqa: ANN401, what its ``show`` takes
        return getattr(group, self.name, None) if self.of is None else self.of(group)

    def cells(self, group: object) -> Row:
        """The cells of a row: the value, and its interval if the figure has one."""
        value = self.value(group)
        if not self.interval:
            return {self.name: value}
        found = Estimate(value, getattr(group, self.interval, None)) if self.of is None else value
        return dict(zip((self.name, self.interval), found or (None, None), strict=True))


def _counter(name: str, tables: str, short: str | None = None) -> Figure:
    return Figure(name=name, show=count, tables=tables, short=short)


def _of_part(part: str) -> Figure:
    return Figure(
        name=f"{part}_length",
        title=f"  of {part}",
        show=plain,
        tables="runs",
        of=lambda report: (found := report.parts.get(part)) and found.mean_acceptance_length,
    )


def _rows(name: str, title: str) -> Figure:
    return Figure(
        name=f"rows_{name}", title=title, show=count, tables="runs", of=lambda found: found.rows()[name]
    )


def _of_time(name: str, title: str, of: Callable[[Any], Any]) -> Figure:
    """A time of one run each, which has no spread and so no ratio."""
    return Figure(name=name, title=title, show=seconds, tables="runs times", of=of)


# Every number that a table has of a group. Tables: "report" of one run, its "group" by category and the like, "runs"
# side by side (the "times" without a ratio), "arm" of an evaluation, "csv" of a comparison.
FIGURES = (
    _counter("num_requests", "report runs group csv", "requests"),
    _counter("num_prompt_tokens", "report"),
    _counter("num_cached_tokens", "report"),
    _counter("total_num_output_tokens", "report runs"),
    _counter("num_drafts", "report runs group csv", "drafts"),
    _counter("num_steps_without_drafts", "csv"),
    _counter("num_draft_tokens", "report runs"),
    _counter("num_accepted_tokens", "report runs csv"),
    _counter("num_preemptions", "report"),
    _counter("num_unfinished", "report"),
    Figure(
        name="mean_acceptance_length",
        title="mean acceptance length",
        short="length",
        interval="mean_acceptance_length_ci95",
        show=plain,
        tables="runs group arm",
    ),
    Figure(
        name="mean_acceptance_length_per_request", title="  mean over requests", show=plain, tables="runs"
    ),
    *map(_of_part, PARTS),
    Figure(
        name="length_over_all_steps",
        title="  over all steps",
        short="over all steps",
        show=plain,
        tables="runs arm",
        needed=lambda group: group.num_drafts and group.num_steps_without_drafts,
    ),
    Figure(
        name="cut_rate",
        title="  cut by constraints",
        short="cut",
        show=percent,
        tables="runs group",
        needed=lambda group: group.cut_rate is not None,
    ),
    Figure(name="draft_acceptance_rate", short="drafts accepted", show=percent, tables="group"),
    Figure(
        name="tokens_per_step",
        title="tokens per step",
        show=plain,
        tables="runs group arm",
        needed=lambda group: group.received is not None,
    ),
    Figure(name="auc", tables="csv", of=lambda group: group.confidence.auc),
    Figure(name="ece", tables="csv", of=lambda group: group.confidence.ece),
    _rows("target", "target rows"),
    _rows("target_rejected", "  rejected drafts"),
    _rows("first_pass", "drafter KV fill"),
    _rows("first_pass_wasted", "  padding"),
    _rows("loop", "draft loop rows"),
    Figure(name="output_tokens_per_second", title="output tokens/s", show=rate, tables="runs times"),
    _of_time("ttft", "time to first token", lambda found: found.ttft_seconds and found.ttft_seconds.mean),
    _of_time("tpot", "time per output token", lambda found: found.tpot_seconds and found.tpot_seconds.mean),
    _of_time("step", "decode step", lambda found: (step := found.steps.get("decode")) and step.mean_seconds),
    Figure(
        name="times_plain",
        title="against plain decoding",
        show=ratio,
        tables="runs times",
        of=lambda found: found.baseline and found.baseline.ratio,
    ),
)


def field_of(of: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The field ``name`` of what ``of`` finds, None where that is None."""

    def found(*group: object) -> Any:  # noqa: ANN401
        each = of(*group)
        return None if each is None else getattr(each, name)

    return found


def chosen(table: str, groups: Iterable[object]) -> list[Figure]:
    """The figures that ``table`` shows of ``groups``."""
    groups = list(groups)
    return [
        each
        for each in FIGURES
        if table in each.tables.split() and (each.needed is None or any(map(each.needed, groups)))
    ]


def by_position(groups: Iterable[Any], most: int | None = None, title: str = "token") -> list[Figure]:
    """Joint acceptance by draft position, at most of so many."""
    longest = max((len(group.acceptance) for group in groups), default=0)

    def at(position: int) -> Figure:
        return Figure(
            name=f"{title} {position}",
            show=percent,
            of=field_of(lambda group: dict(enumerate(group.acceptance)).get(position), "rate"),
        )

    return [at(position) for position in range(longest if most is None else min(most, longest))]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """``figures`` of groups; each group with the cells that tell it from the others, such as its arm or category."""

    groups: Sequence[tuple[Row, Any]]
    figures: Sequence[Figure]

    def table(self, keys: Sequence[Column], title: str, **others: Any) -> Table:  # noqa: ANN401, fields of a table
        """A row for each group, a column for each figure."""
        columns = [each if each.short is None else replace(each, title=each.short) for each in self.figures]
        rows = tuple(
            {**own, **{key: cell for each in self.figures for key, cell in each.cells(group).items()}}
            for own, group in self.groups
        )
        return Table(
            title=title, columns=(*keys, *columns), rows=rows, **{"num_keys": max(1, len(keys))} | others
        )

    def across(self, title: str) -> Table:
        """A row for each figure that some group has, a column for each group's ``arm``, and ratios to the first."""
        names = [str(own["arm"]) for own, _ in self.groups]
        columns = [Column(name="metric", title=""), Column(name="run 0", title=names[0])]
        for at, name in enumerate(names[1:], start=1):
            columns += [Column(name=f"run {at}", title=name), Column(name=f"ratio {at}", title="ratio")]
        rows = []
        for each in self.figures:
            values = [each.value(group) for _, group in self.groups]
            ratios = (
                [""] * len(values)
                if "times" in each.tables
                else [_over(value, values[0]) for value in values]
            )
            rows.append(_across(each.heading, map(each.show, values), ratios))
            if each.interval:
                ends = (between(getattr(group, each.interval), each.show) for _, group in self.groups)
                rows.append(_across("  95 %", ends, [""] * len(values)))
        known = (row for row in rows if set(row.values()) - {row["metric"], DASH, ""})
        return Table(title=title, columns=tuple(columns), rows=tuple(known), num_keys=2, group=2)


def _across(label: str, cells: Iterable[str], ratios: Iterable[str]) -> dict[str, str]:
    row = {"metric": label}
    for at, (cell, over) in enumerate(zip(cells, ratios, strict=True)):
        row |= {f"run {at}": cell, f"ratio {at}": over}
    return row


def _over(number: object, first: object) -> str:
    """The ratio of two numbers, of which the second is not 0."""
    if not isinstance(number, int | float) or not isinstance(first, int | float) or not first:
        return ""
    return ratio(number / first)
