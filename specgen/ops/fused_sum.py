# mypy: allow-untyped-decorators
"""The sum over ranks, the residual stream and the norm as one kernel, over memory that GPUs map into each other.

Each rank writes its rows into a box in every rank's memory, and reads all of them from its own (NVLink or PCIe, never
multicast). A number that has not arrived yet is -0.0, which nobody sends: what is there needs no flag, and no order.
Boxes are used in turn, one call after the other. A call empties the box of the call before: in that one, which
nobody writes to until all have ended this call, everything has been read.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import permutations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.device import Ranks
from specgen.ops import Norm, joined
from specgen.ops.jit_modules import num_sms
from specgen.ops.launch import PDL
from specgen.ops.row_kernels import TritonNorm, rms_normed, row_block, to_e4m3

_TURNS = tl.constexpr(3)
_EMPTY = tl.constexpr(-32768)  # the bits of -0.0 in half precision
_MOST_BYTES = 8 << 20  # of the rows of a launch; more take several
_BLOCKS = 2  # of a multiprocessor, which all have to run at once: they wait for each other


def can_fuse(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs here: half precision, and every GPU from this rank's first one on sees the others."""
    if (
        device.type != "cuda"
        or dtype not in (torch.bfloat16, torch.float16)
        or find_spec("flashinfer") is None
    ):
        return False
    if torch.cuda.get_device_capability(device)[0] < 9:
        return False
    first = torch.cuda.current_device() - ranks.rank
    pairs = permutations(range(first, first + ranks.size), 2)  # all, so that every rank says the same
    return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)


@triton.jit
def _box(address: tl.tensor, turn: tl.tensor, rank: int, row: tl.tensor, shape: tl.tuple) -> tl.tensor:
    """Where a row of ``rank`` lies among the boxes at ``address``; shape: ranks, rows of a box and their size."""
    first = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16)
    return first + ((turn * shape[0] + rank) * shape[1] + row) * shape[2]


@triton.jit
def _received(box: tl.tensor, size: int, BLOCK: tl.constexpr) -> tl.tensor:  # noqa: N803
    """The bits of a row, once all of them have arrived."""
    columns = tl.arange(0, BLOCK)
    bits = tl.load(box + columns, columns < size, 0, volatile=True)
    while tl.max((bits == _EMPTY).to(tl.int32), 0) > 0:
        bits = tl.load(box + columns, columns < size, 0, volatile=True)
    return bits


@triton.jit(do_not_specialize=["num_rows"])
def _sum_norm_kernel(
    stream: tl.tensor,
    parts: tl.tensor,
    weight: tl.tensor,
    out_scale: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    state: tl.tensor,
    addresses: tl.tuple,
    num_rows: int,
    size: int,
    part_stride: int,
    eps: float,
    most_rows: int,
    RANK: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    CASTS_LAST: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    first, step, columns = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCK)
    inside = columns < size
    dtype: tl.constexpr = stream.dtype.element_ty
    shape = (RANKS, most_rows, size)
    w = tl.load(weight + columns, inside, 0)
    if out_scale is not None:
        inverse = 1.0 / tl.load(out_scale)  # a weight as well
    gdc_wait()
    gdc_launch_dependents()
    turn, rows_before = tl.load(state), tl.load(state + 1)
    for row in range(first, num_rows, step):  # all, before anything is waited for
        mine = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            mine += tl.load(parts + part * part_stride + row * size + columns, inside, 0).to(tl.float32)
        bits = mine.to(dtype).to(tl.int16, bitcast=True)
        bits = tl.where(bits == _EMPTY, 0, bits)
        for rank in tl.static_range(RANKS):
            tl.store(_box(addresses[rank], turn, RANK, row, shape) + columns, bits, inside)
    for row in range(first, rows_before, step):
        for rank in tl.static_range(RANKS):
            used = _box(addresses[RANK], (turn + _TURNS - 1) % _TURNS, rank, row, shape)
            tl.store(used + columns, _EMPTY, inside)
    for row in range(first, num_rows, step):
        before, delta = tl.load(stream + row * size + columns, inside, 0), tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(RANKS):  # in the same order everywhere, so that all have the same bits
            bits = _received(_box(addresses[RANK], turn, rank, row, shape), size, BLOCK)
            delta += bits.to(dtype, bitcast=True).to(tl.float32)
        added = before + delta.to(dtype)
        tl.store(total + row * size + columns, added, inside)
        normed = rms_normed(added, w, size, eps, CASTS_LAST)
        if out_scale is not None:
            normed = to_e4m3(normed, inverse)
        tl.store(out + row * size + columns, normed, inside)
    if tl.atomic_add(state + 2, 1) == step - 1:  # the last one: all have read the turn
        tl.store(state, (turn + 1) % _TURNS)
        tl.store(state + 1, num_rows)
        tl.store(state + 2, 0)


@dataclass(frozen=True)
class Boxes:
    """What ranks send each other: of every rank 3 x ranks x ``most_rows`` x N numbers in half precision."""

    addresses: tuple[int, ...]  # of each rank's boxes, mapped into this process
    state: Tensor  # [3] int32: the turn, rows of the call before, programs of this call that have ended
    most_rows: int


@dataclass(frozen=True, kw_only=True)
class FusedNorm:
    """A norm whose ``add`` sums the parts of every rank as well."""

    norm: TritonNorm  # of a rank alone
    ranks: Ranks
    boxes: Boxes

    @classmethod
    def build(cls, norm: Norm, ranks: Ranks) -> "FusedNorm":
        """All ranks build theirs in the same order."""
        assert isinstance(norm, TritonNorm)
        return cls(norm=norm, ranks=ranks, boxes=_boxes(ranks, norm.weight.shape[0]))

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def add(self, stream: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        stream, each, most_rows = stream.contiguous(), joined(parts), self.boxes.most_rows
        total, out = torch.empty_like(stream), torch.empty_like(stream, dtype=self.norm.out_dtype(stream))
        for first in range(0, len(stream), most_rows):
            rows = slice(first, first + most_rows)
            self._launch(stream[rows], each[:, rows], total[rows], out[rows])
        return total, out

    def _launch(self, stream: Tensor, parts: Tensor, total: Tensor, out: Tensor) -> None:
        (rows, size), norm, boxes = stream.shape, self.norm, self.boxes
        _sum_norm_kernel[(min(rows, _BLOCKS * num_sms(stream.device)),)](
            *(stream, parts, norm.weight, norm.out_scale, total, out, boxes.state, boxes.addresses),
            *(rows, size, parts.stride(0), norm.eps, boxes.most_rows),
            RANK=self.ranks.rank,
            RANKS=self.ranks.size,
            PARTS=len(parts),
            CASTS_LAST=norm.casts_last,
            maxnreg=64,
            **row_block(size),
            **PDL,
        )


@triton.jit
def _empty_kernel(address: tl.tensor, length: int, BLOCK: tl.constexpr) -> None:  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(address.to(tl.pointer_type(tl.int16)) + at, _EMPTY, at < length)


@cache
def _boxes(ranks: Ranks, size: int) -> Boxes:
    """Of rows of ``size``; for the life of the process, as graphs read the addresses."""
    from flashinfer.comm.cuda_ipc import create_shared_buffer

    most_rows = max(_MOST_BYTES // (size * 2), 64)
    length = _TURNS.value * ranks.size * most_rows * size
    addresses = tuple(create_shared_buffer(2 * length, ranks.group))
    boxes = Boxes(addresses, torch.zeros(3, dtype=torch.int32, device="cuda"), most_rows)
    _empty_kernel[(triton.cdiv(length, 1024),)](addresses[ranks.rank], length, BLOCK=1024)
    ranks.gather(boxes.state)  # after which every rank's are empty
    torch.cuda.synchronize()
    return boxes
