"""The least time that a decode step can take: the bytes it must read over the bandwidth of the memory."""

from dataclasses import dataclass

from specgen.build import Models
from specgen.checkpoint import Checkpoint
from specgen.models.config import kv_bytes_per_token


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What the passes of a decode step must read at least, in bytes.

    Rows gathered from embeddings and what is written are left out: they are thousands of times smaller.
    """

    target: int  # weights of one pass
    head_first: int  # weights of the head's first pass, which fuses the target's features
    head_later: int  # weights of each further one
    target_kv: int  # for each position
    head_kv: int  # for each position and pass

    @classmethod
    def of(cls, models: Models, bytes_per_value: int) -> "StepBytes":
        """Of a loaded pair whose weights and cache take ``bytes_per_value``."""
        assert models.head is not None
        head = models.checkpoints["drafter"]
        fused = head.tensors["fc.weight"].numel * bytes_per_value
        first = _read_whole(head) * bytes_per_value
        return cls(
            target=_read_whole(models.checkpoints["model"]) * bytes_per_value,
            head_first=first,
            head_later=first - fused,
            target_kv=kv_bytes_per_token(models.target.config, bytes_per_value),
            head_kv=kv_bytes_per_token(models.head.config, bytes_per_value),
        )

    def step(self, num_spec_tokens: int, batch: int, context: float) -> float:
        """Of a step of ``batch`` sequences at ``context`` positions each; ``num_spec_tokens`` passes are the head's."""
        positions = batch * context
        plain = self.target + positions * self.target_kv
        if num_spec_tokens == 0:
            return plain
        weights = self.head_first + (num_spec_tokens - 1) * self.head_later
        return plain + weights + num_spec_tokens * positions * self.head_kv


def _read_whole(checkpoint: Checkpoint) -> int:
    """How many weights a pass reads: all but embeddings and tables of ids."""
    skipped = ("embed_tokens.weight", "d2t", "t2d")
    return sum(info.numel for name, info in checkpoint.tensors.items() if not name.endswith(skipped))
