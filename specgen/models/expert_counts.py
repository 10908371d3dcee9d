"""How many experts a pass of a mixture touches, counted on the device, and what reading them takes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.kv.layout import Layout
from specgen.models.model_config import LayerConfig

_MXFP4_BYTES = 0.5 + 1 / 32  # per value: 4 bits, and a scale of 32 values


@dataclass(frozen=True, kw_only=True)
class ExpertSize:
    """The experts of a target: how many there are, and what one of them takes."""

    num_layers: int  # that are mixtures
    num_experts: int  # of a layer
    num_chosen: int  # by a row in a layer
    num_values: int  # weights of one expert
    num_bytes: int  # that reading one expert takes, its biases included

    @classmethod
    def of(cls, config: LayerConfig, bytes_per_value: int) -> "ExpertSize | None":
        """By the config of a target or a head, whose plain weights take ``bytes_per_value``; None for a dense one."""
        mixture = config.mixture
        if mixture is None:
            return None
        num_values = 3 * config.hidden_size * mixture.width  # gate, up and down
        num_biases = 2 * mixture.width + config.hidden_size if mixture.biases else 0
        weights = num_values * (_MXFP4_BYTES if mixture.mxfp4 else bytes_per_value)
        first = f"layers.{mixture.layers.index(True)}.mlp.experts.0.gate_proj"
        if config.fp8 is not None and not config.fp8.ignores(config.prefix + first):
            gate = config.fp8.num_scales(mixture.width, config.hidden_size)
            down = config.fp8.num_scales(config.hidden_size, mixture.width)
            weights = num_values + 4 * (2 * gate + down)
        return cls(
            num_layers=sum(mixture.layers),
            num_experts=mixture.num_experts,
            num_chosen=mixture.num_chosen,
            num_values=num_values,
            num_bytes=int(weights) + num_biases * bytes_per_value,
        )

    @property
    def total_bytes(self) -> int:
        """Of all experts of all layers."""
        return self.num_layers * self.num_experts * self.num_bytes

    def touched_by_chance(self, num_rows: int) -> float:
        """Experts of a layer that so many rows touch on average, if each chooses evenly and independently."""
        missed = (
            1 - self.num_chosen / self.num_experts
        ) ** num_rows  # the chance that all rows leave one out
        return self.num_experts * (1.0 - missed)

    def bytes_of(self, touched: float) -> float:
        """What a pass reads that touches so many experts per layer."""
        return self.num_layers * touched * self.num_bytes


def num_touched(ids: Tensor, layout: Layout, active: Tensor, num_experts: int) -> Tensor:
    """The distinct ``ids`` [layers, rows, k] in each layer, summed over the layers: [2] int64.

    The first number is that of all rows, the second that of the first row of each sequence, which is all that a plain
    step computes. The rows are those of ``layout``. An expert counts once for each
    layer, however many rows chose it. Rows of sequences that are not ``active`` [B] choose as well; what no other
    row has chosen is not counted.
    """
    nowhere = num_experts  # a column that is left out
    chosen = torch.where(active[layout.sequences][:, None], ids.long(), nowhere)
    marks = torch.zeros(len(ids), num_experts + 1, dtype=torch.int32, device=ids.device)
    # all layers together: a few kernels for each layer would show in the time of a step
    marks.scatter_(1, chosen.flatten(1), 1)
    marks.scatter_(1, chosen[:, layout.first_rows].flatten(1), 2)
    marks = marks[:, :num_experts]
    return torch.stack(((marks > 0).sum(), (marks > 1).sum()))
