"""What a bench has measured, round by round, kept in a directory so that the same command goes on."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from specgen.bench.repeat import Repeat
from specgen.bench.repeats import Repeats
from specgen.config import require
from specgen.rundir.atomic import writable
from specgen.rundir.locking import locked
from specgen.rundir.provenance import FREE_IN_A_RUN
from specgen.rundir.results import require_same
from specgen.rundir.row_file import RowFile

_KEPT = "what is measured is kept; fix that and run the same command again"
_REMEDY = "name a new directory, or ask for the same"
_EXTENDED = ("bench.repeats", "bench.precision")  # more of them only add rounds
_TIMED = {"engine.device", "engine.tensor_parallel", "engine.cuda_graphs", "device.cpu", "device.threads"}
_FREE = {*FREE_IN_A_RUN, *_EXTENDED} - _TIMED


class Rounds:
    """Every round so far: a repeat by arm, taken one behind the other in one process.

    A round is kept when all its arms have had their turn: ratios are of one round, and a stop in the middle of it
    would put hours between its repeats.
    """

    def __init__(self, file: RowFile | None = None) -> None:
        self._file = file
        self._each: dict[str, dict[str, Repeat]] = {}
        for name, row in () if file is None else file.items():
            self._each[name] = {arm: Repeat.from_json(found) for arm, found in row["arms"].items()}

    def __len__(self) -> int:
        return len(self._each)

    def add(self, arms: Mapping[str, Repeat]) -> None:
        """Keep a round; it survives a power loss."""
        name = f"round {len(self._each) + 1}"
        self._each[name] = dict(arms)
        if self._file is not None:
            self._file.add({"id": name, "arms": {arm: repeat.to_json() for arm, repeat in arms.items()}})
            self._file.sync()

    def count(self, arm: str) -> int:
        """The rounds that ``arm`` took part in."""
        return sum(arm in each for each in self._each.values())

    def of(self, arm: str) -> Repeats:
        """The repeats of an arm that has some."""
        return Repeats(each={name: each[arm] for name, each in self._each.items() if arm in each})

    def measured(self, arms: Iterable[str]) -> dict[str, Repeats]:
        """Those of ``arms`` that have repeats, and these."""
        return {arm: self.of(arm) for arm in arms if self.count(arm)}


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
        with closing(RowFile(output / f"{name}.rounds.jsonl")) as file:
            yield Rounds(file)
