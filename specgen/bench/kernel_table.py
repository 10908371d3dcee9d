"""What the kernel table shows: its columns, its rows and its plots."""

from collections.abc import Iterator, Sequence

from specgen import display
from specgen.bench.decode_pass import Cell, Query, queries
from specgen.bench.output import BenchTable, Plot, Value
from specgen.bench.timing import Timing
from specgen.report.table import Column, Row


def measured_row(
    cell: Cell, query: Query, names: Sequence[str], timings: Sequence[Timing], difference: float, bound: float
) -> Row:
    """What ``timings`` of the backends ``names`` gave; ``bound`` in seconds."""
    row: dict[str, Value] = {
        "num_seqs": cell.num_seqs,
        "max_seq_len": cell.max_seq_len,
        "query": query.name,
    }
    for name, timing in zip(names, timings, strict=True):
        row |= {f"{name}_mean": 1e6 * timing.mean, f"{name}_std": 1e6 * timing.std}
    if len(timings) == 2:
        row["speedup"] = timings[1].mean / timings[0].mean
    row["bound"] = 1e6 * bound
    row |= {f"{name}_over_bound": each.mean / bound for name, each in zip(names, timings, strict=True)}
    return row | {"difference": difference}


def _columns(names: Sequence[str]) -> tuple[Column, ...]:
    """The columns of ``measured_row``."""
    times = [
        Column(name=f"{name}_{what}", unit="us", show=display.plain)
        for name in names
        for what in ("mean", "std")
    ]
    return (
        *(Column(name=name) for name in ("num_seqs", "max_seq_len", "query")),
        *times,
        *([Column(name="speedup", show=display.ratio)] if len(names) == 2 else []),
        Column(name="bound", unit="us"),
        *(Column(name=f"{name}_over_bound", show=display.ratio) for name in names),
        Column(name="difference", show=display.percent),
    )


def _plots(names: Sequence[str], num_spec_tokens: int) -> Iterator[Plot]:
    """For each kind of query the speedup where there is one, and how far the first backend is from its bound."""
    shown = {f"{names[0]}_over_bound": f"{names[0]} over the memory's bound"}
    if len(names) == 2:
        shown = {"speedup": f"{names[0]} against {names[1]}"} | shown
    for y, what in shown.items():
        for query in queries(num_spec_tokens):
            title = f"{what}, query {query.name}"
            yield Plot(title=title, x="num_seqs", y=y, series="max_seq_len", where={"query": query.name})


def empty_table(head: Row, names: Sequence[str], num_spec_tokens: int) -> BenchTable:
    """The table of the backends ``names``, without rows."""
    return BenchTable(
        name="kernels",
        title="Attention of one layer in a decode pass",
        head=head,
        columns=_columns(names),
        rows=(),
        plots=tuple(_plots(names, num_spec_tokens)),
        num_keys=3,
    )


def ordered(rows: Sequence[Row]) -> tuple[Row, ...]:
    """One kind of query after the other, each in the order in which it was measured."""
    kinds = list(dict.fromkeys(row["query"] for row in rows))
    return tuple(sorted(rows, key=lambda row: kinds.index(row["query"])))
