# mypy: allow-untyped-decorators
"""Programmatic dependent launch, which every Triton kernel here uses: it starts while the one before it still runs.

On Hopper and later a kernel may be launched before its predecessor has finished. Each kernel allows the launch of its
successor at once, does what depends on weights alone, and waits for its predecessor to finish before it reads or
writes anything else. The predecessor has waited for its own predecessor, so the order of the stream holds.

Attention loads more before it waits: lengths, block tables and the KV of earlier passes. So a GEMM, which it comes
behind, allows the launch of its successor only when it has itself waited: all that ran before the GEMM is done then.
So does the convolution of Gated DeltaNet, behind which the recurrence loads its states. What comes between GEMM and
attention, such as the norm of queries and keys, was launched by the GEMM and need not wait before it allows the next.
"""

import triton
import triton.language as tl

PDL = {"launch_pdl": True}


@triton.jit
def prefetch_l2(pointers: tl.tensor, num_bytes: int) -> None:
    """Start loading ``num_bytes`` (a multiple of 16) from each of ``pointers`` into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), tl.full(pointers.shape, num_bytes, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
