"""What all ranks do alike: meeting in a group, and their share of the cores; and how one that fails says so."""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from specgen.device import use
from specgen.ranks import Ranks

_ENVIRONMENT = {  # what libraries read from the environment alone
    # NVLink multicast is never used: on hosts that several share it can put GPUs out of service
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # torch would abort this process when a rank is gone; ``crew`` knows who it was and what to do
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Of a rank in its group."""

    rank: int
    size: int
    device: str
    port: int  # of rank 0's store, on this machine
    patience: float  # seconds that a rank waits for the others
    num_threads: int  # on a CPU, the same on all ranks: sums may depend on it

    @property
    def name(self) -> str:
        """As a message names it."""
        return f"rank {self.rank} of {self.size} on {self.device}"


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The last word of a rank."""

    reason: str


def join(place: Place, store: Store | None = None) -> Ranks:
    """Meet the other ranks, who call it too; rank 0 brings the ``store``. ``RuntimeError`` where they do not come."""
    os.environ |= _ENVIRONMENT
    timeout, device = timedelta(seconds=place.patience), torch.device(place.device)
    if store is None:
        store = TCPStore("127.0.0.1", place.port, place.size, is_master=False, timeout=timeout)
    torch.set_num_threads(place.num_threads)
    use(device)
    if device.type == "cpu":
        # all are on this machine, whose name gloo might not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    return Ranks(rank=place.rank, size=place.size, group=dist.group.WORLD)
