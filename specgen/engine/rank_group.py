"""What all ranks share: joining the process group, a checksum of their decisions, and unsolicited messages."""

import os
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from zlib import crc32

import torch
from torch import distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from specgen.device import Ranks, collective, use

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
ENVIRONMENT = {  # what libraries read from the environment alone
    # all ranks are on this machine, and nobody else is to reach them
    "GLOO_SOCKET_IFNAME": _LOOPBACK,
    "NCCL_SOCKET_IFNAME": _LOOPBACK,
    # NVLink multicast is never used: on hosts that several share it can put GPUs out of service
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # torch would abort this process when a rank is gone; ``worker_group`` reports which one
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Rank, device and limits of one process of the group."""

    rank: int
    size: int
    device: str
    port: int  # of rank 0's store, on this machine
    timeout: float  # seconds that a rank waits for the others
    num_threads: int  # on a CPU, the same on all ranks: sums may depend on it

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.size} on {self.device}"


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The last message of a rank that fails."""

    reason: str
    waited: bool  # for others, in vain


@dataclass(frozen=True)
class Alive:
    """The heartbeat of a rank during long work."""


@dataclass
class Checksum:
    """A running checksum of what a rank has computed and decided, by which ranks are compared."""

    value: int = 0

    def add(self, numbers: Iterable[int]) -> None:
        """Update with ``numbers``; their order matters."""
        self.value = crc32(array("q", numbers).tobytes(), self.value)


def join(place: Place, alive: Callable[[], None], store: Store | None = None) -> Ranks:
    """Meet the other ranks, who call it too; rank 0 brings the ``store``. ``RankUnreachable`` where they do not come.

    Changes the environment: see ``ENVIRONMENT``.
    """
    os.environ |= ENVIRONMENT
    timeout, device = timedelta(seconds=place.timeout), torch.device(place.device)
    if store is None:
        store = TCPStore("127.0.0.1", place.port, place.size, is_master=False, timeout=timeout)
    torch.set_num_threads(place.num_threads)
    use(device)
    with collective():
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
    return Ranks(rank=place.rank, size=place.size, group=dist.group.WORLD, alive=alive)
