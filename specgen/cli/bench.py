"""``specgen bench``: its commands and the output of their tables."""

import sys
from collections.abc import Iterable
from dataclasses import MISSING, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.help import Command, Commands
from specgen.cli.measuring import (
    DRY_RUN,
    OUTPUT_LENS,
    print_forecast,
    print_table,
    refuse_earlier,
    stoppable,
    turns,
    write_table,
)
from specgen.cli.options import AS_JSON, Only, numbers, repeating, with_options
from specgen.cli.progress_bar import QUIET
from specgen.config import EngineConfig, option
from specgen.prompts.formats import Reading
from specgen.prompts.load import DataSource

if TYPE_CHECKING:
    from specgen.experiments.output import BenchTable

app = typer.Typer(
    cls=Commands,
    name="bench",
    help="Measure kernels and the engine: tables on the terminal, or one JSON document.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_OUTPUT = option(
    None,
    "Results",
    "Directory for the table: NAME.csv, NAME.json, NAME.html with plots, and NAME.yaml, which repeats it (--config).",
)
_KEPT = option(
    None,
    "Results",
    "Directory for the table: NAME.csv, NAME.json, NAME.html with plots, NAME.yaml, which repeats it (--config), and "
    "NAME.rounds.jsonl, in which every round is kept: the same command goes on, of the settings in NAME.settings.json.",
)
_REPEATS = "Measurements per number."
_MATRIX = option(
    MISSING,
    "Table",
    "Arms and prompts: vllm-25196, vllm-19825, vllm-21477, batch-and-decoding or batch-and-k.",
)
_AXIS = option(
    None,
    "Table",
    "Other values on an axis of the matrix, such as batch=8,32, K=0,4,auto, attention=sdpa, "
    "cuda_graphs=off, decoding=plain,padded; may be repeated.",
)

_SIZES = {
    "cuda": ("1,4,8,16,32,64,128,256", "1024,2048,4096,8192,16384,32768,65536,131072"),
    "cpu": ("1,4", "128,256"),
}
_EXPERTS = {
    "cuda": (
        "qwen3-30b-a3b,qwen3-30b-a3b-fp8,gpt-oss-20b,gpt-oss-20b-bf16",
        "1,5,8,32,40,64,128,160,320,640",
    ),
    "cpu": ("small", "1,5,40"),
}
_PREFILL = {"max_prefill_tokens": 8192}  # as in a server


@app.command(cls=Command)
@with_options
def kernels(
    *,
    ctx: typer.Context,
    num_seqs: str | None = option(
        None, "Table", "Sequences per pass, comma-separated.", shown="1,4,8,16,32,64,128,256; on a CPU 1,4"
    ),
    max_seq_lens: str | None = option(
        None,
        "Table",
        "Longest contexts, comma-separated; those that do not fit in memory are left out.",
        shown="1024 to 131072 in powers of two; on a CPU 128,256",
    ),
    num_heads: int | None = option(
        None, "Table", "Query heads.", least=1, shown="32; with --latents 20, GLM-4.7-Flash's"
    ),
    num_kv_heads: int | None = option(None, "Table", "Key and value heads.", least=1, shown="8"),
    head_dim: int | None = option(None, "Table", "Elements per head.", least=1, shown="128"),
    latents: bool = option(
        False,
        "Table",
        "Latents of 512 + 64 numbers instead of keys and values (DeepSeek-V3, GLM-4.7-Flash): absorbed attention "
        "alone.",
    ),
    num_spec_tokens: int = option(4, "Table", "Drafts, K: passes of K+1 rows are timed too."),
    page_size: int = option(64, "Table", "Tokens per page.", least=1),
    engine: Annotated[EngineConfig, Only("dtype kv_dtype device")],
    repeats: int = option(20, "Table", _REPEATS),
    output: Path | None = _OUTPUT,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Time attention alone: hopper, trtllm and FlashInfer's wrapper, by sequences, context and rows per sequence.

    Without options on a GPU: the table of vLLM's PR 19825 for the heads of an 8B model, and for K = 4.
    """
    from specgen.engine.choices import FP8, device_and_dtype  # imports torch
    from specgen.experiments.kernels import KernelJob, measure, timed_heads

    device, dtype = device_and_dtype(engine)
    defaults = _SIZES[device.type]
    job = KernelJob(
        heads=timed_heads(
            num_heads,
            num_kv_heads,
            head_dim,
            latents=latents,
            dtype=dtype,
            kv_dtype=FP8 if engine.kv_dtype == "fp8" else dtype,
            page_size=page_size,
            max_query_len=num_spec_tokens + 1,
        ),
        num_seqs=numbers("num-seqs", num_seqs or defaults[0]),
        max_seq_lens=numbers("max-seq-lens", max_seq_lens or defaults[1]),
        num_spec_tokens=num_spec_tokens,
        repeats=repeats,
        device=device,
    )
    publish("kernels", measure(job), output, as_json, repeating(ctx), quiet)


@app.command(cls=Command)
@with_options
def experts(
    *,
    ctx: typer.Context,
    shapes: str | None = option(
        None,
        "Table",
        "Experts of qwen3-30b-a3b, qwen3-30b-a3b-fp8 (by block), qwen3-30b-a3b-fp8-dynamic (by channel), "
        "glm-4.7-flash-fp8 (by block), gpt-oss-20b (MXFP4), gpt-oss-20b-bf16, or small; comma-separated.",
        shown="qwen3-30b-a3b, qwen3-30b-a3b-fp8 and both of gpt-oss-20b; on a CPU small",
    ),
    rows: str | None = option(
        None,
        "Table",
        "Rows per pass, comma-separated.",
        shown="1,5,8,32,40,64,128,160,320,640; on a CPU 1,5,40",
    ),
    engine: Annotated[EngineConfig, Only("dtype device")],
    repeats: int = option(20, "Table", _REPEATS),
    output: Path | None = _OUTPUT,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Time the experts of one layer of a mixture by number of rows, against the bytes of those that are touched."""
    from specgen.engine.choices import device_and_dtype  # imports torch
    from specgen.experiments.expert_bench import ExpertJob, measure

    device, dtype = device_and_dtype(engine)
    defaults = _EXPERTS[device.type]
    job = ExpertJob(
        shapes=tuple(name.strip() for name in (shapes or defaults[0]).split(",")),
        rows=numbers("rows", rows or defaults[1]),
        repeats=repeats,
        dtype=dtype,
        device=device,
    )
    publish("experts", measure(job), output, as_json, repeating(ctx), quiet)


@app.command(cls=Command)
@with_options
def throughput(
    *,
    ctx: typer.Context,
    matrix: str = _MATRIX,
    axis: list[str] | None = _AXIS,
    dataset: str | None = option(
        None, "Prompts", "As for generate, or random for random tokens.", shown="the matrix's"
    ),
    data: Annotated[DataSource, Only("data_path")],
    num_prompts: int | None = option(
        None, "Prompts", "Prompts per run; repeated where the data set has fewer.", shown="the matrix's"
    ),
    how: Reading,
    prompt_tokens: int | None = option(None, "Prompts", "Tokens per random prompt.", shown="the matrix's"),
    max_new_tokens: int | None = option(None, "Sampling", "Longest answer in tokens.", shown="the matrix's"),
    output_lens: str = OUTPUT_LENS,
    max_batch_size: int | None = option(None, "Running", "Sequences per batch.", shown="the matrix's"),
    engine: Annotated[
        EngineConfig,
        Only(
            "model drafter chat_template_kwargs num_spec_tokens max_prefill_tokens device tensor_parallel dtype "
            "kv_dtype attention "
            "cuda_graphs gpu_memory_utilization",
            _PREFILL,
        ),
    ],
    repeats: int = option(3, "Table", _REPEATS),
    dry_run: bool = DRY_RUN,
    output: Path | None = _KEPT,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Output tokens per second, ratios and latencies: the tables of vLLM's pull requests, and batch against K."""
    from specgen.experiments.matrices import find_matrix

    chosen = find_matrix(matrix).with_values(axis or ())
    given = {
        "dataset": dataset,
        "num_prompts": num_prompts,
        "prompt_tokens": prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "max_batch_size": max_batch_size,
        "output_lens": output_lens,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    workload = replace(chosen.workload, how=how, **changes)
    engine = replace(engine, max_batch_size=workload.max_batch_size, prefix_cache=False)
    from specgen.experiments.throughput import ThroughputJob, forecast_of  # imports torch
    from specgen.experiments.throughput import throughput as measure

    job = ThroughputJob(
        matrix=chosen, workload=workload, engine=engine, data_path=data.data_path, repeats=repeats
    )
    if dry_run:
        print_forecast(forecast_of(job, output))
        return
    with stoppable(job.name, output):
        for table in measure(job, output, turns(quiet)):
            write_table(table, output, repeating(ctx))
    print_table(table, output, as_json, quiet)


@app.command(cls=Command)
@with_options
def step(
    *,
    ctx: typer.Context,
    batch_sizes: str = option("1,8,32", "Table", "Batch sizes, comma-separated."),
    prompt_tokens: int = option(256, "Table", "Random tokens per prompt."),
    num_spec_tokens: int = option(4, "Speculation", "Draft tokens per step, K: 0 (plain decoding) to 16."),
    engine: Annotated[
        EngineConfig,
        Only(
            "model drafter drafter_batch max_prefill_tokens device tensor_parallel dtype kv_dtype attention "
            "cuda_graphs",
            _PREFILL,
        ),
    ],
    output: Path | None = _OUTPUT,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Explain a decode step: milliseconds by part (draft loop, verify, accept, drafter KV fill, idle) and kernel, and
    lower bounds."""
    from specgen.experiments.explain import StepJob, explain  # imports torch

    job = StepJob(
        engine=replace(engine, prefix_cache=False, num_spec_tokens=num_spec_tokens),
        batch_sizes=numbers("batch-sizes", batch_sizes),
        prompt_tokens=prompt_tokens,
    )
    publish("step", explain(job), output, as_json, repeating(ctx), quiet)


def publish(
    name: str, tables: Iterable["BenchTable"], output: Path | None, as_json: bool, config: str, quiet: bool
) -> None:
    """Write the files of a growing table after every row, and print the last one; earlier ones are not replaced."""
    refuse_earlier(name, output)
    for table in tables:
        if not quiet:
            print(f"{table.name}: {len(table.rows)} rows", end="\r", file=sys.stderr, flush=True)
        write_table(table, output, config)
    if not quiet:
        print(file=sys.stderr)
    print_table(table, output, as_json, quiet)
