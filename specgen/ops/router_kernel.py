# mypy: allow-untyped-decorators
"""Triton kernels that choose the experts of rows from the partial sums of a router's logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops.experts import Choice, Routing, SigmoidRouting, sigmoid_choice
from specgen.ops.launch import PDL

_LEAST = tl.constexpr(-(2**31))  # behind every number


@triton.jit
def _ordered(values: tl.tensor) -> tl.tensor:
    """Integers in the order of float32 ``values``: as many different ones as are asked for, NaN or not."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _summed(
    parts: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    num_rows: int,
    width: int,
    PARTS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """The logits of a row of ``width`` in ``column`` [n], where ``inside``: float32 [n]."""
    logits = tl.zeros(column.shape, tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_rows + row) * width + column
        logits += tl.load(parts + place, inside, 0).to(tl.float32)
    return logits


@triton.jit
def _best(
    key: tl.tensor,
    values: tl.tensor,
    expert: tl.tensor,
    K: tl.constexpr,  # noqa: N803
    K_BLOCK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> tuple[tl.tensor, tl.tensor]:
    """The experts with the K largest keys, and their values: [K_BLOCK] each; behind them 0 and -inf."""
    slot = tl.arange(0, K_BLOCK)
    chosen, best = tl.zeros((K_BLOCK,), tl.int64), tl.full((K_BLOCK,), float("-inf"), tl.float32)
    for place in tl.static_range(K):
        first = tl.min(tl.where(key == tl.max(key), expert, BLOCK))
        value = tl.sum(tl.where(expert == first, values, 0))
        chosen, best = tl.where(slot == place, first, chosen), tl.where(slot == place, value, best)
        key = tl.where(expert == first, _LEAST, key)
    return chosen, best


@triton.jit
def _store(
    ids: tl.tensor,
    weights: tl.tensor,
    row: tl.tensor,
    chosen: tl.tensor,
    weight: tl.tensor,
    shared: tl.tensor,
    num_experts: int,
    K: tl.constexpr,  # noqa: N803
    SHARED: tl.constexpr,  # noqa: N803
    K_BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """K experts and their weights [K_BLOCK], behind them SHARED from ``num_experts`` on with the weights ``shared``."""
    slot = tl.arange(0, K_BLOCK)
    place = row * (K + SHARED) + slot
    tl.store(ids + place, tl.where(slot < K, chosen, num_experts + slot - K), slot < K + SHARED)
    weight = tl.where(slot < K, weight, shared)
    tl.store(weights + place, weight.to(weights.dtype.element_ty), slot < K + SHARED)


@triton.jit(do_not_specialize=["num_rows"])
def _choose_kernel(
    parts: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    num_rows: int,
    num_experts: int,
    width: int,
    PARTS: tl.constexpr,  # noqa: N803
    WEIGHING: tl.constexpr,  # noqa: N803
    GATED: tl.constexpr,  # noqa: N803
    K: tl.constexpr,  # noqa: N803
    SHARED: tl.constexpr,  # noqa: N803
    K_BLOCK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """A program per row."""
    gdc_launch_dependents()
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = expert < num_experts
    gdc_wait()
    slot = tl.arange(0, K_BLOCK)
    dtype = weights.dtype.element_ty
    logits = _summed(parts, row, expert, inside, num_rows, width, PARTS)
    shared = tl.full((K_BLOCK,), 1.0, tl.float32)
    if GATED:
        gate = _summed(parts, row, num_experts + 0 * slot, slot >= K, num_rows, width, PARTS)
        shared = 1 / (1 + tl.exp(-gate.to(dtype).to(tl.float32)))
    logits = logits.to(dtype).to(tl.float32)  # as one GEMM would be rounded
    key = tl.where(inside, _ordered(logits), _LEAST)
    chosen, best = _best(key, logits, expert, K, K_BLOCK, BLOCK)
    largest = tl.max(tl.where(slot == 0, best, float("-inf")))
    share = tl.exp(best - largest)
    if WEIGHING == "softmax":
        share /= tl.sum(tl.where(inside, tl.exp(logits - largest), 0))
    elif WEIGHING == "sigmoid":
        share = 1 / (1 + tl.exp(-best))
    else:  # the same with and without the softmax of all experts, in which the sum cancels
        share /= tl.sum(share)
    if scales is not None:
        share *= tl.load(scales + chosen)  # of the first where no expert is
    _store(ids, weights, row, chosen, share, shared, num_experts, K, SHARED, K_BLOCK)


@triton.jit(do_not_specialize=["num_rows"])
def _choose_by_score_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    num_rows: int,
    num_experts: int,
    width: int,
    scale: float,
    PARTS: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    CHOSEN_GROUPS: tl.constexpr,  # noqa: N803
    NORMALIZED: tl.constexpr,  # noqa: N803
    K: tl.constexpr,  # noqa: N803
    SHARED: tl.constexpr,  # noqa: N803
    K_BLOCK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """``SigmoidRouting``; a program per row."""
    gdc_launch_dependents()
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = expert < num_experts
    added = tl.load(bias + expert, inside, 0)
    gdc_wait()
    scores = 1 / (1 + tl.exp(-_summed(parts, row, expert, inside, num_rows, width, PARTS)))
    biased = scores + added
    key = tl.where(inside, _ordered(biased), _LEAST)
    if GROUPS > 1:
        size: tl.constexpr = BLOCK // GROUPS
        grouped, place = tl.reshape(biased, (GROUPS, size)), tl.arange(0, size)[None, :]
        best = tl.max(grouped, 1)
        first = tl.min(tl.where(grouped == best[:, None], place, size), 1)
        second = tl.max(tl.where(place == first[:, None], float("-inf"), grouped), 1)
        group, left = tl.arange(0, GROUPS), _ordered(best + second)
        kept = tl.zeros((GROUPS,), tl.int1)
        for _ in tl.static_range(CHOSEN_GROUPS):
            first = tl.min(tl.where(left == tl.max(left), group, GROUPS))
            kept, left = kept | (group == first), tl.where(group == first, _LEAST, left)
        key = tl.reshape(tl.where(kept[:, None], tl.reshape(key, (GROUPS, size)), _LEAST), (BLOCK,))
    chosen, weight = _best(key, scores, expert, K, K_BLOCK, BLOCK)
    slot = tl.arange(0, K_BLOCK)
    if NORMALIZED:
        weight /= tl.sum(tl.where(slot < K, weight, 0)) + 1e-20
    _store(ids, weights, row, chosen, weight * scale, 1.0, num_experts, K, SHARED, K_BLOCK)


def fused_sigmoid_choice(dtype: torch.dtype, routing: SigmoidRouting) -> Choice:
    """One kernel, where groups are powers of two; of equal scores the expert with the lower id is better.

    Its weights are rounded to ``dtype``.
    """
    num_experts, groups = len(routing.bias), routing.num_groups
    if groups > 1 and (num_experts.bit_count() > 1 or groups.bit_count() > 1):
        return sigmoid_choice(routing)

    def choose(parts: Tensor) -> tuple[Tensor, Tensor]:
        (num_parts, num_rows, width), k = parts.shape, routing.num_chosen
        ids = torch.empty(num_rows, k + routing.num_shared, dtype=torch.int64, device=parts.device)
        weights = torch.empty_like(ids, dtype=dtype)
        if num_rows:
            _choose_by_score_kernel[(num_rows,)](
                *(
                    parts.contiguous(),
                    routing.bias,
                    ids,
                    weights,
                    num_rows,
                    num_experts,
                    width,
                    routing.scale,
                ),
                PARTS=num_parts,
                GROUPS=groups,
                CHOSEN_GROUPS=routing.num_chosen_groups,
                NORMALIZED=routing.normalized,
                K=k,
                SHARED=routing.num_shared,
                K_BLOCK=triton.next_power_of_2(k + routing.num_shared),
                BLOCK=triton.next_power_of_2(num_experts),
                num_warps=1,
                **PDL,
            )
        return ids, weights

    return choose


def fused_choice(dtype: torch.dtype, routing: Routing) -> Choice:
    """One kernel; of equal logits the expert with the lower id is better."""
    num_experts, k, num_shared = routing.num_experts, routing.num_chosen, routing.num_shared

    def choose(parts: Tensor) -> tuple[Tensor, Tensor]:
        num_parts, num_rows, width = parts.shape
        ids = torch.empty(num_rows, k + num_shared, dtype=torch.int64, device=parts.device)
        weights = torch.empty_like(ids, dtype=dtype)
        if num_rows:
            _choose_kernel[(num_rows,)](
                *(parts.contiguous(), routing.scales, ids, weights, num_rows, num_experts, width),
                PARTS=num_parts,
                WEIGHING=routing.weighing,
                GATED=routing.gated,
                K=k,
                SHARED=num_shared,
                K_BLOCK=triton.next_power_of_2(k + num_shared),
                BLOCK=triton.next_power_of_2(num_experts),
                num_warps=1,
                **PDL,
            )
        return ids, weights

    return choose
