"""Studies as data: which tasks, how many questions, and the arms that are compared over them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from specgen.bundled import evaluation_directory
from specgen.config import (
    AttentionName,
    DrafterBatchName,
    DraftLength,
    DtypeName,
    EngineConfig,
    GraphsName,
    UserError,
    choices,
    require,
)
from specgen.json_fields import check_fields, load_json


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one arm changes; None leaves what the command line says.

    ``num_spec_tokens`` is a number, 0 for plain decoding, or ``auto``.
    """

    name: str
    drafter_batch: DrafterBatchName | None = None
    num_spec_tokens: int | str | None = None
    attention: AttentionName | None = None
    cuda_graphs: GraphsName | None = None
    dtype: DtypeName | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        require(bool(self.name), "an arm has an empty name: give it one")
        for field, known in choices(EngineConfig).items():
            value = getattr(self, field, None)
            require(
                value is None or value in known,
                f"{field} of arm {self.name!r} is {value!r}: use one of {', '.join(known)}",
            )
        self.configure(EngineConfig(model="", drafter=""))  # the ranges are checked there
        require(
            self.temperature is None or self.temperature >= 0,
            f"temperature of arm {self.name!r} is {self.temperature}: use 0 (greedy) or more",
        )

    def configure(self, engine: EngineConfig) -> EngineConfig:
        """``engine`` with this arm's changes; the temperature is the requests' and is not in it."""
        changes: dict[str, Any] = {
            "drafter_batch": self.drafter_batch,
            "attention": self.attention,
            "cuda_graphs": self.cuda_graphs,
            "dtype": self.dtype,
        }
        if self.num_spec_tokens is not None:
            changes["num_spec_tokens"] = DraftLength.of(self.num_spec_tokens)
        return replace(engine, **{key: value for key, value in changes.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms over the same questions; ``source`` is where the design is from. None is lm-eval's own setting."""

    name: str
    source: str
    tasks: tuple[str, ...]
    arms: tuple[Arm, ...]
    limit: int | None = None  # questions of each task
    num_fewshot: int | None = None
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        require(bool(self.tasks), "tasks is empty: name at least one")
        require(bool(names), "arms is empty: name at least one")
        require(len(set(names)) == len(names), f"arms are named {', '.join(names)}: give each its own name")
        for field, least in (("limit", 1), ("num_fewshot", 0), ("max_batch_size", 1)):
            value = getattr(self, field)
            require(value is None or value >= least, f"{field} is {value}: use at least {least}")

    @classmethod
    def from_json(cls, name: str, value: Mapping[str, Any]) -> Self:
        """The study that a file called ``name`` holds; ``UserError`` for one that cannot be run."""
        known = check_fields({**value, "name": name}, cls)
        arms = tuple(Arm(**check_fields(arm, Arm)) for arm in known["arms"])
        return cls(**{**known, "tasks": tuple(known["tasks"]), "arms": arms})


def load_study(name: str) -> Study:
    """A bundled study by its name, or one from a JSON file by its path; ``UserError`` lists the bundled ones."""
    files = {path.stem: path for path in sorted((evaluation_directory() / "studies").glob("*.json"))}
    path = files.get(name, Path(name))
    require(path.is_file(), f"study is {name!r}: name a JSON file, or one of {', '.join(files)}")
    value = load_json(path, "mend it")
    try:
        return Study.from_json(path.stem, value)
    except (UserError, TypeError) as error:
        raise UserError(f"{path} is no study: {error}") from error
