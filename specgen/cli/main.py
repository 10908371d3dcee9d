"""The commands: the only file that prints; their options are in ``options.py``."""

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from specgen import __version__
from specgen.bundled import pair
from specgen.cli import options as opt
from specgen.cli.bench import app as bench
from specgen.config import Cluster, EngineConfig, SamplingParams, UserError, require, spec_tokens

if TYPE_CHECKING:
    from specgen.core.endings import DeviceLost
    from specgen.evaluation.studies import Study
    from specgen.evaluation.study import StudyJob
    from specgen.events import Event
    from specgen.jobs.job import Job
    from specgen.jobs.run_output import Result


class _Commands(TyperGroup):
    """Ends a command quietly once nobody reads its output any more, as ``head`` does when it has seen enough."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # its own type is private
        """Run the command that was named."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError as error:
            if not _is_unread(sys.stdout):  # typer would take it for that of stdout, and exit without a word
                raise RuntimeError("a pipe that is not stdout is broken") from error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the exit
            raise typer.Exit(128 + signal.SIGPIPE) from None


def _is_unread(file: TextIO) -> bool:
    """Whether ``file`` is a pipe whose reader is gone."""
    poll = select.poll()
    poll.register(file, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


app = typer.Typer(
    cls=_Commands,
    name="specgen",
    help="Offline batch generation with EAGLE3 speculative decoding, and what the speculation was worth.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench)

_FAILURES_SHOWN = 3
_GOES_ON = "the same command goes on from there"
_BUG = (
    f"this is a bug in specgen {__version__}: report it with the traceback above, the command, "
    "and for a run directory its manifest.json"
)
_KEPT_NOWHERE = "nothing is kept without --output"


def main() -> None:
    """Run the command line; a ``UserError`` is the user's to mend: one line and exit code 2. The rest is ours."""
    try:
        app()
    except UserError as error:
        print(f"specgen: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("specgen: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if _is_of_the_device(error):
            print(f"specgen: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
            print(f"specgen: {_BUG}", file=sys.stderr)
        sys.exit(1)


def _is_of_the_device(error: Exception) -> bool:
    """Whether it is ``DeviceLost``, whose module loads torch: where it is not loaded nobody has raised it."""
    core = sys.modules.get("specgen.core.endings")
    return core is not None and isinstance(error, core.DeviceLost)


@app.command()
def generate(
    model: opt.ModelOption = None,
    drafter: opt.DrafterOption = None,
    dataset: opt.DatasetOption = "bundled",
    data_path: opt.DataPathOption = None,
    num_prompts: opt.NumPromptsOption = None,
    shard: opt.ShardOption = "0/1",
    num_spec_tokens: opt.NumSpecTokensOption = "4",
    drafter_batch: opt.DrafterBatchOption = opt.DrafterBatch.padded,
    draft_sampling: opt.DraftSamplingOption = opt.DraftSampling.greedy,
    max_new_tokens: opt.MaxNewTokensOption = 128,
    temperature: opt.TemperatureOption = 0.0,
    top_p: opt.TopPOption = 1.0,
    top_k: opt.TopKOption = 0,
    min_p: opt.MinPOption = 0.0,
    seed: opt.SeedOption = 0,
    stop: opt.StopOption = None,
    ignore_eos: opt.IgnoreEosOption = False,
    max_batch_size: opt.MaxBatchSizeOption = 32,
    max_prefill_tokens: opt.MaxPrefillTokensOption = 2048,
    kv_memory: opt.KvMemoryOption = None,
    device: opt.DeviceOption = "auto",
    dtype: opt.DtypeOption = opt.Dtype.auto,
    attention: opt.AttentionOption = opt.Attention.auto,
    cuda_graphs: opt.CudaGraphsOption = opt.CudaGraphs.auto,
    gpu_memory_utilization: opt.GpuMemoryUtilizationOption = 0.9,
    prefix_cache: opt.PrefixCacheOption = True,
    executor: opt.ExecutorOption = opt.Executor.local,
    num_workers: opt.NumWorkersOption = None,
    address: opt.AddressOption = None,
    output: opt.OutputOption = None,
    restart: opt.RestartOption = False,
    format: opt.FormatOption = opt.Format.jsonl,
    max_failures: opt.MaxFailuresOption = None,
    baseline: opt.BaselineOption = False,
    as_json: opt.AsJsonOption = False,
) -> None:
    """Generate for a whole prompt set and report what the speculation was worth.

    Without options: the bundled model pair on the bundled prompts. With --output what was stopped or killed goes on
    when the command is given again. Exit code 3 if a request failed.
    """
    most, spec_length = spec_tokens(num_spec_tokens)
    target, head = pair(model, drafter, most)
    engine = EngineConfig(
        model=target,
        drafter=head,
        num_spec_tokens=most,
        spec_length=spec_length,
        drafter_batch=drafter_batch.value,
        draft_sampling=draft_sampling.value,
        max_batch_size=max_batch_size,
        max_prefill_tokens=max_prefill_tokens,
        kv_memory=None if kv_memory is None else _bytes(kv_memory),
        device=device,
        dtype=dtype.value,
        attention=attention.value,
        cuda_graphs=cuda_graphs.value,
        gpu_memory_utilization=gpu_memory_utilization,
        prefix_cache=prefix_cache,
    )
    sampling = SamplingParams(
        max_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    from specgen.core.endings import DeviceLost  # imports torch
    from specgen.jobs.job import Job
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
        format=format.value,
    )
    try:
        if output == Path("-"):
            result = _run_into_stdout(job, as_json)
        else:
            result = _run(job, output, _KEPT_NOWHERE if output is None else _GOES_ON)
            _print(result, as_json, sys.stdout)
    except DeviceLost as lost:
        _go_on(lost, job, output)
    _print_notes(result, output)
    if result.report["num_errors"]:
        raise typer.Exit(3)


@app.command()
def report(
    directories: Annotated[
        list[Path], typer.Argument(help="Run directories; several are compared.", show_default=False)
    ],
    against: Annotated[
        str | None,
        typer.Option(
            help="Published figures to set one run beside; a name that is not there lists them.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the report of a run again, compare runs side by side, or set one beside published figures."""
    from specgen.report import tables
    from specgen.report.report import load

    runs = [(str(directory), *load(directory)) for directory in directories]
    if against is not None:
        require(len(runs) == 1, f"against is {against!r} for {len(runs)} runs: give one directory")
        document, text = _beside(runs[0][0], runs[0][1], against)
        print(json.dumps(document) if as_json else text)
    elif as_json:
        reports = {name: numbers for name, numbers, _ in runs}
        print(json.dumps(reports if len(runs) > 1 else runs[0][1]))
    elif len(runs) == 1:
        print(tables.render(runs[0][1], runs[0][2].get("settings", {})), end="")
    else:
        print(tables.compare([(name, numbers) for name, numbers, _ in runs]), end="")


@app.command()
def merge(
    output: Annotated[Path, typer.Argument(help="New directory for the whole run.", show_default=False)],
    directories: Annotated[
        list[Path], typer.Argument(help="Run directories of all shards, in any order.", show_default=False)
    ],
    format: opt.FormatOption = opt.Format.jsonl,
    as_json: opt.AsJsonOption = False,
) -> None:
    """Bring the shards of a run together: rows in the order of the prompts, and one report.

    Exit code 3 if a request failed.
    """
    from specgen.jobs.merge import merge  # imports torch
    from specgen.jobs.run_output import read_result

    merge(output, directories, format.value)
    result = read_result(output)
    _print(result, as_json, sys.stdout)
    _print_notes(result, output)
    if result.report["num_errors"]:
        raise typer.Exit(3)


@app.command()
def verify(
    model: opt.ModelOption = None,
    drafter: opt.DrafterOption = None,
    dataset: opt.DatasetOption = "bundled",
    data_path: opt.DataPathOption = None,
    num_prompts: opt.NumPromptsOption = None,
    num_spec_tokens: opt.NumSpecTokensOption = "4",
    max_new_tokens: opt.MaxNewTokensOption = 128,
    batch_sizes: opt.BatchSizesOption = "1,8,32",
    device: opt.DeviceOption = "auto",
    dtype: opt.DtypeOption = opt.Dtype.auto,
    attention: opt.AttentionOption = opt.Attention.auto,
    cuda_graphs: opt.CudaGraphsOption = opt.CudaGraphs.auto,
    output: opt.AuditOutputOption = None,
    as_json: opt.AsJsonOption = False,
) -> None:
    """Show that speculation changes no greedy text: every arm against plain decoding, place by place.

    Exit code 1 if texts part where the rounding of the number format cannot explain it.
    """
    most, spec_length = spec_tokens(num_spec_tokens)
    target, head = pair(model, drafter, most)
    engine = EngineConfig(
        model=target,
        drafter=head,
        num_spec_tokens=most,
        spec_length=spec_length,
        device=device,
        dtype=dtype.value,
        attention=attention.value,
        cuda_graphs=cuda_graphs.value,
    )
    sizes = opt.numbers("batch-sizes", batch_sizes)
    require(
        output is None or not output.exists(),
        f"output {str(output)!r} exists: name a new file, or remove it first",
    )
    from specgen.evaluation import audit_table
    from specgen.evaluation.audit import AuditJob, audit  # imports torch
    from specgen.rundir.atomic import naming, writable, write_json

    job = AuditJob(
        engine=engine,
        sampling=SamplingParams(max_tokens=max_new_tokens),
        dataset=dataset,
        data_path=data_path,
        num_prompts=num_prompts,
        batch_sizes=sizes,
    )
    found = audit(job, _Bar()).to_json()
    if output is not None:
        with writable(output):
            with naming(output):
                output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, found)
    print(json.dumps(found) if as_json else audit_table.render(found), end="\n" if as_json else "")
    failures = found["failures"]
    _print_failures(failures[:_FAILURES_SHOWN], len(failures), "--json and --output have all")
    if found["num_unexplained"]:
        raise typer.Exit(1)


@app.command(name="eval")
def evaluate(
    tasks: opt.TasksArgument = None,
    study: opt.StudyOption = None,
    arms: opt.ArmsOption = None,
    limit: opt.LimitOption = None,
    num_fewshot: opt.NumFewshotOption = None,
    apply_chat_template: opt.ApplyChatTemplateOption = False,
    data_path: opt.TaskDataPathOption = None,
    model: opt.ModelOption = None,
    drafter: opt.DrafterOption = None,
    num_spec_tokens: opt.NumSpecTokensOption = "4",
    draft_sampling: opt.DraftSamplingOption = opt.DraftSampling.greedy,
    seed: opt.SeedOption = 0,
    max_batch_size: opt.StudyBatchSizeOption = None,
    max_prefill_tokens: opt.MaxPrefillTokensOption = 2048,
    kv_memory: opt.KvMemoryOption = None,
    device: opt.DeviceOption = "auto",
    dtype: opt.DtypeOption = opt.Dtype.auto,
    attention: opt.AttentionOption = opt.Attention.auto,
    cuda_graphs: opt.CudaGraphsOption = opt.CudaGraphs.auto,
    gpu_memory_utilization: opt.GpuMemoryUtilizationOption = 0.9,
    prefix_cache: opt.PrefixCacheOption = True,
    log_samples: opt.LogSamplesOption = False,
    output: opt.StudyOutputOption = None,
) -> None:
    """Did speculation change the answers, and what did it give: lm-eval's tasks, arm by arm, and their comparison."""
    chosen = _study(tasks, study, arms)
    changes: dict[str, Any] = {"limit": limit, "num_fewshot": num_fewshot, "max_batch_size": max_batch_size}
    chosen = replace(chosen, **{name: value for name, value in changes.items() if value is not None})
    most, spec_length = spec_tokens(num_spec_tokens)
    target, head = pair(model, drafter, most)
    engine = EngineConfig(
        model=target,
        drafter=head,
        num_spec_tokens=most,
        spec_length=spec_length,
        draft_sampling=draft_sampling.value,
        max_batch_size=chosen.max_batch_size or 32,
        max_prefill_tokens=max_prefill_tokens,
        kv_memory=None if kv_memory is None else _bytes(kv_memory),
        device=device,
        dtype=dtype.value,
        attention=attention.value,
        cuda_graphs=cuda_graphs.value,
        gpu_memory_utilization=gpu_memory_utilization,
        prefix_cache=prefix_cache,
    )
    require(
        output is not None or not log_samples, "log-samples has nowhere to go: name a directory with --output"
    )
    from specgen.evaluation.study import StudyJob  # imports torch and lm-eval

    job = StudyJob(
        study=chosen, engine=engine, apply_chat_template=apply_chat_template, data_path=data_path, seed=seed
    )
    with _breakable(_KEPT_NOWHERE if output is None else _GOES_ON):
        _evaluate(job, output, output if log_samples else None)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Checkpoint: a directory or hub id.", show_default=False)],
    other: Annotated[
        str | None, typer.Argument(help="Second checkpoint: do target and head fit?", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what a checkpoint is, how it is understood, and whether target and head fit."""
    from specgen.checkpoints.inspect_checkpoint import describe

    description = describe(path, other)
    print(json.dumps(description.to_json()) if as_json else description.to_text())
    if description.misfits:
        raise typer.Exit(1)


def _beside(run: str, report: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The report of ``run`` beside the published figures ``name``, as JSON and as text."""
    from specgen.report.against import compare, load_results
    from specgen.report.against_table import render
    from specgen.report.references import load_reference

    reference = load_reference(name)
    lines = compare(report, load_results(Path(run)), reference)
    beside = {"reference": asdict(reference), "figures": [line.to_json() for line in lines]}
    return {**report, "against": beside}, render(run, report["num_spec_tokens"], reference, lines).rstrip()


def _study(tasks: str | None, study: str | None, arms: str | None) -> "Study":
    """The study of a file, or the named arms on ``tasks``; what is given beside a file takes its place."""
    from specgen.evaluation.studies import ALL_NAMED, Study, load_study, named_arms

    require(tasks is not None or study is not None, "no task is named: try word_problems, or use --study")
    names = None if tasks is None else tuple(name.strip() for name in tasks.split(","))
    if study is None:
        assert names is not None
        return Study(name=str(tasks), source="", tasks=names, arms=named_arms(arms or ALL_NAMED))
    loaded = load_study(study)
    return replace(
        loaded, tasks=names or loaded.tasks, arms=loaded.arms if arms is None else named_arms(arms)
    )


def _evaluate(job: "StudyJob", output: Path | None, samples: Path | None) -> None:
    """Run the arms, print what each gives as it comes, then what they show together."""
    from specgen.evaluation import comparison_tables, study
    from specgen.rundir.results import directory

    with directory(output, "study.json") as path:
        run, results = study.StudyRun(job, path), []
        for result in run.arms():
            results.append(result)
            print(f"{result.run.name}\n{result.table}")
            if samples is not None:
                study.write_samples(result, samples / result.run.name)
        comparison = run.compare(results)
    print(comparison_tables.render(comparison, run.settings()), end="")
    if output is not None:
        print(f"Files are in {output}; open {output / 'report.html'} in a browser.", file=sys.stderr)
    if comparison.num_unexplained:
        raise typer.Exit(1)


@contextmanager
def _breakable(remedy: str) -> Iterator[None]:
    """Where a signal breaks off what runs within, say so and exit."""
    from specgen.rundir.interrupt import breakable

    with breakable() as interrupt:
        try:
            yield
        except KeyboardInterrupt:
            print(f"specgen: interrupted; {remedy}", file=sys.stderr)
            raise typer.Exit(interrupt.exit_code) from None


def _bytes(text: str) -> int:
    """A number of bytes from ``1073741824``, ``512MiB`` or ``2GB``."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {letter: 1 << 10 * power, f"{letter}IB": 1 << 10 * power, f"{letter}B": 1000**power}
    number = text.rstrip("KMGTIBkmgtib ")
    unit = text[len(number) :].strip().upper()
    require(
        unit in units and number.replace(".", "", 1).isdecimal(),
        f"kv-memory is {text!r}: write a size such as 512MiB or 2GiB",
    )
    return int(float(number) * units[unit])


def _cluster(executor: opt.Executor, num_workers: int | None, address: str | None) -> Cluster | None:
    """The workers that are asked for, if any."""
    if executor is opt.Executor.ray:
        return Cluster(num_workers=1 if num_workers is None else num_workers, address=address)
    require(num_workers is None and address is None, "num-workers and address are Ray's: add --executor ray")
    return None


def _run(job: "Job", output: Path | None, remedy: str) -> "Result":
    """Run ``job``; where it is ended before its end, say so and exit."""
    from specgen.jobs.run import TooManyFailuresError, run
    from specgen.rundir.interrupt import StoppedError, interruptible

    with interruptible() as interrupt:
        try:
            return run(job, output, _Bar(), interrupt)
        except StoppedError as ended:
            print(f"specgen: {ended}; {remedy}", file=sys.stderr)
            raise typer.Exit(interrupt.exit_code) from None
        except TooManyFailuresError as ended:
            print(f"specgen: {ended}; {remedy}", file=sys.stderr)
            raise typer.Exit(3) from None


def _go_on(lost: "DeviceLost", job: "Job", output: Path | None) -> NoReturn:
    """The same command in place of this process, with whose end alone the device takes back its memory.

    Exit code 1 where that would not go on from here, or where nothing was running that could be done otherwise.
    """
    kept = output is not None and output != Path("-")
    if not (kept and job.is_repeatable and lost.requests):
        print(f"specgen: {lost}; {_GOES_ON if kept else 'nothing is kept'}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"specgen: the device is lost ({lost.reason}): going on in a new process", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [argument for argument in sys.orig_argv[1:] if argument != "--restart"]
    os.execv(sys.executable, [sys.executable, *arguments])


def _run_into_stdout(job: "Job", as_json: bool) -> "Result":
    """Run ``job`` somewhere and leave its rows on stdout and its report on stderr."""
    import shutil
    import tempfile

    from specgen.jobs.run_output import MAIN_FILES

    with tempfile.TemporaryDirectory(prefix="specgen-") as path:
        result = _run(job, Path(path), "nothing is kept with --output -")
        with (Path(path) / MAIN_FILES[job.format]).open("rb") as rows:
            shutil.copyfileobj(rows, sys.stdout.buffer)
    _print(result, as_json, sys.stderr)
    return result


def _print(result: "Result", as_json: bool, file: TextIO) -> None:
    """The report; before its tables some of the text."""
    from specgen.report import tables

    if as_json:
        print(json.dumps(result.report), file=file)
        return
    for asked, answered in result.samples:
        print(f"Prompt:\n{_indented(asked)}\nAnswer:\n{_indented(answered)}\n", file=file)
    print(tables.render(result.report, result.settings), end="", file=file)


def _print_notes(result: "Result", output: Path | None) -> None:
    """What is no part of the report, on stderr: what was not run, and where the files are."""
    _print_failures(result.failures, result.report["num_errors"], "errors.jsonl of --output has them all")
    if output is not None and output != Path("-"):
        print(f"Files are in {output}; open {output / 'report.html'} in a browser.", file=sys.stderr)


def _print_failures(first: list[str], num_failures: int, where_all_are: str) -> None:
    """The ``first`` requests that failed, on stderr."""
    for failure in first:
        print(f"specgen: failed: {failure}", file=sys.stderr)
    if (more := num_failures - len(first)) > 0:
        print(f"specgen: and {more} more; {where_all_are}", file=sys.stderr)


def _indented(text: str) -> str:
    """``text`` with its lines two places in, cut to what fits a screen."""
    short = text.strip() if len(text) <= 600 else text[:600].strip() + " ..."
    return "  " + "\n  ".join(short.splitlines())


class _Bar:
    """Progress on stderr: requests done, output tokens a second, acceptance length so far."""

    def prepare(self, what: str) -> None:
        """See ``progress.Progress``."""
        note = (
            "getting ready; kernels that this machine has not run before are compiled first, a minute or two"
        )
        print(f"{what}: {note}", file=sys.stderr)

    def start(self, what: str, num_requests: int, num_done: int = 0) -> None:
        """See ``progress.Progress``."""
        from tqdm import tqdm

        from specgen.rundir.tally import Tally

        self._bar = tqdm(total=num_requests, initial=num_done, desc=what, unit="req", dynamic_ncols=True)
        self._tally = Tally()

    def see(self, event: "Event") -> None:
        """See ``progress.Progress``."""
        from specgen.events import Captured, OutOfMemory, Stepped

        self._tally.see(event)
        match event:
            case Stepped():
                speed = f"{self._tally.tokens_per_second or 0:.0f} tok/s"
                length = f"acceptance length {self._tally.acceptance_length or 1:.2f}"
                self._bar.set_postfix_str(f"{speed}, {length}", refresh=False)
            case Captured(what=what, num_sequences=number, seconds=seconds, fits=fits):
                done = (
                    f"captured in {seconds:.1f} s" if fits else "no memory to capture it, so it runs without"
                )
                self._bar.write(f"CUDA graph of a {what} of {number} sequences: {done}", file=sys.stderr)
            case OutOfMemory(max_batch_size=batch, max_prefill_tokens=tokens):
                self._bar.write(
                    f"out of GPU memory: going on with a batch of {batch} and {tokens} prefill tokens",
                    file=sys.stderr,
                )
            case _:
                pass

    def advance(self) -> None:
        """See ``progress.Progress``."""
        self._bar.update()

    def finish(self) -> None:
        """See ``progress.Progress``."""
        self._bar.close()
