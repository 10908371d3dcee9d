"""Studies as data: tasks, number of questions, and the arms to compare."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from specgen.config import EngineConfig, UserError, choices, option, parse_batch_size, require, shown
from specgen.config.bundled import evaluation_directory
from specgen.config.errors import did_you_mean
from specgen.config.field_types import number, whole
from specgen.config.json_fields import check_keys, load_json
from specgen.engine.arms import DECODING, Arm

_SETTINGS = ("drafter_batch", "num_spec_tokens", "attention", "cuda_graphs", "dtype", "temperature")
_LATER = ("kv_dtype",)  # kept only where they are set, so that an evaluation of an earlier version goes on
_NAMED = {"padded": "padded", "non-padded": "non-padded", "baseline": "plain"}  # name: decoding
ALL_NAMED = ",".join(_NAMED)
OF_NGRAMS = "padded,baseline"  # which have no drafter batch


def named_arms(text: str) -> tuple[Arm, ...]:
    """The arms in a comma-separated list; ``UserError`` for an unknown name."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        require(
            name in _NAMED,
            f"arm {name!r} is unknown{did_you_mean(name, _NAMED)}: use {', '.join(_NAMED)}, or --study for others",
        )
    return tuple(Arm(name=name, changes=DECODING[_NAMED[name]]) for name in names)


def arm_of(value: object) -> Arm:
    """The arm of a JSON object in a study file; ``UserError`` for invalid settings.

    Settings that are null or missing come from the command line. ``num_spec_tokens`` is a number (0 for plain
    decoding) or ``auto``.
    """
    try:
        known = check_keys(value, needed={"name"}, known={"name", *_SETTINGS, *_LATER})
    except UserError as error:
        raise UserError(f"of the arm {shown(value)} {error}") from error
    name = known.pop("name")
    arm = Arm(name=name, changes={key: setting for key, setting in known.items() if setting is not None})
    require(
        isinstance(name, str) and name not in ("", "..") and Path(name).name == name,
        f"an arm is named {shown(name)}: use the name of a directory, which it gets",
    )
    for field, names in choices(EngineConfig).items():
        setting = arm.changes.get(field)
        require(
            setting is None or setting in names,
            f"{field} of arm {name!r} is {setting!r}: use one of {', '.join(names)}",
        )
    arm.configure(EngineConfig(model="", drafter=""))  # the ranges are checked there
    temperature = number(arm.changes.get("temperature", 0), f"temperature of arm {name!r}")
    require(temperature >= 0, f"temperature of arm {name!r} is {temperature}: use 0 (greedy) or more")
    return arm


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is asked, where a study or a command says so; None of ``limit`` and shots means lm-eval's default."""

    limit: int | None = option(None, "Study", "Only the first N documents of each task.", shown="all")
    num_fewshot: int | None = option(None, "Study", "Examples before each question.", shown="the task's")
    max_batch_size: int | None = option(
        None,
        "Running",
        "Sequences per batch.",
        metavar="INTEGER|auto",
        shown="auto, or that of --study",
        parse=parse_batch_size,
    )

    def __post_init__(self) -> None:
        for field, least in (("limit", 1), ("num_fewshot", 0), ("max_batch_size", 0)):
            value, name = getattr(self, field), field.replace("_", "-")
            require(value is None or whole(value, name) >= least, f"{name} is {value}: use at least {least}")

    def over(self, study: "Study") -> "Study":
        """``study`` with those that are said."""
        return replace(study, **{name: value for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How the tasks of a study are asked, whatever they are; None is as the task says."""

    apply_chat_template: bool = option(False, "Study", "Render prompts as a chat, examples as earlier turns.")
    data_path: Path | None = option(
        None, "Study", "Directory with the train and test files of gsm8k, instead of the hub."
    )
    confirm_run_unsafe_code: bool = option(
        False,
        "Study",
        "Let tasks such as humaneval run code that the model has written, on this machine; HF_ALLOW_CODE_EVAL=1 says "
        "it to the evaluator too.",
    )
    seed: int = option(0, "Sampling", "With the request's id it determines all random numbers.")
    n: int | None = option(
        None,
        "Sampling",
        "Texts of each question, which differ where the task or an arm samples: for pass@k, and votes.",
        shown="the task's repeats",
        least=1,
    )
    max_new_tokens: int | None = option(
        None,
        "Sampling",
        "Longest text in tokens, reasoning included.",
        shown="the task's, or else 256",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class Study(Limits):
    """Arms on the same questions; ``source`` is the address of the design."""

    name: str
    tasks: tuple[str, ...]
    arms: tuple[Arm, ...]
    source: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [arm.name for arm in self.arms]
        require(bool(self.tasks), "tasks is empty: name at least one")
        require(bool(names), "arms is empty: name at least one")
        require(len(set(names)) == len(names), f"arms are named {', '.join(names)}: give each its own name")

    @classmethod
    def from_json(cls, name: str, value: Mapping[str, Any]) -> Self:
        """The study in a file named ``name``; ``UserError`` if it is invalid."""
        names = {each.name for each in fields(cls)}
        known = check_keys({**value, "name": name}, needed={"tasks", "arms"}, known=names)
        for field, of in (("tasks", str), ("arms", dict)):
            given = known[field]
            require(
                isinstance(given, list) and all(isinstance(each, of) for each in given),
                f"{field} is {shown(given)}: use a list of {'names' if of is str else 'objects'}",
            )
        arms = tuple(map(arm_of, known["arms"]))
        return cls(**{**known, "tasks": tuple(known["tasks"]), "arms": arms})

    def to_json(self) -> dict[str, Any]:
        """The inverse of ``from_json``, with the name; missing settings of an arm are null."""
        arms = [{"name": arm.name, **dict.fromkeys(_SETTINGS), **arm.changes} for arm in self.arms]
        return vars(self) | {"tasks": list(self.tasks), "arms": arms}


def load_study(name: str) -> Study:
    """A bundled study by name, or a JSON file by path; ``UserError`` lists the bundled ones."""
    files = {path.stem: path for path in sorted((evaluation_directory() / "studies").glob("*.json"))}
    path = files.get(name, Path(name))
    require(
        path.is_file(),
        f"study is {name!r}{did_you_mean(name, files)}: name a JSON file, or one of {', '.join(files)}",
    )
    value = load_json(path, "fix it")
    try:
        return Study.from_json(path.stem, value)
    except (UserError, TypeError) as error:
        raise UserError(f"{path} is not a study: {error}") from error
