"""What benches print while they measure and at the end, the files of their tables, and how they end early."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specgen.cli.printing import print_files, print_parts
from specgen.config import option, require
from specgen.record.files import writable, write_text
from specgen.record.interrupt import breakable
from specgen.report import display

if TYPE_CHECKING:
    from specgen.experiments.output import BenchTable
    from specgen.experiments.turns import Turn, Watch
    from specgen.report.terminal import Part


DRY_RUN = option(
    False, "Table", "Print the arms with their memory and least time; read no weights and run nothing."
)
OUTPUT_LENS = option(
    "fixed",
    "Sampling",
    "fixed: up to --max-new-tokens or the end that the model finds; data: as many tokens as the data's own answers "
    "have, up to --max-new-tokens, with later turns (sharegpt), or max_tokens of a row.",
    metavar="fixed|data",
)


def turns(quiet: bool) -> "Watch":
    """Prints a line for each turn of a bench's arms; nothing with ``quiet``."""
    return (lambda turn: None) if quiet else _print_turn


def _print_turn(turn: "Turn") -> None:
    """One line on stderr: the time that is left, the arm, and what its turn gave."""
    print(
        f"[{display.duration(turn.seconds_left)} left] {turn.arm}: {_outcome(turn)}",
        file=sys.stderr,
        flush=True,
    )


def _outcome(turn: "Turn") -> str:
    if turn.failure is not None:
        return "failed"
    if turn.repeat is None:
        return "warmed up"
    speed, found = turn.repeat.tokens_per_second, [f"repeat {turn.number}"]
    if turn.plain is not None:
        found.append(f"{display.ratio(speed / turn.plain.tokens_per_second)} of plain")
    if turn.repeat.tpot is not None:
        found.append(f"{display.seconds(turn.repeat.tpot.median)} per token")
    return f"{display.rate(speed)} tokens/s, {', '.join(found)}"


@contextmanager
def stoppable(name: str, output: Path | None) -> Iterator[None]:
    """Ends the command in one line at SIGINT or SIGTERM, which says what is kept of the bench ``name``."""
    with breakable() as interrupt:
        try:
            yield
        except KeyboardInterrupt:
            print(f"specgen: interrupted; {_kept(name, output)}", file=sys.stderr)
            raise typer.Exit(interrupt.exit_code) from None


def _kept(name: str, output: Path | None) -> str:
    from specgen.experiments.rounds import num_kept

    if output is None:
        return "nothing is kept without --output"
    number = num_kept(output, name)
    if not number:
        return "no round was finished, so nothing is kept"
    return f"{display.several(number, 'whole round')} kept in {output}: the same command goes on"


def print_forecast(parts: "Iterable[Part]") -> None:
    """Print the arms of a dry run and what they will take."""
    print_parts(parts, sys.stdout)


def refuse_earlier(name: str, output: Path | None) -> None:
    """``UserError`` where ``output`` is a file, or has the table ``name`` already."""
    if output is None:
        return
    require(not output.is_file(), f"output {str(output)!r} is a file: name a directory for tables")
    require(
        not (output / f"{name}.json").exists(),
        f"output {str(output)!r} holds an earlier {name}.json: name a new directory, or remove it first",
    )


def write_table(table: "BenchTable", output: Path | None, config: str) -> None:
    """The files of ``table``, and ``config``, which repeats it."""
    if output is not None:
        with writable(output):
            table.write(output)
            write_text(output / f"{table.name}.yaml", config)


def print_table(table: "BenchTable", output: Path | None, as_json: bool, quiet: bool) -> None:
    """A table that is complete; exit code 1 where it has no row, as its notes say."""
    if as_json:
        print(json.dumps(table.to_json()))
    else:
        print_parts(table.parts(), sys.stdout)
    if output is not None and not quiet:
        print_files(output, f"{table.name}.html")
    if not table.rows:  # every arm has failed
        raise typer.Exit(1)
