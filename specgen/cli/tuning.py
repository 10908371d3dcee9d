"""``specgen tune``: K, drafter batch and batch size for a user's own traffic."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from specgen.cli.measuring import (
    DRY_RUN,
    OUTPUT_LENS,
    print_forecast,
    print_table,
    stoppable,
    turns,
    write_table,
)
from specgen.cli.options import AS_JSON, Only, numbers, repeating, with_options
from specgen.cli.progress_bar import QUIET
from specgen.config import MOST_DRAFTS, DrafterBatchName, DraftLength, EngineConfig, option, require
from specgen.prompts.formats import Reading
from specgen.prompts.load import DataSource

_UNITS = {"s": 1, "m": 60, "h": 3600}
_NEW_TOKENS = {"fixed": 256, "data": 4096}  # by --output-lens
_PER_SLOT = 4  # prompts; with fewer the batch is seldom full
_NUM_PROMPTS = option(
    None, "Prompts", "Prompts per run; repeated where the data set has fewer.", shown="four per batch slot"
)
_MAX_NEW_TOKENS = option(
    None, "Sampling", "Longest answer in tokens.", shown="256; with --output-lens data 4096"
)
_OUTPUT = option(
    None,
    "Results",
    "Directory for tune.csv, tune.json, tune.html with plots, tune.yaml, which repeats it (--config), "
    "tune.settings.json, what was asked, and tune.rounds.jsonl, with every round: the same command goes on.",
)


def draft_lengths(text: str) -> tuple[DraftLength, ...]:
    """The values of ``--k``: ``0-7,auto,uniform``; each once, in order."""
    chosen = ("auto", "uniform")
    found: list[DraftLength] = []
    for part in (part.strip() for part in text.split(",")):
        first, dash, last = part.partition("-")
        ends = (first, last) if dash else (first, first)
        require(
            part in chosen or all(end.isascii() and end.isdecimal() for end in ends),
            f"k is {text!r}: write numbers, ranges, auto and uniform, separated by commas, such as 0-7,auto",
        )
        require(
            part in chosen or int(ends[1]) <= MOST_DRAFTS,
            f"k is {text!r}: use at most {MOST_DRAFTS} in {part}",
        )
        values = [part] if part in chosen else list(range(int(ends[0]), int(ends[1]) + 1))
        require(bool(values), f"k is {text!r}: {part} is empty: write the smaller number first")
        found += [DraftLength.of(value) for value in values]
    return tuple(dict.fromkeys(found))


def seconds(text: str) -> float:
    """The value of ``--budget``: ``90s``, ``10m``, ``2h``."""
    number, unit = text[:-1], text[-1:]
    require(
        unit in _UNITS and number.replace(".", "", 1).isdecimal() and float(number) > 0,
        f"budget is {text!r}: write a time such as 90s, 10m or 2h",
    )
    return float(number) * _UNITS[unit]


def _batches(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers("batch", text)))


def _drafter_batches(text: str) -> tuple[DrafterBatchName, ...]:
    known = get_args(DrafterBatchName)
    asked = [part.strip() for part in text.split(",")]
    for name in asked:
        require(name in known, f"drafter-batch has {name!r}: use some of {', '.join(known)}")
    return tuple(name for name in known if name in asked)


@dataclass(frozen=True, kw_only=True)
class Arms:
    batches: tuple[int, ...] = option(
        "1,8,32",
        "Table",
        "Batch sizes, comma-separated: how many requests run at once.",
        name="batch",
        parse=_batches,
    )
    draft_lengths: tuple[DraftLength, ...] = option(
        "1-7,auto",
        "Table",
        "Draft tokens per step, comma-separated: numbers, ranges, auto. Plain is always measured.",
        name="k",
        parse=draft_lengths,
    )
    drafter_batches: tuple[DrafterBatchName, ...] = option(
        "padded,non-padded",
        "Table",
        "Drafter batches, comma-separated.",
        name="drafter_batch",
        parse=_drafter_batches,
    )
    repeats: int = option(10, "Table", "Measurements of an arm, at most.")
    precision: float = option(
        0.02, "Table", "Measure until the 95 % interval of a speed-up is plus or minus this fraction."
    )
    budget: float | None = option(
        None,
        "Table",
        "End after this time, such as 90s, 10m or 2h, shared by the batch sizes.",
        shown="no limit",
        parse=seconds,
    )


@with_options
def tune(
    *,
    ctx: typer.Context,
    arms: Arms,
    dry_run: bool = DRY_RUN,
    data: Annotated[DataSource, Only("dataset data_path")],
    num_prompts: int | None = _NUM_PROMPTS,
    how: Reading,
    output_lens: str = OUTPUT_LENS,
    max_new_tokens: int | None = _MAX_NEW_TOKENS,
    engine: Annotated[
        EngineConfig,
        Only(
            "generation_config "
            "model drafter chat_template_kwargs max_prefill_tokens device tensor_parallel dtype kv_dtype "
            "attention cuda_graphs "
            "gpu_memory_utilization",
            {"max_prefill_tokens": 8192},
        ),
    ],
    output: Path | None = _OUTPUT,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Find the K, drafter batch and batch size that are fastest on your prompts, and say by how much.

    Arms run in interleaved rounds until their speed-ups over plain decoding are known well enough; those that cannot
    win are dropped early. Ends with a recommendation and the command to run.
    """
    from specgen.experiments.matrices import Workload

    lens: Any = output_lens  # ``Workload`` checks it
    largest = max(arms.batches)
    workload = Workload(
        dataset=data.dataset,
        num_prompts=num_prompts,
        per_slot=_PER_SLOT,
        max_new_tokens=_NEW_TOKENS.get(output_lens, 1) if max_new_tokens is None else max_new_tokens,
        max_batch_size=largest,
        output_lens=lens,
        how=how,
    )
    most = max(1, *(length.most for length in arms.draft_lengths))
    engine = replace(engine, num_spec_tokens=most, max_batch_size=largest, prefix_cache=False)
    from specgen.experiments.tune import NAME, TuneJob, forecast_of  # imports torch
    from specgen.experiments.tune import tune as measure

    job = TuneJob(**vars(arms), workload=workload, engine=engine, data_path=data.data_path)
    if dry_run:
        print_forecast(forecast_of(job, output))
        return

    def say(sentence: str) -> None:
        if not quiet:
            print(sentence, file=sys.stderr)

    with stoppable(NAME, output):
        for table in measure(job, output, turns(quiet), say):
            write_table(table, output, repeating(ctx))
    print_table(table, output, as_json, quiet)
