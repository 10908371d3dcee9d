"""What FlashInfer's kernels are planned with: the lengths of a pass, and scratch memory by need."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from specgen.config import UserError
from specgen.kv.layout import Layout
from specgen.ops.jit_modules import num_sms


class PassLens:
    """Lengths on the host, pages on the device; a layout without ``host`` lengths is asked for them, and waits."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.query_lens = torch.tensor(layout.host.query_lens if layout.host else layout.query_lens.tolist())
        self.kv_lens = self.query_lens + torch.tensor(
            layout.host.starts if layout.host else layout.starts.tolist()
        )
        self.page_size = layout.page_size
        self.num_rows = int(self.query_lens.sum())  # that belong to a sequence

    @cached_property
    def first_rows(self) -> Tensor:
        """Where each sequence's rows begin, and where the last one's end: int32 ``[B + 1]``."""
        return offsets(self.query_lens)

    @cached_property
    def first_pages(self) -> Tensor:
        """Where each sequence's pages begin in ``pages``, and where the last one's end: int32 ``[B + 1]``."""
        return offsets(-(-self.kv_lens // self.page_size))

    @cached_property
    def last_page_lens(self) -> Tensor:
        """Positions in each sequence's last page: int32 ``[B]``."""
        return ((self.kv_lens - 1) % self.page_size + 1).to(torch.int32)

    @cached_property
    def pages(self) -> Tensor:
        """The pages of all sequences, one sequence after the other: int32 on the device, which is not waited for."""
        tables, total = self._layout.block_tables, int(self.first_pages[-1])
        counts = -(-self._layout.kv_lens // self.page_size)
        return tables[spread(counts, total)]


def spread(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Of ``counts`` ``[B]`` one behind the other, ``total`` in all: the sequence of each, and its place there."""
    sequences = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=total)
    return sequences, torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[sequences]


def offsets(lens: Tensor) -> Tensor:
    """Where each of ``lens`` ``[B]`` begins and where the last one ends: int32 ``[B + 1]``."""
    return F.pad(lens.cumsum(0), (1, 0)).to(torch.int32)


MIB = 1 << 20
# XQA counts its finished blocks in the first 8 MiB, trtllm-gen asks for 128 MiB in all
_COUNTERS = 8 * MIB
DECODE_BYTES = 128 * MIB


def decode_workspace(device: torch.device, *, max_group: int, max_rows: int, max_head_dim: int) -> Tensor:
    """Zeros for the TensorRT-LLM decode kernels on ``device``, which leave the counters at zero after every call.

    Two calls that run at once must not share it. ``UserError`` if kernels of that shape need more than there is.
    """
    need = xqa_bytes(num_sms(device), rows=max_group * max_rows, head_dim=max_head_dim)
    if need > DECODE_BYTES:
        raise UserError(
            f"XQA needs {need // MIB} MiB of scratch memory on this GPU and takes "
            f"{DECODE_BYTES // MIB}: use --attention flashinfer"
        )
    return torch.zeros(DECODE_BYTES, dtype=torch.uint8, device=device)


def xqa_bytes(num_sms: int, *, rows: int, head_dim: int) -> int:
    """What XQA writes at most for ``rows`` query rows of one KV head: query length times heads per KV head.

    A sequence is split only while all splits of all sequences together have an SM each, so neither the batch nor
    the context matters. A split keeps its rows' output in 2 bytes an element, their maxima and their sums; rows
    come in tiles of up to 64 that may be half empty.
    """
    tiled = 2 * -(-rows // 64) * 64
    return _COUNTERS + num_sms * tiled * (2 * head_dim + 8)


def prefill_bytes(num_sms: int, *, group: int, head_dim: int) -> int:
    """What FlashInfer's FA2 prefill writes at most for ``group`` heads per KV head.

    It splits a sequence only while there are no more than two blocks per SM; a block keeps the output and the
    log-sum-exp of up to 128 rows of each of its heads in float32.
    """
    return 2 * num_sms * group * 128 * (head_dim + 1) * 4 + MIB
