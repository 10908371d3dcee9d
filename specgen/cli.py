"""The commands: the only file that parses arguments or prints."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specgen.bundled import data_directory
from specgen.config import EngineConfig, SamplingParams, require

if TYPE_CHECKING:
    from specgen.events import Event

app = typer.Typer(
    name="specgen",
    help="Offline batch generation with EAGLE3 speculative decoding, and what the speculation was worth.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MODELS, DATA, DRAFTING, SAMPLING, RUNNING, RESULTS = (
    "Models",
    "Prompts",
    "Speculation",
    "Sampling",
    "Running",
    "Results",
)


_FAILURES_SHOWN = 3


class DrafterBatch(StrEnum):
    """Which rows the drafter's first pass computes."""

    padded = "padded"
    non_padded = "non-padded"


class DraftSampling(StrEnum):
    """How a draft is chosen."""

    greedy = "greedy"
    probabilistic = "probabilistic"


class Attention(StrEnum):
    """Attention backends."""

    auto = "auto"
    sdpa = "sdpa"


class Dtype(StrEnum):
    """Number formats of weights and KV cache."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def main() -> None:
    """Run the command line; a ``ValueError`` is the user's to mend: one line and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"specgen: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("specgen: interrupted", file=sys.stderr)
        sys.exit(130)


@app.command()
def generate(
    model: Annotated[
        str | None,
        typer.Option(
            help="Target: a directory or hub id.", rich_help_panel=MODELS, show_default="the bundled target"
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="EAGLE3 head: a directory or hub id.",
            rich_help_panel=MODELS,
            show_default="the bundled head",
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            help="bundled, mt-bench, sharegpt, gsm8k, spec-bench, humaneval, or a JSONL file with id and "
            "prompt, messages or prompt_token_ids.",
            rich_help_panel=DATA,
        ),
    ] = "bundled",
    data_path: Annotated[
        Path | None,
        typer.Option(
            help="Read the named data set from this file or directory instead of the hub.",
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Use only the first N prompts.", rich_help_panel=DATA, show_default="all"),
    ] = None,
    num_spec_tokens: Annotated[
        int, typer.Option(help="Draft tokens a step, K; 0 is plain decoding.", rich_help_panel=DRAFTING)
    ] = 4,
    drafter_batch: Annotated[
        DrafterBatch,
        typer.Option(
            help="Drafter's first pass over all verified rows, or over the accepted ones alone.",
            rich_help_panel=DRAFTING,
        ),
    ] = DrafterBatch.padded,
    draft_sampling: Annotated[
        DraftSampling,
        typer.Option(
            help="Choose drafts by argmax or draw them at the temperature; text is distributed alike.",
            rich_help_panel=DRAFTING,
        ),
    ] = DraftSampling.greedy,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest answer in tokens.", rich_help_panel=SAMPLING)
    ] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 1 is off.", rich_help_panel=SAMPLING)] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Sample from the K likeliest tokens; 0 is off.", rich_help_panel=SAMPLING)
    ] = 0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Drop tokens below this share of the likeliest one; 0 is off.", rich_help_panel=SAMPLING
        ),
    ] = 0.0,
    seed: Annotated[
        int,
        typer.Option(help="With the request's id it fixes every random draw.", rich_help_panel=SAMPLING),
    ] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End a text before this string; may be repeated.",
            rich_help_panel=SAMPLING,
            show_default=False,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to the full length.", rich_help_panel=SAMPLING)
    ] = False,
    max_batch_size: Annotated[
        int, typer.Option(help="Sequences that decode together.", rich_help_panel=RUNNING)
    ] = 32,
    max_prefill_tokens: Annotated[
        int, typer.Option(help="Prompt tokens in one prefill pass.", rich_help_panel=RUNNING)
    ] = 2048,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for the KV cache, such as 512MiB or 2GiB.",
            rich_help_panel=RUNNING,
            show_default="what the batch can need, at most 1GiB on a CPU and 80 % of free memory on a GPU",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=RUNNING)] = "auto",
    dtype: Annotated[
        Dtype, typer.Option(help="auto: float32 on a CPU, bfloat16 on a GPU.", rich_help_panel=RUNNING)
    ] = Dtype.auto,
    attention: Annotated[Attention, typer.Option(help="Attention backend.", rich_help_panel=RUNNING)] = (
        Attention.auto
    ),
    output: Annotated[
        Path | None,
        typer.Option(
            help="New directory for completions.jsonl, events.jsonl, report.json, report.html, manifest.json.",
            rich_help_panel=RESULTS,
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline",
            help="Run plain decoding on the same prompts too and compare.",
            rich_help_panel=RESULTS,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the report as one JSON document.", rich_help_panel=RESULTS),
    ] = False,
) -> None:
    """Generate for a whole prompt set and report what the speculation was worth.

    Without options: the bundled model pair on the bundled prompts.
    """
    target, head = _pair(model, drafter, num_spec_tokens)
    engine = EngineConfig(
        model=target,
        drafter=head,
        num_spec_tokens=num_spec_tokens,
        drafter_batch=drafter_batch.value,
        draft_sampling=draft_sampling.value,
        max_batch_size=max_batch_size,
        max_prefill_tokens=max_prefill_tokens,
        kv_memory=None if kv_memory is None else _bytes(kv_memory),
        device=device,
        dtype=dtype.value,
        attention=attention.value,
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
    from specgen.run import Job, run  # imports torch

    job = Job(
        engine=engine,
        sampling=sampling,
        dataset=dataset,
        data_path=data_path,
        num_prompts=num_prompts,
        baseline=baseline,
    )
    result = run(job, output, _Bar())
    for failure in result.failures[:_FAILURES_SHOWN]:
        print(f"specgen: not run: {failure}", file=sys.stderr)
    if (more := len(result.failures) - _FAILURES_SHOWN) > 0:
        print(f"specgen: and {more} more; completions.jsonl of --output has them all", file=sys.stderr)
    if as_json:
        print(json.dumps(result.report.to_json()))
        return
    from specgen import tables

    for asked, answered in result.samples:
        print(f"Prompt:\n{_indented(asked)}\nAnswer:\n{_indented(answered)}\n")
    print(tables.render(result.report.to_json(), result.settings), end="")
    if output is not None:
        print(f"Files are in {output}; open {output / 'report.html'} in a browser.", file=sys.stderr)


@app.command()
def report(
    directories: Annotated[
        list[Path], typer.Argument(help="Run directories; several are compared.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the report of a run again, or compare runs side by side."""
    from specgen import tables
    from specgen.report import load

    runs = [(str(directory), *load(directory)) for directory in directories]
    if as_json:
        reports = {name: numbers for name, numbers, _ in runs}
        print(json.dumps(reports if len(runs) > 1 else runs[0][1]))
    elif len(runs) == 1:
        print(tables.render(runs[0][1], runs[0][2].get("settings", {})), end="")
    else:
        print(tables.compare([(name, numbers) for name, numbers, _ in runs]), end="")


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Checkpoint: a directory or hub id.", show_default=False)],
    other: Annotated[
        str | None, typer.Argument(help="Second checkpoint: do target and head fit?", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what a checkpoint is, how it is understood, and whether target and head fit."""
    from specgen.inspect_checkpoint import describe

    description = describe(path, other)
    print(json.dumps(description.to_json()) if as_json else description.to_text())
    if description.misfits:
        raise typer.Exit(1)


def _pair(model: str | None, drafter: str | None, num_spec_tokens: int) -> tuple[str, str | None]:
    """Target and head; the bundled head goes with the bundled target alone."""
    if model is None:
        require(
            drafter is None,
            f"drafter {drafter!r} is given without a model: name its target with --model",
        )
        demo = data_directory() / "demo"
        return str(demo / "target"), str(demo / "drafter")
    require(
        drafter is not None or num_spec_tokens == 0,
        f"model {model!r} has no drafter: name one with --drafter, or use --num-spec-tokens 0",
    )
    return model, drafter


def _bytes(text: str) -> int:
    """A number of bytes from ``1073741824``, ``512MiB`` or ``2GB``."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {letter: 1 << 10 * power, f"{letter}IB": 1 << 10 * power, f"{letter}B": 1000**power}
    number = text.rstrip("KMGTIBkmgtib ")
    unit = text[len(number) :].strip().upper()
    require(
        unit in units and number.replace(".", "", 1).isdigit(),
        f"kv-memory is {text!r}: write a size such as 512MiB or 2GiB",
    )
    return int(float(number) * units[unit])


def _indented(text: str) -> str:
    """``text`` with its lines two places in, cut to what fits a screen."""
    short = text.strip() if len(text) <= 600 else text[:600].strip() + " ..."
    return "  " + "\n  ".join(short.splitlines())


class _Bar:
    """Progress on stderr: requests done, output tokens a second, acceptance length so far."""

    def start(self, what: str, num_requests: int) -> None:
        """See ``run.Progress``."""
        from tqdm import tqdm

        self._bar = tqdm(total=num_requests, desc=what, unit="req", dynamic_ncols=True)
        self._tokens = self._steps = self._accepted = 0

    def see(self, event: "Event") -> None:
        """See ``run.Progress``."""
        from specgen.events import Finished, Prefilled, Stepped, Verified

        match event:
            case Prefilled(emitted=emitted):
                self._tokens += emitted
            case Verified(accepted=accepted, emitted=emitted):
                self._tokens += emitted
                self._steps += 1
                self._accepted += accepted
            case Stepped(time=time):
                length = 1 + self._accepted / max(self._steps, 1)
                self._bar.set_postfix_str(
                    f"{self._tokens / time:.0f} tok/s, acceptance length {length:.2f}", refresh=False
                )
            case Finished():
                self._bar.update()
            case _:
                pass

    def finish(self) -> None:
        """See ``run.Progress``."""
        self._bar.close()
