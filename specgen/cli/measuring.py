"""``specgen tune``, what it prints while it measures, and the tables of benches."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specgen.cli.options import AS_JSON, Only, repeating, with_options
from specgen.cli.printing import kept_in, print_files, print_found, print_parts, stoppable
from specgen.cli.progress_bar import QUIET
from specgen.config import option
from specgen.experiments.tune_job import TuneJob
from specgen.record.files import writable, write_text
from specgen.record.interrupt import breakable
from specgen.report import display

if TYPE_CHECKING:
    from specgen.experiments.output import BenchTable
    from specgen.experiments.turns import Turn, Watch

_DRY_RUN = option(False, "Table", "Print the arms with their memory; read no weights and run nothing.")


def turns(quiet: bool) -> "Watch":
    """Prints a line for each turn of a bench's arms; nothing with ``quiet``."""
    return (lambda turn: None) if quiet else _print_turn


def _print_turn(turn: "Turn") -> None:
    """One line on stderr: the time that is left, the arm, and what its turn gave."""
    print(
        f"[{display.duration(turn.seconds_left)} left] {turn.arm}: {_outcome(turn)}",
        file=sys.stderr,
        flush=True,
    )


def _outcome(turn: "Turn") -> str:
    if turn.failure is not None:
        return "failed"
    if turn.repeat is None:
        return "warmed up"
    speed, found = turn.repeat.tokens_per_second, [f"repeat {turn.number}"]
    if turn.plain is not None and turn.repeat.acceptance_length is not None:  # else it says nothing of drafts
        found.append(f"{display.ratio(speed / turn.plain.tokens_per_second)} of plain")
    if turn.repeat.tpot is not None:
        found.append(f"{display.seconds(turn.repeat.tpot.median)} per token")
    return f"{display.rate(speed)} tokens/s, {', '.join(found)}"


def _kept(output: Path | None) -> str:
    """What is kept of a tune that ends early."""
    from specgen.experiments.rounds import num_kept

    if output is None:
        return kept_in(output)
    number = num_kept(output)
    if not number:
        return "no round was finished, so nothing is kept"
    return f"{display.several(number, 'whole round')} kept in {output}: the same command goes on"


def write_table(table: "BenchTable", output: Path | None, config: str) -> None:
    """The files of ``table``, and ``config``, which repeats it."""
    if output is not None:
        with writable(output):
            table.write(output)
            write_text(output / f"{table.name}.yaml", config)


def print_table(table: "BenchTable", output: Path | None, as_json: bool, quiet: bool) -> None:
    """A table that is complete; exit code 1 where it has no row, as its notes say."""
    print_found(table.to_json(), table.parts(), as_json)
    if output is not None and not quiet:
        print_files(output, f"{table.name}.html")
    if not table.rows:  # every arm has failed
        raise typer.Exit(1)


# --- tune -----------------------------------------------------------------------------------------


_NUM_PROMPTS = option(
    None, "Prompts", "Prompts per run; repeated where the data set has fewer.", shown="four per batch slot"
)
_TUNED = option(
    None,
    "Results",
    "Directory for tune.csv, tune.json, tune.html with plots, tune.yaml, which repeats it (--config), "
    "tune.settings.json, what was asked, and tune.rounds.jsonl, with every round: the same command goes on.",
)


_JOB = Only(
    "batches draft_lengths drafter_batches attentions graphs repeats precision budget model lora drafter dataset "
    "data_path num_prompts split prompt_field chat prompt_tokens chat_template_kwargs draft_lm_head synthetic "
    "output_lens max_new_tokens generation_config max_prefill_tokens device tensor_parallel dtype kv_dtype "
    "gpu_memory_utilization",
    {"max_prefill_tokens": 8192, "num_prompts": _NUM_PROMPTS},  # as in a server
)


@with_options
def tune(
    *,
    ctx: typer.Context,
    job: Annotated[TuneJob, _JOB],
    dry_run: bool = _DRY_RUN,
    output: Path | None = _TUNED,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Find the K, drafter batch and batch size that are fastest on your prompts, and say by how much.

    Arms run in interleaved rounds until their speed-ups over plain decoding are known well enough; those that cannot
    win are dropped early. Ends with a recommendation and the command to run. With --config NAME it makes a bundled
    table, in which every arm has all repeats: vllm-25196, vllm-19825, vllm-21477, batch-and-decoding or batch-and-k.
    """
    from specgen.experiments.plans import forecast, prepare  # imports torch
    from specgen.experiments.tune import tune as measure

    if dry_run:
        print_parts(forecast(prepare(job, output)), sys.stdout)
        return

    with stoppable(breakable, lambda: _kept(output)):
        for table in measure(job, output, turns(quiet)):
            write_table(table, output, repeating(ctx))
    print_table(table, output, as_json, quiet)
