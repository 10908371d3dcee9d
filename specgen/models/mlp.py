"""What is behind the attention of a layer: MLPs, and mixtures of experts, and how these load."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.config import require
from specgen.models.loader import Loader
from specgen.models.model_config import MixtureConfig, SigmoidWeights
from specgen.ops import Map, Ops
from specgen.ops.experts import (
    MXFP4_BLOCK,
    Activation,
    Choice,
    Experts,
    ExpertsMap,
    Gating,
    Routing,
    SigmoidRouting,
    weighing_inputs,
)
from specgen.ops.weight import OUTPUTS, Weight


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Gate and up as one matrix, and down."""

    gated: Map  # [rows, H] -> [rows, I]
    input_scale: Tensor | None  # of its inputs in FP8; see Weight.static_scale
    down: Map  # [rows, I] -> [parts, rows, H]

    @classmethod
    def build(
        cls,
        hidden: int,
        inner: int,
        prefix: str,
        load: Loader,
        ops: Ops,
        bias: bool = False,
        activation: Activation = "swish",
    ) -> "MLP":
        """Load ``{prefix}*`` of a layer ``hidden`` wide; gate and up are ``inner`` wide."""
        return cls.of(*_mlp(hidden, inner, prefix, load, bias), ops, activation)

    @classmethod
    def of(cls, gate_up: Weight, down: Weight, ops: Ops, activation: Activation = "swish") -> "MLP":
        return cls(
            gated=ops.gated_linear(gate_up, down.static_scale, activation),
            input_scale=gate_up.static_scale,
            down=ops.linear_parts(down),
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """[rows, H] -> [parts, rows, H]; see ``Ops.linear_parts``."""
        return (self.down(self.gated(x)),)


def _mlp(hidden: int, inner: int, prefix: str, load: Loader, bias: bool = False) -> tuple[Weight, Weight]:
    gate_up = load.linear({prefix + "gate_proj": inner, prefix + "up_proj": inner}, hidden, bias=bias)
    return gate_up, load.linear({prefix + "down_proj": hidden}, inner, bias=bias)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Routes every row to its experts; nothing waits for the device.

    A shared expert, which all rows go through, is one more of these (or several, one beside another), or where its
    weights are not like theirs an MLP beside them. If it is gated, its weight comes from the choice in both cases.
    """

    router: Map  # [rows, H] -> logits [parts, rows, E], behind them that of a gate; see Ops.linear_parts
    choice: Choice
    num_chosen: int  # of those that the choice returns; others are shared
    experts: ExpertsMap
    # of x and weights [rows, 1 or 0]; see MLP
    beside: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None

    @classmethod
    def build(cls, config: MixtureConfig, hidden: int, prefix: str, load: Loader, ops: Ops) -> "Mixture":
        """Load ``{prefix}*`` of a layer ``hidden`` wide."""
        router = _router(config, hidden, prefix, load, ops)
        experts, beside, num_shared = _experts(config, hidden, f"{prefix}experts.", load), None, 0
        if config.shared_width:
            name = "shared_expert." if config.shared_gate else "shared_experts."
            shared = _mlp(hidden, config.shared_width, prefix + name, load)
            num_shared = config.num_like_experts
            if _alike(experts, shared, num_shared):
                experts = _with_shared(experts, shared, num_shared)
            else:
                beside = _beside(MLP.of(*shared, ops), config.shared_gate)
                num_shared = int(config.shared_gate)
        mapped = ops.experts(experts)
        return cls(
            router=router,
            choice=_choice(config, prefix, load, ops, num_shared),
            num_chosen=config.num_chosen,
            experts=weighing_inputs(mapped) if config.weighs_inputs else mapped,
            beside=beside,
        )

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> tuple[Tensor, ...]:
        """[rows, H] -> what is to be added, each [parts, rows, H]; see ``Ops.linear_parts``.

        The router reads ``routed`` [rows, H], if that is not the same.
        """
        ids, weights = self.choice(self.router(x if routed is None else routed))
        weights, k = weights.to(x.dtype), self.num_chosen
        if self.beside is None:
            return (self.experts(x, ids, weights),)
        return self.experts(x, ids[:, :k], weights[:, :k]), *self.beside(x, weights[:, k:])


def _beside(mlp: MLP, gated: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    if not gated:
        return lambda x, weights: mlp(x)
    return lambda x, weights: tuple(each * weights for each in mlp(x))


def _alike(experts: Experts, shared: tuple[Weight, Weight], count: int) -> bool:
    """Whether gate and up, and down, of a shared expert can be ``count`` more of ``experts``."""
    both = tuple(zip(shared, (experts.gate_up, experts.down), strict=True))
    stored = all((a.format, a.activations, a.bias) == (b.format, b.activations, None) for a, b in both)
    # Several would round parts of a row to e4m3, each with a scale of its own
    return (
        stored and experts.gating == Gating() and (count == 1 or (count > 1 and shared[0].format == "plain"))
    )


def _with_shared(experts: Experts, shared: tuple[Weight, Weight], count: int) -> Experts:
    """``experts``, and behind them ``shared`` as ``count`` more, each with a part of its width."""
    gate_up, down = shared
    hidden, width = len(down.data), experts.down.data.shape[-1]

    def more(weight: Weight, data: Tensor) -> Weight:  # with scales as of one
        scale = None if weight.scale is None else weight.scale[None]
        return replace(weight, data=data, scale=scale, input_scale=weight.static_scale)

    gate_up = more(gate_up, gate_up.data.view(2, count, width, hidden).transpose(0, 1).flatten(1, 2))
    down = more(down, down.data.view(hidden, count, width).transpose(0, 1))
    return replace(
        experts,
        gate_up=Weight.stacked((experts.gate_up, gate_up)),
        down=Weight.stacked((experts.down, down)),
    )


def _router(config: MixtureConfig, hidden: int, prefix: str, load: Loader, ops: Ops) -> Map:
    """The logits that a choice is made of."""
    weight = load.linear({prefix + config.router: config.num_experts}, hidden, bias=config.biases)
    if isinstance(config.weights, SigmoidWeights):
        return ops.linear_float32(weight)  # in bfloat16 those as close as a bias is small would be equal
    if not config.shared_gate:
        return ops.linear_parts(weight)
    gate = load.linear({f"{prefix}shared_expert_gate": 1}, hidden)
    if not weight.format == gate.format == "plain":  # which round their inputs in ways of their own
        each = ops.linear(weight), ops.linear(gate)
        return lambda x: torch.cat([logits(x) for logits in each], -1)[None]
    both = Weight.joined((weight, gate))
    return ops.linear_parts(replace(both, data=F.pad(both.data, (0, 0, 0, -len(both.data) % OUTPUTS))))


def _choice(config: MixtureConfig, prefix: str, load: Loader, ops: Ops, num_shared: int) -> Choice:
    """What is made of the router's logits."""
    if not isinstance(config.weights, SigmoidWeights):
        routing = Routing(
            num_experts=config.num_experts,
            num_chosen=config.num_chosen,
            weighing=config.weights,
            num_shared=num_shared,
            gated=config.shared_gate,
            scales=None
            if config.scales is None
            else load.float32(prefix + config.scales, (config.num_experts,)),
        )
        return ops.choice(routing)
    of_scores = SigmoidRouting(
        num_chosen=config.num_chosen,
        bias=load.float32(f"{prefix}{config.router}.e_score_correction_bias", (config.num_experts,)),
        num_groups=config.weights.num_groups,
        num_chosen_groups=config.weights.num_chosen_groups,
        normalized=config.weights.normalized,
        scale=config.weights.scale,
        num_shared=num_shared,
    )
    return ops.sigmoid_choice(of_scores)


def _experts(config: MixtureConfig, hidden: int, prefix: str, load: Loader) -> Experts:
    require(
        hidden % config.multiple == config.width % config.multiple == 0,
        f"hidden_size is {hidden} and an expert {config.width} wide: experts need multiples of {config.multiple}, "
        "use another checkpoint",
    )
    gating = Gating(activation=config.activation, alpha=config.alpha, shift=config.shift, limit=config.limit)
    if f"{prefix}0.gate_proj.weight" in load:
        require(
            not config.biases,
            f"{prefix}* are single experts, of which biases are not read: use another checkpoint",
        )
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
