"""``specgen bench``: its commands and their options, and where a table goes."""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.bundled import pair
from specgen.cli import options as opt
from specgen.config import EngineConfig, require, spec_tokens
from specgen.rundir.atomic import writable

if TYPE_CHECKING:
    from specgen.bench.output import Table

app = typer.Typer(
    name="bench",
    help="Measure kernels and the engine: tables on the terminal, one JSON document as the last line.",
    no_args_is_help=True,
)

TABLE = "Table"  # a group of --help

BenchOutputOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory for the table as NAME.csv and NAME.json, and with its plots as NAME.html.",
        rich_help_panel=opt.RESULTS,
        show_default=False,
    ),
]
RepeatsOption = Annotated[int, typer.Option(help="Measurements of each number.", rich_help_panel=TABLE)]
NumSeqsOption = Annotated[
    str | None,
    typer.Option(
        help="Sequences of a pass, each tried.",
        rich_help_panel=TABLE,
        show_default="1,4,8,16,32,64,128,256; on a CPU 1,4",
    ),
]
MaxSeqLensOption = Annotated[
    str | None,
    typer.Option(
        help="Longest contexts, each tried; those that do not fit the memory are left out.",
        rich_help_panel=TABLE,
        show_default="1024 to 131072 in powers of two; on a CPU 128,256",
    ),
]
HeadsOption = Annotated[int, typer.Option(min=1, help="Heads of a query.", rich_help_panel=TABLE)]
KvHeadsOption = Annotated[int, typer.Option(min=1, help="Heads of keys and values.", rich_help_panel=TABLE)]
HeadDimOption = Annotated[int, typer.Option(min=1, help="Elements of a head.", rich_help_panel=TABLE)]
PageSizeOption = Annotated[int, typer.Option(min=1, help="Positions of a page.", rich_help_panel=TABLE)]
VerifiedOption = Annotated[
    int,
    typer.Option(
        "--num-spec-tokens", help="Drafts, K: passes of K+1 rows are timed too.", rich_help_panel=TABLE
    ),
]
MatrixOption = Annotated[
    str,
    typer.Option(
        help="Which arms, over which prompts: vllm-25196, vllm-19825, vllm-21477, batch-and-decoding or batch-and-k.",
        rich_help_panel=TABLE,
    ),
]
AxisOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Other values on an axis of the matrix, such as batch=8,32, K=0,4,auto, attention=sdpa, "
        "cuda_graphs=off, decoding=plain,padded; may be repeated.",
        rich_help_panel=TABLE,
        show_default=False,
    ),
]
WorkloadDatasetOption = Annotated[
    str | None,
    typer.Option(
        help="As for generate, or random: tokens that are drawn.",
        rich_help_panel=opt.DATA,
        show_default="the matrix's",
    ),
]
WorkloadPromptsOption = Annotated[
    int | None,
    typer.Option(
        help="Prompts of a run; over again where the data set has fewer.",
        rich_help_panel=opt.DATA,
        show_default="the matrix's",
    ),
]
PromptTokensOption = Annotated[
    int | None,
    typer.Option(help="Tokens of each random prompt.", rich_help_panel=opt.DATA, show_default="the matrix's"),
]
WorkloadTokensOption = Annotated[
    int | None,
    typer.Option(help="Longest answer in tokens.", rich_help_panel=opt.SAMPLING, show_default="the matrix's"),
]
WorkloadBatchOption = Annotated[
    int | None,
    typer.Option(
        help="Sequences that decode together.", rich_help_panel=opt.RUNNING, show_default="the matrix's"
    ),
]
ExplainedSizesOption = Annotated[
    str,
    typer.Option(help="Numbers of sequences that decode together, each explained.", rich_help_panel=TABLE),
]
ExplainedTokensOption = Annotated[
    int, typer.Option(help="Random tokens of each prompt.", rich_help_panel=TABLE)
]

_SIZES = {
    "cuda": ("1,4,8,16,32,64,128,256", "1024,2048,4096,8192,16384,32768,65536,131072"),
    "cpu": ("1,4", "128,256"),
}


@app.command()
def kernels(
    num_seqs: NumSeqsOption = None,
    max_seq_lens: MaxSeqLensOption = None,
    num_heads: HeadsOption = 32,
    num_kv_heads: KvHeadsOption = 8,
    head_dim: HeadDimOption = 128,
    num_spec_tokens: VerifiedOption = 4,
    page_size: PageSizeOption = 64,
    dtype: opt.DtypeOption = opt.Dtype.auto,
    device: opt.DeviceOption = "auto",
    repeats: RepeatsOption = 20,
    output: BenchOutputOption = None,
) -> None:
    """Time attention alone: trtllm against FlashInfer's wrapper, by sequences, context and rows a sequence.

    Without options on a GPU: the table of vLLM's PR 19825 for the heads of an 8B model, and for K = 4.
    """
    from specgen.attention import Heads  # imports torch
    from specgen.bench.kernels import KernelJob, measure
    from specgen.device import choose_device
    from specgen.engine.choices import choose_dtype
    from specgen.engine.loading import DTYPES

    place = choose_device(device)
    number_format = DTYPES[choose_dtype(dtype.value, place)]
    defaults = _SIZES[place.type]
    job = KernelJob(
        heads=Heads(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=number_format,
            kv_dtype=number_format,
            page_size=page_size,
            max_query_len=num_spec_tokens + 1,
        ),
        num_seqs=opt.numbers("num-seqs", num_seqs or defaults[0]),
        max_seq_lens=opt.numbers("max-seq-lens", max_seq_lens or defaults[1]),
        num_spec_tokens=num_spec_tokens,
        repeats=repeats,
        device=place,
    )
    publish(measure(job), output)


@app.command()
def throughput(
    matrix: MatrixOption,
    axis: AxisOption = None,
    model: opt.ModelOption = None,
    drafter: opt.DrafterOption = None,
    dataset: WorkloadDatasetOption = None,
    data_path: opt.DataPathOption = None,
    num_prompts: WorkloadPromptsOption = None,
    prompt_tokens: PromptTokensOption = None,
    num_spec_tokens: opt.NumSpecTokensOption = "4",
    max_new_tokens: WorkloadTokensOption = None,
    max_batch_size: WorkloadBatchOption = None,
    max_prefill_tokens: opt.MaxPrefillTokensOption = 8192,
    device: opt.DeviceOption = "auto",
    dtype: opt.DtypeOption = opt.Dtype.auto,
    attention: opt.AttentionOption = opt.Attention.auto,
    cuda_graphs: opt.CudaGraphsOption = opt.CudaGraphs.auto,
    gpu_memory_utilization: opt.GpuMemoryUtilizationOption = 0.9,
    repeats: RepeatsOption = 3,
    output: BenchOutputOption = None,
) -> None:
    """Output tokens a second, ratios and latencies: the tables of vLLM's pull requests, and batch against K."""
    from specgen.bench.matrices import find_matrix

    chosen = find_matrix(matrix).with_values(axis or ())
    given = {
        "dataset": dataset,
        "num_prompts": num_prompts,
        "prompt_tokens": prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "max_batch_size": max_batch_size,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    workload = replace(chosen.workload, **changes)
    most, spec_length = spec_tokens(num_spec_tokens)
    target, head = pair(model, drafter, most)
    engine = EngineConfig(
        model=target,
        drafter=head,
        num_spec_tokens=most,
        spec_length=spec_length,
        max_batch_size=workload.max_batch_size,
        max_prefill_tokens=max_prefill_tokens,
        device=device,
        dtype=dtype.value,
        attention=attention.value,
        cuda_graphs=cuda_graphs.value,
        gpu_memory_utilization=gpu_memory_utilization,
        prefix_cache=False,
    )
    from specgen.bench.throughput import ThroughputJob, throughput  # imports torch

    job = ThroughputJob(matrix=chosen, workload=workload, engine=engine, data_path=data_path, repeats=repeats)
    publish(throughput(job), output)


@app.command()
def step(
    batch_sizes: ExplainedSizesOption = "1,8,32",
    prompt_tokens: ExplainedTokensOption = 256,
    model: opt.ModelOption = None,
    drafter: opt.DrafterOption = None,
    num_spec_tokens: opt.NumSpecTokensOption = "4",
    drafter_batch: opt.DrafterBatchOption = opt.DrafterBatch.padded,
    max_prefill_tokens: opt.MaxPrefillTokensOption = 8192,
    device: opt.DeviceOption = "auto",
    dtype: opt.DtypeOption = opt.Dtype.auto,
    attention: opt.AttentionOption = opt.Attention.auto,
    cuda_graphs: opt.CudaGraphsOption = opt.CudaGraphs.auto,
    output: BenchOutputOption = None,
) -> None:
    """Explain a decode step: milliseconds by part (draft loop, verify, accept, first pass, idle) and their bounds."""
    most, spec_length = spec_tokens(num_spec_tokens)
    target, head = pair(model, drafter, most)
    engine = EngineConfig(
        model=target,
        drafter=head,
        num_spec_tokens=most,
        spec_length=spec_length,
        drafter_batch=drafter_batch.value,
        max_prefill_tokens=max_prefill_tokens,
        device=device,
        dtype=dtype.value,
        attention=attention.value,
        cuda_graphs=cuda_graphs.value,
        prefix_cache=False,
    )
    from specgen.bench.explain import StepJob, explain  # imports torch

    sizes = opt.numbers("batch-sizes", batch_sizes)
    publish(explain(StepJob(engine=engine, batch_sizes=sizes, prompt_tokens=prompt_tokens)), output)


def publish(tables: Iterable["Table"], output: Path | None) -> None:
    """Keep the files of a table that grows up to date, so that an end half way costs no row; print the last one."""
    require(
        output is None or not output.is_file(),
        f"output {str(output)!r} is a file: name a directory for tables",
    )
    for table in tables:
        print(f"{table.name}: {len(table.rows)} rows", end="\r", file=sys.stderr, flush=True)
        if output is not None:
            with writable(output):
                table.write(output)
    print(file=sys.stderr)
    print(table.to_text())
    if output is not None:
        print(f"Files are in {output}; open {output / table.name}.html in a browser.", file=sys.stderr)
    print(json.dumps(table.to_json()))
