"""``specgen eval``, lm-eval's tasks over the arms of a study; ``verify``, the losslessness audit; ``score``."""

import os
import shutil
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specgen.cli.options import AS_JSON, ON_A_DEVICE, Only, repeating, with_options
from specgen.cli.printing import (
    kept_in,
    print_failures,
    print_files,
    print_found,
    print_parts,
    printing,
    stoppable,
)
from specgen.cli.progress_bar import QUIET, progress
from specgen.config import EngineConfig, LayoutName, SamplingParams, UserError, counts, option, require
from specgen.experiments.studies import (
    ALL_NAMED,
    OF_NGRAMS,
    Asking,
    Limits,
    Study,
    load_study,
    named_arms,
)
from specgen.jobs.job import Job
from specgen.jobs.shards import WHOLE
from specgen.prompts.load import DataSource
from specgen.record.files import write_text
from specgen.record.interrupt import breakable, interruptible
from specgen.report.display import several

if TYPE_CHECKING:
    from specgen.experiments.study import StudyJob

_FAILURES_SHOWN = 3  # of an audit
_TASKS = typer.Argument(
    help="Tasks of lm-eval, comma-separated; word_problems is bundled.", show_default="those of --study"
)
_RUNS = typer.Argument(help="Finished runs of `specgen generate` of one target.", show_default=False)
_ENGINE = Only(
    "generation_config model lora drafter chat_template_kwargs num_spec_tokens draft_sampling draft_lm_head "
    f"verification max_prefill_tokens kv_memory {ON_A_DEVICE} gpu_memory_utilization prefix_cache"
)


@with_options
def evaluate(
    *,
    ctx: typer.Context,
    tasks: Annotated[str | None, _TASKS] = None,
    study: str | None = option(
        None,
        "Study",
        "A bundled study (fp8-kv, vllm-25196) or a JSON file: tasks, arms, limit, shots and batch in one, such as "
        '{"tasks": ["gsm8k"], "arms": [{"name": "K2", "num_spec_tokens": 2}, {"name": "off", "num_spec_tokens": 0}]}; '
        "docs/formats.md has all fields.",
    ),
    arms: str | None = option(
        None,
        "Study",
        "Which of padded, non-padded and baseline (plain decoding), comma-separated.",
        shown="all three, or those of --study",
    ),
    limits: Limits,
    how: Asking,
    engine: Annotated[EngineConfig, _ENGINE],
    log_samples: bool = option(False, "Results", "Write every question and answer to --output too."),
    output: Path | None = option(
        None,
        "Results",
        "New directory for comparison.json, config.yaml, and per arm a directory with lm-eval's results.json and "
        "the files that `specgen report` reads.",
    ),
    quiet: bool = QUIET,
) -> None:
    """Whether speculation changed the answers, and how much faster it was: lm-eval's tasks, arm by arm, compared."""
    require(output is not None or not log_samples, "log-samples needs a directory: name one with --output")
    chosen = limits.over(_study(tasks, study, arms, engine))
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's own bars; read when tqdm is imported
    from specgen.experiments.study import StudyJob  # imports torch and lm-eval

    batch = chosen.max_batch_size or engine.max_batch_size
    job = StudyJob(study=chosen, engine=replace(engine, max_batch_size=batch), **vars(how))
    with stoppable(breakable, partial(kept_in, output)):
        _run(job, output, output if log_samples else None, repeating(ctx), quiet)


def _study(tasks: str | None, study: str | None, arms: str | None, engine: EngineConfig) -> Study:
    """The study of a file, whose tasks and arms options replace, or the named arms on ``tasks``."""
    require(tasks is not None or study is not None, "no task is given: try word_problems, or use --study")
    names = None if tasks is None else tuple(name.strip() for name in tasks.split(","))
    if study is None:
        assert names is not None
        own = ALL_NAMED if engine.lookup is None else OF_NGRAMS
        return Study(name=str(tasks), tasks=names, arms=named_arms(arms or own))
    loaded = load_study(study)
    return replace(
        loaded, tasks=names or loaded.tasks, arms=loaded.arms if arms is None else named_arms(arms)
    )


def _run(job: "StudyJob", output: Path | None, samples: Path | None, config: str, quiet: bool) -> None:
    """Run the arms, print the result of each as it finishes, then their comparison."""
    from specgen.experiments import study
    from specgen.experiments.study_tables import of_comparison
    from specgen.record.results import directory

    with directory(output, "study.json") as path:
        run, done = study.StudyRun(job, path, progress(quiet)), []
        write_text(path / "config.yaml", config)
        for arm in run.arms():
            done.append(arm)
            print_parts([arm.name, study.results_table(arm)], sys.stdout)
            if samples is not None:
                study.write_samples(arm, samples / arm.name)
        comparison = run.compare(done)
    print_parts(of_comparison(comparison, run.settings()), sys.stdout)
    if output is not None and not quiet:
        print_files(output, "report.html")
    if comparison.num_unexplained or not comparison.is_tested:
        raise typer.Exit(1)


@with_options
def verify(
    *,
    ctx: typer.Context,
    data: DataSource,
    sampling: Annotated[SamplingParams, Only("max_tokens")],
    batch_sizes: str = option(
        "1,8,32", "Running", "Batch sizes to test; the reference is plain decoding at the smallest."
    ),
    engine: Annotated[
        EngineConfig,
        Only(
            f"generation_config model lora drafter chat_template_kwargs num_spec_tokens draft_lm_head {ON_A_DEVICE}",
            drafts=True,
        ),
    ],
    output: Path | None = option(
        None,
        "Results",
        "New file for the report as one JSON document; NAME.config.yaml beside it repeats the command.",
    ),
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Show that speculation changes no greedy text: every arm against plain decoding, token by token.

    Exit code 1 if texts diverge by more than the rounding of the dtype explains, or if no step had drafts to test.
    """
    sizes = counts("batch-sizes", batch_sizes)
    config = None if output is None else output.parent / f"{output.stem}.config.yaml"
    from specgen.experiments.audit import audit  # imports torch
    from specgen.experiments.study_tables import is_tested, of_audit
    from specgen.record.files import new_file, writable, write_json

    with new_file(output), new_file(config):
        found = audit(engine, sampling, data, sizes, progress(quiet))
        if output is not None and config is not None:
            with writable(output):
                write_text(config, repeating(ctx))
                write_json(output, found)
    print_found(found, of_audit(found), as_json)
    failures = found["failures"]
    print_failures(failures[:_FAILURES_SHOWN], len(failures), "--json and --output have all")
    if found["num_unexplained"] or not is_tested(found):
        raise typer.Exit(1)


@with_options
def score(
    *,
    ctx: typer.Context,
    job: Annotated[
        Job,
        Only(
            "model lora chat_template_kwargs dataset data_path num_prompts split prompt_field chat shard "
            f"max_batch_size max_prefill_tokens kv_memory {ON_A_DEVICE} gpu_memory_utilization prefix_cache restart",
            defaults={"drafter": None, "num_spec_tokens": 0},
        ),
    ],
    output: Path | None = option(
        None,
        "Results",
        "Directory for scores.jsonl, errors.jsonl, score.json and config.yaml; a run of the same command there is "
        "resumed. Without it, rows go to stdout.",
    ),
    quiet: bool = QUIET,
) -> None:
    """The log-probability of given texts: rows with a prompt and a completion, or several completions.

    Nothing is generated or drafted; scores are of the model's own distribution.

    Exit code 3 if a row failed, 75 if SIGTERM stopped it (the same command resumes).
    """
    from specgen.jobs import score as scoring  # imports torch

    if ctx.params["shard"] == "auto" and output is not None:
        output = output / job.shard.directory_name
    require(
        output is not None or (job.shard == WHOLE and not job.restart),
        "shard and restart are about a directory, and none is given: add --output DIR",
    )
    with tempfile.TemporaryDirectory(prefix="specgen-") as temporary:
        path = Path(temporary) / "scores" if output is None else output
        with stoppable(interruptible, partial(kept_in, output)) as interrupt:
            done, failures = scoring.score(job, path, progress(quiet), interrupt)
        if output is None:
            with (path / scoring.ROWS).open("rb") as rows, printing():
                shutil.copyfileobj(rows, sys.stdout.buffer)
        else:
            write_text(path / "config.yaml", repeating(ctx))
    if not quiet:
        where = "" if output is None else f"; they are in {output / scoring.ROWS}"
        print(f"specgen: {several(done, 'row')} scored{where}", file=sys.stderr)
    kept = (
        "run with --output DIR to keep all reasons"
        if output is None
        else f"{output / scoring.ERRORS} has them all"
    )
    print_failures(failures[:_FAILURES_SHOWN], len(failures), kept)
    if failures:
        raise typer.Exit(3)


@with_options
def features(
    *,
    runs: list[Path] = _RUNS,
    layers: str | None = option(
        None,
        "Table",
        "Layers whose inputs are kept, counted from 0, comma-separated; the stream behind the last one always is.",
        shown="2, L//2, L-3 of a target of L layers, as EAGLE3 heads read",
    ),
    layout: LayoutName = option(
        "speculators", "Results", "Whose trainer the files are for; specforge: its offline training."
    ),
    model: str | None = option(
        None, "Models", "The runs' target, where it lies elsewhere now.", shown="as the runs name it"
    ),
    lora: str | None = option(
        None, "Models", "The runs' LoRA adapter, where it lies elsewhere now.", shown="as the runs name it"
    ),
    engine: Annotated[
        EngineConfig,
        Only("device max_prefill_tokens", defaults={"model": "", "drafter": None, "num_spec_tokens": 0}),
    ],
    output: Path | None = option(
        None, "Results", "Directory for the data set; the same command goes on there.", shown="required"
    ),
    quiet: bool = QUIET,
) -> None:
    """Hidden states of a target for its own answers, to train a draft head on, as speculators or SpecForge read them.

    Each text takes one prefill: nothing is generated. Exit code 75 if SIGTERM stopped it (the same command goes on).
    """
    from specgen.jobs.features import dump_features  # imports torch

    numbers = () if layers is None else counts("layers", layers, least=0)
    if output is None:
        raise UserError("no output is named: add --output DIR for the data set")
    moved = {name: path for name, path in (("model", model), ("lora", lora)) if path}
    given = {"device": engine.device, "max_prefill_tokens": engine.max_prefill_tokens, **moved}
    with stoppable(interruptible, partial(kept_in, output)) as interrupt:
        done, size = dump_features(runs, output, numbers, progress(quiet), interrupt, layout, **given)
    if not quiet:
        print(
            f"specgen: features of {several(done, 'text')}, {size / 1e9:,.2f} GB, are in {output}",
            file=sys.stderr,
        )
