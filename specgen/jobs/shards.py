"""Shards: which rows of an input are one command's, as the user writes it or as a scheduler has it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from specgen.config import require

# By scheduler, the variables with the number of this process, counted from 0, and how many there are. SLURM_PROCID and
# SLURM_NTASKS are set for the script of a job too, which runs once; SLURM_STEP_NUM_TASKS only for what srun starts.
_RANKS = {
    "Slurm's srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "SkyPilot's jobs": ("SKYPILOT_JOB_RANK", "SKYPILOT_NUM_JOBS"),
    "SkyPilot's nodes": ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    "dstack": ("DSTACK_NODE_RANK", "DSTACK_NODES_NUM"),
    "torchrun": ("RANK", "WORLD_SIZE"),
}
_ARRAY = "SLURM_ARRAY_TASK_"
_BY_HAND = "write --shard I/N"


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

    @property
    def directory_name(self) -> str:
        """Its directory in that of all shards."""
        return f"{self.index}-of-{self.count}"

    def holds(self, row: int) -> bool:
        """Whether ``row``, counted from 0, belongs to it."""
        return row % self.count == self.index


WHOLE = Shard()


def parse_shard(text: str) -> Shard:
    """The shard written as ``0/4``, or with ``auto`` the scheduler's; ``UserError`` for anything else."""
    if text == "auto":
        return scheduled_shard(os.environ)
    index, _, count = text.partition("/")
    require(
        index.isdecimal() and count.isdecimal(),
        f"shard is {text!r}: write which one of how many, counted from 0, such as 0/4, or auto for the scheduler's",
    )
    return Shard(index=int(index), count=int(count))


def scheduled_shard(variables: Mapping[str, str]) -> Shard:
    """The shard of this process among those that a scheduler started, by its environment ``variables``.

    ``UserError`` where no scheduler set them, or two that disagree. One that says "the only one" leaves it to others.
    """
    found = {
        scheduler: Shard(index=_number(variables, rank), count=_number(variables, count))
        for scheduler, (rank, count) in _RANKS.items()
        if count in variables or (rank in variables and rank != "SLURM_PROCID")
    }
    if f"{_ARRAY}ID" in variables:
        found["Slurm's array"] = _of_array(variables)
    parts = {scheduler: shard for scheduler, shard in found.items() if shard != WHOLE} or found
    num_tasks = variables.get("SLURM_NTASKS", "1")
    require(
        bool(parts) or num_tasks == "1",
        f"shard is auto in a Slurm job of {num_tasks} tasks, but outside of srun, which starts them: put srun before "
        f"the command, or {_BY_HAND}",
    )
    names = ", ".join([f"{_ARRAY}ID", *(rank for rank, _ in _RANKS.values())])
    require(bool(parts), f"shard is auto, and no scheduler says which one ({names} are not set): {_BY_HAND}")
    said = " and ".join(f"{scheduler} says {shard}" for scheduler, shard in parts.items())
    require(len(set(parts.values())) == 1, f"shard is auto, but {said}: {_BY_HAND}")
    return next(iter(parts.values()))


def _of_array(variables: Mapping[str, str]) -> Shard:
    """That of a task of a Slurm array, whose ids begin anywhere and have any step, but no holes."""
    task, first, last, step, count = (
        _number(variables, _ARRAY + name) for name in ("ID", "MIN", "MAX", "STEP", "COUNT")
    )
    require(
        step >= 1 and last == first + (count - 1) * step and task in range(first, last + 1, step),
        f"shard is auto, and the ids of the Slurm array have holes ({count} from {first} to {last} with step {step}): "
        f"submit one without, such as --array=0-{max(count, 1) - 1}, or {_BY_HAND}",
    )
    return Shard(index=(task - first) // step, count=count)


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name)
    require(
        text is not None, f"shard is auto, but {name} is not set, unlike others of its scheduler: {_BY_HAND}"
    )
    assert text is not None
    require(text.isdecimal(), f"shard is auto, but {name} is {text!r} and no number: {_BY_HAND}")
    return int(text)
