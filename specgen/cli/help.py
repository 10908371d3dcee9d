"""``--help`` as plain text in sections: nothing is cut off, so that every option can be copied at 80 columns."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from specgen.errors import UserError, shown

_WIDEST = 26  # columns of the options' names; a longer one has a line of its own
_LONGEST = 1000  # characters of a command's sentence in the list of commands


class Command(TyperCommand):
    """A command whose help has a section per group of options, and whose errors say where a value comes from."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = error.param.name if error.param else ""
            if (source := ctx.get_parameter_source(name)) and source.name == "DEFAULT_MAP":
                set_to = f"config sets {name.replace('_', '-')} to {shown(ctx.default_map[name])}"
                raise UserError(f"{set_to}: {error.message}") from error
            raise

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ANN401
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                title = getattr(param, "rich_help_panel", None) or default
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=_WIDEST)


class Commands(TyperGroup):
    """Commands whose list has the whole first sentence of each."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ANN401
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(_LONGEST)) for name, each in commands if each])
