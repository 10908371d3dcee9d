"""Options of a command for typer, from its parameters and the fields of its configurations, or from a file."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
import yaml

from specgen.config import VLLM_NAMES, EngineConfig, Group, SamplingParams, option, require
from specgen.config.bundled import matrices, pair
from specgen.config.errors import UserError, did_you_mean, first_line
from specgen.config.urls import refuse_url

# What a file cannot say: what asks for no run, and what would start the same run over each time it is repeated.
_NOT_SETTINGS = {"config", "help", "restart", "retry_errors"}

# Fields of ``EngineConfig`` that are options of every command with an engine
ON_A_DEVICE = "device tensor_parallel dtype kv_dtype attention cuda_graphs"
AS_JSON = option(False, "Results", "Print the report as one JSON document.", name="json")


def _read_config(ctx: typer.Context, path: Path | None) -> None:
    """Make the settings of the file at ``path``, or of the bundled one of that name, the command's defaults.

    Its command line overrides them.
    """
    if path is not None:
        known, path = named(ctx), matrices().get(str(path), path)
        ctx.default_map = {known[name].name: value for name, value in settings_of(path, known).items()}


_CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of options by their long names, such as num-prompts: 8; the command line wins. A run writes "
        "the one that repeats it.",
        show_default=False,
        is_eager=True,
        callback=_read_config,
    ),
]


@dataclass(frozen=True)
class Only:
    """The fields of a configuration that are options of a command; without it, all that can be.

    ``defaults`` are the command's, instead of the fields'; a field that is no option has its value from there. One that
    is an ``option`` itself is the field's with other words, and takes values of its default's type.
    """

    names: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    drafts: bool = False  # whether the command refuses K = 0, which then is no remedy for a missing drafter


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` for typer: an option per parameter and per field of a configuration, sorted by group; and --config.

    Arguments and ``typer.Context`` are left as they are.
    """
    parameters: list[Parameter] = []
    # by parameter: type, the option of each field, ``Only.drafts``
    configs: dict[str, tuple[type, dict[str, str], bool]] = {}
    fixed: dict[str, dict[str, Any]] = {}  # by parameter: the values of fields that are no options
    parsed: dict[str, Callable[[str], object]] = {}  # by parameter: what converts its text
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        kind, *notes = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if is_dataclass(kind):
            assert isinstance(kind, type)
            only = next((note for note in notes if isinstance(note, Only)), Only(""))
            options = _field_options(kind, only)
            configs[name] = kind, {field: each.name for field, each in options.items()}, only.drafts
            fixed[name] = {field: value for field, value in only.defaults.items() if field not in options}
            parameters += options.values()
        elif isinstance(parameter.default, Field):
            help = parameter.default.metadata
            parameters.append(_option(name, kind, parameter.default.default, help))
            if help["parse"] is not None:
                parsed[name] = help["parse"]
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @wraps(command)
    def run(config: None = None, **given: Any) -> None:  # noqa: ANN401
        for name, value in given.items():
            refuse_url(name.replace("_", "-"), value)
            if name in parsed and value is not None:
                given[name] = parsed[name](value)
        for name, (kind, options, drafts) in configs.items():
            asked = {field: given.pop(name) for field, name in options.items()}
            given[name] = _configuration(kind, fixed[name] | asked, drafts)
        command(**given)

    order = [None, *get_args(Group)]
    parameters.sort(key=lambda each: order.index(_info(each).rich_help_panel))
    parameters.append(Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=_CONFIG))
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
    return run


def _info(parameter: Parameter) -> Any:  # noqa: ANN401
    """The ``typer.Option`` of ``parameter``; an empty one for a context."""
    return getattr(parameter.annotation, "__metadata__", [typer.Option()])[0]


def _field_options(config: type, only: Only) -> dict[str, Parameter]:
    """The option of each field of ``config`` that can be one, or is in ``only`` if that names any."""
    known, options = {each.name: (each, kind) for each, kind in _leaves(config)}, {}
    for name in only.names.split() or known:
        each, kind = known[name]
        own: Any = only.defaults.get(name, each.default)
        if isinstance(own, Field):
            kind = kind if own.default is None else type(own.default)
            default, help = own.default, own.metadata
        else:
            default, help = own, each.metadata
        if default is MISSING:  # ``_configuration`` supplies another
            kind, default = kind | None, None
        options[name] = _option(help["name"] or name, kind, default, help)
    return options


def _leaves(config: type) -> Iterator[tuple[Field[Any], Any]]:
    """The fields that can be options, with their types; of a configuration within ``config`` its fields."""
    hints = get_type_hints(config)
    for each in fields(config):
        if each.metadata:
            yield each, hints[each.name]
        elif is_dataclass(hints[each.name]):
            yield from _leaves(hints[each.name])


def _option(name: str, kind: Any, default: Any, help: Mapping[str, Any]) -> Parameter:  # noqa: ANN401
    """The parameter ``name`` of a command as an option; ``help`` is the metadata of ``config.option``."""
    if help["parse"] is not None:
        many = isinstance(default, tuple)
        text = ",".join(map(str, default)) if many else str(default)
        kind, default = (str | None, None) if default is None else (str, text)
    elif isinstance(default, tuple):
        kind, default = list[str], list(default)
    switch = f"--{help['name'] or name}".replace("_", "-")
    if help["off"]:
        switch += f"/--{help['off']}"
    elif default is True:
        switch += "/--no-" + switch.removeprefix("--")
    elif default is MISSING:
        default = Parameter.empty
    info = typer.Option(
        switch,
        help=help["text"] + (f" [default: {help['shown']}]" if help["shown"] else ""),
        rich_help_panel=help["group"],
        show_default=not help["shown"],
        metavar=help["metavar"],
        min=help["least"],
    )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _configuration(config: type, given: Mapping[str, Any], drafts: bool) -> Any:  # noqa: ANN401
    """A ``config`` from the values of its options; without --model an engine has the bundled pair."""
    own, hints = {}, get_type_hints(config)
    for each in fields(config):
        value = given.get(each.name)
        if not each.metadata and is_dataclass(hints[each.name]):
            own[each.name] = _configuration(hints[each.name], given, drafts)
        elif isinstance(value, list):
            own[each.name] = tuple(value)
        elif value is not None and each.metadata["parse"] is not None:
            own[each.name] = each.metadata["parse"](value)
        elif each.name in given:
            own[each.name] = value
    if config is EngineConfig:
        length = None if drafts else own.get("num_spec_tokens")
        own["model"], own["drafter"] = pair(own.get("model"), own.get("drafter"), length)
    return config(**own)


def given_fields(ctx: typer.Context) -> frozenset[str]:
    """The fields of ``SamplingParams`` that the command line sets, or the file of --config."""
    options = {each.name: each.metadata.get("name") or each.name for each in fields(SamplingParams)}
    return frozenset(name for name, option in options.items() if is_given(ctx, option))


def settings_of(path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the YAML file ``path`` as values of the parameters ``known``, by name as in the file.

    Texts are left for the command to convert, as those of its command line are: ``off`` is a text and no boolean.
    ``UserError`` for a name that is unknown or set twice and for a value that no option takes.
    """
    root = _root(path)
    if root is None:
        return {}
    require(
        isinstance(root, yaml.MappingNode), f"config {str(path)!r} holds no settings: write NAME: VALUE lines"
    )
    off = {
        other.lstrip("-"): name
        for name, each in known.items()
        for other in getattr(each, "secondary_opts", ())
    }
    found: dict[str, Any] = {}
    for key, node in root.value:
        where = f"config {str(path)!r}, line {key.start_mark.line + 1}"
        name = str(key.value).replace("-", "_")
        name = VLLM_NAMES.get(name, name).replace("_", "-")
        require(name not in _NOT_SETTINGS, f"{where}: {name} is for the command line alone: remove it")
        require(name not in off, f"{where}: {name} is set by its opposite: write {off.get(name)}: false")
        require(
            name in known,
            f"{where}: unknown option {key.value!r}{did_you_mean(name, known)}: "
            "write long options without --, as --help lists them",
        )
        require(name not in found, f"{where}: {name} is set twice: remove one")
        found[name] = _value(node, known[name], f"{where}: {name}")
    return found


def _root(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except OSError as error:
        raise UserError(
            f"config {str(path)!r}{did_you_mean(str(path), matrices())} cannot be read ({error.strerror}): name a "
            "YAML file"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"config {str(path)!r} is not valid YAML ({first_line(error)}): fix it") from error


def _value(node: yaml.Node, parameter: Any, where: str) -> Any:  # noqa: ANN401
    """The text of a scalar, the texts of a list (with commas where the option takes one text), JSON of an object."""
    require(
        not (isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "~", "null")),
        f"{where} has no value: give it one, or remove the line",
    )
    several = getattr(parameter, "multiple", False) or parameter.nargs == -1
    if isinstance(node, yaml.MappingNode):
        return json.dumps(yaml.SafeLoader("").construct_document(node), default=str)
    texts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    require(
        all(isinstance(each, yaml.ScalarNode) for each in texts),
        f"{where} is a list of more than texts: write texts",
    )
    plain = [str(each.value) for each in texts]
    return plain if several else ",".join(plain)


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether the command line or the file of --config sets the parameter ``name``."""
    return getattr(ctx.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"


def named(ctx: typer.Context) -> dict[str, Any]:
    """The parameters of a command that a file may set, by long option or by the name of the argument."""
    return {
        max(each.opts, key=len).lstrip("-").replace("_", "-"): each
        for each in ctx.command.get_params(ctx)
        if each.name not in _NOT_SETTINGS
    }


def repeating(ctx: typer.Context) -> str:
    """The file that repeats the command of ``ctx``: what its command line and its own file have set."""
    given = {
        name: ctx.params[each.name]
        for name, each in named(ctx).items()
        if each.name in ctx.params and is_given(ctx, each.name)
    }
    plain = {name: _plain(value) for name, value in given.items()}
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1000) if plain else ""
    before, specgen, words = ctx.command_path.rpartition("specgen")
    return f"# {specgen or before}{words} --config FILE\n{text}"


def _plain(value: object) -> object:
    """``value`` as YAML has it; a text of digits without quotes, as every scalar of the file is read as a text."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str) and value.isascii() and value.isdecimal() and value == str(int(value)):
        return int(value)
    # also of a URL, as YAML knows only str
    return value if isinstance(value, bool | int | float) else str(value)
