"""A share of an input, so that machines that know nothing of each other can do one job."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specgen.config import UserError, first_line, require
from specgen.rundir.atomic import write_json_lines

REQUESTS = "requests.jsonl"  # in the directory of a shard: a row of the input a line, as the ids of its turns


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The rows ``index``, ``index + count``, ... of an input; the only shard of one is all of it."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        require(
            0 <= self.index < self.count,
            f"shard is {self}: of {self.count} shards, use 0/{self.count} to {self.count - 1}/{self.count}"
            if self.count > 0
            else f"shard is {self}: the number behind the stroke is that of the shards, at least 1",
        )

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, place: int) -> bool:
        """Whether the row at ``place``, counted from 0, belongs to it."""
        return place % self.count == self.index


WHOLE = Shard()


def parse_shard(text: str) -> Shard:
    """The shard called ``0/4``; ``UserError`` for anything else."""
    index, _, count = text.partition("/")
    require(
        index.isdecimal() and count.isdecimal(),
        f"shard is {text!r}: write which one of how many, counted from 0, such as 0/4",
    )
    return Shard(index=int(index), count=int(count))


def write_requests(path: Path, rows: Iterable[Sequence[str]]) -> None:
    """Write the ids of each of the ``rows`` of a shard: without the input, nothing else tells their order."""
    write_json_lines(path, rows)


def read_requests(path: Path) -> Iterator[list[str]]:
    """What ``write_requests`` has written; ``UserError`` where it was changed."""
    with path.open("rb") as lines:
        try:
            yield from map(json.loads, lines)
        except ValueError as error:
            reason = first_line(error)
            raise UserError(
                f"{path} is not JSON lines ({reason}): copy the directory as it was left"
            ) from error
