"""The feed-forward block of a layer: gated, or a mixture of experts in its place."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.config import require
from specgen.models.model_config import MixtureConfig, SigmoidWeights
from specgen.models.take import Take
from specgen.ops import Map, Ops
from specgen.ops.experts import Experts, ExpertsMap, Gating
from specgen.ops.mxfp4 import BLOCK
from specgen.ops.router import Choice, SigmoidRouting
from specgen.ops.weight import Weight

# Takes the ids [rows, k] of the experts that each mixture's rows choose in a pass, if somebody counts them
Chosen = list[Tensor] | None


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Gate and up as one matrix, and down."""

    gated: Map  # [rows, H] -> [rows, I]
    input_scale: Tensor | None  # of its inputs in FP8; see Weight.static_scale
    down: Map  # [rows, I] -> [parts, rows, H]

    @classmethod
    def build(cls, hidden: int, inner: int, prefix: str, take: Take, ops: Ops, bias: bool = False) -> "MLP":
        """Load ``{prefix}*`` of a layer ``hidden`` wide; gate and up are ``inner`` wide."""
        gate_up = take.linear({prefix + "gate_proj": inner, prefix + "up_proj": inner}, hidden, bias=bias)
        down = take.linear({prefix + "down_proj": hidden}, inner, bias=bias)
        return cls(
            gated=ops.gated_linear(gate_up, down.static_scale),
            input_scale=gate_up.static_scale,
            down=ops.linear_parts(down),
        )

    def __call__(self, x: Tensor, chosen: Chosen = None) -> tuple[Tensor, ...]:
        """[rows, H] -> [parts, rows, H]; see ``Ops.linear_parts``. There is nothing to choose."""
        return (self.down(self.gated(x)),)


_ALIGNED = 8  # 16 bytes in half precision: what grouped products ask of a row


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Routes every row to its experts; nothing waits for the device."""

    router: Map  # [rows, H] -> logits [parts, rows, E]; see Ops.linear_parts
    choice: Choice
    experts: ExpertsMap
    shared: MLP | None = None  # beside them, for every row

    @classmethod
    def build(cls, config: MixtureConfig, hidden: int, prefix: str, take: Take, ops: Ops) -> "Mixture":
        """Load ``{prefix}*`` of a layer ``hidden`` wide."""
        router, choice = _router(config, hidden, prefix + config.router, take, ops)
        shared = None
        if config.shared_width:
            shared = MLP.build(hidden, config.shared_width, f"{prefix}shared_experts.", take, ops)
        experts = ops.experts(_experts(config, hidden, f"{prefix}experts.", take))
        return cls(router=router, choice=choice, experts=experts, shared=shared)

    def __call__(self, x: Tensor, chosen: Chosen = None) -> tuple[Tensor, ...]:
        """[rows, H] -> what is to be added, each [parts, rows, H]; see ``Ops.linear_parts``."""
        ids, weights = self.choice(self.router(x))
        if chosen is not None:
            chosen.append(ids)
        parts = self.experts(x, ids, weights.to(x.dtype))
        return (parts,) if self.shared is None else (parts, *self.shared(x))


def _router(config: MixtureConfig, hidden: int, name: str, take: Take, ops: Ops) -> tuple[Map, Choice]:
    """Logits of the router ``name``, and what is made of them."""
    weight = take.linear({name: config.num_experts}, hidden, bias=config.biases)
    if not isinstance(config.weights, SigmoidWeights):
        return ops.linear_parts(weight), ops.choice(config.num_chosen, config.weights)
    routing = SigmoidRouting(
        num_chosen=config.num_chosen,
        bias=take.float32(f"{name}.e_score_correction_bias", (config.num_experts,)),
        num_groups=config.weights.num_groups,
        num_chosen_groups=config.weights.num_chosen_groups,
        normalized=config.weights.normalized,
        scale=config.weights.scale,
    )
    # in bfloat16 logits as close as a bias is small would be equal
    return ops.linear_float32(weight), ops.sigmoid_choice(routing)


def _experts(config: MixtureConfig, hidden: int, prefix: str, take: Take) -> Experts:
    multiple = BLOCK if config.mxfp4 else _ALIGNED
    require(
        hidden % multiple == config.width % multiple == 0,
        f"hidden_size is {hidden} and an expert {config.width} wide: experts need multiples of {multiple}, "
        "use another checkpoint",
    )
    gating = Gating(alpha=config.alpha, shift=config.shift, limit=config.limit)
    if f"{prefix}0.gate_proj.weight" in take:
        gate_up, down = _one_by_one(config, hidden, prefix, take)
    else:
        gate_up = _stacked(
            config, prefix + "gate_up_proj", 2 * config.width, hidden, take, config.interleaved
        )
        down = _stacked(config, prefix + "down_proj", hidden, config.width, take, False)
    return Experts(gate_up=gate_up, down=down, gating=gating)


def _one_by_one(config: MixtureConfig, hidden: int, prefix: str, take: Take) -> tuple[Weight, Weight]:
    """From a tensor for each matrix of each expert."""

    def stacked(shape: tuple[int, int], *names: str) -> Weight:
        each = range(config.num_experts)
        return take.stacked([[f"{prefix}{e}.{name}" for name in names] for e in each], shape)

    return stacked((config.width, hidden), "gate_proj", "up_proj"), stacked(
        (hidden, config.width), "down_proj"
    )


def _stacked(
    config: MixtureConfig, name: str, num_out: int, num_in: int, take: Take, interleaved: bool
) -> Weight:
    """From tensors of all experts; where gate and up alternate (``interleaved``), all of gate goes before up."""
    count = config.num_experts

    def ordered(rows: Tensor) -> Tensor:
        return torch.cat((rows[:, ::2], rows[:, 1::2]), 1) if interleaved else rows

    bias = take(f"{name}_bias", (count, num_out), ordered) if config.biases else None
    if config.mxfp4:
        blocks, rest = (count, num_out, num_in // BLOCK), BLOCK // 2
        data = take.packed(f"{name}_blocks", (*blocks, rest), lambda stored: ordered(stored.flatten(2)))
        return Weight(
            data=data, scale=take.packed(f"{name}_scales", blocks, ordered), bias=bias, format="mxfp4"
        )
    if config.interleaved:
        return Weight(data=take(name, (count, num_in, num_out), lambda stored: ordered(stored.mT)), bias=bias)
    return Weight(data=take(name, (count, num_out, num_in)), bias=bias)
