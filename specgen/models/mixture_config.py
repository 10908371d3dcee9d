"""Mixtures of experts, as in a ``config.json``; no torch."""

from dataclasses import dataclass
from typing import Literal

from specgen.config import require
from specgen.models.config_fields import Raw, count


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """The experts of a model: each token goes through the ``num_chosen`` that a router chooses in each layer."""

    num_experts: int
    num_chosen: int
    width: int  # of an expert's gate, and of its up
    layers: tuple[bool, ...]  # by layer: whether it is a mixture; the others have an MLP
    weights: Literal["softmax", "normalized", "softmax of chosen"]  # how a router's logits become weights
    router: str  # its name in a checkpoint, beside "experts"
    biases: bool = False  # of router and experts
    interleaved: bool = False  # gate and up alternate in a checkpoint, whose plain matrices are [in, out]
    mxfp4: bool = False
    # see Gating
    alpha: float = 1.0
    shift: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        require(
            self.num_chosen <= self.num_experts,
            f"num_experts_per_tok is {self.num_chosen} of {self.num_experts} experts: config.json is wrong",
        )

    def facts(self) -> dict[str, str]:
        """How it was understood: printed texts by label."""
        mixtures, total = sum(self.layers), len(self.layers)
        where = "all layers" if mixtures == total else f"{mixtures} of {total} layers"
        form = ", in MXFP4" if self.mxfp4 else ""
        limit = "" if self.limit is None else f", gate and up clamped at {self.limit:g}"
        return {
            "experts": f"{self.num_experts} in {where}, {self.width} wide{form}{limit}",
            "router": f"chooses {self.num_chosen} per token; {_WEIGHTS[self.weights]}",
        }


_WEIGHTS = {
    "softmax": "weights from the softmax over all",
    "normalized": "weights from the softmax over all, divided by their sum",
    "softmax of chosen": "weights from the softmax over the chosen",
}


def num_experts(config: Raw) -> int:
    """Under either of its names: transformers 5 renames it when it saves."""
    names = [name for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
    counts = [count(config, name) for name in names or ["num_experts"]]
    require(
        len(set(counts)) == 1,
        f"num_experts is {counts[0]} and num_local_experts {counts[-1]}: config.json is wrong",
    )
    return counts[0]


def num_chosen(config: Raw) -> int:
    """Experts per token, under either of its names."""
    name = "num_experts_per_tok"
    return count(
        config, name if config.get("experts_per_token") is None or config.get(name) else "experts_per_token"
    )
