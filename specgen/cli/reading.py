"""Commands that run no model: ``specgen report``, ``merge`` and ``inspect``."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.options import AS_JSON, FORMAT, with_options
from specgen.cli.printing import print_notes_and_exit, print_parts, print_result
from specgen.config import FormatName, require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specgen.report.terminal import Part

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def report(
    directories: Annotated[
        list[Path], typer.Argument(help="Run directories; several are compared.", show_default=False)
    ],
    against: Annotated[
        str | None,
        typer.Option(
            help="Published figures to compare one run with; an unknown name lists them.", show_default=False
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Print the report of a run again, or compare runs with each other or one with published figures."""
    from specgen.report.report import load
    from specgen.report.side_by_side import of_runs
    from specgen.report.tables import of_run

    runs = [(str(directory), *load(directory)) for directory in directories]
    if against is not None:
        require(len(runs) == 1, f"against is {against!r} for {len(runs)} runs: give one directory")
        document, parts = _against(runs[0][0], runs[0][1], against)
        if as_json:
            print(json.dumps(document))
        else:
            print_parts(parts, sys.stdout)
    elif as_json:
        reports = {name: numbers for name, numbers, _ in runs}
        print(json.dumps(reports if len(runs) > 1 else runs[0][1]))
    elif len(runs) == 1:
        print_parts(of_run(runs[0][1], runs[0][2].get("settings", {})), sys.stdout)
    else:
        print_parts(of_runs([(name, numbers) for name, numbers, _ in runs]), sys.stdout)


def _against(run: str, report: dict[str, Any], name: str) -> tuple[dict[str, Any], "Iterator[Part]"]:
    """The report of ``run`` and the published figures ``name``, as JSON and for a terminal."""
    from specgen.report.against import compare_figures, load_results, of_figures
    from specgen.report.references import load_reference

    reference = load_reference(name)
    lines = compare_figures(report, load_results(Path(run)), reference)
    against = {"reference": asdict(reference), "figures": [line.to_json() for line in lines]}
    return {**report, "against": against}, of_figures(run, report["num_spec_tokens"], reference, lines)


@with_options
def merge(
    output: Annotated[Path, typer.Argument(help="New directory for the whole run.", show_default=False)],
    directories: Annotated[
        list[Path], typer.Argument(help="Run directories of all shards, in any order.", show_default=False)
    ],
    format: FormatName = FORMAT,
    as_json: bool = AS_JSON,
) -> None:
    """Merge the shards of a run: rows in the order of the prompts, and one report.

    Exit code 3 if a request failed.
    """
    from specgen.jobs.merge import merge  # imports torch
    from specgen.jobs.run_output import read_result

    merge(output, directories, format)
    result = read_result(output)
    print_result(result, as_json, sys.stdout)
    print_notes_and_exit(result, output)


def inspect(
    path: Annotated[str, typer.Argument(help="Checkpoint: a directory or hub id.", show_default=False)],
    other: Annotated[
        str | None,
        typer.Argument(
            help="Second checkpoint, or ngram[:N]: do target and drafter fit?", show_default=False
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Say what a checkpoint is, how it is read, and whether target and head fit."""
    from specgen.checkpoints.inspect_checkpoint import describe

    description = describe(path, other)
    print(json.dumps(description.to_json()) if as_json else description.to_text())
    if description.misfits:
        raise typer.Exit(1)
