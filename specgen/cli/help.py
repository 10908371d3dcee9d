"""``--help`` as plain text in sections, so that every option can be copied at 80 columns; and errors as one line."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from specgen.config import VLLM_NAMES
from specgen.config.errors import UserError, did_you_mean, nearest, require, shown
from specgen.config.urls import require_no_secrets

_WIDEST = 26  # columns of the options' names; a longer one is alone on its line
_ALSO = {ours.replace("_", "-"): theirs.replace("_", "-") for theirs, ours in VLLM_NAMES.items()}
_LONGEST = 1000  # characters of a command's sentence in the list of commands
_UsageError: Any = typer.BadParameter.__base__  # typer does not export it
_REMEDIES = {int: "use a whole number", float: "use a number", bool: "use true or false"}


class Command(TyperCommand):
    """A command whose help has a section per group of options, and whose errors are a ``UserError``.

    They name the value and where it comes from. Of an option with several values the last counts, and that is said.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        given = list(args)
        for before, word in zip(["", *given], given, strict=False):
            if before != "--stop" and not word.startswith("--stop="):  # which take any text
                require_no_secrets(word.partition("=")[2] if word.startswith("--") else word)
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            raise UserError(self._of_value(ctx, given, error)) from error
        except _UsageError as error:
            raise UserError(_one_line(ctx, error)) from error
        found = self._values(ctx, given)
        for name in found.keys() & _ALSO.keys():
            require(
                _ALSO[name] not in found, f"{_ALSO[name]} and {name} are the same option: give one of them"
            )
        for name, values in found.items():
            each = list(dict.fromkeys(map(str, values)))
            if len(each) > 1:  # a script may add to options that it was given
                said = f"{name} is given {len(values)} times, as {' and '.join(map(shown, each))}"
                print(f"specgen: warning: {said}: the last counts", file=sys.stderr)
        return rest

    def make_parser(self, ctx: Any) -> Any:  # noqa: ANN401
        """A parser that knows some options by vLLM's names too, which ``--help`` does not list."""
        parser: Any = super().make_parser(ctx)
        for param in self.get_params(ctx):
            if _name(param) in _ALSO:
                parser.add_option(param, [f"--{_ALSO[_name(param)]}"], param.name)
        return parser

    def _values(self, ctx: Any, args: list[str]) -> dict[str, list[Any]]:  # noqa: ANN401
        """The values of each option that takes one, by the name given, in the order of the command line."""
        parser: Any = self.make_parser(ctx)
        single: list[Any] = [
            each
            for each in self.get_params(ctx)
            if each.param_type_name == "option" and not getattr(each, "multiple", False)
        ]
        for param in single:  # in place of what takes the last value
            if param.is_flag:
                parser.add_option(param, param.opts, param.name, action="append_const", const="on")
                if param.secondary_opts:
                    off = param.secondary_opts
                    parser.add_option(param, off, param.name, action="append_const", const="off")
            else:
                parser.add_option(param, param.opts, param.name, action="append", nargs=param.nargs)
            if (theirs := _ALSO.get(_name(param))) is not None:
                parser.add_option(param, [f"--{theirs}"], theirs, action="append")
        found, _, _ = parser.parse_args(args)
        names = {_name(each): each.name for each in single} | {theirs: theirs for theirs in _ALSO.values()}
        return {name: found[dest] for name, dest in names.items() if found.get(dest)}

    def _of_value(self, ctx: Any, args: list[str], error: Any) -> str:  # noqa: ANN401
        """What is wrong with the value of an option or argument, or that there is none."""
        param, name = error.param, "" if error.param is None else _name(error.param)
        if type(error).__name__ == "MissingParameter":
            return f"{name} is missing: give it, as `{ctx.command_path} -h` says"
        reason = str(error.message).removeprefix("Value error, ").rstrip(".")
        if param is None or param.param_type_name == "argument":
            return f"{name}: {reason}".removeprefix(": ")
        kind = _kind(ctx, param)
        choices = [str(each) for each in get_args(kind)] if get_origin(kind) is Literal else []
        source = ctx.get_parameter_source(param.name)
        if source and source.name == "DEFAULT_MAP":
            value = ctx.default_map[param.name]
            said = f"config sets {name} to {shown(value)}"
        else:
            values = self._values(ctx, args)
            name = name if name in values else _ALSO.get(name, name)
            value = values.get(name, [""])[-1]
            said = f"{name} is {shown(value)}"
        if choices:
            near = nearest(str(value), choices, likeness=0.8)
            meant = "" if near is None else f" (did you mean {near}?)"
            return f"{said}{meant}: use one of {', '.join(choices)}"
        if kind not in _REMEDIES:
            return f"{said}: {reason[:1].lower()}{reason[1:]}"
        least, number = getattr(param, "min", None), _number(value)
        too_small = least is not None and number is not None and number < least
        return f"{said}: {f'use at least {least}' if too_small else _REMEDIES[kind]}"

    def sections(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:  # noqa: ANN401
        """The name and help of each option, by the section of ``--help`` that it stands in."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                title = getattr(param, "rich_help_panel", None) or default
                sections.setdefault(title, []).append(record)
        return sections

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ANN401
        write_sections(formatter, self.sections(ctx))


def write_sections(formatter: Any, sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:  # noqa: ANN401
    """Write names and help by section, each name as wide as it needs up to ``_WIDEST`` columns."""
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records, col_max=_WIDEST)


class Commands(TyperGroup):
    """Commands whose list has the whole first sentence of each; an unknown one is a ``UserError``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        with _on_one_line(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        require(
            not args or self.get_command(ctx, args[0]) is not None or args[0].startswith("-"),
            f"unknown command {args[0]!r}{did_you_mean(args[0], self.list_commands(ctx))}: `{ctx.command_path} -h` "
            "lists them"
            if args
            else "",
        )
        with _on_one_line(ctx):
            return super().resolve_command(ctx, args)

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ANN401
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(_LONGEST)) for name, each in commands if each])


@contextmanager
def _on_one_line(ctx: Any) -> Iterator[None]:  # noqa: ANN401
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        raise UserError(_one_line(ctx, error)) from error


def _kind(ctx: Any, param: Any) -> Any:  # noqa: ANN401
    """The type of the values of ``param``, as its command declares it; of several or optional values that of one."""
    kind = ctx.command.callback.__annotations__[param.name]
    while get_origin(kind) not in (None, Literal):
        kind = next(each for each in get_args(kind) if each is not type(None))
    return kind


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _name(param: Any) -> str:  # noqa: ANN401
    """An option as messages name it, ``num-prompts``; an argument by its name."""
    if param.param_type_name == "argument":
        return str(param.name)
    return str(max(param.opts, key=len)).lstrip("-")


def _one_line(ctx: Any, error: Any) -> str:  # noqa: ANN401
    """An error of typer's own as a message of specgen's."""
    if type(error).__name__ == "NoSuchOption":
        known = [name for each in ctx.command.get_params(ctx) for name in each.opts]
        meant = did_you_mean(error.option_name, known)
        return f"unknown option {error.option_name}{meant}: `{ctx.command_path} -h` lists them"
    said = str(error.format_message()).rstrip(".")
    return f"{said[:1].lower()}{said[1:]}: `{ctx.command_path} -h` says what it takes"
