"""Multi-head latent attention, as in a ``config.json``; no torch."""

from dataclasses import dataclass

from specgen.config import require
from specgen.models.config_fields import Raw, count, flag
from specgen.models.rope_config import latent_scale


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024): of a position only one latent for all heads is stored.

    A head's key is ``nope_dim`` numbers made of the latent and ``rope_dim`` rotated ones, which all heads share; its
    value is made of the latent too.
    """

    rank: int  # of the latent
    nope_dim: int
    rope_dim: int
    value_dim: int  # of a head
    query_rank: int | None  # of the queries' own latent, which is not stored; None: they have none
    scale: float  # of q . k
    interleaved: bool  # rotary pairs are neighbours in the checkpoint, not halves

    def __post_init__(self) -> None:
        require(
            self.rope_dim % 2 == 0, f"qk_rope_head_dim is {self.rope_dim}: rotary positions need an even one"
        )

    @property
    def key_dim(self) -> int:
        """Of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Numbers that are stored of a position."""
        return self.rank + self.rope_dim

    @classmethod
    def from_hf(cls, config: Raw) -> "LatentConfig":
        """Read the fields that DeepSeek-V3 and its relatives have."""
        require(
            not flag(config, "attention_bias"),
            "attention_bias is true: latent attention with biases is not supported, use another checkpoint",
        )
        nope, rope = count(config, "qk_nope_head_dim"), count(config, "qk_rope_head_dim")
        return cls(
            rank=count(config, "kv_lora_rank"),
            nope_dim=nope,
            rope_dim=rope,
            value_dim=count(config, "v_head_dim"),
            query_rank=None if config.get("q_lora_rank") is None else count(config, "q_lora_rank"),
            scale=(nope + rope) ** -0.5 * latent_scale(config) ** 2,
            interleaved=flag({"rope_interleave": True, **config}, "rope_interleave"),
        )

    def __str__(self) -> str:
        queries = "" if self.query_rank is None else f", queries from {self.query_rank}"
        return (
            f"latent: {self.rank} + {self.rope_dim} numbers a position for all heads{queries}; keys {self.nope_dim} + "
            f"{self.rope_dim}, values {self.value_dim} wide"
        )
