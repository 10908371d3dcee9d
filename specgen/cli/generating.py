"""``specgen generate``: the job that the options ask for, and how it ends."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from specgen.cli.options import AS_JSON, DATA_PATH, DATASET, FORMAT, NUM_PROMPTS, with_options
from specgen.cli.printing import print_notes_and_exit, print_result
from specgen.cli.progress_bar import ProgressBar
from specgen.config import Cluster, EngineConfig, ExecutorName, FormatName, SamplingParams, option, require

if TYPE_CHECKING:
    from specgen.core.endings import DeviceLost
    from specgen.jobs.job import Job
    from specgen.jobs.run_output import Result

GOES_ON = "the same command goes on from there"
KEPT_NOWHERE = "nothing is kept without --output"
_SHARD = option(
    "0/1",
    "Prompts",
    "Run one of N shards of the prompts, counted from 0: every N-th prompt, such as 0/4; on another machine "
    "1/4. `specgen merge` brings the directories together.",
    metavar="I/N",
    shown="all",
)
_OUTPUT = option(
    None,
    "Results",
    "Directory for completions.jsonl, errors.jsonl, events.jsonl, status.json, report.json, report.html and "
    "manifest.json. What an earlier run of the same command left there goes on. - for stdout: the rows alone.",
)


@with_options
def generate(
    *,
    engine: EngineConfig,
    sampling: SamplingParams,
    dataset: str = DATASET,
    data_path: Path | None = DATA_PATH,
    num_prompts: int | None = NUM_PROMPTS,
    shard: str = _SHARD,
    executor: ExecutorName = option(
        "local",
        "Running",
        "local: this process; ray: the workers of a Ray cluster, each with an engine and a GPU of its own.",
    ),
    num_workers: int | None = option(None, "Running", "Workers of --executor ray.", shown="1"),
    address: str | None = option(
        None,
        "Running",
        "A Ray cluster that runs already, as ray.init takes it: auto, or HOST:PORT.",
        shown="a new one on this machine",
    ),
    output: Path | None = _OUTPUT,
    restart: bool = option(
        False,
        "Results",
        "Begin anew; the directory as it was is kept beside --output, with .1 behind its name.",
    ),
    format: FormatName = FORMAT,
    max_failures: int | None = option(
        None, "Results", "End the run when more requests than this have failed.", shown="no limit"
    ),
    baseline: bool = option(False, "Results", "Run plain decoding on the same prompts too and compare."),
    as_json: bool = AS_JSON,
) -> None:
    """Generate for a whole prompt set and report what the speculation was worth.

    Without options: the bundled model pair on the bundled prompts. With --output what was stopped or killed goes on
    when the command is given again. Exit code 3 if a request failed.
    """
    from specgen.jobs.job import Job  # imports torch
    from specgen.jobs.shard import parse_shard

    job = Job(
        engine=engine,
        sampling=sampling,
        dataset=dataset,
        data_path=data_path,
        num_prompts=num_prompts,
        baseline=baseline,
        shard=parse_shard(shard),
        cluster=_cluster(executor, num_workers, address),
        restart=restart,
        max_failures=max_failures,
        format=format,
    )
    _run_and_print(job, output, as_json)


def _run_and_print(job: "Job", output: Path | None, as_json: bool) -> None:
    """Run ``job`` and print its report and notes; exit code 3 if a request failed."""
    from specgen.core.endings import DeviceLost

    try:
        if output == Path("-"):
            result = _run_into_stdout(job, as_json)
        else:
            result = _run(job, output, KEPT_NOWHERE if output is None else GOES_ON)
            print_result(result, as_json, sys.stdout)
    except DeviceLost as lost:
        go_on(lost, job, output)
    print_notes_and_exit(result, output)


def _cluster(executor: ExecutorName, num_workers: int | None, address: str | None) -> Cluster | None:
    """The workers that are asked for, if any."""
    if executor == "ray":
        return Cluster(num_workers=1 if num_workers is None else num_workers, address=address)
    require(num_workers is None and address is None, "num-workers and address are Ray's: add --executor ray")
    return None


def _run(job: "Job", output: Path | None, remedy: str) -> "Result":
    """Run ``job``; where it is ended before its end, say so and exit."""
    from specgen.jobs.run import TooManyFailuresError, run
    from specgen.rundir.interrupt import StoppedError, interruptible

    with interruptible() as interrupt:
        try:
            return run(job, output, ProgressBar(), interrupt)
        except (StoppedError, TooManyFailuresError) as ended:
            print(f"specgen: {ended}; {remedy}", file=sys.stderr)
            code = interrupt.exit_code if isinstance(ended, StoppedError) else 3
            raise typer.Exit(code) from None


def _run_into_stdout(job: "Job", as_json: bool) -> "Result":
    """Run ``job`` somewhere and leave its rows on stdout and its report on stderr."""
    import shutil
    import tempfile

    from specgen.jobs.run_output import MAIN_FILES

    with tempfile.TemporaryDirectory(prefix="specgen-") as path:
        result = _run(job, Path(path), "nothing is kept with --output -")
        with (Path(path) / MAIN_FILES[job.format]).open("rb") as rows:
            shutil.copyfileobj(rows, sys.stdout.buffer)
    print_result(result, as_json, sys.stderr)
    return result


def go_on(lost: "DeviceLost", job: "Job", output: Path | None) -> NoReturn:
    """The same command in place of this process, with whose end alone the device takes back its memory.

    Exit code 1 where that would not go on from here, or where nothing was running that could be done otherwise.
    """
    kept = output is not None and output != Path("-")
    if not (kept and job.is_repeatable and lost.requests):
        print(f"specgen: {lost}; {GOES_ON if kept else 'nothing is kept'}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"specgen: the device is lost ({lost.reason}): going on in a new process", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [argument for argument in sys.orig_argv[1:] if argument != "--restart"]
    os.execv(sys.executable, [sys.executable, *arguments])
