"""The rows of a run as a Parquet table."""

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.rundir.atomic import replacement

if TYPE_CHECKING:
    import pyarrow

_ROW_GROUP = 512  # rows in memory at a time


def export_parquet(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the rows of ``completions.jsonl`` as ``path``, which ``datasets.load_dataset("parquet")`` reads.

    The columns are fixed; ``category``, ``endpoint``, ``logprobs`` and the two of reasoning are null
    where a row has none. Memory is that of
    one row group, and the file is replaced atomically.
    """
    from pyarrow import Table, parquet

    schema, remaining = _schema(), iter(rows)
    with replacement(path) as file, parquet.ParquetWriter(file, schema) as writer:
        while group := [_table_row(row) for row in islice(remaining, _ROW_GROUP)]:
            writer.write_table(Table.from_pylist(group, schema=schema))


def _table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with log-probabilities as objects: a list of a column cannot mix ids and floats."""
    if "logprobs" not in row:
        return dict(row)
    logprobs = [
        {
            "chosen": each["chosen"],
            "top": [{"token_id": token, "logprob": value} for token, value in each["top"]],
        }
        for each in row["logprobs"]
    ]
    return {**row, "logprobs": logprobs}


def _schema() -> "pyarrow.Schema":
    import pyarrow as pa

    text, whole_number, number = pa.string(), pa.int64(), pa.float64()
    likely = pa.struct({"token_id": whole_number, "logprob": number})
    metrics = {
        "mean_acceptance_length": number,
        "draft_acceptance_rate": number,
        "acceptance_histogram": pa.list_(whole_number),
        "num_spec_steps": whole_number,
        "num_accepted_draft_tokens": whole_number,
        "num_draft_tokens": whole_number,
        "num_spec_tokens": whole_number,
        "per_step_accepted": pa.list_(whole_number),
        "num_steps_without_drafts": whole_number,
    }
    columns = {
        "id": text,
        "prompt": text,
        "reasoning": text,
        "num_reasoning_tokens": whole_number,
        "text": text,
        "token_ids": pa.list_(whole_number),
        "finish_reason": text,
        "ended_by": text,
        "turn": whole_number,
        "num_prompt_tokens": whole_number,
        "category": text,
        "endpoint": text,
        "logprobs": pa.list_(pa.struct({"chosen": number, "top": pa.list_(likely)})),
        "metrics": pa.struct(metrics),
    }
    return pa.schema(list(columns.items()))
