"""From the name of a data set to its prompts, with the rows that cannot be run set aside."""

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from specgen import bundled
from specgen.config import require
from specgen.prompts.formats import DATASETS, OWN, TURNS, Format, checked_text
from specgen.prompts.prompt import Prompt, Rejected
from specgen.prompts.rows import Row, read_hub, read_path


def load_prompts(
    dataset: str, *, data_path: Path | None, num_prompts: int | None
) -> tuple[list[Prompt], list[Rejected]]:
    """The first ``num_prompts`` prompts of a data set (None: all), and the rows met that cannot be run.

    ``dataset`` is ``bundled``, a name in ``DATASETS``, or a path to own rows. ``data_path`` reads a named
    data set from a local file or directory instead of the hub. Of rows with the same id the first counts.
    ``ValueError`` where the data set is unknown, cannot be reached, or has no rows.
    """
    require(num_prompts is None or num_prompts >= 1, f"num-prompts is {num_prompts}: use at least 1")
    row_format, rows = _open(dataset, data_path)
    prompts: dict[str, Prompt] = {}
    rejected: list[Rejected] = []
    for row in rows:
        result = _to_prompt(row, row_format, prompts)
        if isinstance(result, Prompt):
            prompts[result.id] = result
        else:
            rejected.append(result)
        if len(prompts) == num_prompts:
            break
    require(bool(prompts or rejected), f"{data_path or dataset} has no rows: name a file with at least one")
    return list(prompts.values()), rejected


def _open(dataset: str, data_path: Path | None) -> tuple[Format, Iterator[Row]]:
    names = ", ".join(DATASETS)
    if known := DATASETS.get(dataset):
        rows = read_path(data_path, preferred=known.files) if data_path else read_hub(dataset, known.hub)
        return known.format, rows
    require(
        data_path is None,
        f"data-path is {data_path} but dataset is {dataset!r}: name the format of that path, one of {names}, "
        "or give a file of your own as the data set itself",
    )
    if dataset == "bundled":
        return TURNS, read_path(bundled.data_directory() / "prompts" / "mt_bench.jsonl")
    require(
        Path(dataset).exists(),
        f"dataset is {dataset!r}, neither a known name nor a file: use bundled, {names}, or a JSONL file",
    )
    return OWN, read_path(Path(dataset))


def _to_prompt(row: Row, row_format: Format, earlier: Container[str]) -> Prompt | Rejected:
    row_id = row.where
    try:
        require(row.error is None, str(row.error))
        require(isinstance(row.value, dict), "not a JSON object")
        row_id = _row_id(row.value, row_format)
        require(row_id not in earlier, "an earlier row has the same id, or the same content and no id")
        return row_format.parse(row_id, row.value)
    except (ValueError, RecursionError) as error:
        return Rejected(id=row_id, reason=f"{row.where}: {error}")


def _row_id(row: Mapping[str, Any], row_format: Format) -> str:
    """The row's own id, or where it has none a hash of its content, which is the same in every run."""
    key = row_format.id_key
    value = row.get(key)
    if value is None:
        require(not row_format.id_required, f"no {key}")
        # A field without a value is the same as no field: tables of `datasets` fill the gaps.
        content = {name: field for name, field in row.items() if field is not None}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]
    require(type(value) in (str, int), f"{key} is {value!r}: use a string or a whole number")
    return checked_text(str(value), key)
