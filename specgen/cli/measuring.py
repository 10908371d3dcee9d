"""What benches print while they measure, and how they end early."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specgen import display
from specgen.rundir.interrupt import breakable

if TYPE_CHECKING:
    from specgen.bench.turns import Turn


def print_turn(turn: "Turn") -> None:
    """One line on stderr: the time that is left, the arm, and what its turn gave."""
    print(
        f"[{display.duration(turn.seconds_left)} left] {turn.arm}: {_said(turn)}", file=sys.stderr, flush=True
    )


def _said(turn: "Turn") -> str:
    if turn.failed:
        return "failed"
    if turn.repeat is None:
        return "warmed up"
    speed, found = turn.repeat.tokens_per_second, [f"{turn.number} of {turn.most}"]
    if turn.plain is not None:
        found.append(f"{display.ratio(speed / turn.plain.tokens_per_second)} of plain")
    if turn.repeat.tpot is not None:
        found.append(f"{display.seconds(turn.repeat.tpot.median)} per token")
    return f"{display.rate(speed)} tokens/s, {', '.join(found)}"


@contextmanager
def stoppable(output: Path | None) -> Iterator[None]:
    """Ends the command in one line at SIGINT or SIGTERM, which says what is kept."""
    with breakable() as interrupt:
        try:
            yield
        except KeyboardInterrupt:
            kept = f"rounds in {output} are kept: the same command goes on"
            lost = "nothing is kept without --output"
            print(f"specgen: interrupted; {lost if output is None else kept}", file=sys.stderr)
            raise typer.Exit(interrupt.exit_code) from None
