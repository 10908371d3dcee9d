"""Tensors from weight files to a GPU: threads copy pieces into pinned memory, from where the GPU fetches them.

A copy straight from a mapped file goes through one thread of the driver's, at a few GB/s.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

_PIECE = 16 << 20  # bytes
_THREADS = 8
_SMALL = 1 << 20  # bytes, up to which the detour does not pay


class Fetched(Protocol):
    """As ``torch.cuda.Event``: whether the GPU has fetched what was in a buffer."""

    def record(self, stream: Any) -> None: ...  # noqa: ANN401
    def synchronize(self) -> None: ...


class Upload:
    """Copies tensors from the host into tensors of a GPU, in the order of its current stream.

    ``pinned`` makes a buffer of so many bytes, ``fetched`` the event that goes with it; a buffer is written only when
    its event says that the GPU is done with it.
    """

    def __init__(
        self,
        pinned: Callable[[int], Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
        fetched: Callable[[], Fetched] = torch.cuda.Event,
    ) -> None:
        self._threads = ThreadPoolExecutor(_THREADS)
        self._buffers: SimpleQueue[tuple[Tensor, Fetched]] = SimpleQueue()
        for _ in range(_THREADS):
            self._buffers.put((pinned(_PIECE), fetched()))

    def close(self) -> None:
        """Let go of the threads; the buffers go when the GPU has fetched them."""
        self._threads.shutdown()

    def into(self, target: Tensor, source: Tensor, stream: Any) -> None:  # noqa: ANN401
        """Copy ``source``, on the host, into ``target`` on the device of ``stream``; both are contiguous and alike.

        What follows in ``stream`` sees it.
        """
        assert target.dtype == source.dtype
        assert target.shape == source.shape
        assert target.is_contiguous()
        assert source.is_contiguous()
        if source.nbytes <= _SMALL:
            target.copy_(source)
            return
        here, there = (each.view(-1).view(torch.uint8) for each in (source, target))
        pieces = [slice(start, start + _PIECE) for start in range(0, len(here), _PIECE)]
        for done in [self._threads.submit(self._piece, here[each], there[each], stream) for each in pieces]:
            done.result()

    def _piece(self, source: Tensor, target: Tensor, stream: Any) -> None:  # noqa: ANN401
        """Of bytes ``[n]``."""
        buffer, fetched = self._buffers.get()
        try:
            fetched.synchronize()
            mine = buffer[: len(source)]
            mine.numpy()[:] = source.numpy()  # by this thread alone; torch would start several more in each
            with torch.cuda.stream(stream):  # of its device, which is another thread's affair
                target.copy_(mine, non_blocking=True)
            fetched.record(stream)
        finally:
            self._buffers.put((buffer, fetched))


@contextmanager
def uploading(device: torch.device) -> Iterator[Upload | None]:
    """For tensors to a GPU; None for another ``device``."""
    if device.type != "cuda":
        yield None
        return
    upload = Upload()
    try:
        yield upload
    finally:
        upload.close()
