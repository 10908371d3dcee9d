"""What is behind the attention of a layer: MLPs, and mixtures of experts, and how these load."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.config import require
from specgen.models.loader import Loader
from specgen.models.model_config import MixtureConfig, SigmoidWeights
from specgen.ops import Map, Ops, Pair
from specgen.ops.experts import MXFP4_BLOCK, Choice, Experts, ExpertsMap, Gating, SigmoidRouting
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
    def build(cls, hidden: int, inner: int, prefix: str, load: Loader, ops: Ops, bias: bool = False) -> "MLP":
        """Load ``{prefix}*`` of a layer ``hidden`` wide; gate and up are ``inner`` wide."""
        gate_up = load.linear({prefix + "gate_proj": inner, prefix + "up_proj": inner}, hidden, bias=bias)
        down = load.linear({prefix + "down_proj": hidden}, inner, bias=bias)
        return cls(
            gated=ops.gated_linear(gate_up, down.static_scale),
            input_scale=gate_up.static_scale,
            down=ops.linear_parts(down),
        )

    def __call__(self, x: Tensor, chosen: Chosen = None) -> tuple[Tensor, ...]:
        """[rows, H] -> [parts, rows, H]; see ``Ops.linear_parts``. There is nothing to choose."""
        return (self.down(self.gated(x)),)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Routes every row to its experts; nothing waits for the device."""

    router: Map  # [rows, H] -> logits [parts, rows, E]; see Ops.linear_parts
    choice: Choice
    experts: ExpertsMap
    shared: MLP | None = None  # beside them, for every row
    gate: tuple[Map, Pair] | None = (
        None  # [rows, H] -> [rows, 1], and what the shared one then counts; None: in full
    )

    @classmethod
    def build(cls, config: MixtureConfig, hidden: int, prefix: str, load: Loader, ops: Ops) -> "Mixture":
        """Load ``{prefix}*`` of a layer ``hidden`` wide."""
        router, choice = _router(config, hidden, prefix + config.router, load, ops)
        shared, gate = None, None
        if config.shared_width:
            name = "shared_expert." if config.shared_gate else "shared_experts."
            shared = MLP.build(hidden, config.shared_width, prefix + name, load, ops)
        if config.shared_gate:
            gate = ops.linear(load.linear({f"{prefix}shared_expert_gate": 1}, hidden)), ops.sigmoid_gated
        experts = ops.experts(_experts(config, hidden, f"{prefix}experts.", load))
        return cls(router=router, choice=choice, experts=experts, shared=shared, gate=gate)

    def __call__(self, x: Tensor, chosen: Chosen = None) -> tuple[Tensor, ...]:
        """[rows, H] -> what is to be added, each [parts, rows, H]; see ``Ops.linear_parts``."""
        ids, weights = self.choice(self.router(x))
        if chosen is not None:
            chosen.append(ids)
        parts = self.experts(x, ids, weights.to(x.dtype))
        if self.shared is None:
            return (parts,)
        shared = self.shared(x)
        if self.gate is not None:
            opening, gated = self.gate
            shared = tuple(gated(each, opening(x)) for each in shared)
        return parts, *shared


def _router(config: MixtureConfig, hidden: int, name: str, load: Loader, ops: Ops) -> tuple[Map, Choice]:
    """Logits of the router ``name``, and what is made of them."""
    weight = load.linear({name: config.num_experts}, hidden, bias=config.biases)
    if not isinstance(config.weights, SigmoidWeights):
        return ops.linear_parts(weight), ops.choice(config.num_chosen, config.weights)
    routing = SigmoidRouting(
        num_chosen=config.num_chosen,
        bias=load.float32(f"{name}.e_score_correction_bias", (config.num_experts,)),
        num_groups=config.weights.num_groups,
        num_chosen_groups=config.weights.num_chosen_groups,
        normalized=config.weights.normalized,
        scale=config.weights.scale,
    )
    # in bfloat16 logits as close as a bias is small would be equal
    return ops.linear_float32(weight), ops.sigmoid_choice(routing)


def _experts(config: MixtureConfig, hidden: int, prefix: str, load: Loader) -> Experts:
    require(
        hidden % config.multiple == config.width % config.multiple == 0,
        f"hidden_size is {hidden} and an expert {config.width} wide: experts need multiples of {config.multiple}, "
        "use another checkpoint",
    )
    gating = Gating(alpha=config.alpha, shift=config.shift, limit=config.limit)
    if f"{prefix}0.gate_proj.weight" in load:
        gate_up, down = _one_by_one(config, hidden, prefix, load)
    else:
        alternating = config.fused == "in, out alternating"
        gate_up = _stacked(config, prefix + "gate_up_proj", 2 * config.width, hidden, load, alternating)
        down = _stacked(config, prefix + "down_proj", hidden, config.width, load, False)
    return Experts(gate_up=gate_up, down=down, gating=gating)


def _one_by_one(config: MixtureConfig, hidden: int, prefix: str, load: Loader) -> tuple[Weight, Weight]:
    """From a tensor for each matrix of each expert."""

    def stacked(shape: tuple[int, int], *names: str) -> Weight:
        each = range(config.num_experts)
        return load.stacked([[f"{prefix}{e}.{name}" for name in names] for e in each], shape)

    return stacked((config.width, hidden), "gate_proj", "up_proj"), stacked(
        (hidden, config.width), "down_proj"
    )


def _stacked(
    config: MixtureConfig, name: str, num_out: int, num_in: int, load: Loader, alternating: bool
) -> Weight:
    """From tensors of all experts; where gate and up alternate, all of gate goes before up."""
    count = config.num_experts

    def ordered(rows: Tensor) -> Tensor:
        return torch.cat((rows[:, ::2], rows[:, 1::2]), 1) if alternating else rows

    bias = load(f"{name}_bias", (count, num_out), ordered) if config.biases else None
    if config.mxfp4:
        blocks, rest = (count, num_out, num_in // MXFP4_BLOCK), MXFP4_BLOCK // 2
        data = load.packed(f"{name}_blocks", (*blocks, rest), lambda stored: ordered(stored.flatten(2)))
        return Weight(
            data=data, scale=load.packed(f"{name}_scales", blocks, ordered), bias=bias, format="mxfp4"
        )
    if config.fused != "out, in":
        return Weight(data=load(name, (count, num_in, num_out), lambda stored: ordered(stored.mT)), bias=bias)
    return Weight(data=load(name, (count, num_out, num_in)), bias=bias)
