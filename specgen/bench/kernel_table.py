"""The table of the kernel bench: columns, rows and plots."""

from collections.abc import Iterator, Sequence

from specgen import display
from specgen.bench.decode_pass import Cell, Query, queries
from specgen.bench.output import BenchTable, Plot, Value
from specgen.bench.timing import Timing
from specgen.report.table import Column, Row


def measured_row(
    cell: Cell, query: Query, names: Sequence[str], timings: Sequence[Timing], difference: float, bound: float
) -> Row:
    """The row of one query of one cell; ``timings`` are of the backends ``names``, ``bound`` is in seconds.

    Speedups are over the last backend.
    """
    row: dict[str, Value] = {"num_seqs": cell.num_seqs, "max_seq_len": cell.max_seq_len, "query": query.name}
    for name, timing in zip(names, timings, strict=True):
        row |= {f"{name}_mean": 1e6 * timing.mean, f"{name}_std": 1e6 * timing.std}
    *compared, last = timings
    row |= {f"{name}_speedup": last.mean / each.mean for name, each in zip(names, compared, strict=False)}
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
        *(Column(name=f"{name}_speedup", show=display.ratio) for name in names[:-1]),
        Column(name="bound", unit="us"),
        *(Column(name=f"{name}_over_bound", show=display.ratio) for name in names),
        Column(name="difference", show=display.percent),
        Column(name="kernels"),
    )


def _plots(names: Sequence[str], num_spec_tokens: int) -> Iterator[Plot]:
    """Per kind of query the speedups over the last backend, and the first backend over its bound."""
    shown = {f"{name}_speedup": f"{name} against {names[-1]}" for name in names[:-1]}
    shown[f"{names[0]}_over_bound"] = f"{names[0]} over the memory bound"
    for y, what in shown.items():
        for query in queries(num_spec_tokens):
            title = f"{what}, query {query.name}"
            yield Plot(title=title, x="num_seqs", y=y, series="max_seq_len", where={"query": (query.name,)})


def empty_table(conditions: Row, names: Sequence[str], num_spec_tokens: int) -> BenchTable:
    """The table of the backends ``names``, without rows."""
    return BenchTable(
        name="kernels",
        title="Attention of one layer in a decode pass",
        conditions=conditions,
        columns=_columns(names),
        rows=(),
        plots=tuple(_plots(names, num_spec_tokens)),
        num_keys=3,
    )


def ordered(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows grouped by kind of query, each in the order measured."""
    kinds = list(dict.fromkeys(row["query"] for row in rows))
    return tuple(sorted(rows, key=lambda row: kinds.index(row["query"])))
