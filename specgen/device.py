"""Devices: points of their work in time, copies to and from the host, and the ranks of a model.

A rank is a process with one device; ranks that run one model together exchange tensors by collectives.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

_CONTAINER = Path("/sys/fs/cgroup/memory.max")  # bytes, as the kernel limits them


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """``values``, nested or not, as a tensor on ``device``.

    Pinned memory lets a GPU fetch them when it gets there; from ordinary memory the host would wait for the GPU.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def use(device: torch.device) -> None:
    """Make ``device`` the current one, by which streams, events, graphs and Triton's launches go."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize() -> None:
    """Wait until a GPU, where there is one, has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class DeviceEvent:
    """The point in time at which a device gets to what is launched next, by the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def reached(self) -> bool:
        """Whether the device has come there."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the device has come there."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: "DeviceEvent") -> float:
        """Seconds from ``earlier``, of the same device; both are reached."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return 1e-3 * float(earlier._event.elapsed_time(self._event))


class HostCopy:
    """The numbers of a device tensor on their way to the host; the tensor may be overwritten at once."""

    def __init__(self, source: Tensor) -> None:
        if source.device.type == "cpu":
            self._numbers = source.clone()
        else:
            self._numbers = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._numbers.copy_(source, non_blocking=True)
        self.done = DeviceEvent(source.device)

    @property
    def ready(self) -> bool:
        return self.done.reached

    def read(self) -> list[Any]:
        """Wait until they are there; nested lists in the shape of the tensor."""
        numbers: list[Any] = self.tensor().tolist()
        return numbers

    def tensor(self) -> Tensor:
        """The same as a tensor on the CPU."""
        self.done.wait()
        return self._numbers


def total_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory; of a CPU those that the machine has, or the container that this process is in."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        limit = int(_CONTAINER.read_text())
    except (OSError, ValueError):  # no container, or "max"
        limit = sys.maxsize
    return min(limit, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class RankUnreachable(RuntimeError):  # noqa: N818
    """Another rank did not answer within ``seconds``; the fault is not this rank's."""

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(reason)
        self.seconds = seconds


@contextmanager
def collective() -> Iterator[None]:
    """Around a collective on the hosts: its failure is a ``RankUnreachable``, as the others are missing."""
    began = time.monotonic()
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankUnreachable(str(error), time.monotonic() - began) from error


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
        # on GPUs the host waits for nobody here
        with collective() if x.device.type == "cpu" else nullcontext():
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
