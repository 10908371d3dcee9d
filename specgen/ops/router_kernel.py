# mypy: allow-untyped-decorators
"""A Triton kernel that chooses the experts of rows from the partial sums of a router's logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops.launch import PDL
from specgen.ops.router import Choice, Weighing


@triton.jit(do_not_specialize=["num_rows"])
def _choose_kernel(
    parts: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    num_rows: int,
    num_experts: int,
    PARTS: tl.constexpr,  # noqa: N803
    WEIGHING: tl.constexpr,  # noqa: N803
    K: tl.constexpr,  # noqa: N803
    K_BLOCK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """A program per row."""
    gdc_launch_dependents()
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = expert < num_experts
    gdc_wait()
    logits = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(parts + (part * num_rows + row) * num_experts + expert, inside, 0).to(tl.float32)
    logits = logits.to(weights.dtype.element_ty).to(tl.float32)  # as one product would be rounded
    # Integers in the order of the logits: K different experts whatever the values, NaN included.
    bits = logits.to(tl.int32, bitcast=True)
    key = tl.where(inside, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -(2**31))
    slot = tl.arange(0, K_BLOCK)
    chosen, best = tl.zeros((K_BLOCK,), tl.int64), tl.full((K_BLOCK,), float("-inf"), tl.float32)
    for place in tl.static_range(K):
        first = tl.min(tl.where(key == tl.max(key), expert, BLOCK))
        value = tl.sum(tl.where(expert == first, logits, 0))
        chosen, best = tl.where(slot == place, first, chosen), tl.where(slot == place, value, best)
        key = tl.where(expert == first, -(2**31), key)
    largest = tl.max(tl.where(slot == 0, best, float("-inf")))
    share = tl.exp(best - largest)
    if WEIGHING == "softmax":
        share /= tl.sum(tl.where(inside, tl.exp(logits - largest), 0))
    else:  # the same with and without the softmax of all experts, in which the sum cancels
        share /= tl.sum(share)
    place = row * K + slot
    tl.store(ids + place, chosen, slot < K)
    tl.store(weights + place, share.to(weights.dtype.element_ty), slot < K)


def fused_choice(dtype: torch.dtype, num_chosen: int, weighing: Weighing) -> Choice:
    """One kernel; of equal logits the expert with the lower id is better."""

    def choose(parts: Tensor) -> tuple[Tensor, Tensor]:
        num_parts, num_rows, num_experts = parts.shape
        ids = torch.empty(num_rows, num_chosen, dtype=torch.int64, device=parts.device)
        weights = torch.empty(num_rows, num_chosen, dtype=dtype, device=parts.device)
        if num_rows:
            _choose_kernel[(num_rows,)](
                *(parts.contiguous(), ids, weights, num_rows, num_experts),
                PARTS=num_parts,
                WEIGHING=weighing,
                K=num_chosen,
                K_BLOCK=triton.next_power_of_2(num_chosen),
                BLOCK=triton.next_power_of_2(num_experts),
                num_warps=1,
                **PDL,
            )
        return ids, weights

    return choose
