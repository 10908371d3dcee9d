"""Published figures from ``eval/reference/``, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from specgen.bundled import evaluation_directory
from specgen.config import UserError, require
from specgen.json_fields import check_fields, load_json


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

    @classmethod
    def from_json(cls, name: str, value: Mapping[str, Any]) -> Self:
        """The reference in a file named ``name``; ``UserError`` for a missing or unknown key."""
        known = check_fields({**value, "name": name}, cls)
        accuracy = tuple(
            PublishedAccuracy(**check_fields(entry, PublishedAccuracy)) for entry in known["accuracy"]
        )
        return cls(**{**known, "acceptance": tuple(known["acceptance"]), "accuracy": accuracy})


def load_reference(name: str) -> Reference:
    """The bundled reference ``name``; ``UserError`` listing the bundled ones for any other name."""
    files = {path.stem: path for path in sorted((evaluation_directory() / "reference").glob("*.json"))}
    require(name in files, f"against is {name!r}, which is not a reference: use one of {', '.join(files)}")
    return read_reference(files[name])


def read_reference(path: Path) -> Reference:
    """The reference in ``path``; ``UserError`` for invalid content."""
    value = load_json(path, "fix it")
    try:
        return Reference.from_json(path.stem, value)
    except (UserError, TypeError) as error:
        raise UserError(f"{path} is not a reference: {error}") from error
