"""What the scripts of this directory share: a program of one command, its tables, and how fast a device can be."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import typer
from bound import Work

from specgen.cli.help import Command
from specgen.cli.main import HELP
from specgen.cli.measuring import print_table, write_table
from specgen.cli.printing import stoppable
from specgen.config import option, require
from specgen.experiments.output import BenchTable
from specgen.record.interrupt import breakable

OUTPUT = option(
    None,
    "Results",
    "Directory for the table: NAME.csv, NAME.json, NAME.html with plots, and NAME.yaml, which repeats it (--config).",
)


def program_of(command: Callable[..., None]) -> typer.Typer:
    """The program of a script with one ``command``, made by ``with_options``; ``cli.main.main`` runs it."""
    program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    program.command(cls=Command, context_settings=HELP)(command)
    return program


def publish(
    name: str, tables: Iterable[BenchTable], output: Path | None, as_json: bool, config: str, quiet: bool
) -> None:
    """Write the files of a growing table after every row, and print the last one; earlier ones are not replaced."""
    if output is not None:
        require(not output.is_file(), f"output {str(output)!r} is a file: name a directory for tables")
        require(
            not (output / f"{name}.json").exists(),
            f"output {str(output)!r} holds an earlier {name}.json: name a new directory, or remove it first",
        )

    def kept() -> str:
        written = output is not None and (output / f"{name}.json").exists()
        return f"the rows so far are in {output}" if written else "nothing is kept"

    with stoppable(breakable, kept):
        for table in tables:
            if not quiet:
                print(f"{table.name}: {len(table.rows)} rows", end="\r", file=sys.stderr, flush=True)
            write_table(table, output, config)
    if not quiet:
        print(file=sys.stderr)
    print_table(table, output, as_json, quiet)


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """What bounds the time of work: reading and computing overlap, so the longer one counts."""

    bytes_per_second: float
    flops_per_second: float  # in the model's dtype

    def seconds(self, work: Work) -> float:
        """The least that ``work`` takes."""
        return max(work.num_bytes / self.bytes_per_second, work.flops / self.flops_per_second)

    def limit(self, work: Work) -> str:
        """Which one bounds it: ``memory`` or ``arithmetic``."""
        reading = work.num_bytes / self.bytes_per_second
        return "memory" if reading >= work.flops / self.flops_per_second else "arithmetic"
