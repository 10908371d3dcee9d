"""The shapes of the experts bench: layers with random weights, routes, the bytes of a pass, and its exact result."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from specgen.ops.experts import Experts, Gating
from specgen.ops.fp8 import GROUP, dequantised, rounded
from specgen.ops.mxfp4 import dequantized
from specgen.ops.weight import Weight

_CLAMPED = Gating(alpha=1.702, shift=1.0, limit=7.0)
Routes = tuple[Tensor, Tensor]  # ids [rows, k] int64 and weights [rows, k]


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts of one layer of a model."""

    num_experts: int
    hidden: int
    inner: int
    k: int  # experts per row
    gating: Gating
    biases: bool = False
    mxfp4: bool = False
    fp8: Literal["token", "group"] | None = None  # what shares a scale of inputs; see Weight

    def __str__(self) -> str:
        fp8 = {None: "", "token": ", FP8 by channel", "group": ", FP8 by block"}[self.fp8]
        kind = ", MXFP4" if self.mxfp4 else fp8
        return f"{self.num_experts} experts of {self.hidden} x {self.inner}, top {self.k}{kind}"

    def layer(self, seed: int, dtype: torch.dtype, device: torch.device) -> Experts:
        """Random weights that keep the size of their inputs; a ``seed`` each."""
        generator = torch.Generator(device).manual_seed(seed)
        matrices = (2 * self.inner, self.hidden), (self.hidden, self.inner)
        gate_up, down = (self._weight(*matrix, dtype, generator) for matrix in matrices)
        return Experts(gate_up=gate_up, down=down, gating=self.gating)

    def _weight(self, num_out: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Weight:
        device, shape = generator.device, (self.num_experts, num_out)
        bias = None
        if self.biases:
            bias = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        if not self.mxfp4:
            data = torch.randn(*shape, width, dtype=dtype, device=device, generator=generator)
            plain = Weight(data=data.mul_(width**-0.5), bias=bias)
            return plain if self.fp8 is None else _in_fp8(plain, self.fp8)
        sizes = {"dtype": torch.uint8, "device": device, "generator": generator}
        return Weight(
            data=torch.randint(0, 256, (*shape, width // 2), **sizes),  # type: ignore[call-overload]
            scale=torch.randint(117, 121, (*shape, width // 32), **sizes),  # type: ignore[call-overload]
            bias=bias,
            format="mxfp4",
        )

    def routes(self, rows: int, seed: int, dtype: torch.dtype, device: torch.device) -> Routes:
        """``k`` different experts for each row, all as likely."""
        generator = torch.Generator(device).manual_seed(seed)
        scores = torch.rand(rows, self.num_experts, device=device, generator=generator)
        kept = scores.topk(self.k)
        return kept.indices, kept.values.softmax(-1).to(dtype)

    def flops(self, rows: int) -> int:
        return rows * self.k * 2 * 3 * self.hidden * self.inner


def _in_fp8(weight: Weight, activations: Literal["token", "group"]) -> Weight:
    """With one scale for all, stored as ``activations`` go with: per channel or, for each 128 outputs, per block."""
    largest = 6 * weight.data.shape[-1] ** -0.5
    columns = 1 if activations == "token" else -(-weight.data.shape[-1] // GROUP)
    return replace(
        weight,
        data=weight.data.mul_(448 / largest).clamp_(-448, 448).to(torch.float8_e4m3fn),
        scale=torch.full((*weight.data.shape[:2], columns), largest / 448, device=weight.data.device),
        format="fp8",
        activations=activations,
    )


def expert_bytes(experts: Experts) -> int:
    """Bytes of one expert's weights, scales and biases."""
    weights = (experts.gate_up, experts.down)
    biases = sum(weight.bias.nbytes for weight in weights if weight.bias is not None)
    return (sum(weight.num_bytes for weight in weights) + biases) // len(experts.down.data)


def touched(ids: Tensor) -> list[int]:
    """The experts that any row chose, ascending."""
    return sorted(set(ids.flatten().tolist()))


def exact(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The sum of what the experts return, [rows, H] in float32, by a loop over experts.

    Those in FP8 round gate and up, and what is gated, to the dtype of ``x``, so that e4m3 rounds the same numbers.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in touched(ids):
        row, slot = (ids == expert).nonzero(as_tuple=True)
        between = x.dtype if experts.down.format == "fp8" else torch.float32
        gate, up = _product(experts.gate_up, expert, x[row].float()).to(between).chunk(2, -1)
        result = _product(experts.down, expert, experts.gating(gate, up).float())
        out.index_add_(0, row, result * weights[row, slot, None].float())
    return out


def _product(weight: Weight, expert: int, x: Tensor) -> Tensor:
    out = (rounded(x, weight) if weight.format == "fp8" else x) @ _matrix(weight, expert).T
    return out if weight.bias is None else out + weight.bias[expert].float()


def _matrix(weight: Weight, expert: int) -> Tensor:
    """One expert's matrix in float32."""
    if weight.scale is None:
        return weight.data[expert].float()
    one = replace(weight, data=weight.data[expert, None], scale=weight.scale[expert, None])
    if weight.format == "fp8":
        return dequantised(one)[0]
    return dequantized(one, torch.float32).data[0]


_QWEN3 = ExpertShape(num_experts=128, hidden=2048, inner=768, k=8, gating=Gating())
SHAPES = {
    "qwen3-30b-a3b": _QWEN3,
    "qwen3-30b-a3b-fp8": replace(_QWEN3, fp8="group"),
    "qwen3-30b-a3b-fp8-dynamic": replace(_QWEN3, fp8="token"),
    "glm-4.7-flash-fp8": ExpertShape(
        num_experts=64, hidden=2048, inner=1536, k=4, gating=Gating(), fp8="group"
    ),
    "gpt-oss-20b": ExpertShape(
        num_experts=32, hidden=2880, inner=2880, k=4, gating=_CLAMPED, biases=True, mxfp4=True
    ),
    "gpt-oss-20b-bf16": ExpertShape(
        num_experts=32, hidden=2880, inner=2880, k=4, gating=_CLAMPED, biases=True
    ),
    "small": ExpertShape(num_experts=8, hidden=64, inner=96, k=2, gating=_CLAMPED, biases=True),
}
