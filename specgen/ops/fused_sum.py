"""The sum over ranks, the residual stream and the norm as one kernel of FlashInfer's, over memory that GPUs share.

``trtllm_allreduce_fusion`` with a workspace that peers map into each other (NVLink or PCIe, never multicast): on two
H100s 5 us for one row of 4,096 and 9 us for 160, of which NCCL's sum alone takes 20 and 26. Compiling the
module takes five minutes.
"""

import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from specgen.device import Ranks
from specgen.ops import Norm, joined
from specgen.ops.jit_modules import Module
from specgen.ops.row_kernels import sum_parts

_WORKSPACE_BYTES = 16 << 20  # a third of its largest buffer; what more rows would need goes through NCCL
_ALIGNED = 16  # elements that a thread of the kernel may take at once


def can_fuse(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs here: half precision, and every GPU from this rank's first one on sees the others."""
    if (
        device.type != "cuda"
        or dtype not in (torch.bfloat16, torch.float16)
        or find_spec("flashinfer") is None
    ):
        return False
    if ranks.size not in (2, 4, 8, 16):
        return False
    first = torch.cuda.current_device() - ranks.rank
    pairs = permutations(range(first, first + ranks.size), 2)  # all, so that every rank says the same
    return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)


@dataclass(frozen=True, kw_only=True)
class FusedNorm:
    """A norm whose ``add`` sums the parts of every rank as well."""

    norm: Norm  # of a rank alone
    sums: Norm  # for more rows than the workspace holds
    weight: Tensor  # [N]
    eps: float
    ranks: Ranks

    @classmethod
    def build(cls, norm: Norm, sums: Norm, weight: Tensor, eps: float, ranks: Ranks) -> Norm:
        """All ranks build theirs in the same order. Widths that the kernel cannot take stay with ``sums``."""
        if weight.dim() != 1 or weight.shape[0] % _ALIGNED:
            return sums
        _workspace(ranks, weight.shape[0])
        return cls(norm=norm, sums=sums, weight=weight.contiguous(), eps=eps, ranks=ranks)

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def add(self, stream: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        rows, size = stream.shape
        if not 0 < rows <= _most_rows(self.ranks, size) or not stream.is_contiguous():
            return self.sums.add(stream, *parts)
        from flashinfer.comm import AllReduceFusionPattern, trtllm_allreduce_fusion

        each = joined(parts)
        mine = each[0] if each.dtype == stream.dtype and len(each) == 1 else sum_parts(each, stream.dtype)
        total, normed = torch.empty_like(stream), torch.empty_like(stream)
        trtllm_allreduce_fusion(
            allreduce_in=mine,
            world_size=self.ranks.size,
            world_rank=self.ranks.rank,
            token_num=rows,
            hidden_dim=size,
            workspace_ptrs=_workspace(self.ranks, size),
            launch_with_pdl=True,
            trigger_completion_at_end=False,  # the next kernel loads weights meanwhile, and waits before it reads
            fp32_acc=True,
            pattern_code=AllReduceFusionPattern.kARResidualRMSNorm,
            use_oneshot=None,  # by the number of bytes
            allreduce_out=None,
            residual_in=stream,
            residual_out=total,
            norm_out=normed,
            quant_out=None,
            scale_out=None,
            rms_gamma=self.weight,
            rms_eps=self.eps,
            scale_factor=None,
            layout_code=None,
        )
        return total, normed


def fused_sum_module() -> Module:
    """What ``FusedNorm`` needs compiled."""

    def spec() -> Any:  # noqa: ANN401
        from flashinfer.jit.comm import gen_trtllm_comm_module

        return gen_trtllm_comm_module()

    return Module(what="the sum over GPUs", spec=spec)


def _most_rows(ranks: Ranks, size: int) -> int:
    return max(_WORKSPACE_BYTES // (ranks.size * size * 2), 64)


@cache
def _workspace(ranks: Ranks, size: int) -> Any:  # noqa: ANN401
    """The addresses of all ranks' buffers, int64 on this GPU; for the life of the process, as graphs read them."""
    from flashinfer.comm import trtllm_create_ipc_workspace_for_all_reduce_fusion as create
    from flashinfer.jit.comm import gen_trtllm_comm_module

    if ranks.rank == 0 and not gen_trtllm_comm_module().is_compiled:
        line = "specgen: compiling FlashInfer's sum over GPUs, once on this machine: about five minutes"
        print(line, file=sys.stderr, flush=True)
    handles, addresses, _ = create(
        ranks.rank,
        ranks.size,
        _most_rows(ranks, size),
        size,
        group=ranks.group,
        create_metadata=True,
        use_symm_dev_mem=False,  # the other way may use multicast
    )
    _kept.append(handles)
    return addresses


_kept: list[object] = []  # what FlashInfer keeps buffers alive by
