"""``specgen verify``: the losslessness audit."""

import json
from pathlib import Path
from typing import Annotated

import typer

from specgen.cli.options import AsJson, DataPath, Dataset, NumPrompts, Only, numbers, with_options
from specgen.cli.printing import print_failures
from specgen.cli.progress_bar import ProgressBar
from specgen.config import EngineConfig, Help, SamplingParams, require

_FAILURES_SHOWN = 3


@with_options
def verify(
    *,
    dataset: Dataset = "bundled",
    data_path: DataPath = None,
    num_prompts: NumPrompts = None,
    sampling: Annotated[SamplingParams, Only("max_tokens")],
    batch_sizes: Annotated[
        str,
        Help(
            "Numbers of sequences that decode together, each tried; plain decoding at the smallest is what all "
            "are compared with.",
            "Running",
        ),
    ] = "1,8,32",
    engine: Annotated[EngineConfig, Only("model drafter num_spec_tokens device dtype attention cuda_graphs")],
    output: Annotated[
        Path | None, Help("New file for the same as one JSON document.", "Results", default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show that speculation changes no greedy text: every arm against plain decoding, place by place.

    Exit code 1 if texts part where the rounding of the number format cannot explain it.
    """
    sizes = numbers("batch-sizes", batch_sizes)
    require(
        output is None or not output.exists(),
        f"output {str(output)!r} exists: name a new file, or remove it first",
    )
    from specgen.evaluation import audit_table
    from specgen.evaluation.audit import AuditJob, audit  # imports torch
    from specgen.rundir.atomic import naming, writable, write_json

    job = AuditJob(
        engine=engine,
        sampling=sampling,
        dataset=dataset,
        data_path=data_path,
        num_prompts=num_prompts,
        batch_sizes=sizes,
    )
    found = audit(job, ProgressBar()).to_json()
    if output is not None:
        with writable(output):
            with naming(output):
                output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, found)
    print(json.dumps(found) if as_json else audit_table.render(found), end="\n" if as_json else "")
    failures = found["failures"]
    print_failures(failures[:_FAILURES_SHOWN], len(failures), "--json and --output have all")
    if found["num_unexplained"]:
        raise typer.Exit(1)
