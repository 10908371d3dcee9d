"""A run beside published figures, for a terminal."""

from collections.abc import Iterator, Sequence

from specgen.display import DASH, ends, hundredths, percent, plain
from specgen.report.against import LENGTH, Beside
from specgen.report.references import Reference
from specgen.report.table import Column, Row, Table
from specgen.report.terminal import Part

_COLUMNS = (
    Column(name="figure", title=""),
    Column(name="ours", title="this run"),
    Column(name="ci95", title="95 %"),
    Column(name="theirs", title="reference"),
    Column(name="inside"),
)


def of_figures(
    run: str, num_spec_tokens: int, reference: Reference, lines: Sequence[Beside]
) -> Iterator[Part]:
    """``lines`` of ``against.compare`` for the run called ``run`` with its K."""
    yield (
        f"{run} against {reference.name}: {reference.model} with {reference.drafter}, "
        f"K {reference.num_spec_tokens}; {reference.setting}"
    )
    yield reference.source
    yield Table(title=reference.name, columns=_COLUMNS, rows=tuple(map(_row, lines)))
    yield verdict(num_spec_tokens, reference, lines)


def verdict(num_spec_tokens: int, reference: Reference, lines: Sequence[Beside]) -> str:
    """Which published figures the run's intervals leave out, and what could not be compared."""
    compared = [line for line in lines if line.inside is not None]
    outside = [line.figure for line in compared if not line.inside]
    if not compared:
        sentences = ["This run has no figure to compare with the reference."]
    elif outside:
        sentences = [
            f"Outside the run's intervals: {', '.join(outside)} ({len(outside)} of {len(compared)} figures)."
        ]
    else:
        sentences = [f"The run's intervals hold every figure compared ({len(compared)})."]
    if num_spec_tokens != reference.num_spec_tokens and reference.mean_acceptance_length is not None:
        sentences += ["Mean lengths of different draft lengths are not compared."]
    measures = {accuracy.measure for accuracy in reference.accuracy}
    missing = [line.figure for line in lines if line.ours is None and line.figure in measures]
    if missing:
        sentences += [f"Not measured by this run: {', '.join(missing)}; `specgen eval` measures accuracy."]
    return " ".join(sentences)


def _row(line: Beside) -> Row:
    show = plain if line.figure == LENGTH else percent
    error = "" if line.stderr is None else f" ± {hundredths(line.stderr)}"
    unknown = "not compared" if line.ours is None else DASH
    return {
        "figure": line.figure,
        "ours": show(line.ours),
        "ci95": ends(line.ci95, show),
        "theirs": show(line.theirs) + error,
        "inside": {None: unknown, True: "yes", False: "no"}[line.inside],
    }
