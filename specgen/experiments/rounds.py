"""What a bench has measured, round by round, kept in a directory so that the same command goes on."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from specgen.config import require
from specgen.experiments.repeat import MedianRange, Repeat, Repeats
from specgen.rundir.atomic import writable
from specgen.rundir.provenance import FREE_IN_A_RUN
from specgen.rundir.results import locked, require_same
from specgen.rundir.row_file import RowFile, id_of

_KEPT = "what is measured is kept; fix that and run the same command again"
_REMEDY = "name a new directory, or ask for the same"
_EXTENDED = ("bench.repeats", "bench.precision")  # more of them only add rounds
_FINGERPRINTS = {"fingerprints.model", "fingerprints.drafter"}
_TIMED = {"engine.device", "engine.tensor_parallel", "engine.cuda_graphs", "device.cpu", "device.threads"}
PLAIN = "plain decoding"  # the arm of a comparison without a head
LEAST_ROUNDS = 2  # for a ratio of a comparison: one round has no spread
_FREE = {*FREE_IN_A_RUN, *_EXTENDED} - _TIMED


class Rounds:
    """Every round so far: a repeat by arm, taken one behind the other in one process.

    A round is kept when all its arms have had their turn: ratios are of one round, and a stop in the middle of it
    would put hours between its repeats. Of a file that holds rounds of several workloads or conditions, these are
    those ``under`` one of them.
    """

    def __init__(
        self, rows: Iterable[Mapping[str, Any]] = (), file: RowFile | None = None, under: str = ""
    ) -> None:
        self._file, self._under = file, under  # for what is added
        self._each = {
            str(row["id"]): {arm: Repeat.from_json(found) for arm, found in row["arms"].items()}
            for row in rows
            if row.get("under", "") == under
        }

    def __len__(self) -> int:
        return len(self._each)

    def add(self, arms: Mapping[str, Repeat]) -> None:
        """Keep a round; it survives a power loss."""
        name = f"{self._under} round {len(self._each) + 1}".lstrip()
        self._each[name] = dict(arms)
        if self._file is not None:
            found = {arm: repeat.to_json() for arm, repeat in arms.items()}
            self._file.add({"id": name, **({"under": self._under} if self._under else {}), "arms": found})
            self._file.sync()

    def count(self, arm: str) -> int:
        """The rounds that ``arm`` took part in."""
        return sum(arm in each for each in self._each.values())

    def of(self, arm: str) -> Repeats:
        """The repeats of an arm that has some."""
        return Repeats(each={name: each[arm] for name, each in self._each.items() if arm in each})

    def speeds(self) -> list[dict[str, float]]:
        """Output tokens per second by arm, round by round."""
        return [{arm: each.tokens_per_second for arm, each in arms.items()} for arms in self._each.values()]

    def incomplete(self, arms: Iterable[str], repeats: int) -> list[str]:
        """Those of ``arms`` that have fewer than all ``repeats``."""
        return [arm for arm in arms if self.count(arm) < repeats]

    def measured(self, arms: Iterable[str]) -> dict[str, Repeats]:
        """Those of ``arms`` that have repeats, and these."""
        return {arm: self.of(arm) for arm in arms if self.count(arm)}


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The rounds of each data set of a comparison; their arms are heads and ``PLAIN``."""

    rounds: Mapping[str, Rounds] = field(default_factory=dict)

    @classmethod
    def of(
        cls, rows: Collection[Mapping[str, Any]], under: Mapping[str, str], file: RowFile | None = None
    ) -> Self:
        """Of the ``rows`` of one file, with the digest by data set of the conditions that rounds count ``under``."""
        return cls(rounds={data: Rounds(rows, file, f"{data} {digest}") for data, digest in under.items()})

    def speed(self, data: str, arm: str) -> MedianRange | None:
        """Output tokens per second; None where fewer than ``LEAST_ROUNDS`` were measured."""
        found = self._of(data, arm)
        return found.speed if found else None

    def times(self, data: str, arm: str, other: str) -> MedianRange | None:
        """The speed of ``arm`` over that of ``other`` in the same round."""
        mine, theirs = self._of(data, arm), self._of(data, other)
        return mine.times(theirs) if mine and theirs else None

    def _of(self, data: str, arm: str) -> Repeats | None:
        rounds = self.rounds.get(data, Rounds())
        return rounds.of(arm) if rounds.count(arm) >= LEAST_ROUNDS else None

    def to_json(self) -> dict[str, Any]:
        """Of the data sets that have rounds."""
        return {data: rounds.speeds() for data, rounds in self.rounds.items() if len(rounds)}


def record_of(output: Path, name: str) -> Path:
    """The file in ``output`` with the settings of the bench ``name``."""
    return output / f"{name}.settings.json"


@contextmanager
def kept_rounds(output: Path | None, name: str, settings: Mapping[str, Any]) -> Iterator[Rounds]:
    """The rounds in ``NAME.rounds.jsonl`` of ``output``, to go on with; None keeps them nowhere.

    The directory is locked meanwhile. ``UserError`` where it holds a bench of that name with other ``settings``, of
    another device or other weights too.
    """
    if output is None:
        yield Rounds()
        return
    output = output.absolute()
    require(not output.is_file(), f"output {str(output)!r} is a file: name a directory for tables")
    with writable(output, _KEPT), locked(output):
        record = record_of(output, name)
        require(
            record.exists() or not (output / f"{name}.json").exists(),
            f"output {str(output)!r} holds {name}.json without the rounds that it is of: name a new directory",
        )
        require_same(record, settings, free=_FREE, remedy=_REMEDY)
        with closing(RowFile(_rounds_of(output, name))) as file:
            yield Rounds(file.values(), file)


def seen_rounds(output: Path | None, name: str, settings: Mapping[str, Any]) -> Rounds:
    """What ``kept_rounds`` would go on with; writes and locks nothing. ``settings`` need no fingerprints of weights."""
    if output is None or not record_of(output, name).exists():
        return Rounds()
    require_same(record_of(output, name), settings, free=_FREE | _FINGERPRINTS, remedy=_REMEDY)
    return Rounds(map(json.loads, _whole_rounds(output, name)))


def num_kept(output: Path, name: str) -> int:
    """The rounds of the bench ``name`` that are in ``output``."""
    return len(_whole_rounds(output, name))


def _rounds_of(output: Path, name: str) -> Path:
    return output / f"{name}.rounds.jsonl"


def _whole_rounds(output: Path, name: str) -> list[bytes]:
    """The lines of the file, without a torn last one."""
    path = _rounds_of(output, name)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if id_of(line) is not None]
