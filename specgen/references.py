"""Published figures, from ``eval/reference/``, and a run beside them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from specgen.bundled import evaluation_directory
from specgen.config import require
from specgen.json_fields import check_fields

LENGTH = "mean acceptance length"


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A share of right answers and its standard error; ``measure`` is the task and lm-eval's name of the metric."""

    measure: str
    value: float
    stderr: float

    def __post_init__(self) -> None:
        require(0 <= self.value <= 1, f"accuracy is {self.value}: write a share in [0, 1]")
        require(self.stderr >= 0, f"stderr is {self.stderr}: write a share of at least 0")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Figures that somebody published for a target and a head; ``source`` is the address to read them at."""

    name: str
    source: str
    model: str
    drafter: str
    setting: str  # prompts and lengths
    num_spec_tokens: int
    mean_acceptance_length: float | None
    acceptance: tuple[float, ...]  # [K], joint; empty where none was published
    accuracy: tuple[Accuracy, ...]

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

    @classmethod
    def from_json(cls, name: str, value: Mapping[str, Any]) -> Self:
        """The reference that a file called ``name`` holds; ``ValueError`` for a key too few or too many."""
        require(isinstance(value, Mapping), f"{value!r} is not a JSON object")
        known = check_fields({**value, "name": name}, cls)
        accuracy = tuple(Accuracy(**check_fields(entry, Accuracy)) for entry in known["accuracy"])
        return cls(**{**known, "acceptance": tuple(known["acceptance"]), "accuracy": accuracy})


@dataclass(frozen=True, kw_only=True)
class Beside:
    """One figure of a run and the published one; the run's are None where it has none to compare."""

    figure: str
    ours: float | None
    ci95: tuple[float, float] | None
    theirs: float

    @property
    def inside(self) -> bool | None:
        """Whether the published figure lies in the run's interval; None without an interval."""
        return None if self.ci95 is None else self.ci95[0] <= self.theirs <= self.ci95[1]

    def to_json(self) -> dict[str, Any]:
        """The fields, and ``inside``."""
        return {**asdict(self), "inside": self.inside}


def load_reference(name: str) -> Reference:
    """The bundled reference ``name``; ``ValueError`` with the names that exist for any other."""
    files = {path.stem: path for path in sorted((evaluation_directory() / "reference").glob("*.json"))}
    require(name in files, f"against is {name!r}, which is no reference: use one of {', '.join(files)}")
    return read_reference(files[name])


def read_reference(path: Path) -> Reference:
    """The reference in ``path``; ``ValueError``, with the path, for one that does not hold what it must."""
    try:
        return Reference.from_json(path.stem, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no reference: {error}") from error


def compare(report: Mapping[str, Any], reference: Reference) -> tuple[Beside, ...]:
    """A run's ``report.json`` beside ``reference``: length, acceptance by position, accuracy.

    Mean lengths of different draft lengths are not compared; the joint rate at a position is, as it does not
    depend on the drafts after it. A ``report.json`` holds no accuracy.
    """
    lines = []
    if reference.mean_acceptance_length is not None:
        same = report["num_spec_tokens"] == reference.num_spec_tokens
        lines.append(
            Beside(
                figure=LENGTH,
                ours=report["mean_acceptance_length"] if same else None,
                ci95=_interval(report["mean_acceptance_length_ci95"]) if same else None,
                theirs=reference.mean_acceptance_length,
            )
        )
    seen = {row["position"]: row for row in report["acceptance"]}
    for position, rate in enumerate(reference.acceptance):
        row = seen.get(position, {"rate": None, "ci95": None})
        figure = f"acceptance at token {position}"
        lines.append(Beside(figure=figure, ours=row["rate"], ci95=_interval(row["ci95"]), theirs=rate))
    for accuracy in reference.accuracy:
        figure = f"{accuracy.measure}, stderr {100 * accuracy.stderr:.1f} %"
        lines.append(Beside(figure=figure, ours=None, ci95=None, theirs=accuracy.value))
    return tuple(lines)


def _interval(ends: Sequence[float] | None) -> tuple[float, float] | None:
    return None if ends is None else (ends[0], ends[1])
