"""A mixture of experts in plain torch: which experts a row goes through, their weights, also in MXFP4, and GEMMs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.ops.fp8 import dequantised, rounding, through_e4m3
from specgen.ops.weight import Weight

# How logits become weights: the softmax over all experts, the same divided by the sum over the chosen, the softmax
# over the chosen, or the sigmoid of each.
Weighing = Literal["softmax", "normalized", "softmax of chosen", "sigmoid"]
Activation = Literal["swish", "gelu tanh"]
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "swish": F.silu,
    "gelu tanh": partial(F.gelu, approximate="tanh"),
}
# Logits as partial sums [n, rows, E or more] (see Ops.linear_parts) -> the ids of each row's experts [rows, k + m]
# int64, the k that are chosen, best first, before m shared ones; and their weights [rows, k + m] in the model's dtype.
Choice = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How most routers choose: the experts with the largest logits.

    All rows go through the ``num_shared`` experts from ``num_experts`` on as well. They count in full or, ``gated``,
    by the sigmoid of the logit behind those of the others.
    """

    num_experts: int  # to choose from
    num_chosen: int
    weighing: Weighing
    num_shared: int = 0
    gated: bool = False
    scales: Tensor | None = None  # [E] float32, of the weights of those chosen by the softmax over all


_OF_CHOSEN: dict[str, Callable[[Tensor], Tensor]] = {  # of the logits of the chosen alone
    "softmax of chosen": lambda best: best.softmax(-1),
    "sigmoid": lambda best: best.float().sigmoid().to(best.dtype),
}


def choice(routing: Routing) -> Choice:
    """In plain torch, of logits in one part."""
    num_experts, num_chosen, weighing = routing.num_experts, routing.num_chosen, routing.weighing

    def choose(parts: Tensor) -> tuple[Tensor, Tensor]:
        logits, gate = parts[0, :, :num_experts], parts[0, :, num_experts : num_experts + 1]
        if weighing in _OF_CHOSEN:
            best, ids = logits.topk(num_chosen)
            weights = _OF_CHOSEN[weighing](best)
        else:
            best, ids = logits.softmax(-1, dtype=torch.float32).topk(num_chosen)
            if weighing == "normalized":
                best = best / best.sum(-1, keepdim=True)
            if routing.scales is not None:
                best = best * routing.scales[ids]
            weights = best.to(logits.dtype)
        shared = _OF_CHOSEN["sigmoid"](gate) if routing.gated else torch.ones_like(weights[:, :1])
        return _with_shared(ids, weights, num_experts, shared.expand(-1, routing.num_shared))

    return choose


def _with_shared(ids: Tensor, weights: Tensor, first: int, shared: Tensor) -> tuple[Tensor, Tensor]:
    """And, behind the others, the experts from ``first`` on with the weights ``shared`` [rows, m]."""
    more = torch.arange(first, first + shared.shape[1], device=ids.device).expand(shared.shape)
    return torch.cat((ids, more), -1), torch.cat((weights, shared), -1)


@dataclass(frozen=True, kw_only=True)
class SigmoidRouting:
    """How DeepSeek-V3 and its relatives choose: the best experts of the best groups, by biased scores.

    A logit's score is its sigmoid. ``bias`` [E] float32 is added for the choice alone; a group's score is the sum of
    its best two. Weights are the scores, over their sum if ``normalized``, times ``scale``. All rows go through
    ``num_shared`` experts behind these as well, which count in full.
    """

    num_chosen: int
    bias: Tensor
    num_groups: int
    num_chosen_groups: int
    normalized: bool
    scale: float
    num_shared: int = 0


def sigmoid_choice(routing: SigmoidRouting) -> Choice:
    """In plain torch, of float32 logits in any number of parts; the weights are float32 too."""
    groups = routing.num_groups

    def choose(parts: Tensor) -> tuple[Tensor, Tensor]:
        scores = parts.sum(0).sigmoid()
        biased = scores + routing.bias
        if groups > 1:
            grouped = biased.view(len(biased), groups, biased.shape[-1] // groups)
            best = grouped.topk(2).values.sum(-1).topk(routing.num_chosen_groups).indices
            left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            biased = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(-2)
        ids = biased.topk(routing.num_chosen).indices
        weights = scores.gather(-1, ids)
        if routing.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        shared = torch.ones_like(weights[:, :1]).expand(-1, routing.num_shared)
        return _with_shared(ids, weights * routing.scale, len(routing.bias), shared)

    return choose


# MXFP4: 4-bit floats in blocks along a row, each block with a power of two as its scale; read as they are.
MXFP4_BLOCK = 32  # values with one scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three low bits; the fourth is the sign
_EXPONENT_BIAS = 127  # of the scales' exponents


def from_mxfp4(weight: Weight, dtype: torch.dtype) -> Weight:
    """``weight`` [E, out, in] in the format "plain", on its device; exact in bfloat16 and float32.

    Expert by expert, so that what it needs besides the result is small.
    """
    assert weight.format == "mxfp4", weight.format
    assert weight.scale is not None
    pairs = _pairs(weight.data.device)
    plain = torch.empty(*weight.data.shape[:-1], 2 * weight.data.shape[-1], dtype=dtype, device=pairs.device)
    for out, packed, scale in zip(plain, weight.data, weight.scale, strict=True):
        values = pairs[packed.int()].view(*scale.shape, MXFP4_BLOCK)
        out.copy_(torch.ldexp(values, scale[..., None].int() - _EXPONENT_BIAS).flatten(-2))
    return Weight(data=plain, bias=weight.bias)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two values of each byte, [256, 2] float32: the low four bits are the first."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=device)
    byte = torch.arange(256, device=device)
    return values[torch.stack((byte & 15, byte >> 4), -1)]


# x [rows, H], the ids of each row's experts [rows, k] int64 (each row's differ), their weights [rows, k] in x's dtype
# -> the weighted sum of what they return as partial sums [n, rows, H], added in Norm.add; see Ops.linear_parts.
ExpertsMap = Callable[[Tensor, Tensor, Tensor], Tensor]


def weighing_inputs(experts: ExpertsMap) -> ExpertsMap:
    """For rows that go through one expert each: the weight counts in front of it, and what it returns in full.

    A gated expert is not linear, so that is another number. All kernels serve it, whatever the weights' format.
    """

    def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        assert ids.shape[1] == 1, "a row has one input for all its experts"
        return experts(x * weights, ids, torch.ones_like(weights))

    return forward


@dataclass(frozen=True, kw_only=True)
class Gating:
    """``gate * sigmoid(alpha * gate) * (up + shift)``, the gate clamped from above and up on both sides by ``limit``.

    As it is, SwiGLU; GPT-OSS has alpha 1.702, shift 1 and limit 7. Gemma 4 has GELU, by its approximation with tanh.
    """

    activation: Activation = "swish"
    alpha: float = 1.0
    shift: float = 0.0
    limit: float | None = None

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        # each rounds once, the other form at every step, as all do in transformers
        activate = ACTIVATIONS[self.activation]
        gated = activate(gate) if self.alpha == 1.0 else gate * torch.sigmoid(gate * self.alpha)
        return gated * (up + self.shift)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The weights of all experts of a layer, E matrices in one ``Weight`` each."""

    gate_up: Weight  # [E, 2 * I, H]: the rows of gate before those of up, however the checkpoint has them
    down: Weight  # [E, H, I]
    gating: Gating


def grouped_experts(experts: Experts) -> ExpertsMap:
    """By ``torch``'s grouped GEMM, on any device; nothing waits for the device.

    Quantized weights are dequantised: on a CPU once, elsewhere in every call, so that no copy of them stays.
    """
    gate_up, down = _grouped_gemm(experts.gate_up), _grouped_gemm(experts.down)
    gating, num_experts = experts.gating, len(experts.gate_up.data)
    del experts  # of quantized weights only what ``gate_up`` and ``down`` keep

    def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        k = ids.shape[1]
        sorted_ids, order = ids.flatten().sort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, sorted_ids, torch.ones_like(sorted_ids, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = gate_up(x[order // k], sorted_ids, ends).chunk(2, -1)
        out = down(gating(gate, up), sorted_ids, ends)
        unsorted = torch.empty_like(out)
        unsorted[order] = out
        return (unsorted.view(*ids.shape, -1) * weights[..., None]).sum(1)[None]

    return forward


def _grouped_gemm(weight: Weight) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Of rows sorted by expert, their experts' ids, and where each expert's rows end."""
    matrices, bias = _matrices(weight), weight.bias
    rounds = _rounding(weight)

    def gemm(x: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        out = F.grouped_mm(rounds(x, ids), matrices().mT, offs=ends).to(x.dtype)
        return out if bias is None else out + bias[ids]

    return gemm


def _rounding(weight: Weight) -> Callable[[Tensor, Tensor], Tensor]:
    """What becomes of rows, whose experts are given too, before their GEMM."""
    scales = weight.input_scale
    if scales is not None:
        return lambda x, ids: through_e4m3(x.float(), scales[ids, None])
    by_row = rounding(weight) if weight.format == "fp8" else None
    return lambda x, ids: x if by_row is None else by_row(x)


def _matrices(weight: Weight) -> Callable[[], Tensor]:
    """The matrices [E, out, in] when they are needed: in the model's dtype, of FP8 in float32."""
    if weight.format == "plain":
        return lambda: weight.data
    unpack = dequantised if weight.format == "fp8" else _unpacked
    if weight.data.device.type != "cpu":
        return lambda: unpack(weight)
    plain = unpack(weight)
    return lambda: plain


def _unpacked(weight: Weight) -> Tensor:
    assert weight.bias is not None, "the bias tells the model's dtype"
    return from_mxfp4(weight, weight.bias.dtype).data
