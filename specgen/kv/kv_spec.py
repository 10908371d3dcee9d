"""What a model stores of each position, as the model says it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """Per position and layer ``num_planes`` tensors ``[num_heads, head_dim]``; GQA has two, keys and values."""

    num_layers: int
    num_planes: int
    num_heads: int
    head_dim: int

    def bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes that one position takes in the cache."""
        return self.num_layers * self.num_planes * self.num_heads * self.head_dim * bytes_per_value
