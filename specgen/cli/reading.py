"""Commands that run no model: ``specgen report``, ``merge`` and ``inspect``."""

import json
import sys
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.comparing import print_comparison
from specgen.cli.options import AS_JSON, with_options
from specgen.cli.printing import print_found, print_notes_and_exit, print_parts
from specgen.config import DraftLmHeadName, FormatName, KVDtypeName, option, parse_bytes, require
from specgen.config.bundled import pair
from specgen.config.urls import Url, location
from specgen.jobs.job import FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from specgen.report.references import Reference
    from specgen.report.report import Report
    from specgen.report.terminal import Part

_NUMBERS = ("manifest.json", "report.json", "status.json")  # of a finished run, without its rows
_MENDING = (
    "specgen: `specgen generate` as for the shards, but with --output {output} and without --shard, tries failed rows "
    "again; with --retry-errors as a corrected file of prompts has them. Answers are kept."
)
_AS_JSON = option(False, None, "Print one JSON document.", name="json")


@with_options
def report(
    directories: Annotated[
        list[str],
        typer.Argument(
            help="Directories or URLs of runs (several are set side by side), or the directory of a comparison, an "
            "evaluation or a bench, or one folder of all these.",
            show_default=False,
        ),
    ],
    against: str | None = option(
        None,
        None,
        "Published figures to put beside one run, or the heads of a comparison; what they have not measured is "
        "refused. An unknown name lists them.",
    ),
    as_json: bool = _AS_JSON,
) -> None:
    """Print the report of a run again, or compare runs with each other or one with published figures.

    Of a run that was stopped or still goes on it is the report of what it has so far. A folder of runs, comparisons,
    evaluations and benches is listed.
    """
    alone = len(directories) == 1 and against is None
    with _on_this_machine(directories, _NUMBERS if alone else ()) as paths:
        _report(paths, dict(zip(map(str, paths), directories, strict=True)), against, as_json)


@contextmanager
def _on_this_machine(directories: "Sequence[str]", least: "Sequence[str]" = ()) -> "Iterator[list[Path]]":
    """The directories, those at a URL as temporary copies, of finished runs with ``least`` alone if it names files."""
    from specgen.record.mirror import fetched

    with ExitStack() as copies:
        places = map(location, directories)
        yield [
            copies.enter_context(fetched(each, least)) if isinstance(each, Url) else each for each in places
        ]


def _report(
    directories: "Sequence[Path]",
    given: "Mapping[str, str]",
    against: str | None,
    as_json: bool,
) -> None:
    """Print the report of ``directories``, which the user has ``given`` in other words if they are copies."""
    from specgen.experiments.head_figures import is_comparison, read_comparison
    from specgen.report.folder import arms, benches, evaluation_note, is_folder, listed, of_bench
    from specgen.report.references import load_reference
    from specgen.report.report import load_so_far
    from specgen.report.tables import of_run

    alone = directories[0] if len(directories) == 1 and against is None else None
    if alone is not None and (documents := benches(alone)):
        found = next(iter(documents.values())) if len(documents) == 1 else documents
        print_found(found, map(of_bench, documents.values()), as_json)
        return
    reference = None if against is None else load_reference(against)
    if len(directories) == 1 and is_comparison(directories[0]):
        print_comparison(read_comparison(directories), reference, None, as_json)
        return
    if alone is not None and is_folder(alone) and (listing := listed(alone)).rows:
        document = {"folder": str(alone), "rows": listing.rows}
        print_found(document, [listing], as_json)
        return
    runs = [(str(arm), *load_so_far(arm)) for directory in directories for arm in arms(directory)]
    name, numbers, manifest = runs[0]
    document, parts = numbers.to_json(), of_run(numbers, manifest.get("settings", {}))
    if reference is not None:
        require(len(runs) == 1, f"against is {against!r} for {len(runs)} runs: give one directory")
        document, parts = _against(name, numbers, manifest, reference)
    elif len(runs) > 1:
        document, parts = _compared(runs, given)
    print_found(document, chain(parts, map(evaluation_note, directories)), as_json)


def _compared(
    runs: "Sequence[tuple[str, Report, dict[str, Any]]]", given: "Mapping[str, str]"
) -> tuple[dict[str, Any], "Iterator[Part]"]:
    """The reports of several runs and how they differ from the first, as JSON and for a terminal."""
    from specgen.report.origin import unlike_settings
    from specgen.report.paired_requests import shared_requests
    from specgen.report.report import requests_of
    from specgen.report.side_by_side import of_runs

    reports = [(given.get(name, name), numbers) for name, numbers, _ in runs]
    settings = unlike_settings([manifest for _, _, manifest in runs])
    shared = shared_requests([requests_of(Path(name), numbers) for name, numbers, _ in runs])
    document = {name: numbers.to_json() for name, numbers in reports}
    for at, ((name, _), each) in enumerate(zip(reports[1:], shared, strict=True), start=1):
        unlike = {key: [found[0], found[at]] for key, found in settings.items() if found[0] != found[at]}
        document[name]["against_first"] = {"settings": unlike, "shared": each.to_json()}
    return document, of_runs(reports, settings, shared)


def _against(
    run: str, report: "Report", manifest: dict[str, Any], reference: "Reference"
) -> tuple[dict[str, Any], "Iterator[Part]"]:
    """The report of ``run`` and the figures of ``reference``, as JSON and for a terminal."""
    from specgen.report.references import compare_run, of_figures

    found = compare_run(Path(run), report, manifest, reference)
    against = {**reference.to_json(), **found.to_json()}
    return {**report.to_json(), "against": against}, of_figures(reference, [found])


@with_options
def merge(
    output: Annotated[
        str, typer.Argument(help="New directory or URL for the whole run.", show_default=False)
    ],
    directories: Annotated[
        list[str],
        typer.Argument(
            help="Run directories of all shards, in any order, or their URLs.",
            show_default=False,
        ),
    ],
    format: FormatName = FORMAT,
    as_json: bool = AS_JSON,
) -> None:
    """Merge the shards of a run, or of scores: rows in the order of the prompts, and one report.

    Exit code 3 if a request failed.
    """
    from specgen.jobs.merge import merge, merge_scores  # imports torch
    from specgen.jobs.score import FILE
    from specgen.record.mirror import mirrored
    from specgen.report.tables import figures

    place = location(output)
    with _on_this_machine(directories) as shards:
        if (shards[0] / FILE).exists():
            require(
                not isinstance(place, Url),
                f"output is {output!r} and the shards are scores: name a directory",
            )
            raise typer.Exit(3 if merge_scores(Path(place), shards) else 0)
        if isinstance(place, Url):
            with mirrored(place) as whole:
                result = merge(whole.path, shards, format)
        else:
            result = merge(place, shards, format)
    print_found(result.report.to_json(), figures(result.report, result.settings), as_json)
    print_notes_and_exit(result, place, remedy=_MENDING.format(output=output))


@with_options
def inspect(
    path: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint: a directory or hub id. Without one, the bundled pair.", show_default=False
        ),
    ] = None,
    other: Annotated[
        str | None,
        typer.Argument(
            help="Second checkpoint, ngram[:N] or suffix[:N]: do target and drafter fit?", show_default=False
        ),
    ] = None,
    lora: str | None = option(None, None, "A LoRA adapter: what it changes in the target.", metavar="DIR"),
    gpu: str | None = option(
        None,
        None,
        "Plan the memory of a GPU, such as 80GiB: weights, KV cache, and how many sequences of 2,048 tokens fit at "
        "which K.",
        metavar="SIZE",
    ),
    kv_dtype: KVDtypeName = option(
        "auto", None, "Of the target's KV cache in that plan, as for `specgen generate`."
    ),
    tensor_parallel: int = option(
        1, None, "GPUs of that plan that share the target, as for `specgen generate`."
    ),
    draft_lm_head: DraftLmHeadName = option(
        "model", None, "The output layer of drafts in that plan, as for `specgen generate`."
    ),
    as_json: bool = _AS_JSON,
) -> None:
    """Say what a checkpoint is, how it is read, and whether target and head fit."""
    from specgen.checkpoints.inspect_checkpoint import describe
    from specgen.report.terminal import width_of

    total = None if gpu is None else parse_bytes(gpu, "gpu")
    require(total is None or total >= 1 << 20, f"gpu is {gpu} bytes: add the unit, such as --gpu 80GiB")
    of_plan = (
        ("kv-dtype", kv_dtype == "auto", "the"),
        ("tensor-parallel", tensor_parallel == 1, "a"),
        ("draft-lm-head", draft_lm_head == "model", "the"),
    )
    for name, is_default, which in of_plan:
        require(
            gpu is not None or is_default,
            f"--{name} requires --gpu: add it with the memory of {which} GPU, such as --gpu 80GiB",
        )
    if path is None:
        path, other = pair()
    description = describe(path, other, lora)
    document, parts = description.to_json(), list["Part"]()
    if total is not None and not description.misfits:
        from specgen.engine.memory_plan import memory_plans, of_plans

        plans = memory_plans(*description.pair(), total, kv_dtype, tensor_parallel, draft_lm_head)
        document["memory_plan"] = [plan.to_json() for plan in plans]
        parts = [*of_plans(plans)]
    if as_json:
        print(json.dumps(document))
    else:
        print(description.to_text(width_of(sys.stdout)))
        if parts:
            print_parts(parts, sys.stdout)
    if description.misfits:
        raise typer.Exit(1)
