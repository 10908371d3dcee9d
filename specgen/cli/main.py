"""The command line ``specgen``: its commands and the handling of errors."""

import os
import select
import signal
import sys
import traceback
from typing import Annotated, TextIO

import typer

from specgen.cli.comparing import compare
from specgen.cli.evaluating import evaluate, features, score, verify
from specgen.cli.generating import generate, prepare
from specgen.cli.help import Command, Commands
from specgen.cli.measuring import tune
from specgen.cli.printing import printing
from specgen.cli.reading import inspect, merge, report
from specgen.config import VERSION, UserError, is_text, require, shown
from specgen.config.errors import DeviceLost
from specgen.record.interrupt import STOPPED, breakable

_INTERRUPTED = "specgen: interrupted"


class _Commands(Commands):
    """Ends a command quietly when the reader of its output is gone, such as ``head``, and in one line at a signal."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # its own type is private
        try:
            return self._invoke(ctx)
        except BrokenPipeError as error:
            if not _is_unread(sys.stdout):  # typer would take it for stdout's and exit silently
                raise RuntimeError("a pipe that is not stdout is broken") from error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
            raise typer.Exit(128 + signal.SIGPIPE) from None

    def _invoke(self, ctx: typer.Context) -> object:
        with breakable(lambda: _INTERRUPTED) as interrupt:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:  # typer would exit silently
                print(_INTERRUPTED, file=sys.stderr)
                raise typer.Exit(interrupt.exit_code) from None
            finally:
                with printing():
                    sys.stdout.flush()


def _is_unread(file: TextIO) -> bool:
    """Whether ``file`` is a pipe whose reader is gone."""
    poll = select.poll()
    poll.register(file, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


HELP: dict[str, object] = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    cls=_Commands,
    name="specgen",
    help="Offline batch generation with speculative decoding, and how much it helped.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=HELP,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"specgen {VERSION}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """The options before a command; ``--version`` has ended by now."""


for command in (generate, report, compare, merge, verify):
    app.command(cls=Command)(command)
app.command(name="eval", cls=Command)(evaluate)
for command in (score, features, tune, inspect, prepare):
    app.command(cls=Command)(command)


_BUG = (
    f"this is a bug in specgen {VERSION}: report it with the traceback above, the command, "
    "and for a run directory its manifest.json"
)


def main(program: typer.Typer = app, name: str | None = None) -> None:
    """Run the command line of ``program``, which messages call ``name``.

    A ``UserError`` is one line with exit code 2, any other a bug with its traceback.
    """
    try:
        for argument in sys.argv[1:]:
            require(is_text(argument), f"{shown(argument)} is not UTF-8: rename it, or write it so")
        program(prog_name=name)
    except SystemExit as ended:
        # Libraries would wait for their threads, and Ray crash where it was just starting
        if ended.code in STOPPED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(ended.code))
        raise
    except UserError as error:
        print(f"specgen: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(_INTERRUPTED, file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, DeviceLost):
            print(f"specgen: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
            print(f"specgen: {_BUG}", file=sys.stderr)
        sys.exit(1)
