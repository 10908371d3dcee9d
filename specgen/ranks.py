"""The processes that run one model together, one device each: this process's rank, and collectives with the others.

Below models, kernels and engine, which all receive them. May import nothing of the package.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor
from torch import distributed as dist


class RankUnreachable(RuntimeError):  # noqa: N818
    """Another rank did not answer within ``seconds``; the fault is not this rank's."""

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(reason)
        self.seconds = seconds


@contextmanager
def collective() -> Iterator[None]:
    """Around a collective on the hosts: its failure is a ``RankUnreachable``, as the others are missing."""
    began = monotonic()
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankUnreachable(str(error), monotonic() - began) from error


def _do_nothing() -> None:
    """A single rank needs no heartbeat."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """``rank`` of ``size`` processes that hold a model's shares; all call its methods in the same order.

    ``group`` is torch's (NCCL for GPUs, gloo for a CPU), and None where one process holds the whole model, or where one
    that is only outlined. Results have the same bits on every rank: they choose tokens, and ranks that disagree on one
    would part for good. ``alive`` is called between the parts of work that may take longer than the others would wait
    in silence; it raises ``RankUnreachable`` where one of them is gone.
    """

    rank: int = 0
    size: int = 1
    group: "dist.ProcessGroup | None" = None
    alive: Callable[[], None] = field(default=_do_nothing, compare=False)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)
        assert self.size > 1 or self.group is None, "a single rank has no group"

    def gather(self, x: Tensor) -> Tensor:
        """``x`` [...] of every rank, in their order: [size, ...]. All have the same shape."""
        if self.size == 1:
            return x[None]
        assert self.group is not None, "an outline computes nothing"
        found = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        with (
            collective() if x.device.type == "cpu" else nullcontext()
        ):  # on GPUs the host waits for nobody here
            _all_gather(found.view(-1), x.contiguous().view(-1), group=self.group)
        return found

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x`` in its dtype; on a CPU in their order."""
        if self.size == 1:
            return x
        if x.device.type == "cpu":  # gloo's own order depends on the number of bytes
            return self.gather(x).sum(0)
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total


# torch 2.13 gave it another name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SINGLE_RANK = Ranks()
