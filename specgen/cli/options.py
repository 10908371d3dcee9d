"""Every option of ``specgen generate``: its type, its help, its group."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from specgen.config import require

# The groups of --help
MODELS, DATA, DRAFTING = "Models", "Prompts", "Speculation"
SAMPLING, RUNNING, RESULTS, STUDY = "Sampling", "Running", "Results", "Study"


class DrafterBatch(StrEnum):
    """Which rows of a verify the drafter takes in."""

    padded = "padded"
    non_padded = "non-padded"


class DraftSampling(StrEnum):
    """How a draft is chosen."""

    greedy = "greedy"
    probabilistic = "probabilistic"


class Attention(StrEnum):
    """Attention backends."""

    auto = "auto"
    trtllm = "trtllm"
    flashinfer = "flashinfer"
    sdpa = "sdpa"
    sdpa_static = "sdpa-static"


class CudaGraphs(StrEnum):
    """What is captured."""

    auto = "auto"
    step = "step"
    passes = "pass"
    off = "off"


class Dtype(StrEnum):
    """Number formats of weights and KV cache."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Executor(StrEnum):
    """Where the engines are."""

    local = "local"
    ray = "ray"


class Format(StrEnum):
    """How the rows of a run are written."""

    jsonl = "jsonl"
    openai = "openai"
    parquet = "parquet"


ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Target: a directory or hub id.", rich_help_panel=MODELS, show_default="the bundled target"
    ),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        help="EAGLE3 head: a directory or hub id.",
        rich_help_panel=MODELS,
        show_default="the bundled head",
    ),
]
DatasetOption = Annotated[
    str,
    typer.Option(
        help="bundled, mt-bench, sharegpt, gsm8k, spec-bench, humaneval, or a file of rows with prompt, messages or "
        "prompt_token_ids, or of an OpenAI batch: JSON lines, gzipped or not, or Parquet. - is standard input.",
        rich_help_panel=DATA,
    ),
]
DataPathOption = Annotated[
    Path | None,
    typer.Option(
        help="Read the named data set from this file or directory instead of the hub.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option(help="Use only the first N prompts.", rich_help_panel=DATA, show_default="all"),
]
ShardOption = Annotated[
    str,
    typer.Option(
        help="Run one of N shards of the prompts, counted from 0: every N-th prompt, such as 0/4; on another machine "
        "1/4. `specgen merge` brings the directories together.",
        metavar="I/N",
        rich_help_panel=DATA,
        show_default="all",
    ),
]
NumSpecTokensOption = Annotated[
    str,
    typer.Option(
        help="Draft tokens a step, K; 0 is plain decoding; auto: at every step what pays best for the batch, by the "
        "measured cost of a step and the acceptance so far, up to 7.",
        metavar="INTEGER|auto",
        rich_help_panel=DRAFTING,
    ),
]
DrafterBatchOption = Annotated[
    DrafterBatch,
    typer.Option(
        help="The drafter takes in all verified rows, or the accepted ones alone.",
        rich_help_panel=DRAFTING,
    ),
]
DraftSamplingOption = Annotated[
    DraftSampling,
    typer.Option(
        help="Choose drafts by argmax or draw them at the temperature; text is distributed alike.",
        rich_help_panel=DRAFTING,
    ),
]
MaxNewTokensOption = Annotated[int, typer.Option(help="Longest answer in tokens.", rich_help_panel=SAMPLING)]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopPOption = Annotated[float, typer.Option(help="Nucleus; 1 is off.", rich_help_panel=SAMPLING)]
TopKOption = Annotated[
    int, typer.Option(help="Sample from the K likeliest tokens; 0 is off.", rich_help_panel=SAMPLING)
]
MinPOption = Annotated[
    float,
    typer.Option(
        help="Drop tokens below this share of the likeliest one; 0 is off.", rich_help_panel=SAMPLING
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(help="With the request's id it fixes every random draw.", rich_help_panel=SAMPLING),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        help="End a text before this string; may be repeated.",
        rich_help_panel=SAMPLING,
        show_default=False,
    ),
]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on to the full length.", rich_help_panel=SAMPLING)
]
MaxBatchSizeOption = Annotated[
    int, typer.Option(help="Sequences that decode together.", rich_help_panel=RUNNING)
]
MaxPrefillTokensOption = Annotated[
    int, typer.Option(help="Prompt tokens in one prefill pass.", rich_help_panel=RUNNING)
]
KvMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Memory for the KV cache, such as 512MiB or 2GiB.",
        rich_help_panel=RUNNING,
        show_default="what the batch can need, at most 1GiB on a CPU and what --gpu-memory-utilization leaves on a GPU",
    ),
]
GpuMemoryUtilizationOption = Annotated[
    float,
    typer.Option(
        help="Share of the GPU's memory to use, weights and graphs included.", rich_help_panel=RUNNING
    ),
]
PrefixCacheOption = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Compute what prompts have in common at their beginning once. Leave it out to compare with other tables.",
        rich_help_panel=RUNNING,
    ),
]
CudaGraphsOption = Annotated[
    CudaGraphs,
    typer.Option(
        help="step: a decode step is one CUDA graph; pass: each forward pass is; off: none. auto: step where the "
        "attention backend can.",
        rich_help_panel=RUNNING,
    ),
]
BatchSizesOption = Annotated[
    str,
    typer.Option(
        help="Numbers of sequences that decode together, each tried; plain decoding at the smallest is what all "
        "are compared with.",
        rich_help_panel=RUNNING,
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=RUNNING)]
DtypeOption = Annotated[
    Dtype, typer.Option(help="auto: float32 on a CPU, bfloat16 on a GPU.", rich_help_panel=RUNNING)
]
AttentionOption = Annotated[
    Attention,
    typer.Option(
        help="trtllm: TensorRT-LLM's decode kernels; flashinfer: its paged wrappers; sdpa: PyTorch's, and sdpa-static, "
        "which can be captured. auto picks and says why.",
        rich_help_panel=RUNNING,
    ),
]
ExecutorOption = Annotated[
    Executor,
    typer.Option(
        help="local: this process; ray: the workers of a Ray cluster, each with an engine and a GPU of its own.",
        rich_help_panel=RUNNING,
    ),
]
NumWorkersOption = Annotated[
    int | None,
    typer.Option(help="Workers of --executor ray.", rich_help_panel=RUNNING, show_default="1"),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        help="A Ray cluster that runs already, as ray.init takes it: auto, or HOST:PORT.",
        rich_help_panel=RUNNING,
        show_default="a new one on this machine",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory for completions.jsonl, errors.jsonl, events.jsonl, status.json, report.json, report.html and "
        "manifest.json. What an earlier run of the same command left there goes on. - for stdout: the rows alone.",
        rich_help_panel=RESULTS,
        show_default=False,
    ),
]
RestartOption = Annotated[
    bool,
    typer.Option(
        "--restart",
        help="Begin anew; the directory as it was is kept beside --output, with .1 behind its name.",
        rich_help_panel=RESULTS,
    ),
]
FormatOption = Annotated[
    Format,
    typer.Option(
        help="Beside completions.jsonl: openai for batch_output.jsonl and batch_errors.jsonl as OpenAI's Batch API "
        "writes them, parquet for completions.parquet.",
        rich_help_panel=RESULTS,
    ),
]
MaxFailuresOption = Annotated[
    int | None,
    typer.Option(
        help="End the run when more requests than this have failed.",
        rich_help_panel=RESULTS,
        show_default="no limit",
    ),
]
BaselineOption = Annotated[
    bool,
    typer.Option(
        "--baseline",
        help="Run plain decoding on the same prompts too and compare.",
        rich_help_panel=RESULTS,
    ),
]
AsJsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print the report as one JSON document.", rich_help_panel=RESULTS),
]
AuditOutputOption = Annotated[
    Path | None,
    typer.Option(
        help="New file for the same as one JSON document.", rich_help_panel=RESULTS, show_default=False
    ),
]
TasksArgument = Annotated[
    str | None,
    typer.Argument(
        help="Tasks of lm-eval with commas between; word_problems is bundled.",
        show_default="those of --study",
    ),
]
StudyOption = Annotated[
    str | None,
    typer.Option(
        help="A bundled study (vllm-25196) or a JSON file: tasks, arms, limit, shots and batch in one.",
        rich_help_panel=STUDY,
        show_default=False,
    ),
]
ArmsOption = Annotated[
    str | None,
    typer.Option(
        help="Which of padded, non-padded and baseline (plain decoding), with commas between.",
        rich_help_panel=STUDY,
        show_default="all three, or those of --study",
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option(help="Only the first N documents of each task.", rich_help_panel=STUDY, show_default="all"),
]
NumFewshotOption = Annotated[
    int | None,
    typer.Option(help="Examples before each question.", rich_help_panel=STUDY, show_default="the task's"),
]
ApplyChatTemplateOption = Annotated[
    bool,
    typer.Option(
        "--apply-chat-template", help="Ask as a chat, examples as earlier turns.", rich_help_panel=STUDY
    ),
]
TaskDataPathOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory with the train and test files of gsm8k, instead of the hub.",
        rich_help_panel=STUDY,
        show_default=False,
    ),
]
StudyBatchSizeOption = Annotated[
    int | None,
    typer.Option(
        help="Sequences that decode together.", rich_help_panel=RUNNING, show_default="32, or that of --study"
    ),
]
LogSamplesOption = Annotated[
    bool,
    typer.Option(
        "--log-samples", help="Leave every question and answer in --output too.", rich_help_panel=RESULTS
    ),
]
StudyOutputOption = Annotated[
    Path | None,
    typer.Option(
        help="New directory for comparison.json, and a directory an arm: lm-eval's results.json, and what "
        "`specgen report` reads.",
        rich_help_panel=RESULTS,
        show_default=False,
    ),
]


def numbers(name: str, text: str) -> tuple[int, ...]:
    """The numbers of the option ``name`` from ``1,8,32``; ``UserError`` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    require(
        all(part.isdecimal() and int(part) >= 1 for part in parts),
        f"{name} is {text!r}: write numbers of at least 1 with commas between, such as 1,8,32",
    )
    return tuple(int(part) for part in parts)
