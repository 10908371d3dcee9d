"""From the name of a data set to its prompts and rejected rows."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from specgen.config import UserError, bundled, option, require, shown
from specgen.config.errors import did_you_mean, nearest
from specgen.config.urls import Url, is_url, location
from specgen.prompts.fields import LONGEST_ID, SAMPLING_FIELDS, checked_text, unfloated
from specgen.prompts.formats import (
    AS_IT_IS,
    DATASETS,
    TURNS,
    USERS,
    Format,
    Reading,
    UnpreparedError,
    kind_of,
)
from specgen.prompts.json_rows import Row
from specgen.prompts.own import CONTENT_FIELDS, is_batch
from specgen.prompts.prompt import Prompt, Rejected
from specgen.prompts.rows import File, HubSource, Source, read_hub, read_path, read_stream

STDIN = "-"
_CHECK = "check its name and split, or download it elsewhere and name its file as the data set"
_NAMES = ("bundled", *DATASETS)
_LONGEST_REASON = 300  # characters, however long the row is
_MEANT = (*CONTENT_FIELDS, *SAMPLING_FIELDS)  # what changes a text
_KNOWN = frozenset((*_MEANT, "id", "custom_id", "category"))
# what other engines or data sets use
_UNSUPPORTED = frozenset(
    (
        *("system", "system_prompt", "tools", "functions", "best_of"),
        *("json_schema", "regex", "ebnf", "grammar"),
    )
)
_LIKENESS = 0.82  # finds temprature and max_new_tokens, not the fields of data sets such as prompt_id
_LONGEST_NAME = 64  # characters of a name that is compared
_MOST = 16  # names
RAW = (
    "all prompts are raw text, but the model has a chat template: a chat model may end raw text at once. Add --chat to "
    "ask them as a user's message (compare: give rows with messages), or --raw if they are meant as they are"
)
TEXT = "a text without fields: taken as it is, without the chat template"


class Notes:
    """How many rows have each field whose name is near a known one, or known elsewhere; and how rows were recognised.

    Other fields are a data set's own.
    """

    def __init__(self) -> None:
        self._misspelt: Counter[str] = Counter()
        self._read_as: Counter[str] = Counter()

    def update(self, row: Mapping[str, Any] | str, *, by_kind: bool) -> None:
        """Count one row; ``by_kind`` unless the user has said how it is read."""
        if isinstance(row, str):
            self._read_as[TEXT] += by_kind
            return
        if is_batch(row):
            return  # refuses unknown names
        if by_kind and (note := kind_of(row).note):
            self._read_as[note] += 1
        for name in row:
            if (
                name not in _KNOWN
                and (name in _UNSUPPORTED or _meant(name) is not None)
                and (name in self._misspelt or len(self._misspelt) < _MOST)
            ):
                self._misspelt[name] += 1

    def clear(self) -> None:
        self._misspelt.clear()
        self._read_as.clear()

    def sentences(self) -> Iterator[str]:
        """One for each such name and each way of reading."""
        for name, number in self._misspelt.items():
            rows = "1 row has" if number == 1 else f"{number:,} rows have"
            if name in _UNSUPPORTED:
                yield f"{rows} a field {shown(name)}, which is ignored, so no answer follows it"
            else:
                yield f"{rows} a field {shown(name)}, which is ignored: did you mean {_meant(name)}?"
        for note, number in self._read_as.items():
            if number:
                rows = "1 row is" if number == 1 else f"{number:,} rows are"
                yield f"{rows} {note} (--prompt-field, --chat and --raw say otherwise)"


@lru_cache(maxsize=1024)
def _meant(name: str) -> str | None:
    return nearest(name, _MEANT, likeness=_LIKENESS) if len(name) <= _LONGEST_NAME else None


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of a data set in its order, streamed, any number of times.

    Every pass reads the data set again and yields ``Prompt | Rejected``, up to the first ``num_prompts`` prompts
    (None: all). All ids, those of later turns and rejected rows included, are different: of rows with the same id the
    first is run, and of rows without one all are. ``notes`` are those of the newest pass. ``UserError`` where the
    data cannot be read, or has no rows.
    """

    name: str
    row_format: Format
    source: Source
    num_prompts: int | None
    how: Reading
    is_own: bool  # a user's rows, where misspelt fields are looked for
    notes: Notes = field(default_factory=Notes, init=False, repr=False, compare=False)

    def __iter__(self) -> Iterator[Prompt | Rejected]:
        self.notes.clear()
        ids, left, row = _Ids(), self.num_prompts or sys.maxsize, None
        for row in self.source.read():
            result = self._parse(row, ids, self.notes)
            yield result
            left -= isinstance(result, Prompt)
            if left == 0:
                break
        require(row is not None, f"{self.name} has no rows: name a file with at least one")

    def select(self, wanted: Iterable[Sequence[str]]) -> Iterator[Prompt | Rejected]:
        """The rows with ids in ``wanted``, which has for each row the ids that ``__iter__`` gave it, or none.

        The others are read and not parsed.
        """
        for row, ids in zip(self.source.read(), wanted, strict=False):
            if ids:
                yield self._parse(row, _KnownIds(ids=ids))

    def _parse(self, row: Row, ids: "_Ids | _KnownIds", notes: Notes | None = None) -> Prompt | Rejected:
        row_id = value = None
        try:
            value = row.value()
            if not isinstance(value, dict | str):
                raise UserError("not a JSON object")
            if notes is not None and self.is_own:
                notes.update(value, by_kind=self.how.is_open)
            if isinstance(value, str):
                value = {"prompt": value}
            row_id = _own_id(value, self.row_format.id_keys) or ids.of_content(_digest_of(value))
            prompt = self.how.applied(self.row_format.parse(row_id, value))
            if not ids.claim(prompt.turn_ids):
                raise UserError(f"an earlier row has the same id {shown(row_id)}: give every row its own")
            return prompt.at(row.where)
        except (UnpreparedError, _ChangedError) as error:
            raise UserError(f"{self.name}, {row.where}: {error}") from error
        except (UserError, RecursionError) as error:
            reason = f"{row.where}: {error}"[:_LONGEST_REASON]
            return Rejected(id=ids.of_rejected(row_id, row.where), reason=reason)

    @property
    def files(self) -> tuple[File, ...]:
        """Those that a user knows: none of the hub or of standard input."""
        return self.source.files if self.source.keeps is None else ()

    def are_raw(self, prompts: Iterable[Prompt | Rejected]) -> bool:
        """Whether ``prompts`` are a user's rows of raw text that nobody has said to leave raw (see ``RAW``)."""
        found = [each for each in prompts if isinstance(each, Prompt)]
        left_open = self.is_own and self.how.chat is None and bool(found)
        return left_open and all(each.text is not None and each.endpoint is None for each in found)

    def key(self) -> str | None:
        """Equal for sets of one name that read equal files in the same way; None for data that are not in files."""
        content = self.source.digest()
        return None if content is None else f"{content}, {self.num_prompts}, {self.how}"


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """The prompts of a data set as a user names them.

    ``dataset`` is ``bundled``, a name in ``DATASETS``, a path to a user's rows (see ``formats``), the id of a data set
    on the hub if ``how`` names its split, or ``-`` for JSON lines from standard input. ``data_path`` reads a named data
    set from a file or directory instead of the hub. Either may be a URL, whose objects are streamed.
    """

    dataset: str = option(
        "bundled",
        "Prompts",
        "bundled, mt-bench, sharegpt, gsm8k, spec-bench, speed-bench, humaneval (mt-bench, gsm8k and humaneval also as "
        "a published table asks them: gsm8k:dspark, gsm8k:vllm), or a file of rows with prompt, messages or "
        "prompt_token_ids, of an OpenAI batch, or of a public set: JSON lines, CSV or lines of text, gzipped or "
        "not, Parquet, Arrow, or a directory from save_to_disk of datasets; also as a URL (s3://, gs://, az://, "
        "hf://). - is standard input; with --split a data set on the hub.",
    )
    data_path: Path | Url | None = option(
        None,
        "Prompts",
        "Read the named data set from this file, directory or URL instead of the hub.",
        metavar="PATH",
        parse=location,
    )
    num_prompts: int | None = option(None, "Prompts", "Use only the first N prompts.", shown="all")
    how: Reading = AS_IT_IS

    def open(self) -> PromptSet:
        """The first ``num_prompts`` prompts (None: all), and the rejected rows among them.

        ``UserError`` where the data set is unknown or cannot be reached.
        """
        require(
            self.num_prompts is None or self.num_prompts >= 1,
            f"num-prompts is {self.num_prompts}: use at least 1",
        )
        known, source = _open(self.dataset, self.data_path, self.how.split)
        return PromptSet(
            name="standard input" if self.dataset == STDIN else str(self.data_path or self.dataset),
            row_format=self.how.format(known),
            source=source,
            num_prompts=self.num_prompts,
            how=self.how,
            is_own=known is USERS,
        )

    def to_json(self) -> dict[str, Any]:
        """For a manifest; how rows are read shows in the digest of the prompts."""
        path = None if self.data_path is None else str(self.data_path)
        return {"dataset": self.dataset, "data_path": path, "num_prompts": self.num_prompts}


def _open(dataset: str, data_path: Path | Url | None, split: str | None) -> tuple[Format, Source]:
    names = ", ".join(DATASETS)
    if known := DATASETS.get(dataset):
        if data_path is None:
            require(
                known.hub is not None,
                f"dataset is {dataset!r}, but its licence lets nobody pass its texts on: fetch them with "
                "prepare_data.py of NVIDIA's Model-Optimizer (examples/specdec_bench), and name the file or directory "
                "with --data-path",
            )
            assert known.hub is not None
            return known.format, read_hub(dataset, replace(known.hub, split=split or known.hub.split))
        require(split is None, f"split is {split!r} but data-path names the file or directory: leave one out")
        return known.format, read_path(data_path, preferred=known.files)
    require(
        data_path is None,
        f"data-path is {data_path} but dataset is {dataset!r}: name the format of that path, one of {names}, "
        "or give a file of your own as the data set itself",
    )
    if split is not None:
        return USERS, _open_split(dataset, split)
    if dataset == "bundled":
        return TURNS, read_path(bundled.data_directory() / "prompts" / "mt_bench.jsonl")
    if dataset == STDIN:
        return USERS, read_stream(sys.stdin.buffer)
    path = location(dataset)
    require(
        isinstance(path, Url) or path.exists(),
        f"dataset is {dataset!r}, neither a known name nor a file{did_you_mean(dataset, _NAMES)}: use bundled, "
        f"{names}, a file of your own, - for standard input, or with --split a data set on the hub",
    )
    return USERS, read_path(path)


def _open_split(dataset: str, split: str) -> Source:
    """A split of a data set on the hub, as ``ID`` or ``ID:CONFIG``, or of a directory laid out like one."""
    require(
        dataset not in ("bundled", STDIN)
        and not is_url(dataset)
        and not Path(dataset).is_file()
        and not (Path(dataset) / "state.json").is_file(),  # one table, saved by ``datasets``
        f"split is {split!r} but dataset is {dataset!r}, which has none: leave --split out",
    )
    if (Path(dataset) / "dataset_dict.json").is_file():  # saved by ``datasets``
        return read_path(Path(dataset) / split)
    path, _, name = (dataset, "", "") if Path(dataset).exists() else dataset.partition(":")
    return read_hub(dataset, HubSource(path=path, name=name or None, split=split), _CHECK)


class _ChangedError(Exception):
    """A row is not what it was in an earlier pass; the text is for the user."""


class _Ids:
    """The ids of the rows so far, for a pass over all of them."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._copies: dict[str, int] = {}  # of rows with one content, the last number

    def claim(self, ids: Sequence[str]) -> bool:
        """Whether all ``ids`` are now those of this row: no earlier row has one of them."""
        free = self._taken.isdisjoint(ids)
        if free:
            self._taken.update(ids)
        return free

    def of_content(self, digest: str) -> str:
        """The id of a row without one: the first with its content has ``digest``, the next ``digest-2``, ..."""
        if digest not in self._taken:
            return digest
        numbers = count(self._copies.get(digest, 1) + 1)
        self._copies[digest] = next(n for n in numbers if f"{digest}-{n}" not in self._taken)
        return f"{digest}-{self._copies[digest]}"

    def of_rejected(self, row_id: str | None, where: str) -> str:
        """The id of a row that cannot be run: its own, with its place if that is taken, or its place alone."""
        if row_id is not None and self.claim([row_id]):
            return row_id
        place = where if row_id is None else f"{row_id} ({where})"
        names = (place if tried == 1 else f"{place} ({tried})" for tried in count(1))
        return next(name for name in names if self.claim([name]))


@dataclass(frozen=True, kw_only=True)
class _KnownIds:
    """Those that an earlier pass gave to a row, instead of ``_Ids``."""

    ids: Sequence[str]

    def claim(self, ids: Sequence[str]) -> bool:
        return tuple(ids) == tuple(self.ids[: len(ids)])  # behind them are those of further samples

    def of_content(self, digest: str) -> str:
        if not self.ids[0].startswith(digest):
            raise _ChangedError("it has another content than when this run has read it: put that back")
        return self.ids[0]

    def of_rejected(self, row_id: str | None, where: str) -> str:
        return self.ids[0]


def _digest_of(row: Mapping[str, Any]) -> str:
    """A hash of the content of ``row``. Null is the same as no field: `datasets` fills missing fields with nulls."""
    content = {name: field for name, field in row.items() if field is not None}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _own_id(row: Mapping[str, Any], id_keys: Sequence[str]) -> str | None:
    """The row's own id, if it has one."""
    for key in id_keys:
        if (value := row.get(key)) is not None:
            break
    else:
        return None
    if type(value) is str and value.isprintable() and len(value) <= LONGEST_ID and value.strip():
        return value
    value = unfloated(value)
    if type(value) not in (str, int):  # not `require`, which would format its message for every row
        raise UserError(f"{key} is {shown(value)}: use a string or a whole number")
    row_id = checked_text(str(value), key)
    if len(row_id) > LONGEST_ID:
        raise UserError(f"{key} has {len(row_id):,} characters: use at most {LONGEST_ID}")
    if not row_id.isprintable():
        raise UserError(f"{key} is {shown(row_id)}: use characters that can be printed")
    return row_id
