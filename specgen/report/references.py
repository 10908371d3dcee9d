"""Published figures from ``eval/references.json``, each with its source, and whether a run's intervals contain them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from specgen.config import SamplingParams, require
from specgen.config.bundled import evaluation_directory
from specgen.config.json_fields import load_json
from specgen.report.acceptance import Acceptance
from specgen.report.display import DASH, count, ends, hundredths, percent, plain, several
from specgen.report.intervals import wilson
from specgen.report.report import Report, requests_of
from specgen.report.table import Column, Row, Table
from specgen.report.terminal import ALARMING, Part

POOLED, REQUESTS = "pooled", "requests"
_LENGTHS = {POOLED: "mean acceptance length", REQUESTS: "mean length over requests"}
_FILES = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet")
_THINKING = ("enable_thinking", "thinking")  # as chat templates name it
_COLUMNS = (
    Column(name="figure", title=""),
    Column(name="theirs", title="reference"),
    Column(name="ours"),
    Column(name="ci95", title="95 %"),
    Column(name="inside"),
)


@dataclass(frozen=True, kw_only=True)
class PublishedAccuracy:
    """An accuracy and its standard error; ``measure`` is ``TASK METRIC`` as lm-eval names them."""

    measure: str
    value: float
    stderr: float


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions under which figures are comparable; None where one is not known, or makes no difference.

    ``dataset`` is a name as of ``--dataset``, of a file its name without the ending, of an evaluation ``eval TASK``.
    ``besides`` has every other parameter of sampling in words, those that rows set themselves too, and of how many
    prompts where not of all.
    """

    dataset: str
    num_spec_tokens: int
    temperature: float
    thinking: bool | None = None
    draft_sampling: str | None = None
    besides: str | None = None

    def shown(self) -> dict[str, str]:
        """Each in words, by label."""
        thinking = {None: "not known", True: "on", False: "off"}[self.thinking]
        return {
            "data set": self.dataset,
            "K": str(self.num_spec_tokens),
            "temperature": f"{self.temperature:g}",
            "thinking": thinking,
            "draft sampling": self.draft_sampling or "not known",
            "with": self.besides or "not known",
        }

    def text(self) -> str:
        """``gsm8k, K 7, temperature 1, thinking off``, without what is not known."""
        (_, data), *others = self.shown().items()
        return ", ".join([data, *(f"{label} {text}" for label, text in others if text != "not known")])


@dataclass(frozen=True, kw_only=True)
class Measurement(Conditions):
    """The figures of one data set. ``mean`` says how the length was averaged, and is required beside one.

    ``pooled`` is 1 + accepted / steps over all requests, ``requests`` the mean of the lengths of each.
    """

    mean: Literal["pooled", "requests"] | None = None
    mean_acceptance_length: float | None = None
    acceptance: tuple[float, ...] = ()  # [K], joint, pooled; empty if not published
    accuracy: tuple[PublishedAccuracy, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Published figures of a target and a drafter; ``source`` is their address."""

    name: str
    source: str
    model: str
    drafter: str
    setting: str  # prompts and lengths
    measurements: tuple[Measurement, ...]

    def to_json(self) -> dict[str, Any]:
        """The origin of the figures, without them."""
        return {name: text for name, text in asdict(self).items() if name != "measurements"}

    def of(self, ours: Conditions) -> Measurement:
        """The figures that were measured as ``ours``; ``UserError`` names the first condition that none has."""
        left = list(self.measurements)
        for name, label in zip(_CONDITIONS, ours.shown(), strict=True):
            agree = (None, getattr(ours, name))
            alike = [each for each in left if agree[1] is None or getattr(each, name) in agree]
            theirs = ", ".join(dict.fromkeys(each.shown()[label] for each in left))
            require(
                bool(alike),
                f"{self.name} has figures for {label} {theirs} ({left[0].text()}), but this run is of {label} "
                f"{ours.shown()[label]}: generate with the same, or choose another reference",
            )
            left = alike
        require(
            len(left) == 1,
            f"{self.name} has {len(left)} figures for {ours.text()} ({'; '.join(each.text() for each in left)}): say "
            "with --chat-template-kwargs whether the model thinks",
        )
        return left[0]


_CONDITIONS = tuple(each.name for each in fields(Conditions))


def load_reference(name: str) -> Reference:
    """The bundled reference ``name``; ``UserError`` listing the bundled ones for any other name."""
    found = {each.name: each for each in load_references()}
    require(
        name in found, f"against is {name!r}, which is not a reference: use one of {', '.join(sorted(found))}"
    )
    return found[name]


def load_references() -> tuple[Reference, ...]:
    """All that are bundled."""
    text = (evaluation_directory() / "references.json").read_bytes()
    return msgspec.json.decode(text, type=tuple[Reference, ...])


# --- a run against them ---------------------------------------------------------------------------


def conditions_of(manifest: Mapping[str, Any], *, has_reasoning: bool = False) -> Conditions:
    """The conditions of the run with this manifest; unless its command says so, it thinks if texts have reasoning.

    ``UserError`` where K was chosen at every step.
    """
    engine, data, temperature = manifest["engine"], manifest["data"], manifest["sampling"]["temperature"]
    require(
        engine.get("spec_length", "fixed") == "fixed",
        "this run chose K at every step (num-spec-tokens auto), as no reference did: generate with a fixed K",
    )
    require(
        "temperature" not in data.get("own_parameters", ()),
        "rows of this run set their own temperature, as those of no reference do: generate without it",
    )
    asked = engine.get("chat_template_kwargs", {})
    thinking = next(
        (asked[name] for name in _THINKING if isinstance(asked.get(name), bool)), has_reasoning or None
    )
    return Conditions(
        dataset=_data_name(data["dataset"]) if "dataset" in data else f"eval {', '.join(data['tasks'])}",
        num_spec_tokens=engine["num_spec_tokens"],
        temperature=temperature,
        thinking=thinking,
        draft_sampling=engine.get("draft_sampling")
        if temperature > 0
        else None,  # else all drafts are greedy
        besides=_besides(manifest),
    )


def _besides(manifest: Mapping[str, Any]) -> str | None:
    """The other sampling parameters and of how many prompts, in words.

    None for an evaluation, whose tasks set them, and where not known.
    """
    if "dataset" not in manifest["data"] or "max_tokens" not in manifest["sampling"]:
        return None
    asked = msgspec.convert(manifest["sampling"], SamplingParams).besides()
    if first := manifest["data"].get("num_prompts"):
        asked += f", on the first {several(first, 'prompt')}"
    besides = ("logprobs", "prompt_logprobs", "seed")  # others decide texts
    own = [name for name in manifest["data"].get("own_parameters", ()) if name not in besides]
    return asked + (f", where rows do not set their own {', '.join(own)}" if own else "")


def without_suffix(path: str) -> PurePath:
    """``path`` without that of a file of rows; a head's name may have another dot."""
    bare = path.removesuffix(".gz")
    return PurePath(bare).with_suffix("") if bare.endswith(_FILES) else PurePath(path)


def _data_name(dataset: str) -> str:
    name = without_suffix(dataset)
    return dataset if name == PurePath(dataset) else name.name


@dataclass(frozen=True, kw_only=True)
class FigureComparison:
    """One figure of a run and the published one; ``ours`` and ``ci95`` are None where the run has none."""

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


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """A run beside the figures that were measured as it was; ``keys`` tell it from other runs of one table."""

    run: Conditions
    measurement: Measurement
    figures: tuple[FigureComparison, ...]
    keys: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        figures = [each.to_json() for each in self.figures]
        return {
            **self.keys,
            "run": asdict(self.run),
            "measurement": asdict(self.measurement),
            "figures": figures,
        }


def compare_run(
    directory: Path,
    report: Report,
    manifest: Mapping[str, Any],
    reference: Reference,
    keys: Mapping[str, str] = MappingProxyType({}),
) -> RunComparison:
    """The run in ``directory`` against ``reference``; ``UserError`` where nothing was measured as it was."""
    run = conditions_of(manifest, has_reasoning="reasoning" in report.parts)
    theirs = reference.of(run)
    figures = (*_acceptance(directory, report, theirs), *_accuracies(load_results(directory), theirs))
    return RunComparison(run=run, measurement=theirs, figures=figures, keys=keys)


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


def _acceptance(directory: Path, report: Report, theirs: Measurement) -> Iterator[FigureComparison]:
    if theirs.mean_acceptance_length is not None and theirs.mean is not None:
        ours, ci95 = report.mean_acceptance_length, report.mean_acceptance_length_ci95
        if theirs.mean == REQUESTS:
            ours = report.mean_acceptance_length_per_request
            ci95 = Acceptance(requests_of(directory, report)).mean_over_requests_interval()
        yield FigureComparison(
            figure=_LENGTHS[theirs.mean], ours=ours, ci95=ci95, theirs=theirs.mean_acceptance_length
        )
    for place, rate in zip(report.acceptance, theirs.acceptance, strict=False):
        yield FigureComparison(
            figure=f"acceptance at token {place.position}", ours=place.rate, ci95=place.ci95, theirs=rate
        )


def _accuracies(results: Mapping[str, Any], theirs: Measurement) -> Iterator[FigureComparison]:
    """Wilson's interval over the samples: exact for scores of 0 and 1, too wide for scores in between."""
    for accuracy in theirs.accuracy:
        task, metric = accuracy.measure.split(" ")
        ours = results.get("results", {}).get(task, {}).get(metric)
        samples = results.get("n-samples", {}).get(task)
        require(
            ours is None or 0 <= ours <= 1,
            f"{accuracy.measure} of the run is {ours}, not a share in [0, 1]: run `specgen eval` again",
        )
        ci95 = wilson(ours, samples["effective"]) if ours is not None and samples is not None else None
        yield FigureComparison(
            figure=accuracy.measure, ours=ours, ci95=ci95, theirs=accuracy.value, stderr=accuracy.stderr
        )


def of_figures(reference: Reference, runs: Sequence[RunComparison]) -> Iterator[Part]:
    """What the terminal shows of ``runs``, one at least, beside ``reference``."""
    yield f"{reference.name}: {reference.model} with {reference.drafter}; {reference.setting}"
    yield "\n".join(dict.fromkeys(f"on {run.measurement.text()}" for run in runs))
    if here := dict.fromkeys(run.run.besides for run in runs if run.run.besides != run.measurement.besides):
        yield "\n".join(
            f"sampled here with {besides}; see that the reference was" for besides in here if besides
        )
    yield reference.source
    keys = (Column(name=name) for name in runs[0].keys)
    yield Table(
        title=reference.name,
        columns=(*keys, *_COLUMNS),
        rows=tuple({**run.keys, **_row(line)} for run in runs for line in run.figures),
        num_keys=len(runs[0].keys) + 1,
    )
    yield " ".join(_summary(runs))


def _summary(runs: Sequence[RunComparison]) -> Iterator[str]:
    """How many published figures lie outside the run's intervals, and what is not comparable."""
    lines = [line for run in runs for line in run.figures]
    inside = [line.inside for line in lines if line.inside is not None]
    yield f"{count(inside.count(False))} of {several(len(inside), 'figure')} outside our intervals."
    measures = {accuracy.measure for run in runs for accuracy in run.measurement.accuracy}
    if any(line.ours is None and line.figure in measures for line in lines):
        yield "`specgen eval` measures accuracy."
    thinks = {run.measurement.thinking for run in runs if run.run.thinking is None} - {None}
    if thinks:
        yield (
            f"The reference has thinking {' and '.join('on' if each else 'off' for each in thinks)}; whether "
            "this model thinks was not said (--chat-template-kwargs) and shows in no text."
        )


def _row(line: FigureComparison) -> Row:
    show = plain if line.figure in _LENGTHS.values() else percent
    error = "" if line.stderr is None else f" ± {hundredths(line.stderr)}"
    unknown = "not compared" if line.ours is None else DASH
    return {
        "figure": line.figure,
        "theirs": show(line.theirs) + error,
        "ours": show(line.ours),
        "ci95": ends(line.ci95, show),
        "inside": {None: unknown, True: "yes", False: "no"}[line.inside],
        ALARMING: line.inside is False,
    }
