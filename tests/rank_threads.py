"""Ranks as threads of one process: they meet at a barrier, so that a model's shares are tested without processes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from specgen.device import Ranks
from tests.waiting import LIMIT

T = TypeVar("T")


@dataclass
class Table:
    """What every rank brings to a meeting."""

    barrier: Barrier
    brought: list[Tensor | None]

    def meet(self, rank: int, x: Tensor) -> Tensor:
        self.brought[rank] = x.clone()
        self.barrier.wait(LIMIT)
        found = torch.stack([each for each in self.brought if each is not None])
        self.barrier.wait(LIMIT)  # nobody brings the next before all have read this one
        return found


@dataclass(frozen=True, kw_only=True)
class ThreadRanks(Ranks):
    """See ``Ranks``; ``group`` is the table."""

    def gather(self, x: Tensor) -> Tensor:
        table: Any = self.group
        found: Tensor = table.meet(self.rank, x)
        return found


def together(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What ``work`` returns in each of ``size`` ranks; what one raises is raised."""
    group: Any = Table(barrier=Barrier(size), brought=[None] * size)

    def of(rank: int) -> T:
        try:
            return work(ThreadRanks(rank=rank, size=size, group=group))
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(of, rank) for rank in range(size)]
    failed = [error for error in (each.exception() for each in futures) if error is not None]
    if failed:
        raise min(
            failed, key=lambda error: "Barrier" in type(error).__name__
        )  # the others only waited for it
    return [each.result() for each in futures]
