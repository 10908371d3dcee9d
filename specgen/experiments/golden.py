"""The mean acceptance length of a head by K: the curve that engines are given for synthetic acceptance."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from specgen.config import require
from specgen.experiments.head_figures import DECISIVE, HEADS_OWN, OF_DATA, refuse_unlike
from specgen.record import columns
from specgen.report.acceptance import Acceptance, length_interval
from specgen.report.display import checkpoint_name, plain
from specgen.report.intervals import Interval
from specgen.report.origin import unlike_settings
from specgen.report.references import Conditions, conditions_of, own_parameters
from specgen.report.report import load_so_far
from specgen.report.table import Column, Table
from specgen.report.terminal import Part

_ALIKE = (
    *(name for name in DECISIVE if name != "engine.num_spec_tokens"),
    *HEADS_OWN,
    *OF_DATA,
    "data.dataset",
)
_COLUMNS = (
    Column(name="num_spec_tokens", title="K"),
    Column(name="length", title="mean acceptance length", show=plain, interval="ci95"),
    Column(name="measured_at", title="of the run with K"),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The mean acceptance length with K drafts, of the steps of a run with at least as many."""

    num_spec_tokens: int
    length: float  # 1 + accepted / steps
    ci95: Interval | None  # over conversations
    measured_at: int  # K of that run


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The points of K = 1, 2, ... of one head, and what they were measured under."""

    model: str
    drafter: str
    conditions: Conditions  # of the run with the largest K
    sampling: Mapping[str, Any]
    num_requests: int
    points: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def parts(self) -> Iterator[Part]:
        """What the terminal shows."""
        rows = tuple(asdict(point) for point in self.points)
        yield f"{self.model} with {self.drafter} on {self.conditions.text()}"
        yield Table(title="Mean acceptance length by K", columns=_COLUMNS, rows=rows)
        yield "\n".join(self._estimates())

    def to_yaml(self) -> str:
        """As InferenceX keeps it: the model, whether it thinks, and the length by K to two decimals."""
        shown = self.conditions.shown().items()
        asked = (f"{label}: {text}" for label, text in shown if label not in ("K", "draft sampling"))
        lines = (
            "Mean acceptance length, 1 + accepted drafts / steps, by draft tokens (K); measured by specgen",
            " | ".join((*asked, f"requests: {self.num_requests}")),
            f"drafter: {self.drafter} | draft_sampling: {self.conditions.draft_sampling or 'greedy'}",
            *self._estimates(),
        )
        curve = {point.num_spec_tokens: round(point.length, 2) for point in self.points}
        mode = {True: "on", False: "off", None: "unknown"}[self.conditions.thinking]
        document: str = yaml.safe_dump({self.model: {f"thinking_{mode}": curve}}, sort_keys=False)
        return "".join(f"# {line}\n" for line in lines) + document

    def _estimates(self) -> Iterator[str]:
        """Which points were not measured at their own K."""
        for at in sorted({point.measured_at for point in self.points}):
            lower = [point for point in self.points if point.measured_at == at > point.num_spec_tokens]
            if lower:
                names = ", ".join(str(point.num_spec_tokens) for point in lower)
                yield f"K {names}: estimated by min(accepted, K) of the steps of the run with K {at}"


def curve_of(directories: Sequence[Path]) -> Curve:
    """The curve of finished runs that differ in K; ``UserError`` names what else they differ in, or what is missing.

    A K without a run is estimated from the run with the next larger one: of a step that accepted so many drafts,
    min(accepted, K) would have been. It is an estimate, as a run with that K begins its steps elsewhere in the text.
    """
    read = [(directory, *load_so_far(directory)) for directory in directories]
    manifests = [manifest for *_, manifest in read]
    unlike = unlike_settings(manifests)
    refuse_unlike(directories, {name: found for name, found in unlike.items() if name.startswith(_ALIKE)})
    found: dict[int, Acceptance] = {}
    for directory, report, manifest in read:
        require(report.state is None, f"{directory}: {report.unfinished}")
        k, own = conditions_of(manifest).num_spec_tokens, own_parameters(manifest)
        require(
            not own,
            f"rows of {directory} set their own {', '.join(own)}, so there is no one setting: generate without them",
        )
        require(k not in found, f"{directory} is a second run with K {k}: give one for each K")
        run = columns.read(directory, k)
        require(
            bool(run.counts.num_drafts.any()),
            f"{directory} has no steps with drafts: give a run of `specgen generate` with a drafter",
        )
        found[k] = Acceptance(run)
    points = []
    for k in range(1, max(found) + 1):
        at = min(each for each in found if each >= k)
        accepted = found[at].over_all_steps(slice(k))
        length = 1 + (accepted.rate or 0.0)
        points.append(
            Point(num_spec_tokens=k, length=length, ci95=length_interval(accepted, k), measured_at=at)
        )
    _, report, manifest = max(read, key=lambda each: each[1].num_spec_tokens)
    return Curve(
        model=manifest.get("served_model_name", checkpoint_name(manifest["engine"]["model"])),
        drafter=checkpoint_name(manifest["engine"]["drafter"]),
        conditions=conditions_of(manifest, has_reasoning="reasoning" in report.parts),
        sampling=manifest["sampling"],
        num_requests=report.num_requests,
        points=tuple(points),
    )
