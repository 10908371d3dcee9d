"""Speeds from rounds in which all heads and plain decoding took turns: kept as measured, ratios within a round."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from specgen.rundir.atomic import open_output, sync
from specgen.rundir.row_file import cut_torn_line

PLAIN = "plain decoding"
FILE = "speed.jsonl"
LEAST_ROUNDS = 2  # for a ratio: one round has no spread
Round = Mapping[str, float]  # output tokens per second by arm


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of a figure over rounds, with the lowest and the highest."""

    median: float
    ends: tuple[float, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least one value."""
        return cls(median=statistics.median(values), ends=(min(values), max(values)))

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "lowest": self.ends[0], "highest": self.ends[1]}


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The rounds of each data set; the arms of a round are heads and ``PLAIN``."""

    rounds: Mapping[str, Sequence[Round]] = field(default_factory=dict)

    def speed(self, data: str, arm: str) -> Spread | None:
        """Output tokens per second; None where fewer than ``LEAST_ROUNDS`` were measured."""
        return self._spread(data, lambda each: each[arm], arm)

    def times(self, data: str, arm: str, other: str) -> Spread | None:
        """The speed of ``arm`` over that of ``other`` in the same round."""
        return self._spread(data, lambda each: each[arm] / each[other], arm, other)

    def _spread(self, data: str, figure: Callable[[Round], float], *arms: str) -> Spread | None:
        values = [figure(each) for each in self.rounds.get(data, ()) if all(arm in each for arm in arms)]
        return Spread.of(values) if len(values) >= LEAST_ROUNDS else None

    def to_json(self) -> dict[str, Any]:
        return {data: [dict(each) for each in rounds] for data, rounds in self.rounds.items()}


class RoundFile:
    """The rounds on disk, one line each; those measured under other conditions are passed over.

    ``under`` has a digest of the conditions by data set.
    """

    def __init__(self, path: Path, under: Mapping[str, str]) -> None:
        self._path, self._under = path, under

    def speeds(self) -> Speeds:
        """What has been measured; a torn last line, of a kill, is left out."""
        rounds: dict[str, list[Round]] = {}
        text = self._path.read_text() if self._path.exists() else ""
        for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines()):
            if self._under.get(line["data"]) == line["under"]:
                rounds.setdefault(line["data"], []).append(line["tokens_per_second"])
        return Speeds(rounds=rounds)

    def add(self, data: str, measured: Round) -> None:
        """Keep one whole round."""
        self._path.touch()
        cut_torn_line(self._path)
        line = {"data": data, "under": self._under[data], "tokens_per_second": measured}
        with open_output(self._path, "a") as file:
            file.write(json.dumps(line).encode() + b"\n")
            sync(file)
