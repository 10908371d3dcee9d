"""Mixtures of experts, as in a ``config.json``; no torch."""

from dataclasses import dataclass, replace
from typing import Literal

from specgen.config import require


@dataclass(frozen=True, kw_only=True)
class SigmoidWeights:
    """Weights of DeepSeek-V3 and its relatives; see ``SigmoidRouting`` in ``ops/router.py``."""

    num_groups: int
    num_chosen_groups: int
    normalized: bool
    scale: float

    def check(self, num_experts: int, num_chosen: int) -> None:
        """``UserError`` where so many cannot be chosen."""
        size, rest = divmod(num_experts, self.num_groups)
        fits = rest == 0 and self.num_chosen_groups <= self.num_groups and (self.num_groups == 1 or size >= 2)
        require(
            fits and num_chosen <= self.num_chosen_groups * size,
            f"n_group is {self.num_groups} and topk_group {self.num_chosen_groups} for {num_chosen} of {num_experts} "
            "experts: config.json is wrong",
        )

    def __str__(self) -> str:
        groups = f" from {self.num_chosen_groups} of {self.num_groups} groups" * (self.num_groups > 1)
        sums = ", divided by their sum" * self.normalized
        return f"the choice{groups} with a bias; weights by sigmoid{sums}, times {self.scale:g}"


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """The experts of a model: each token goes through the ``num_chosen`` that a router chooses in each layer."""

    num_experts: int
    num_chosen: int
    width: int  # of an expert's gate, and of its up
    layers: tuple[bool, ...]  # by layer: whether it is a mixture; the others have an MLP
    weights: (
        Literal["softmax", "normalized", "softmax of chosen"] | SigmoidWeights
    )  # how a router's logits become weights
    router: str  # its name in a checkpoint, beside "experts"
    biases: bool = False  # of router and experts
    interleaved: bool = False  # gate and up alternate in a checkpoint, whose plain matrices are [in, out]
    mxfp4: bool = False
    shared_width: int = 0  # of the expert that all tokens go through; 0: there is none
    # see Gating
    alpha: float = 1.0
    shift: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        require(
            self.num_chosen <= self.num_experts,
            f"num_experts_per_tok is {self.num_chosen} of {self.num_experts} experts: config.json is wrong",
        )
        if isinstance(self.weights, SigmoidWeights):
            self.weights.check(self.num_experts, self.num_chosen)

    def shared(self, count: int) -> "MixtureConfig":
        """What one of ``count`` ranks has of it: a part of every expert."""
        return replace(self, width=self.width // count, shared_width=self.shared_width // count)

    def facts(self) -> dict[str, str]:
        """How it was understood: printed texts by label."""
        mixtures, total = sum(self.layers), len(self.layers)
        where = "all layers" if mixtures == total else f"{mixtures} of {total} layers"
        form = ", in MXFP4" if self.mxfp4 else ""
        limit = "" if self.limit is None else f", gate and up clamped at {self.limit:g}"
        shared = f"; beside one for all tokens, {self.shared_width} wide" if self.shared_width else ""
        weights = _WEIGHTS[self.weights] if isinstance(self.weights, str) else str(self.weights)
        return {
            "experts": f"{self.num_experts} in {where}, {self.width} wide{form}{limit}{shared}",
            "router": f"chooses {self.num_chosen} per token; {weights}",
        }


_WEIGHTS = {
    "softmax": "weights from the softmax over all",
    "normalized": "weights from the softmax over all, divided by their sum",
    "softmax of chosen": "weights from the softmax over the chosen",
}
