"""``--config FILE.yaml``: options of a command from a file, and the file that repeats a command."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import yaml

from specgen.config.errors import UserError, did_you_mean, first_line, require

# What a file cannot say: what asks for no run, and what would start the same run over each time it is repeated.
_NOT_SETTINGS = {"config", "help", "restart"}


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
    found: dict[str, Any] = {}
    for key, node in root.value:
        where = f"config {str(path)!r}, line {key.start_mark.line + 1}"
        name = str(key.value).replace("_", "-")
        require(name not in _NOT_SETTINGS, f"{where}: {name} is for the command line alone: remove it")
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
            f"config {str(path)!r} cannot be read ({error.strerror}): name a YAML file"
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
        return json.dumps(_constructed(node), default=str)
    texts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    require(
        all(isinstance(each, yaml.ScalarNode) for each in texts),
        f"{where} is a list of more than texts: write texts",
    )
    plain = [str(each.value) for each in texts]
    return plain if several else ",".join(plain)


def _constructed(node: yaml.Node) -> Any:  # noqa: ANN401
    return yaml.SafeLoader("").construct_document(node)


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
    return f"# specgen{ctx.command_path.rpartition('specgen')[2]} --config FILE\n{text}"


def _plain(value: object) -> object:
    """As YAML has it; a text of digits without quotes, as every scalar of the file is read as a text."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str) and value.isascii() and value.isdecimal() and value == str(int(value)):
        return int(value)
    return value if isinstance(value, bool | int | float | str) else str(value)
