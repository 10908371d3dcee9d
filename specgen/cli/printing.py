"""Printing of tables and sentences on stdout, notes and failures on stderr."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from specgen.config import UserError
from specgen.config.urls import Url
from specgen.record.interrupt import Interrupt, StoppedError

if TYPE_CHECKING:
    from specgen.jobs.run_output import RunResult
    from specgen.report.terminal import Part

_FAILURES_SHOWN = 3  # where a file has them all


def kept_in(output: Path | Url | None) -> str:
    """What is kept of a run that ends early."""
    return "nothing is kept without --output" if output is None else "the same command resumes the run"


def directory_of(output: Path | Url | None) -> Path | Url | None:
    """``output`` if files are kept there; None also for ``-``, stdout."""
    return None if output == Path("-") else output


@contextmanager
def stoppable(
    handled: Callable[[Callable[[], str]], AbstractContextManager[Interrupt]], kept: Callable[[], str]
) -> Iterator[Interrupt]:
    """Ends the command in one line at SIGINT or SIGTERM, which says what is ``kept``.

    ``handled`` is ``interruptible`` for work that polls and then raises ``StoppedError``, else ``breakable``.
    """
    with handled(lambda: f"specgen: interrupted; {kept()}") as interrupt:
        try:
            yield interrupt
        except (StoppedError, KeyboardInterrupt) as stopped:
            print(f"specgen: {str(stopped) or 'interrupted'}; {kept()}", file=sys.stderr)
            raise typer.Exit(interrupt.exit_code) from None


@contextmanager
def printing() -> Iterator[None]:
    """``UserError`` for what stdout does not take meanwhile, but for a reader that is gone."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        raise UserError(
            f"standard output cannot be written ({error.strerror}): free space there, or name a directory with "
            "--output"
        ) from error


def print_parts(parts: "Iterable[Part]", file: TextIO) -> None:
    """Tables and sentences, no wider than the terminal; what is alarming is red there."""
    from specgen.report.terminal import has_colours, render, width_of  # imports rich

    text = render(parts, width_of(file), has_colours(file))
    with printing():
        print(text, end="", file=file)


def print_found(document: object, parts: "Iterable[Part]", as_json: bool, file: TextIO | None = None) -> None:
    """What was found, as one JSON document or as ``parts``, on stdout unless there is a ``file``."""
    out = sys.stdout if file is None else file
    if as_json:
        with printing():
            print(json.dumps(document), file=out)
    else:
        print_parts(parts, out)


def print_samples(result: "RunResult", file: TextIO) -> None:
    for asked, answered in result.samples:
        print(f"Prompt:\n{_indented(asked)}\nAnswer:\n{_indented(answered)}\n", file=file)


def print_notes_and_exit(
    result: "RunResult", output: Path | Url | None, quiet: bool = False, remedy: str = ""
) -> None:
    """Failed requests and the location of the files, on stderr; exit code 3 if a request failed, in a baseline too.

    Without files this is the only place of the reasons, so more of them are shown; with them ``remedy`` is said.
    """
    num_errors, num_plain_errors = result.report.num_errors, result.report.num_plain_errors
    if (output := directory_of(output)) is None:
        print_failures(result.failures, num_errors, "run with --output DIR to keep all reasons")
    else:
        where = f"{output / 'errors.jsonl'} has them all"
        print_failures(result.failures[:_FAILURES_SHOWN], num_errors, where)
        if not quiet:
            print_files(output, "report.html")
    if num_plain_errors:
        kept = "" if output is None else f" (see {output / 'baseline' / 'errors.jsonl'})"
        print(f"specgen: requests that failed in plain decoding: {num_plain_errors}{kept}", file=sys.stderr)
    if num_errors or num_plain_errors:
        if remedy and output is not None:
            print(remedy, file=sys.stderr)
        raise typer.Exit(3)


def print_files(output: Path | Url, page: str) -> None:
    """The location of the files, on stderr."""
    is_here = isinstance(output, Path)  # no browser opens a store
    where = f"open {output / page} in a browser" if is_here else f"{page} there is the page"
    print(f"Files are in {output}; {where}.", file=sys.stderr)


def print_failures(first: Sequence[str], num_failures: int, where_all_are: str) -> None:
    """The ``first`` failures and the number of the others, on stderr."""
    for failure in first:
        print(f"specgen: failed: {failure}", file=sys.stderr)
    if (more := num_failures - len(first)) > 0:
        print(f"specgen: and {more} more; {where_all_are}", file=sys.stderr)


def _indented(text: str) -> str:
    """``text`` indented by two spaces and cut to fit a screen."""
    short = text.strip() if len(text) <= 600 else text[:600].strip() + " ..."
    return "  " + "\n  ".join(short.splitlines())
