"""The options of a command: the ``Help`` of its parameters and of its configurations' fields, as typer takes them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from specgen.bundled import pair
from specgen.config import DraftLength, EngineConfig, FormatName, Group, Help, require

Dataset = Annotated[
    str,
    Help(
        "bundled, mt-bench, sharegpt, gsm8k, spec-bench, humaneval, or a file of rows with prompt, messages or "
        "prompt_token_ids, or of an OpenAI batch: JSON lines, gzipped or not, or Parquet. - is standard input.",
        "Prompts",
    ),
]
DataPath = Annotated[
    Path | None,
    Help("Read the named data set from this file or directory instead of the hub.", "Prompts", default=False),
]
NumPrompts = Annotated[int | None, Help("Use only the first N prompts.", "Prompts", default="all")]
Format = Annotated[
    FormatName,
    Help(
        "Beside completions.jsonl: openai for batch_output.jsonl and batch_errors.jsonl as OpenAI's Batch API "
        "writes them, parquet for completions.parquet.",
        "Results",
    ),
]
AsJson = Annotated[bool, Help("Print the report as one JSON document.", "Results", name="json")]


@dataclass(frozen=True)
class Only:
    """The fields of a configuration that a command has as options; without it, all that have a ``Help``."""

    names: str
    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the command, where they are not the field's


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as typer takes it: an option for each parameter, and for each field of a configuration.

    Options are in the order of their groups, those of a group in the order of the parameters.
    """
    parameters: list[Parameter] = []
    configs: dict[str, tuple[type, dict[str, str]]] = {}  # parameter: its type, and the option of each field
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        config, *notes = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if is_dataclass(config):
            assert isinstance(config, type)
            options = _field_options(config, *notes)
            configs[name] = config, {field: option.name for field, option in options.items()}
            parameters += options.values()
        else:
            parameters.append(_option(name, hints[name], parameter.default))

    @wraps(command)
    def run(**given: Any) -> None:  # noqa: ANN401
        for name, (config, options) in configs.items():
            given[name] = _configuration(config, {field: given.pop(name) for field, name in options.items()})
        command(**given)

    order = [None, *get_args(Group)]
    parameters.sort(key=lambda each: order.index(each.annotation.__metadata__[0].rich_help_panel))
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
    return run


def _field_options(config: type, only: Only | None = None) -> dict[str, Parameter]:
    """The option of each field of ``config`` that has a ``Help`` and that ``only``, if there is one, names."""
    hints = get_type_hints(config, include_extras=True)
    names = [name for name, hint in hints.items() if get_origin(hint) is Annotated]
    defaults = {name: getattr(config, name, None) for name in names} | dict(only.defaults if only else {})
    return {
        name: _option(hints[name].__metadata__[0].name or name, hints[name], defaults[name])
        for name in (only.names.split() if only else names)
    }


def _option(name: str, hint: Any, default: Any) -> Parameter:  # noqa: ANN401
    """The parameter ``name`` with an option or argument of typer's in its annotation."""
    kind, help = get_args(hint)
    if isinstance(help, Help):
        if help.parse is not None:
            kind, default = (str | None, None) if default is None else (str, str(default))
        elif get_origin(kind) is tuple:
            kind, default = list[str], list(default)
        elif default is None:
            kind = kind | None  # a command without it has another in its place
        switch = f"--{(help.name or name).replace('_', '-')}"
        option = typer.Option(
            *((switch,) if default is not True else ()),  # typer's own are a pair, --it and --no-it
            help=help.text,
            rich_help_panel=help.group,
            show_default=help.default,
            metavar=help.metavar,
            min=help.least,
        )
        hint = Annotated[kind, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _configuration(config: type, given: dict[str, Any]) -> Any:  # noqa: ANN401
    """A ``config`` of what the command line gave; without --model an engine has the bundled pair."""
    hints = get_type_hints(config, include_extras=True)
    for name, value in given.items():
        if (parse := hints[name].__metadata__[0].parse) is not None and value is not None:
            given[name] = parse(value)
        elif isinstance(value, list):
            given[name] = tuple(value)
    if config is EngineConfig:
        length = DraftLength.of(given.get("num_spec_tokens", EngineConfig.num_spec_tokens))
        given["model"], given["drafter"] = pair(given.get("model"), given.get("drafter"), length)
    return config(**given)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """The numbers of the option ``name`` from ``1,8,32``; ``UserError`` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    require(
        all(part.isdecimal() and int(part) >= 1 for part in parts),
        f"{name} is {text!r}: write numbers of at least 1 with commas between, such as 1,8,32",
    )
    return tuple(int(part) for part in parts)
