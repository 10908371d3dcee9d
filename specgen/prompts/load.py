"""From the name of a data set to its prompts and rejected rows."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

from specgen import bundled
from specgen.config import UserError, require
from specgen.prompts.formats import DATASETS, TURNS, USERS, Format
from specgen.prompts.ids import Ids, id_of
from specgen.prompts.json_rows import Row
from specgen.prompts.openai_batch import is_batch
from specgen.prompts.prompt import Prompt, Rejected
from specgen.prompts.rows import read_hub, read_path, read_stream
from specgen.prompts.unknown_fields import UnknownFields
from specgen.spelling import did_you_mean

STDIN = "-"
_LONGEST_REASON = 300  # characters, however long the row is


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of a data set in its order, streamed, any number of times.

    Every pass reads the data set again and yields ``Prompt | Rejected``, up to the first ``num_prompts`` prompts
    (None: all). All ids, those of later turns and rejected rows included, are different: of rows with the same id
    the first is run. ``unknown_fields`` are those of the newest pass. ``UserError`` where the data cannot be read, or
    has no rows.
    """

    name: str
    row_format: Format
    read: Callable[[], Iterable[Row]]
    num_prompts: int | None
    unknown_fields: UnknownFields = field(
        default_factory=UnknownFields, init=False, repr=False, compare=False
    )
    _ids: Ids = field(default_factory=Ids, init=False, repr=False, compare=False)  # the same in every pass

    def __iter__(self) -> Iterator[Prompt | Rejected]:
        num_rows = num_prompts = 0
        self.unknown_fields.clear()
        for num_rows, row in enumerate(self.read(), start=1):
            result = self._parse(num_rows, row, self.unknown_fields)
            num_prompts += isinstance(result, Prompt)
            yield result
            if num_prompts == self.num_prompts:
                break
        require(num_rows > 0, f"{self.name} has no rows: name a file with at least one")

    def select(self, mask: Iterable[bool]) -> Iterator[Prompt | Rejected]:
        """The rows where ``mask``, with a value per row, is true; the others are read and not parsed."""
        for number, row in compress(enumerate(self.read(), start=1), mask):
            yield self._parse(number, row)

    def _parse(self, number: int, row: Row, unknown: UnknownFields | None = None) -> Prompt | Rejected:
        row_id = None
        try:
            value = row.value()
            require(isinstance(value, dict), "not a JSON object")
            if unknown is not None and self.row_format is USERS and not is_batch(value):
                unknown.see(value)
            row_id = id_of(value, self.row_format.id_keys)
            prompt = self.row_format.parse(row_id, value)
            require(
                self._ids.claim(prompt.turn_ids, number),
                "an earlier row has the same id, or the same content and no id",
            )
            return Prompt(**vars(prompt) | {"where": row.where})  # ``replace`` takes five times as long
        except (UserError, RecursionError) as error:
            own = row_id is not None and self._ids.claim([row_id], number)
            reason = f"{row.where}: {error}"[:_LONGEST_REASON]
            return Rejected(
                id=row_id if own and row_id else self._ids.claim_location(row.where, number), reason=reason
            )


def open_prompts(dataset: str, *, data_path: Path | None, num_prompts: int | None) -> PromptSet:
    """The first ``num_prompts`` prompts of a data set (None: all), and the rejected rows among them.

    ``dataset`` is ``bundled``, a name in ``DATASETS``, a path to a user's rows (``formats.parse_users``), or ``-``
    for such rows as JSON lines from standard input. ``data_path`` reads a named data set from a local file or
    directory instead of the hub. ``UserError`` where the data set is unknown or cannot be reached.
    """
    require(num_prompts is None or num_prompts >= 1, f"num-prompts is {num_prompts}: use at least 1")
    row_format, read = _open(dataset, data_path)
    name = "standard input" if dataset == STDIN else str(data_path or dataset)
    return PromptSet(name=name, row_format=row_format, read=read, num_prompts=num_prompts)


def load_prompts(
    dataset: str, *, data_path: Path | None, num_prompts: int | None
) -> tuple[list[Prompt], list[Rejected]]:
    """``open_prompts`` read into two lists."""
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
    known_names = ("bundled", *DATASETS)
    require(
        Path(dataset).exists(),
        f"dataset is {dataset!r}, neither a known name nor a file{did_you_mean(dataset, known_names)}: use bundled, "
        f"{names}, a JSONL file, or - for standard input",
    )
    return USERS, read_path(Path(dataset))
