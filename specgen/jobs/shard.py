"""Shards of the input, for machines that do not communicate with each other."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specgen.config import UserError, first_line, require

REQUESTS = "requests.jsonl"  # of a shard: one line per input row, with the ids of its turns


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The rows ``index``, ``index + count``, ... of an input; 0/1 is all of it."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        require(
            0 <= self.index < self.count,
            f"shard is {self}: of {self.count} shards, use 0/{self.count} to {self.count - 1}/{self.count}"
            if self.count > 0
            else f"shard is {self}: the number after the slash is the number of shards, at least 1",
        )

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, row: int) -> bool:
        """Whether ``row``, counted from 0, belongs to it."""
        return row % self.count == self.index


WHOLE = Shard()


def parse_shard(text: str) -> Shard:
    """The shard written as ``0/4``; ``UserError`` for anything else."""
    index, _, count = text.partition("/")
    require(
        index.isdecimal() and count.isdecimal(),
        f"shard is {text!r}: write which one of how many, counted from 0, such as 0/4",
    )
    return Shard(index=int(index), count=int(count))


def read_requests(path: Path) -> Iterator[list[str]]:
    """The rows of a ``REQUESTS`` file, which give ``merge`` the order; ``UserError`` for a corrupt one."""
    with path.open("rb") as lines:
        try:
            yield from map(json.loads, lines)
        except ValueError as error:
            reason = first_line(error)
            raise UserError(
                f"{path} is not JSON lines ({reason}): copy the directory as it was left"
            ) from error
