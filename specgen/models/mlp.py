"""The gated feed-forward block."""

from dataclasses import dataclass

from torch import Tensor

from specgen.models.take import Take
from specgen.ops import Map, Ops


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

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """[rows, H] -> [parts, rows, H]; see ``Ops.linear_parts``."""
        return (self.down(self.gated(x)),)
