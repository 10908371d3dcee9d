"""``specgen compare``: heads against heads, run here or from finished directories."""

import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specgen.cli.measuring import turns
from specgen.cli.options import ON_A_DEVICE, Only, given_fields, is_given, repeating, with_options
from specgen.cli.printing import kept_in, print_files, print_found, stoppable
from specgen.cli.progress_bar import QUIET, progress
from specgen.config import EngineConfig, ExportName, SamplingParams, option, require
from specgen.config.bundled import heads, pair
from specgen.config.urls import is_url, location
from specgen.prompts.load import DataSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specgen.experiments.head_figures import Comparison
    from specgen.experiments.heads_job import HeadsJob
    from specgen.report.references import Reference

_ENGINE = Only(
    "generation_config model lora chat_template_kwargs num_spec_tokens drafter_batch draft_sampling draft_lm_head "
    f"verification learn_from max_batch_size max_prefill_tokens kv_memory {ON_A_DEVICE} gpu_memory_utilization "
    "prefix_cache",
    {"drafter": "ngram"},  # each of --drafter takes its place
)
_OF_READING = {"directories", "against", "export", "as_json"}
_DIRECTORIES = typer.Argument(
    help="Finished runs of `specgen generate`, or the directory of a comparison, instead of running anything.",
    show_default=False,
)
_AGAINST = option(
    None,
    "Results",
    "Published figures to put beside every head on every data set; what they have not measured is refused before "
    "anything runs. An unknown name lists them.",
)
_OUTPUT = option(
    None,
    "Results",
    "Directory for comparison.json, compare.html and a run directory for every head and data set. An earlier "
    "comparison there is resumed; heads and data sets can be added.",
)


@with_options
def compare(
    ctx: typer.Context,
    *,
    directories: Annotated[list[Path] | None, _DIRECTORIES] = None,
    engine: Annotated[EngineConfig, _ENGINE],
    drafter: list[str] | None = option(
        None,
        "Models",
        "A head, ngram[:N] or suffix[:N], as for generate; once for every one to compare.",
        shown="the bundled heads",
    ),
    sampling: SamplingParams,
    dataset: str = option(
        "bundled",
        "Prompts",
        "Data sets as for generate, comma-separated, such as mt-bench,gsm8k,mine.jsonl; NAME=PATH reads a named one "
        "from that file or directory instead of the hub.",
    ),
    data: Annotated[DataSource, Only("num_prompts")],
    repeats: int = option(
        3,
        "Results",
        "Rounds of speeds: in each one every head and plain decoding answer all prompts in turn. 0: no speeds.",
    ),
    output: Path | None = _OUTPUT,
    against: str | None = _AGAINST,
    export: ExportName | None = option(
        None, "Results", "Print a table for a paper, or as CSV all figures, instead of the comparison."
    ),
    as_json: bool = option(False, "Results", "Print the comparison as one JSON document.", name="json"),
    quiet: bool = QUIET,
) -> None:
    """Compare heads on the same prompts: acceptance lengths, paired differences, speeds measured in interleaved rounds.

    The target is loaded once. Runs that differ in more than head and data set are refused. With --output, running a
    stopped command again resumes it. Exit code 3 if a request failed.
    """
    from specgen.report.references import load_reference

    others = [name for name, given in (("json", as_json), ("against", against)) if given]
    require(export is None or not others, f"export and {' and '.join(others)} are both given: choose one")
    reference = None if against is None else load_reference(against)
    if directories:
        _require_only_read(ctx)
        from specgen.experiments.head_figures import read_comparison

        found = read_comparison(directories)
    else:
        from specgen.experiments.heads_job import HeadsJob  # imports torch

        drafters = _drafters(engine, drafter or [], is_given(ctx, "model"))
        given = given_fields(ctx)
        sources = _sources(dataset, data)
        if reference is not None:
            _require_measured(reference, engine, sampling, sources)
        job = HeadsJob(engine, drafters, sampling, sources, repeats, given)
        found = _run(job, output, repeating(ctx), quiet)
    print_comparison(found, reference, export, as_json)
    if output is not None and not quiet:
        print_files(output, "compare.html")
    if any(run.report.num_errors for run in found.runs):
        raise typer.Exit(3)


def _require_only_read(ctx: typer.Context) -> None:
    """``UserError`` for options that have no effect on finished runs."""
    given = [
        name.replace("_", "-")
        for name in ctx.params
        if name not in _OF_READING and getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    verb = "is" if len(given) == 1 else "are"
    require(
        not given,
        f"{', '.join(given)} {verb} given with directories, whose runs have finished: leave either out",
    )


def _drafters(engine: EngineConfig, given: "Sequence[str]", has_model: bool) -> tuple[str, ...]:
    """The drafters as given, or those bundled for the bundled target."""
    bundled = engine.model == pair()[0]
    require(
        bool(given) or bundled, f"model {engine.model!r} has no drafter to compare: name each with --drafter"
    )
    for each in () if has_model else given:
        pair(None, each)  # refuses a head without a model
    return tuple(given) or heads()


def _sources(text: str, of_each: DataSource) -> tuple[DataSource, ...]:
    """The data sets of ``a,b=PATH``; an existing file may have = in its name."""
    found = []
    for part in text.split(","):
        name, equals, path = part.strip().partition("=")
        if is_url(part.strip()) or Path(part.strip()).exists():
            name, equals, path = part.strip(), "", ""
        require(
            bool(name) and bool(path) == bool(equals),
            f"dataset is {text!r}: write names or files with commas between them, such as mt-bench,gsm8k=FILE",
        )
        found.append(replace(of_each, dataset=name, data_path=location(path) if path else None))
    return tuple(found)


def _require_measured(
    reference: "Reference", engine: EngineConfig, sampling: SamplingParams, sources: "Sequence[DataSource]"
) -> None:
    """``UserError`` for a data set and settings of which ``reference`` has no figure."""
    from specgen.report.references import conditions_of

    asked = {"engine": engine.to_json(), "sampling": {"temperature": sampling.temperature}}
    for source in sources:
        reference.of(conditions_of(asked | {"data": source.to_json()}))


def _run(job: "HeadsJob", output: Path | None, config: str, quiet: bool) -> "Comparison":
    """Run or resume ``job``; if it ends early, say so and exit."""
    from specgen.config.errors import DeviceLost
    from specgen.experiments.head_figures import PLAN
    from specgen.experiments.heads_job import HeadsRun
    from specgen.experiments.heads_tables import write_comparison
    from specgen.record.files import write_text
    from specgen.record.interrupt import interruptible
    from specgen.record.results import directory

    job.check()
    kept = partial(kept_in, output)
    with stoppable(interruptible, kept) as interrupt, directory(output, PLAN) as path:
        try:
            run = HeadsRun(job, path, partial(progress, quiet), interrupt, turns(quiet))
            write_text(path / "config.yaml", config)
            found = run.generate()
            found = replace(found, speeds=run.measure(found))
        except DeviceLost as lost:
            print(f"specgen: {lost}; {kept()}", file=sys.stderr)
            raise typer.Exit(1) from None
        write_comparison(found, path)
    return found


def print_comparison(
    found: "Comparison", reference: "Reference | None", export: ExportName | None, as_json: bool
) -> None:
    """Print it as tables and sentences, in the format ``export``, or as one JSON document, beside ``reference``."""
    from specgen.experiments.head_figures import published
    from specgen.experiments.heads_tables import exported, of_heads
    from specgen.report.references import of_figures

    if export is not None:
        print(exported(found, export), end="")
        return
    document, parts = found.to_json(), of_heads(found)
    if reference is not None:
        runs = published(found, reference)
        document["against"] = reference.to_json() | {"runs": [run.to_json() for run in runs]}
        parts = chain(parts, of_figures(reference, runs))
    print_found(document, parts, as_json)
