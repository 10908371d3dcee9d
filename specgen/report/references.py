"""Published figures from ``eval/reference/``, each with its source, and whether a run's intervals contain them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specgen.config import UserError, require
from specgen.config.bundled import evaluation_directory
from specgen.config.json_fields import check_fields, load_json
from specgen.report.display import DASH, ends, hundredths, percent, plain
from specgen.report.intervals import wilson
from specgen.report.report import Report
from specgen.report.table import Column, Row, Table
from specgen.report.terminal import ALARMING, Part

LENGTH = "mean acceptance length"
_COLUMNS = (
    Column(name="figure", title=""),
    Column(name="ours", title="this run"),
    Column(name="ci95", title="95 %"),
    Column(name="theirs", title="reference"),
    Column(name="inside"),
)


@dataclass(frozen=True, kw_only=True)
class PublishedAccuracy:
    """An accuracy and its standard error; ``measure`` is ``TASK METRIC`` as lm-eval names them."""

    measure: str
    value: float
    stderr: float

    def __post_init__(self) -> None:
        require(0 <= self.value <= 1, f"accuracy is {self.value}: write a share in [0, 1]")
        require(self.stderr >= 0, f"stderr is {self.stderr}: write a share of at least 0")
        require(
            len(self.measure.split(" ")) == 2,
            f"measure is {self.measure!r}: write the task, a space and the metric with its filter",
        )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Published figures of a target and a drafter; ``source`` is their address."""

    name: str
    source: str
    model: str
    drafter: str
    setting: str  # prompts and lengths
    num_spec_tokens: int
    mean_acceptance_length: float | None
    acceptance: tuple[float, ...]  # [K], joint; empty if not published
    accuracy: tuple[PublishedAccuracy, ...]

    def __post_init__(self) -> None:
        length, k = self.mean_acceptance_length, self.num_spec_tokens
        require(
            self.source.startswith("https://"), f"source is {self.source!r}: write the address of the figures"
        )
        require(k >= 1, f"num_spec_tokens is {k}: write the draft length, at least 1")
        require(
            length is None or 1 <= length <= k + 1,
            f"mean_acceptance_length is {length}: a step yields 1 to {k + 1} tokens",
        )
        require(
            len(self.acceptance) in (0, k),
            f"acceptance has {len(self.acceptance)} figures: write one for each of {k} drafts, or none",
        )
        falling = [1.0, *self.acceptance, 0.0]
        require(
            falling == sorted(falling, reverse=True),
            f"acceptance is {list(self.acceptance)}: write joint rates, shares that never rise",
        )


def load_reference(name: str) -> Reference:
    """The bundled reference ``name``; ``UserError`` listing the bundled ones for any other name."""
    files = {path.stem: path for path in sorted((evaluation_directory() / "reference").glob("*.json"))}
    require(name in files, f"against is {name!r}, which is not a reference: use one of {', '.join(files)}")
    return read_reference(files[name])


def read_reference(path: Path) -> Reference:
    """The reference in ``path``; ``UserError`` for invalid content."""
    value = load_json(path, "fix it")
    try:
        known = check_fields({**value, "name": path.stem}, Reference)
        accuracy = (PublishedAccuracy(**check_fields(each, PublishedAccuracy)) for each in known["accuracy"])
        return Reference(**known | {"acceptance": tuple(known["acceptance"]), "accuracy": tuple(accuracy)})
    except (UserError, TypeError) as error:
        raise UserError(f"{path} is not a reference: {error}") from error


# --- a run against them ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FigureComparison:
    """One figure of a run and the published one; ``ours`` and ``ci95`` are None where they are not comparable."""

    figure: str
    ours: float | None
    ci95: Sequence[float] | None
    theirs: float
    stderr: float | None = None  # of the published figure

    @property
    def inside(self) -> bool | None:
        """Whether the published figure lies in the run's interval; None without an interval."""
        return None if self.ci95 is None else self.ci95[0] <= self.theirs <= self.ci95[1]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "inside": self.inside}


def load_results(directory: Path) -> dict[str, Any]:
    """lm-eval's ``results.json`` in a run's directory; empty without one. ``UserError`` for any other content."""
    path = directory / "results.json"
    if not path.is_file():
        return {}
    value = load_json(path, "run `specgen eval` again")
    require(
        all(isinstance(value.get(key), dict) for key in ("results", "n-samples")),
        f"{path} holds no results of lm-eval: run `specgen eval` again",
    )
    return value


def compare_figures(
    report: Report, results: Mapping[str, Any], reference: Reference
) -> Iterator[FigureComparison]:
    """Compare a run's ``report`` and ``results.json`` (from ``load_results``) with ``reference``.

    Mean acceptance lengths are comparable at equal K only; the joint rate at a position does not depend on K.
    """
    if reference.mean_acceptance_length is not None:
        same = report.num_spec_tokens == reference.num_spec_tokens
        yield FigureComparison(
            figure=LENGTH,
            ours=report.mean_acceptance_length if same else None,
            ci95=report.mean_acceptance_length_ci95 if same else None,
            theirs=reference.mean_acceptance_length,
        )
    for position, rate in enumerate(reference.acceptance):
        ours = report.acceptance[position] if position < len(report.acceptance) else None
        yield FigureComparison(
            figure=f"acceptance at token {position}",
            ours=ours.rate if ours else None,
            ci95=ours.ci95 if ours else None,
            theirs=rate,
        )
    for accuracy in reference.accuracy:
        yield _accuracy(results, accuracy)


def _accuracy(results: Mapping[str, Any], accuracy: PublishedAccuracy) -> FigureComparison:
    """Wilson's interval over the samples: exact for scores of 0 and 1, too wide for scores in between."""
    task, metric = accuracy.measure.split(" ")
    ours = results.get("results", {}).get(task, {}).get(metric)
    samples = results.get("n-samples", {}).get(task)
    require(
        ours is None or 0 <= ours <= 1,
        f"{accuracy.measure} of the run is {ours}, not a share in [0, 1]: run `specgen eval` again",
    )
    ci95 = wilson(ours, samples["effective"]) if ours is not None and samples is not None else None
    return FigureComparison(
        figure=accuracy.measure, ours=ours, ci95=ci95, theirs=accuracy.value, stderr=accuracy.stderr
    )


def of_figures(
    run: str, num_spec_tokens: int, reference: Reference, lines: Sequence[FigureComparison]
) -> Iterator[Part]:
    """What the terminal shows of ``lines`` (from ``compare_figures``) for the run named ``run``."""
    yield (
        f"{run} against {reference.name}: {reference.model} with {reference.drafter}, "
        f"K {reference.num_spec_tokens}; {reference.setting}"
    )
    yield reference.source
    yield Table(title=reference.name, columns=_COLUMNS, rows=tuple(map(_row, lines)))
    yield _summary(num_spec_tokens, reference, lines)


def _summary(num_spec_tokens: int, reference: Reference, lines: Sequence[FigureComparison]) -> str:
    """Which published figures lie outside the run's intervals, and what is not comparable."""
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


def _row(line: FigureComparison) -> Row:
    show = plain if line.figure == LENGTH else percent
    error = "" if line.stderr is None else f" ± {hundredths(line.stderr)}"
    unknown = "not compared" if line.ours is None else DASH
    return {
        "figure": line.figure,
        "ours": show(line.ours),
        "ci95": ends(line.ci95, show),
        "theirs": show(line.theirs) + error,
        "inside": {None: unknown, True: "yes", False: "no"}[line.inside],
        ALARMING: line.inside is False,
    }
