"""``specgen generate``, with the exit codes of its job; ``specgen prepare``, what a first run waits for, done ahead."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from specgen.cli.options import AS_JSON, Only, given_fields, repeating, with_options
from specgen.cli.printing import (
    directory_of,
    kept_in,
    print_found,
    print_notes_and_exit,
    print_samples,
    printing,
    stoppable,
)
from specgen.cli.progress_bar import QUIET, progress
from specgen.config import (
    Cluster,
    EngineConfig,
    ExecutorName,
    SamplingParams,
    StructuredOutputs,
    UserError,
    first_line,
    option,
    require,
)
from specgen.config.urls import Url, location
from specgen.jobs.job import Job
from specgen.jobs.shards import WHOLE
from specgen.record.interrupt import interruptible

if TYPE_CHECKING:
    from specgen.config.errors import DeviceLost
    from specgen.jobs.run_output import RunResult

_OUTPUT = option(
    None,
    "Results",
    "Directory for completions.jsonl, errors.jsonl, passes.jsonl, status.json, report.json, report.html, "
    "manifest.json and config.yaml, or its URL (s3://, gs://, az://). An earlier run of the same command there is "
    "resumed. - for stdout: only the rows.",
    metavar="PATH",
    parse=location,
)


@with_options
def generate(
    *,
    ctx: typer.Context,
    output: Path | Url | None = _OUTPUT,
    job: Job,
    json_schema: Path | None = option(
        None, "Sampling", "Answers are JSON that fits the JSON schema in this file.", metavar="FILE"
    ),
    regex: str | None = option(None, "Sampling", "Answers match this regular expression as a whole."),
    choice: list[str] = option((), "Sampling", "Answers are this or another choice; may be repeated."),
    executor: ExecutorName = option(
        "local",
        "Running",
        "local: this process; ray: the workers of a Ray cluster, each with its own engine and GPU.",
    ),
    num_workers: int | None = option(None, "Running", "Workers of --executor ray.", shown="1"),
    address: str | None = option(
        None,
        "Running",
        "A running Ray cluster, as for ray.init: auto, or HOST:PORT.",
        shown="a new one on this machine",
    ),
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Generate for a whole prompt set and report how much speculative decoding helped.

    Without options: the bundled model pair on the bundled prompts. With --output, running a stopped or killed command
    again resumes it. Exit code 3 if a request failed, 75 if SIGTERM stopped it (the same command resumes).
    """
    for name, is_given, does in (
        ("restart", job.restart, "keeps the directory of --output and starts over"),
        ("retry-errors", job.retry_errors, "is about the failed rows of an earlier run"),
    ):
        require(
            not is_given or directory_of(output) is not None,
            f"{name} {does}, and no directory is given: add --output DIR, or leave out --{name}",
        )
    require(
        output is not None or job.shard == WHOLE,
        f"shard is {job.shard} and no file is kept to merge: add --output DIR, or --output - for the rows on stdout",
    )
    if ctx.params["shard"] == "auto":
        if (place := directory_of(output)) is not None:
            output = place / job.shard.directory_name
        # The file that repeats the command is to do so outside of the scheduler too
        ctx.params.update(shard=str(job.shard), output=output)
        progress(quiet).note(f"shard {job.shard}" + ("" if output is None else f" in {output}"))
    cluster = _cluster(executor, num_workers, address)
    given, structured = given_fields(ctx), _structured(json_schema, regex, choice)
    if structured is not None:
        given |= {"structured_outputs"}
        job = replace(job, sampling=replace(job.sampling, structured_outputs=structured))
    job = replace(job, given=given, cluster=cluster, config=repeating(ctx))
    _run_and_print(job, output, as_json, quiet)


def _run_and_print(job: Job, output: Path | Url | None, as_json: bool, quiet: bool) -> None:
    """Run ``job`` and print its report and notes; exit code 3 if a request failed."""
    from specgen.config.errors import DeviceLost
    from specgen.report.tables import figures, of_run

    try:
        if output == Path("-"):
            result = _run_into_stdout(job, as_json, quiet)
        else:
            result = _run(job, output, kept_in(output), quiet)
            if not (quiet or as_json):
                print_samples(result, sys.stdout)
            # report.html says what the names mean
            show = of_run if output is None else figures
            print_found(result.report.to_json(), show(result.report, result.settings), as_json)
    except DeviceLost as lost:
        restart_process(lost, job, output)
    print_notes_and_exit(
        result,
        output,
        quiet,
        "specgen: the same command tries failed rows again; where rows have to be corrected, correct them in the "
        "prompts and add --retry-errors. Answers are kept.",
    )


def _structured(file: Path | None, regex: str | None, choices: list[str]) -> StructuredOutputs | None:
    """What the options say that answers have to fit."""
    if file is None and regex is None and not choices:
        return None
    try:
        schema = None if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"json-schema {str(file)!r} cannot be read ({first_line(error)}): name a file"
        ) from error
    return StructuredOutputs(json=schema, regex=regex, choice=choices)


def _cluster(executor: ExecutorName, num_workers: int | None, address: str | None) -> Cluster | None:
    """The Ray cluster, if asked for."""
    if executor == "ray":
        return Cluster(num_workers=1 if num_workers is None else num_workers, address=address)
    require(num_workers is None and address is None, "num-workers and address are Ray's: add --executor ray")
    return None


def _run(job: Job, output: Path | Url | None, remedy: str, quiet: bool) -> "RunResult":
    """Run ``job``; if it ends early, say so and exit."""
    from specgen.jobs.run import TooManyFailuresError, run

    with stoppable(interruptible, lambda: remedy) as interrupt:
        try:
            return run(job, output, progress(quiet), interrupt)
        except TooManyFailuresError as ended:
            print(f"specgen: {ended}; {remedy}", file=sys.stderr)
            raise typer.Exit(3) from None


def _run_into_stdout(job: Job, as_json: bool, quiet: bool) -> "RunResult":
    """Run ``job`` in a temporary directory; its rows go to stdout and its report to stderr."""
    import shutil
    import tempfile

    from specgen.jobs.run_output import MAIN_FILES
    from specgen.report.tables import of_run

    with tempfile.TemporaryDirectory(prefix="specgen-") as path:
        result = _run(job, Path(path), "nothing is kept with --output -", quiet)
        with (Path(path) / MAIN_FILES[job.format]).open("rb") as rows, printing():
            shutil.copyfileobj(rows, sys.stdout.buffer)
    print_found(result.report.to_json(), of_run(result.report, result.settings), as_json, sys.stderr)
    return result


def restart_process(lost: "DeviceLost", job: Job, output: Path | Url | None) -> NoReturn:
    """Replace this process by the same command, because only a new process gets the device back.

    Exit code 1 where that could not resume the run, or where no request was in flight.
    """
    kept = directory_of(output) is not None
    if not (kept and job.is_repeatable and lost.requests):
        print(f"specgen: {lost}; {kept_in(output) if kept else 'nothing is kept'}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"specgen: the device is lost ({lost.reason}): continuing in a new process", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [argument for argument in sys.orig_argv[1:] if argument != "--restart"]
    os.execv(sys.executable, [sys.executable, *arguments])


@with_options
def prepare(
    *,
    ctx: typer.Context,
    engine: EngineConfig,
    sampling: Annotated[SamplingParams, Only("temperature top_p top_k min_p")],
    forget: bool = option(
        False,
        "Running",
        "Remove the costs of steps that earlier runs kept for K auto, of every model, and measure anew.",
    ),
    graphs: bool = option(
        False,
        "Running",
        "Capture the CUDA graph of every batch size and K too, to see what that takes; a run does so as it comes to "
        "each.",
    ),
    quiet: bool = QUIET,
) -> None:
    """Compile and warm up before the first run on this machine, and print where the time to a first token goes.

    Compiles the kernels that a run with the same options needs, all of them side by side, loads the weights and
    generates one token. Run a second time it shows what every later run waits for.
    """
    from specgen.engine import step_costs  # imports torch
    from specgen.engine.engine import Engine
    from specgen.engine.generation_config import generation_config
    from specgen.engine.loading import open_checkpoints
    from specgen.record.startup import phase, watched

    if forget:
        step_costs.KEPT.forget()
    with watched(progress(quiet).compiling) as startup:
        said = generation_config(open_checkpoints(engine)["model"], engine.generation_config)
        asked = said.over(sampling, given_fields(ctx))
        ready = Engine(engine, expected=asked)
        with phase("first token"):
            (answer,) = ready.generate(["1, 2, 3,"], SamplingParams(max_tokens=1, ignore_eos=True))
        if graphs:
            ready.capture_graphs()
        seconds = startup.take()
    if answer.error is not None:
        raise RuntimeError(answer.error)
    for name, spent in [*seconds.items(), ("in all", sum(seconds.values()))]:
        print(f"{name:<14}{spent:8.1f} s")
