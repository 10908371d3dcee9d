"""From the name of a data set to its prompts, as often as they are asked for, with the rows that cannot be run."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from specgen import bundled
from specgen.config import require, shown
from specgen.prompts.fields import checked_text
from specgen.prompts.formats import DATASETS, TURNS, USERS, Format
from specgen.prompts.json_rows import Row
from specgen.prompts.prompt import Prompt, Rejected
from specgen.prompts.rows import read_hub, read_path, read_stream

STDIN = "-"
_LONGEST_REASON = 300  # characters: a row of megabytes is not repeated in the words about it
_LONGEST_ID = 512


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of a data set in its order, to be iterated any number of times; nothing is held between rows.

    Every pass reads the data set anew and gives ``Prompt | Rejected``, up to the first ``num_prompts`` prompts
    (None: all). The ids of one pass, those of later turns and of rejected rows among them, are all different:
    of rows with the same id the first counts. A pass raises ``ValueError`` where the data cannot be read on, or
    has no rows.
    """

    name: str
    row_format: Format
    read: Callable[[], Iterable[Row]]
    num_prompts: int | None

    def __iter__(self) -> Iterator[Prompt | Rejected]:
        ids, num_rows, num_prompts = _Ids(), 0, 0
        for row in self.read():
            result = _judge(row, self.row_format, ids)
            num_rows += 1
            num_prompts += isinstance(result, Prompt)
            yield result
            if num_prompts == self.num_prompts:
                break
        require(num_rows > 0, f"{self.name} has no rows: name a file with at least one")


def open_prompts(dataset: str, *, data_path: Path | None, num_prompts: int | None) -> PromptSet:
    """The first ``num_prompts`` prompts of a data set (None: all), and the rows met that cannot be run.

    ``dataset`` is ``bundled``, a name in ``DATASETS``, a path to a user's rows (``formats.parse_users``), or ``-``
    for such rows as JSON lines from standard input. ``data_path`` reads a named data set from a local file or
    directory instead of the hub. ``ValueError`` where the data set is unknown
    or cannot be reached.
    """
    require(num_prompts is None or num_prompts >= 1, f"num-prompts is {num_prompts}: use at least 1")
    row_format, read = _open(dataset, data_path)
    name = "standard input" if dataset == STDIN else str(data_path or dataset)
    return PromptSet(name=name, row_format=row_format, read=read, num_prompts=num_prompts)


def load_prompts(
    dataset: str, *, data_path: Path | None, num_prompts: int | None
) -> tuple[list[Prompt], list[Rejected]]:
    """``open_prompts`` in two lists, for those who need all prompts at once."""
    prompts: list[Prompt] = []
    rejected: list[Rejected] = []
    for result in open_prompts(dataset, data_path=data_path, num_prompts=num_prompts):
        if isinstance(result, Prompt):
            prompts.append(result)
        else:
            rejected.append(result)
    return prompts, rejected


def _open(dataset: str, data_path: Path | None) -> tuple[Format, Callable[[], Iterable[Row]]]:
    names = ", ".join(DATASETS)
    if known := DATASETS.get(dataset):
        read = read_path(data_path, preferred=known.files) if data_path else read_hub(dataset, known.hub)
        return known.format, read
    require(
        data_path is None,
        f"data-path is {data_path} but dataset is {dataset!r}: name the format of that path, one of {names}, "
        "or give a file of your own as the data set itself",
    )
    if dataset == "bundled":
        return TURNS, read_path(bundled.data_directory() / "prompts" / "mt_bench.jsonl")
    if dataset == STDIN:
        return USERS, read_stream(sys.stdin.buffer)
    require(
        Path(dataset).exists(),
        f"dataset is {dataset!r}, neither a known name nor a file: use bundled, {names}, a JSONL file, or - for "
        "standard input",
    )
    return USERS, read_path(Path(dataset))


class _Ids:
    """The ids that are taken, kept as digests: a million of any length are about 120 MB."""

    def __init__(self) -> None:
        self._taken: set[bytes] = set()

    def take(self, ids: Iterable[str]) -> bool:
        """Take ``ids``, if all of them are free."""
        digests = {hashlib.blake2b(row_id.encode(), digest_size=16).digest() for row_id in ids}
        free = self._taken.isdisjoint(digests)
        if free:
            self._taken |= digests
        return free

    def take_place(self, where: str) -> str:
        """``where`` as an id, with a number behind it if a row calls itself so."""
        names = (where if number == 1 else f"{where} ({number})" for number in count(1))
        return next(name for name in names if self.take([name]))


def _judge(row: Row, row_format: Format, ids: _Ids) -> Prompt | Rejected:
    row_id = None
    try:
        require(row.error is None, str(row.error))
        require(isinstance(row.value, dict), "not a JSON object")
        row_id = _row_id(row.value, row_format.id_keys)
        prompt = row_format.parse(row_id, row.value)
        require(ids.take(prompt.turn_ids), "an earlier row has the same id, or the same content and no id")
        return replace(prompt, where=row.where)
    except (ValueError, RecursionError) as error:
        own = row_id is not None and ids.take([row_id])
        reason = f"{row.where}: {error}"[:_LONGEST_REASON]
        return Rejected(id=row_id if own and row_id else ids.take_place(row.where), reason=reason)


def _row_id(row: Mapping[str, Any], id_keys: Sequence[str]) -> str:
    """The row's own id, or where it has none a hash of its content, which is the same in every run."""
    key = next((key for key in id_keys if row.get(key) is not None), None)
    if key is None:
        # A field without a value is the same as no field: tables of `datasets` fill the gaps.
        content = {name: field for name, field in row.items() if field is not None}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]
    value = row[key]
    if type(value) not in (str, int):  # words for a row that needs none would be most of what a pass costs
        raise ValueError(f"{key} is {shown(value)}: use a string or a whole number")
    row_id = checked_text(str(value), key)
    require(len(row_id) <= _LONGEST_ID, f"{key} has {len(row_id):,} characters: use at most {_LONGEST_ID}")
    if not row_id.isprintable():
        raise ValueError(f"{key} is {shown(row_id)}: use characters that can be printed")
    return row_id
