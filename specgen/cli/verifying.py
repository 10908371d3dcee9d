"""``specgen verify``: the losslessness audit."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from specgen.cli.options import AS_JSON, Only, numbers, repeating, with_options
from specgen.cli.printing import print_failures, print_parts
from specgen.cli.progress_bar import QUIET, progress
from specgen.config import EngineConfig, SamplingParams, option, require
from specgen.prompts.load import DataSource

_FAILURES_SHOWN = 3


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
            "generation_config "
            "model drafter chat_template_kwargs num_spec_tokens device tensor_parallel dtype kv_dtype attention "
            "cuda_graphs"
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

    Exit code 1 if texts diverge by more than the rounding of the dtype explains.
    """
    sizes = numbers("batch-sizes", batch_sizes)
    config = None if output is None else output.with_suffix(".config.yaml")
    for file in (output, config):
        require(
            file is None or not file.exists(),
            f"output {str(file)!r} exists: name a new file, or remove it first",
        )
    from specgen.experiments.audit import AuditJob, audit  # imports torch
    from specgen.experiments.study_tables import of_audit
    from specgen.record.files import naming, writable, write_json, write_text

    job = AuditJob(engine=engine, sampling=sampling, data=data, batch_sizes=sizes)
    found = audit(job, progress(quiet))
    if output is not None and config is not None:
        with writable(output):
            with naming(output):
                output.parent.mkdir(parents=True, exist_ok=True)
            write_text(config, repeating(ctx))
            write_json(output, found)
    if as_json:
        print(json.dumps(found))
    else:
        print_parts(of_audit(found), sys.stdout)
    failures = found["failures"]
    print_failures(failures[:_FAILURES_SHOWN], len(failures), "--json and --output have all")
    if found["num_unexplained"]:
        raise typer.Exit(1)
