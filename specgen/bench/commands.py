"""``specgen bench``: its commands and their options, and where a table goes."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specgen import options as opt
from specgen.config import require

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
    from specgen.build import DTYPES, choose_device, choose_dtype

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


def publish(tables: Iterable["Table"], output: Path | None) -> None:
    """Keep the files of a table that grows up to date, so that an end half way costs no row; print the last one."""
    require(
        output is None or not output.is_file(),
        f"output {str(output)!r} is a file: name a directory for tables",
    )
    for table in tables:
        print(f"{table.name}: {len(table.rows)} rows", end="\r", file=sys.stderr, flush=True)
        if output is not None:
            table.write(output)
    print(file=sys.stderr)
    print(table.to_text())
    if output is not None:
        print(f"Files are in {output}; open {output / table.name}.html in a browser.", file=sys.stderr)
    print(json.dumps(table.to_json()))
