# mypy: allow-untyped-decorators
"""What every Triton kernel here has in common: it starts while the one before it still runs.

On Hopper and later a kernel may be launched before its predecessor has ended (programmatic dependent launch). Each
kernel allows its successor at once, does what depends on weights alone, and waits for its predecessor before it
reads or writes anything else. That wait is for the end of the predecessor, which has waited for its own, so the order
of a stream holds.
"""

import triton
import triton.language as tl

MIN_COMPUTE_CAPABILITY = 9  # before it there is no such launch
PDL = {"launch_pdl": True}


@triton.jit
def fetch_ahead(pointers: tl.tensor, num_bytes: int) -> None:
    """Start to bring ``num_bytes`` (a multiple of 16) from each of ``pointers`` into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), tl.full(pointers.shape, num_bytes, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
