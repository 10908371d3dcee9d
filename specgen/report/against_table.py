"""A run beside published figures, as plain text for a terminal."""

import textwrap
from collections.abc import Sequence

from specgen.display import DASH, Show, between, hundredths, percent, plain, table
from specgen.report.against import LENGTH, Beside
from specgen.report.references import Reference

_WIDTH = 100  # columns


def render(run: str, num_spec_tokens: int, reference: Reference, lines: Sequence[Beside]) -> str:
    """``lines`` of ``against.compare`` for the run called ``run`` with its K; ends with a line break."""
    about = (
        f"{run} against {reference.name}: {reference.model} with {reference.drafter}, "
        f"K {reference.num_spec_tokens}; {reference.setting}"
    )
    header = ("", "this run", "95 %", "reference", "inside")
    sections = [
        [*textwrap.wrap(about, _WIDTH, break_on_hyphens=False), reference.source],
        table(header, [_row(line) for line in lines]),
        textwrap.wrap(verdict(num_spec_tokens, reference, lines), _WIDTH),
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


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


def _row(line: Beside) -> tuple[str, ...]:
    show: Show = plain if line.figure == LENGTH else percent
    error = "" if line.stderr is None else f" ± {hundredths(line.stderr)}"
    unknown = "not compared" if line.ours is None else DASH
    inside = {None: unknown, True: "yes", False: "no"}[line.inside]
    return line.figure, show(line.ours), between(line.ci95, show), show(line.theirs) + error, inside
