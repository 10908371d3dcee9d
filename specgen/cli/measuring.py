"""``specgen tune``, what it prints while it measures, and the tables of benches."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.options import AS_JSON, Only, numbers, repeating, with_options
from specgen.cli.printing import kept_in, print_files, print_found, print_parts, stoppable
from specgen.cli.progress_bar import QUIET
from specgen.config import (
    MOST_DRAFTS,
    DrafterBatchName,
    DraftLength,
    EngineConfig,
    acceptance_rates,
    choices,
    option,
    require,
)
from specgen.prompts.formats import Reading
from specgen.prompts.load import DataSource
from specgen.record.files import writable, write_text
from specgen.record.interrupt import breakable
from specgen.report import display

if TYPE_CHECKING:
    from specgen.experiments.output import BenchTable
    from specgen.experiments.turns import Turn, Watch

_DRY_RUN = option(
    False, "Table", "Print the arms with their memory and least time; read no weights and run nothing."
)
_SYNTHETIC_ACCEPTANCE = option(
    None,
    "Speculation",
    "What would such a head be worth here? Real passes, but drafts are accepted by dice: a mean acceptance length "
    "at each K (auto: at its largest), such as 3.2, or chances by position behind accepted drafts, such as "
    "0.8,0.7,0.6. The texts are not the model's then.",
    shown="by the target",
    parse=acceptance_rates,
)
_OUTPUT_LENS = option(
    "fixed",
    "Sampling",
    "fixed: up to --max-new-tokens or the end that the model finds; data: as many tokens as the data's own answers "
    "have, up to --max-new-tokens, with later turns (sharegpt), or max_tokens of a row.",
    metavar="fixed|data",
)


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


def _kept(name: str, output: Path | None) -> str:
    """What is kept of the bench ``name`` where it ends early."""
    from specgen.experiments.rounds import num_kept

    if output is None:
        return kept_in(output)
    number = num_kept(output, name)
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


_PREFILL = {"max_prefill_tokens": 8192}  # as in a server
_UNITS = {"s": 1, "m": 60, "h": 3600}
_NEW_TOKENS = {"fixed": 256, "data": 4096}  # by --output-lens
_TUNE_PROMPTS = option(
    None, "Prompts", "Prompts per run; repeated where the data set has fewer.", shown="four per batch slot"
)
_MAX_NEW_TOKENS = option(
    None, "Sampling", "Longest answer in tokens.", shown="256; with --output-lens data 4096"
)
_TUNED = option(
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


def _some_of(field: str, text: str) -> tuple[Any, ...]:
    """The values of the option of a ``field`` of ``EngineConfig``, comma-separated; each once, in order."""
    known = choices(EngineConfig)[field]
    asked = [part.strip() for part in text.split(",")]
    for name in asked:
        require(name in known, f"{field.replace('_', '-')} has {name!r}: use some of {', '.join(known)}")
    return tuple(dict.fromkeys(asked))


@dataclass(frozen=True, kw_only=True)
class Arms:
    batches: tuple[int, ...] = option(
        "1,8,32",
        "Table",
        "Batch sizes, comma-separated: how many requests run at once.",
        name="batch",
        parse=lambda text: tuple(dict.fromkeys(numbers("batch", text))),
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
        parse=partial(_some_of, "drafter_batch"),
    )
    attention: tuple[str, ...] = option(
        "auto",
        "Table",
        "Attention backends as for generate, comma-separated; the first is what others are compared with.",
        parse=partial(_some_of, "attention"),
    )
    cuda_graphs: tuple[str, ...] = option(
        "auto", "Table", "CUDA graphs as for generate, likewise.", parse=partial(_some_of, "cuda_graphs")
    )
    repeats: int = option(10, "Table", "Measurements of an arm, at most.")
    precision: float = option(
        0.02,
        "Table",
        "Measure until the 95 % interval of a speed-up is plus or minus this fraction. 0: every arm has all repeats.",
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
    dry_run: bool = _DRY_RUN,
    data: Annotated[DataSource, Only("dataset data_path")],
    num_prompts: int | None = _TUNE_PROMPTS,
    how: Reading,
    prompt_tokens: int = option(100, "Prompts", "Tokens per prompt of --dataset random."),
    synthetic_acceptance: tuple[float, ...] | float | None = _SYNTHETIC_ACCEPTANCE,
    output_lens: str = _OUTPUT_LENS,
    max_new_tokens: int | None = _MAX_NEW_TOKENS,
    engine: Annotated[
        EngineConfig,
        Only(
            "generation_config model lora drafter chat_template_kwargs max_prefill_tokens "
            "device tensor_parallel dtype kv_dtype gpu_memory_utilization",
            _PREFILL,
        ),
    ],
    output: Path | None = _TUNED,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Find the K, drafter batch and batch size that are fastest on your prompts, and say by how much.

    Arms run in interleaved rounds until their speed-ups over plain decoding are known well enough; those that cannot
    win are dropped early. Ends with a recommendation and the command to run. With --config NAME it makes a bundled
    table, in which every arm has all repeats: vllm-25196, vllm-19825, vllm-21477, batch-and-decoding or batch-and-k.
    """
    from specgen.experiments.tune import TuneJob, forecast_of  # imports torch
    from specgen.experiments.tune import tune as measure
    from specgen.experiments.tune_table import NAME, SETTINGS
    from specgen.experiments.workload import Workload

    lens: Any = output_lens  # ``Workload`` checks it
    largest = max(arms.batches)
    workload = Workload(
        dataset=data.dataset,
        data_path=data.data_path,
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        max_new_tokens=_NEW_TOKENS.get(output_lens, 1) if max_new_tokens is None else max_new_tokens,
        output_lens=lens,
        how=how,
    )
    asked = vars(arms).copy()
    settings: dict[str, tuple[Any, ...]] = {name: asked.pop(name) for name in SETTINGS}
    engine = replace(
        engine,
        num_spec_tokens=max(1, *(length.most for length in arms.draft_lengths)),
        max_batch_size=largest,
        prefix_cache=False,
        synthetic_acceptance=synthetic_acceptance or (),
        **{name: values[0] for name, values in settings.items() if len(values) == 1},
    )
    several = {name: values for name, values in settings.items() if len(values) > 1}
    job = TuneJob(**asked, settings=several, workload=workload, engine=engine)
    if dry_run:
        print_parts(forecast_of(job, output), sys.stdout)
        return

    def say(sentence: str) -> None:
        if not quiet:
            print(sentence, file=sys.stderr)

    with stoppable(breakable, lambda: _kept(NAME, output)):
        for table in measure(job, output, turns(quiet), say):
            write_table(table, output, repeating(ctx))
    print_table(table, output, as_json, quiet)
